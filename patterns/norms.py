"""vLLM's RMSNorm of rows, as an op of its IR, which vLLM lowers behind our passes.

    x, weight ─► vllm_ir.rms_norm ─► normed
    x, residual, weight ─► vllm_ir.fused_add_rms_norm ─► [0] normed, [1] x + residual

In fp32, from x to the result. Inductor leaves out the rounding in front of the weight that the
IR's code has, and so does the op that takes a norm's place."""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mla_fusion.patterns import probe
from mla_fusion.patterns.nodes import arguments, is_aten
from mla_fusion.patterns.products import TYPES
from mla_fusion.patterns.site import called, outputs


@dataclass(frozen=True)
class Norm:
    """`node` is the norm of x [T, K], or of x + residual, with a weight [K]: all of one type."""

    node: fx.Node
    x: fx.Node
    residual: fx.Node | None
    weight: fx.Node
    epsilon: float

    @property
    def normed(self) -> list[fx.Node]:
        """The nodes that are the result."""
        return [self.node] if self.residual is None else outputs(self.node, 0)


def read_norm(node: fx.Node) -> Norm | None:
    """The norm that `node` computes; None for any other node, and for a norm of part of a row."""
    if called(node) not in ("vllm_ir::rms_norm", "vllm_ir::fused_add_rms_norm"):
        return None
    args = arguments(node)
    residual, weight = args.get("x_residual"), args["weight"]
    given: list[Any] = [args["x"], weight, *([residual] if residual else [])]
    values = [each.meta.get("val") if isinstance(each, fx.Node) else None for each in given]
    if args["variance_size"] is not None or not all(isinstance(v, torch.Tensor) for v in values):
        return None
    (x, gain, *_), types = values, {value.dtype for value in values}
    alike = len(types) == 1 and types <= {*TYPES}
    shaped = x.dim() == 2 and gain.shape == x.shape[1:] and isinstance(x.shape[1], int)
    dense = all(value.stride(-1) == 1 for value in values)
    if not (alike and shaped and dense and weight.op == "placeholder"):
        return None
    return Norm(node, args["x"], residual, weight, args["epsilon"])


def source(node: fx.Node) -> fx.Node:
    """What `node` is a chain of views of."""
    while node.target in probe.VIEWS and (
        node.target is not operator.getitem or is_aten(node.args[0])  # type: ignore[arg-type]
    ):
        node = node.args[0]  # type: ignore[assignment]
    return node
