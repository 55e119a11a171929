"""What every spelling of RoPE + cache write is reduced to."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mla_fusion.ops import Rope
from mla_fusion.patterns.nodes import dtype_of
from mla_fusion.patterns.site import Site


@dataclass(frozen=True)
class RopeMatch:
    """The values before rotation, and how the graph rotates them.

    q is [T, H, P + R]; k_pe is [T, 1, R] or [T, R]; positions [T] and cos_sin_cache
    [max_position, R] are None where nothing is rotated. `rotated` are the nodes whose values no
    longer exist once the rotation is part of another op. q_factor is a factor of each token, of any
    shape, that multiplies the query after the rotation; None if there is none.
    """

    rope: Rope
    is_neox: bool
    q: fx.Node
    k_pe: fx.Node
    positions: fx.Node | None = None
    cos_sin_cache: fx.Node | None = None
    rotated: tuple[fx.Node, ...] = ()
    q_factor: fx.Node | None = None


def is_rope_table(table: Any, positions: Any, site: Site) -> bool:
    """Whether these are the arguments of a rotation of all of k_pe [T, 1, R].

    The table [max_position, R] is of the activation type or fp32, positions [T] are int64.
    """
    given = (table, positions, site.k_pe)
    if not all(isinstance(node, fx.Node) and dtype_of(node) for node in given):
        return False
    value, pos, k_pe = (node.meta["val"] for node in given)
    return (
        value.dim() == 2
        and value.shape[1] == k_pe.shape[-1]
        and value.dtype in (k_pe.dtype, torch.float32)
        and pos.dim() == 1
        and pos.dtype == torch.int64
    )


def expected_rotation(
    q: torch.Tensor,
    k_pe: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    is_neox: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RoPE of the last R columns of q [T, H, P + R] and of k_pe [T, 1, R], in float64."""
    width = k_pe.shape[-1]
    cos, sin = table[positions].unsqueeze(1).chunk(2, dim=-1)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        if is_neox:
            a, b = x.chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)

    return torch.cat((q[..., :-width], rotate(q[..., -width:])), dim=-1), rotate(k_pe)
