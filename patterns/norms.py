"""vLLM's RMSNorm of rows, as an op of its IR, which vLLM lowers behind our passes.

    x, weight ─► vllm_ir.rms_norm ─► normed
    x, residual, weight ─► vllm_ir.fused_add_rms_norm ─► [0] normed, [1] x + residual

There x may be a sum, as of shared and routed experts, that nothing else reads, and of its terms one
may be a product with a number, as `routed_scaling_factor` is. The terms must be in memory anyway:
Inductor computes others in the kernel of the norm, and they would be one more. In fp32, from x to
the result. Inductor leaves out the rounding in front of the weight that the IR's code has, and so
does the op that takes a norm's place."""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mla_fusion.patterns import probe
from mla_fusion.patterns.nodes import arguments, is_aten
from mla_fusion.patterns.products import TYPES
from mla_fusion.patterns.site import called, outputs

aten = torch.ops.aten
_RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)


@dataclass(frozen=True)
class Norm:
    """`node` is the norm of x [T, K], or of x times `factor` and all that is `added`, the residual
    last, with a weight [K]: all of one type."""

    node: fx.Node
    x: fx.Node
    added: tuple[fx.Node, ...]
    weight: fx.Node
    epsilon: float
    factor: float = 1.0

    @property
    def normed(self) -> list[fx.Node]:
        """The nodes that are the result."""
        return outputs(self.node, 0) if self.added else [self.node]


def read_norm(node: fx.Node) -> Norm | None:
    """The norm that `node` computes; None for any other node, and for a norm of part of a row."""
    if called(node) not in ("vllm_ir::rms_norm", "vllm_ir::fused_add_rms_norm"):
        return None
    args = arguments(node)
    residual, weight = args.get("x_residual"), args["weight"]
    factor, x, *added = 1.0, args["x"], *([] if residual is None else [residual])
    if added:
        factor, *terms = _terms(x, node)
        x, *added = *terms, residual
    given: list[Any] = [weight, x, *added]
    values = [each.meta.get("val") if isinstance(each, fx.Node) else None for each in given]
    if args["variance_size"] is not None or not all(isinstance(v, torch.Tensor) for v in values):
        return None
    (gain, *rows), types = values, {value.dtype for value in values}
    alike = len(types) == 1 and types <= {*TYPES} and len({str(each.shape) for each in rows}) == 1
    shaped = rows[0].dim() == 2 and gain.shape == rows[0].shape[1:]
    dense = all(value.stride(-1) == 1 for value in values)
    stored = all(map(_is_stored, [x, *added[:-1]])) and weight.op == "placeholder"
    if not (alike and shaped and dense and stored):
        return None
    return Norm(node, x, tuple(added), weight, args["epsilon"], factor)


def _terms(x: fx.Node, norm: fx.Node) -> list[Any]:
    """A factor of the first of the two terms of a sum that only the norm reads, and both; or 1 and
    x."""
    value, reader = x.meta.get("val"), norm
    while x.target in _RESHAPES and value is not None and {*x.users} == {reader}:
        source = x.all_input_nodes[0]
        if str(getattr(source.meta.get("val"), "shape", "")) != str(value.shape):
            break
        x, reader = source, x
    plain = x.target is aten.add.Tensor and len(x.args) == 2 and not x.kwargs
    if not plain or {*x.users} != {reader}:
        return [1.0, x]
    terms: list[Any] = sorted(x.args, key=_is_scaled, reverse=True)
    if _is_scaled(terms[0]) and {*terms[0].users} == {x}:
        scaled, factor = terms[0].args
        return [float(factor), scaled, terms[1]]
    return [1.0, *x.args]


def _is_scaled(node: Any) -> bool:
    """True if `node` is a product of another one with a number."""
    is_product = isinstance(node, fx.Node) and node.target is aten.mul.Tensor
    return is_product and isinstance(node.args[1], int | float)


def _is_stored(node: fx.Node) -> bool:
    """True if Inductor has a value, or what it is a view of, in memory anyway."""
    made: Any = source(node)
    made = made.args[0] if made.target is operator.getitem else made
    lazy = is_aten(made) or called(made).startswith("vllm_ir::")
    return not lazy or made.target in _PRODUCTS


def source(node: fx.Node) -> fx.Node:
    """What `node` is a chain of views of."""
    while node.target in probe.VIEWS and (
        node.target is not operator.getitem or is_aten(node.args[0])  # type: ignore[arg-type]
    ):
        node = node.args[0]  # type: ignore[assignment]
    return node
