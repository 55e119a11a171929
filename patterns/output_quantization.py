"""The quantization of an attention's output in front of o_proj, in one description.

    output ─► auto_functionalized(_C.per_token_group_fp8_quant) ─► [1] fp8, [2] scales
    output ─► auto_functionalized(_C.static_scaled_fp8_quant) ─► [1] fp8
    output ─► to fp32 ─► mul ─► clamp ─► to fp8         (scale ─► reciprocal ─► mul)

The first two are vLLM's `QuantFP8` as a custom op (`+quant_fp8`, which vLLM adds for block-fp8
checkpoints), which is compared by its arguments, the third is its native form for one given scale.
That is run, on random bits of the activations' type, and must equal the formula to the bit: it is
rounded, so that no polynomial tells it from others.

The epilogue's scales are fp32, not rounded or rounded up to powers of two as DeepGEMM wants them on
Hopper (ue8m0); any strides fit, so also those of CUTLASS (columns) and of DeepGEMM (aligned
columns). DeepGEMM's scales on Blackwell, four exponents in an int32, are another op's."""

import operator
from dataclasses import dataclass

import torch
from torch import fx

from mla_fusion.attention.plan.epilogue import EPSILON, GROUP, largest
from mla_fusion.kernels.arithmetic import FP8_DTYPES
from mla_fusion.ops import Quantization
from mla_fusion.patterns import probe, tokens
from mla_fusion.patterns.nodes import arguments, dtype_of, is_aten, tensors, walk
from mla_fusion.patterns.site import called, functionalized_op, is_live, outputs
from mla_fusion.report.reasons import Declined

aten, prims = torch.ops.aten, torch.ops.prims

# Ops, and what they call the values that they write.
_OPS = {"_C::per_token_group_fp8_quant": "output_q", "_C::static_scaled_fp8_quant": "result"}
# What `QuantFP8.forward_native` becomes, each column of a row by itself.
_POINTWISE = probe.CASTS | probe.VIEWS | {
    aten.mul.Tensor, aten.reciprocal.default,
    aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default,
}  # fmt: skip
_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten._scaled_mm.default}
# Views whose values are in the same order if their shape is the same.
_IN_ORDER = probe.VIEWS - {
    operator.getitem, aten.split.Tensor, aten.split_with_sizes.default,
    aten.permute.default, aten.transpose.int,
}  # fmt: skip
_FLOAT = torch.finfo(torch.float32)
_SCALES = (_FLOAT.tiny, 0.01, 0.7, 3.0, _FLOAT.max)  # with which the native form is run


@dataclass(frozen=True)
class OutputQuantization:
    """The nodes that quantize one attention's output."""

    spelling: Quantization
    last: fx.Node  # the last of the quantization: all that it reads comes before
    results: list[list[fx.Node]]  # what is read as the fp8 output, and as scales it computes
    # The given scale, and what the op writes into; the native form has no buffer.
    arguments: dict[str, fx.Node]


def read(output: list[fx.Node]) -> OutputQuantization:
    """The quantization of an attention's output, all nodes of which are `output`. Raises Declined
    if it is not quantized, not visibly, in another way, or has another reader."""
    for node in output:
        _shape(node)
    readers = list(dict.fromkeys(reader for node in output for reader in _readers(node)))
    quantizing = [reader for reader in readers if _makes_bytes(reader)]
    if not quantizing:
        # One that takes fp8 beside the output quantizes the activations inside.
        takes = {reader: set().union(*map(_dtypes, reader.all_input_nodes)) for reader in readers}
        inside = [reader for reader in readers if takes[reader].intersection(FP8_DTYPES)]
        code = "output-opaque" if inside else "output-unquantized"
        raise Declined(code, ", ".join(map(_name, inside or readers)))
    first = quantizing[0]
    if _is_no_product(first):
        return _native(output, readers)
    if others := [_name(reader) for reader in readers if reader is not first]:
        raise Declined("output-shared", f"{_name(first)} and {', '.join(others)}")
    return _by_op(first, output)


def _readers(node: fx.Node) -> list[fx.Node]:
    """The readers of `node`, through views that keep its shape and order."""
    found: list[fx.Node] = []
    for user in node.users:
        if user.target in _IN_ORDER and _shape(user) == _shape(node):
            found += _readers(user)
        elif is_live(user):
            found.append(user)
    return found


