"""vLLM's RMSNorm of rows, in one description.

    x, weight ─► vllm_ir.rms_norm ─► normed
    x, weight, a buffer ─► auto_functionalized(_C.rms_norm) ─► [1] normed
    x ─► to fp32 ─┬─► square ─► mean ─► + epsilon ─► rsqrt ─┐
                  └─────────────────────────────────────────┴─► mul ─► to x's type ─► mul ─► normed
                                                                         weight ──────┘

All three are

    normed = round(round(x * rsqrt(mean(x^2) + epsilon)) * weight)

in fp32, where `round` is to the one type of x, weight and normed. The first two are compared by
their arguments. The third, aten ops, is run on hostile rows, and must equal the formula to the bit:
it is rounded, so that no polynomial tells it from others. A norm of a part of each row, one with a
residual, one with a weight of another type, and Gemma's 1 + weight are other functions.

Inductor leaves the inner rounding out of aten ops that it compiles, and so does
`arithmetic.rms_norm`, which the fused product computes."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import fx

from mla_fusion.kernels.arithmetic import inverse_rms
from mla_fusion.patterns import probe, tokens
from mla_fusion.patterns.nodes import arguments, dtype_of
from mla_fusion.patterns.site import called, made_by, outputs

aten = torch.ops.aten

IR_NORM, C_NORM = "vllm_ir::rms_norm", "_C::rms_norm"
# Each row by itself, besides probe.VIEWS, which `tokens.mixes` checks.
_OPS = probe.CASTS | probe.VIEWS | {
    aten.mul.Tensor, aten.add.Tensor, aten.pow.Tensor_Scalar, aten.mean.dim, aten.rsqrt.default,
}  # fmt: skip
_TYPES = (torch.bfloat16, torch.float16, torch.float32)
# Magnitudes of the rows on which aten ops are run. At the smallest ones epsilon is all that counts,
# at the largest one squares overflow fp32.
_MAGNITUDES = (0.0, 2.0**-30, 2.0**-14, 2.0**-10, 2.0**-7, 0.1, 1.0, 30.0, 2.0**14, 2.0**100)


@dataclass(frozen=True)
class RmsNorm:
    """One norm: x [..., K], weight [K] and the results have one type. The weight is an input of the
    graph, so no launch of the graph writes it.

    results: every node that stands for the normed value, of x's shape. Once nothing reads them,
    `drop_dead(graph, results)` takes the norm out of the graph."""

    x: fx.Node
    weight: fx.Node
    epsilon: float
    results: tuple[fx.Node, ...]


def read_rms_norm(node: fx.Node) -> RmsNorm | None:
    """The norm whose normed value `node` is; None for any other node."""
    if called(node) == IR_NORM:
        found = _of_arguments(arguments(node), "x", (node,))
    elif made_by(node) == C_NORM and node.args[1] == 1:
        call: Any = node.args[0]
        found = _of_arguments(arguments(call), "input", tuple(outputs(call, 1)))
    else:
        return _of_aten(node)
    return found if found and _fits(found, node) else None


def _of_arguments(args: dict[str, Any], x: str, results: tuple[fx.Node, ...]) -> RmsNorm | None:
    """The norm that a call of an op with these arguments is."""
    weight = args["weight"]
    if not isinstance(weight, fx.Node) or args.get("variance_size") is not None:
        return None
    return RmsNorm(args[x], weight, args["epsilon"], results)


def _fits(norm: RmsNorm, node: fx.Node) -> bool:
    """True if types and shapes are those of `RmsNorm`."""
    values = [each.meta.get("val") for each in (norm.x, norm.weight, node)]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return False
    x, weight, made = values
    shapes = [[str(size) for size in value.shape] for value in values]
    return (
        x.dtype in _TYPES
        and x.dtype == weight.dtype == made.dtype
        and shapes[0] == shapes[2]
        and shapes[1] == shapes[0][-1:]
        and norm.weight.op in ("placeholder", "get_attr")
    )


def _of_aten(node: fx.Node) -> RmsNorm | None:
    """The norm that aten ops compute, of which the product with the weight is the last."""
    if node.target is not aten.mul.Tensor or len(node.all_input_nodes) != 2:
        return None
    for scaled, weight in permutations(node.all_input_nodes):
        product = probe.strip(scaled, probe.CASTS)
        root = next((n for n in product.all_input_nodes if n.target is aten.rsqrt.default), None)
        if product.target is not aten.mul.Tensor or root is None:
            continue
        for x in (each for n in product.all_input_nodes if n is not root for each in _casts(n)):
            interior, leaves = probe.cone([node], stop=[x, weight], ops=_OPS)
            epsilons = [n.args[1] for n in interior if n.target is aten.add.Tensor]
            if {*leaves} != {x, weight} or [type(number) for number in epsilons] != [float]:
                continue
            norm = RmsNorm(x, weight, epsilons[0], (node,))  # type: ignore[arg-type]
            if _fits(norm, node) and _is_formula(interior, norm, root):
                return norm
    return None


def _casts(node: fx.Node) -> Iterator[fx.Node]:
    """`node`, and all that it is a mere cast of."""
    yield node
    while node.target in probe.CASTS:
        node = node.args[0]  # type: ignore[assignment]
        yield node


def _is_formula(interior: list[fx.Node], norm: RmsNorm, root: fx.Node) -> bool:
    """True if the last of interior is the formula, to the bit, and nothing is wider than fp32: what
    float64 rounds otherwise is too rare to be met by chance."""
    [node], dtype = norm.results, norm.x.meta["val"].dtype
    wide = all(dtype_of(each) in (dtype, torch.float32) for each in interior)
    if not wide or tokens.mixes(interior):
        return False
    generator = torch.Generator().manual_seed(0x5EED)
    shape, columns = probe.concrete_shape(norm.x), probe.concrete_shape(norm.weight)
    for magnitude in _MAGNITUDES:
        x = (torch.randn(shape, generator=generator) * magnitude).to(dtype)
        weight = torch.randn(columns, generator=generator).to(dtype)
        env = probe.evaluate(interior, {norm.x: x, norm.weight: weight})
        # The root by itself too: it is not rounded to 8 or 11 bits.
        wanted = {root: inverse_rms(x, norm.epsilon), node: twice_rounded(x, weight, norm.epsilon)}
        if env is None or not all(_equal(env[each], value) for each, value in wanted.items()):
            return False
    return True


def twice_rounded(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The norm as the graph has it: x [..., K], weight [K], of one type."""
    return (x.float() * inverse_rms(x, epsilon)).to(x.dtype) * weight


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors are equal, a NaN to any NaN."""
    same = (a == b) | (a.isnan() & b.isnan())
    return a.dtype == b.dtype and a.shape == b.shape and bool(same.all())