def _shape(node: fx.Node) -> list[str]:
    """The shape as text: sizes are symbols."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise Declined("missing-metadata", f"node {node.name}")
    return [str(size) for size in value.shape]


def _name(node: fx.Node) -> str:
    return called(node) or node.name


def _dtypes(node: fx.Node) -> set[torch.dtype]:
    """The types of what a node stands for."""
    if node.op == "call_function" and "val" not in node.meta:
        raise Declined("missing-metadata", f"node {node.name}")
    return {tensor.dtype for tensor in tensors(node)}


def _makes_bytes(reader: fx.Node) -> bool:
    """True if fp8 or other bytes come out of `reader`, at once or after more aten ops."""

    def later(node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if _is_no_product(user)] if _is_no_product(node) else []

    made = set().union(*map(_dtypes, walk([reader], later)))
    return any(dtype.itemsize == 1 for dtype in made - {torch.bool})


def _is_no_product(node: fx.Node) -> bool:
    """True if it is an op without a product: what comes behind o_proj is not its input."""
    return node.target in probe.VIEWS or (is_aten(node) and node.target not in _PRODUCTS)


def _other(detail: str) -> Declined:
    return Declined("output-quantization", detail)


def _by_op(node: fx.Node, output: list[fx.Node]) -> OutputQuantization:
    """An op of vLLM: by one scale, or by those of groups of 128, powers of two or not."""
    if (op := functionalized_op(node)) not in _OPS:
        raise _other(_name(node))
    args = arguments(node)
    quantized, values = args[_OPS[op]], outputs(node, 1)
    _check_type(quantized, FP8_DTYPES)
    *rows_of, columns = _shape(args["input"])
    # It may read the output in another place, as the buffer of its scales.
    source = probe.strip(args["input"], _IN_ORDER)
    if source not in output or [*rows_of, columns] != _shape(source):
        raise _other(f"{_name(node)} of another value")
    if _shape(quantized) != [*rows_of, columns]:
        raise _other(f"{_name(node)} of padded rows")
    if _OPS[op] == "result":
        given = {"quantized": quantized, "scale": args["scale"]}
        _check_one(args["scale"])
        return OutputQuantization(Quantization.TENSOR, node, [values], given)
    most = largest(quantized.meta["val"].dtype)
    wanted = {"group_size": GROUP, "eps": EPSILON, "fp8_min": -most, "fp8_max": most}
    for name, value in wanted.items():
        if args[name] != value:
            raise _other(f"{_name(node)}, {name} {args[name]}")
    scales = args["output_s"]
    _check_type(scales, (torch.float32,), "scales of ")
    if _shape(scales) != [*rows_of, str(int(columns) // GROUP)]:
        raise _other(f"{_name(node)} of padded rows")
    spelling = Quantization.GROUP_UE8M0 if args["scale_ue8m0"] else Quantization.GROUP
    given = {"quantized": quantized, "scales": scales}
    return OutputQuantization(spelling, node, [values, outputs(node, 2)], given)


def _check_type(node: fx.Node, dtypes: tuple[torch.dtype, ...], what: str = "") -> None:
    _shape(node)
    if (dtype := dtype_of(node)) not in dtypes:
        raise _other(f"{what}{dtype}")


def _check_one(scale: fx.Node) -> None:
    """One scale, as the epilogue takes it."""
    _check_type(scale, (torch.float32,), "scales of ")
    if any(size != 1 for size in scale.meta["val"].shape):
        raise _other(f"a scale {list(scale.meta['val'].shape)}")


def _native(output: list[fx.Node], readers: list[fx.Node]) -> OutputQuantization:
    """`QuantFP8` in aten ops, for one given scale."""

    def later(node: fx.Node) -> list[fx.Node]:
        ends = dtype_of(node) in FP8_DTYPES
        return [] if ends else [user for user in node.users if user.target in _POINTWISE]

    dependent = set(walk(output, later))
    sinks = [node for node in dependent if dtype_of(node) in FP8_DTYPES]
    if len(sinks) != 1:
        raise _other(f"in aten ops: {', '.join(map(_name, readers))}")
    [sink] = sinks
    users = {user for node in dependent - {sink} for user in node.users} - dependent
    if others := sorted(filter(is_live, users)):
        raise Declined("output-shared", f"the quantization and {', '.join(map(_name, others))}")
    interior, leaves = probe.cone([sink], stop=output, ops=_POINTWISE)
    given = [leaf for leaf in leaves if leaf not in output]
    if len(given) != 1:
        raise _other(f"in aten ops, from {len(given)} other values")
    _check_one(given[0])
    if output[0].meta["val"].dtype.itemsize != 2:
        raise _other(f"of {output[0].meta['val'].dtype}")
    if not _is_formula(interior, output, given[0]):
        raise _other("in aten ops, by another formula")
    return OutputQuantization(Quantization.TENSOR_NATIVE, sink, [[sink]], {"scale": given[0]})


def _is_formula(interior: list[fx.Node], output: list[fx.Node], scale: fx.Node) -> bool:
    """True if the last of interior is fp8(clamp(x * (1 / scale))), in fp32 and to the bit. What is
    rounded to fp8 is compared before: other orders of operations differ there."""
    if tokens.mixes(interior) or not _takes_reciprocal(interior, output, scale):
        return False
    sink, shape = interior[-1], probe.concrete_shape(output[0])
    dtype = sink.meta["val"].dtype
    most, generator = largest(dtype), torch.Generator().manual_seed(0x5EED)
    for number in _SCALES:
        bits = torch.randint(-(1 << 15), 1 << 15, shape, generator=generator, dtype=torch.int16)
        x = bits.view(output[0].meta["val"].dtype)
        x = torch.where(x.isfinite(), x, torch.ones_like(x))
        value = torch.full(probe.concrete_shape(scale), number)
        wide = (x.float() * value.view(-1).reciprocal()).clamp(-most, most)
        env = probe.evaluate(interior, {**dict.fromkeys(output, x), scale: value})
        if env is None:
            return False
        same = torch.equal(env[sink.all_input_nodes[0]], wide)
        if not (same and torch.equal(env[sink].float(), wide.to(dtype).float())):
            return False
    return True


def _takes_reciprocal(interior: list[fx.Node], output: list[fx.Node], scale: fx.Node) -> bool:
    """True if what is computed from `output` reads 1 / scale, and no other value, for a scale of
    each exponent of positive normal fp32 numbers, the least and the largest."""
    values = set(walk(output, lambda node: node.users.keys() & set(interior)))
    alone = [node for node in interior if node not in values]
    read = {n for node in values & set(interior) for n in node.all_input_nodes} - values
    mantissas = torch.rand(254, generator=torch.Generator().manual_seed(0x5EED)) + 1
    every = torch.ldexp(mantissas, torch.arange(-126, 128)).tolist()
    shape = probe.concrete_shape(scale)
    for number in (_FLOAT.tiny, *every, _FLOAT.max):
        value = torch.full(shape, number)
        env = probe.evaluate(alone, {scale: value})
        want = value.view(-1).reciprocal()
        if env is None or not all(torch.equal(env[n].reshape(-1), want) for n in read):
            return False
    return bool(read)
