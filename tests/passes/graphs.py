"""MLA decode graphs as vLLM's pass manager hands them over, traced from vLLM's own RoPE code.

`build(Spec(...))` runs Dynamo, AOT autograd and Inductor's post-grad passes over a small model of
MLA layers and stops where vLLM's passes would run. So views are repeated, slices are assigned and
in-place ops are functionalized as in an engine. A trace takes 0.3 s and is kept; every call of
`build` returns a copy of its own. Inputs have readable names, see `inputs`.
"""

import functools
import re
from dataclasses import dataclass, fields

import torch
import vllm.compilation.passes.fusion.mla_rope_kvcache_cat_fusion  # noqa: F401  registers its op
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._inductor.compile_fx import compile_fx
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.nn.functional import linear, silu
from vllm import ir
from vllm.model_executor.models.deepseek_v2 import _get_llama_4_scaling
from vllm.utils.torch_utils import _encode_layer_name

from mla_fusion import runtime
from mla_fusion.config import vllm_compat
from tests.passes import linears, stand_ins  # noqa: F401  registers its ops
from tests.passes.rotations import SCALINGS, rotate
from tests.passes.splits import SPLITS

runtime.register_ops()

HIDDEN, HEADS, NOPE, ROPE, LATENT, VALUE, Q_LORA = 24, 2, 12, 8, 16, 6, 20
MAX_POSITION, EPSILON = 32, 1e-6
TRACED_TOKENS = 5


@dataclass(frozen=True)
class Spec:
    """Which graph to build.

    Attributes:
        rope: one of `rotations.ROPES`; "cat_fused" is what vLLM's own fusion pass leaves of
            "native". Or "native_late_cast": an fp32 table is rounded after the lookup; or
            "computed" and "computed_complex": there is no table, as in models of transformers.
        layer_name: "input" (vLLM's opaque object) or "constant" (a string).
        dynamic: whether the number of tokens is a symbol or `TRACED_TOKENS`.
        scaled: empty, or one of `SCALINGS`: how the query is scaled after its rotation.
        quantized: empty, or how `linears.project` quantizes the input of the last product.
        split: empty, or one of `SPLITS`: how the query leaves a wider projection; what kv_c and
            k_pe are views of is not stored either. gated: the gate is read behind the attention.
        ir_norm: kv_c is normalized by an op of vLLM's IR, as its layers do.
    """

    rope: str = "native"
    is_neox: bool = False
    layers: int = 1
    q_lora: bool = False
    layer_name: str = "input"
    dynamic: bool = True
    dtype: torch.dtype = torch.float32
    table_dtype: torch.dtype | None = None
    kv_cache_dtype: str = "auto"
    scaled: str = ""
    quantized: str = ""
    split: str = ""
    gated: bool = False
    ir_norm: bool = False

    @property
    def value(self):
        """Columns of a head in the attention's output: a group, where it is quantized."""
        return linears.GROUP if self.quantized else VALUE

    def __str__(self):
        """The spelling, and what is not as by default."""
        given = {each.name: getattr(self, each.name) for each in fields(self)[1:]}
        named = (f"{name}={given[name]}" for name in given if given[name] != getattr(Spec, name))
        return "-".join((self.rope, *named))


def layer_names(spec):
    """The names of the layers of a graph."""
    return [f"model.layers.{i}.attn" for i in range(spec.layers)]


def shapes(spec):
    """The weights of a graph, by the name of its input."""
    out: dict[str, tuple[int, ...]] = {"table": (MAX_POSITION, ROPE), "k_scale": ()}
    if spec.quantized:
        out["o_scale"] = (1,)
    for i in range(spec.layers):
        out |= {f"w_o_{i}": (HIDDEN, HEADS * spec.value), f"gain_{i}": (LATENT,)}
        columns = HEADS * (NOPE + ROPE) * (2 if spec.split else 1)
        if spec.q_lora:
            out[f"w_a_{i}"] = (Q_LORA + LATENT + ROPE, HIDDEN)
            out[f"w_q_{i}"] = (columns, Q_LORA)
        else:
            out[f"w_kv_{i}"] = (LATENT + ROPE, HIDDEN)
            out[f"w_q_{i}"] = (columns, HIDDEN)
        if spec.split:
            out[f"bias_{i}"] = (columns,)
    return out


def inputs(spec, tokens, seed=0):
    """Random values for the tensor inputs of a graph."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(spec.dtype)

    values = {"hidden": random(tokens, HIDDEN)}
    for name, shape in shapes(spec).items():
        # A weight [N, K] is drawn as [K, N].
        values[name] = (random(*reversed(shape)) * 0.3).t().contiguous()
    angles = torch.rand((MAX_POSITION, ROPE // 2), generator=generator) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    values["table"] = table.to(spec.table_dtype or spec.dtype)
    values["k_scale"] = torch.tensor(0.5, dtype=torch.float32)
    if spec.quantized:
        # Any magnitude, but for the first seed, whose outputs an epilogue resolves.
        exponent = torch.rand(1, generator=generator) * 9 - 7 if seed else torch.tensor([-2.0])
        values["o_scale"] = 10**exponent
    values["positions"] = torch.randint(0, MAX_POSITION, (tokens,), generator=generator)
    return values


def build(spec):
    """A fresh copy of the graph of `spec`."""
    return copy(_trace(spec))


def build_apart(spec):
    """The graph of `spec`, with symbols that no other has: Inductor notes what it assumes of one
    where it does so first."""
    return _trace.__wrapped__(spec)


def copy(module):
    """A copy with nodes of its own; fake values are shared."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    # Its Python code is written when it is asked for: tests run the nodes.
    with _use_lazy_graph_module(True):
        return _make_graph_module(module, graph)


def state(graph):
    """All that makes up a graph, to compare it with itself later; `printed` compares two graphs."""
    return [(n, n.op, n.target, n.args, n.kwargs) for n in graph.nodes]


def printed(module):
    """The graph's printed code."""
    graph = module.graph if isinstance(module, fx.GraphModule) else module
    return str(graph.python_code("self").src)


def find(module, target, index=0):
    """The `index`-th call of `target`; for an op name, a call of it or its functionalized call."""
    return find_all(module, target)[index]


def find_all(module, target):
    """All calls as in `find`, in graph order."""

    def is_call(node):
        if not isinstance(target, str):
            return node.target is target
        callee = node.args[0] if node.target is auto_functionalized else node.target
        return isinstance(callee, torch._ops.OpOverload) and callee._schema.name == target

    return [node for node in module.graph.nodes if node.op == "call_function" and is_call(node)]


def functionalized(graph, op, args, value):
    """`auto_functionalized(op, ...)` at the insertion point; `args` in the order of the schema."""
    kwargs = dict(zip((a.name for a in op._schema.arguments), args, strict=True))
    node = graph.call_function(auto_functionalized, (op,), kwargs)
    node.meta["val"] = value
    return node


def _rms_norm(x, gain):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)).to(x.dtype) * gain


def _layer(spec, i, t, hidden):
    """One MLA layer, step by step as in vLLM's `MultiHeadLatentAttentionWrapper`."""
    q_in = hidden
    if spec.q_lora:
        q_in, kv = linear(hidden, t[f"w_a_{i}"]).split([Q_LORA, LATENT + ROPE], dim=-1)
        q_in = _rms_norm(q_in, 1.5)
    else:
        kv = linear(hidden, t[f"w_kv_{i}"])
    if spec.split:
        kv = silu(kv)
    kv_c, k_pe = kv.split([LATENT, ROPE], dim=-1)
    gain = t[f"gain_{i}"]
    kv_c = ir.ops.rms_norm(kv_c, gain, EPSILON) if spec.ir_norm else _rms_norm(kv_c, gain)
    k_pe = k_pe.unsqueeze(1)
    q = linear(q_in, t[f"w_q_{i}"])
    gate = q
    if spec.split:
        q, gate = SPLITS[spec.split](q, t[f"bias_{i}"], HEADS, NOPE + ROPE)
    q = q.view(-1, HEADS, NOPE + ROPE)
    name = _encode_layer_name(layer_names(spec)[i])
    dtype, scale = spec.kv_cache_dtype, t["k_scale"]
    if spec.rope == "cat_fused":
        written, q[..., NOPE:], k_pe = torch.ops.mla_fusion_tests.rope_update(
            t["positions"], q[..., NOPE:], k_pe.squeeze(1), kv_c, t["table"], spec.is_neox,
            dtype, scale, name,
        )  # fmt: skip
        k_pe = k_pe.unsqueeze(1)
    else:
        if spec.rope != "nope":
            of = t["positions"], q[..., NOPE:], k_pe, t["table"]
            q[..., NOPE:], k_pe = rotate(spec.rope, spec.is_neox, *of)
        written = torch.ops.vllm.unified_mla_kv_cache_update(kv_c, k_pe, name, dtype, scale)
    if spec.scaled:
        q = SCALINGS[spec.scaled](q, t["factor"])
    out = torch.empty((hidden.shape[0], HEADS * spec.value), dtype=q.dtype)
    torch.ops.vllm.unified_mla_attention_with_output(
        q, kv_c, k_pe, out, name, kv_cache_dummy_dep=written
    )
    if spec.gated:
        out = out * gate.flatten(1)[:, : out.shape[1]].sigmoid()
    return hidden + linears.project(spec.quantized, out, t.get("o_scale"), t[f"w_o_{i}"])


class _Captured(Exception):
    """Ends a compilation once the graph is known."""


@functools.cache
def _trace(spec):
    """The graph of `spec` at the place where vLLM's passes run."""

    def model(t):
        hidden = t["hidden"]
        if t["positions"].shape[0] != hidden.shape[0]:  # one symbol for both, as in vLLM
            raise ValueError
        if spec.scaled:
            # Of steps of 2 positions: the factors of nearly all of the 32 differ.
            t = {**t, "factor": _get_llama_4_scaling(2, 0.4, t["positions"])}
        for i in range(spec.layers):
            hidden = _layer(spec, i, t, hidden)
        return hidden

    values = inputs(spec, TRACED_TOKENS)
    if spec.dynamic:
        for name in ("hidden", "positions"):
            torch._dynamo.mark_dynamic(values[name], 0)
    names: list[str] = []
    graphs: list[fx.Graph] = []

    def stop(graph):
        graphs.append(graph)
        raise _Captured

    def backend(module, example_inputs):
        names.extend(_input_names(module, example_inputs))
        with torch._inductor.config.patch(
            post_grad_custom_post_pass=stop,
            enable_auto_functionalized_v2=False,
            force_disable_caches=True,
        ):
            return compile_fx(module, example_inputs)

    torch._dynamo.reset()
    dynamic = None if spec.dynamic else False
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    try:
        with torch.no_grad(), linears.on_a_gpu():
            compiled(values)
    except torch._dynamo.exc.BackendCompilerFailed:
        if not graphs:
            raise
    module = fx.GraphModule(torch.nn.Module(), graphs[0])
    for node, name in zip(module.graph.find_nodes(op="placeholder"), names, strict=True):
        node.target = node.name = name
    if spec.rope == "cat_fused":
        _functionalize_cat_fused(module)
    if spec.layer_name == "constant":
        _bake_layer_names(module, spec)
    module.graph.lint()
    return copy(module)


def _input_names(module, values):
    """Readable names of the flat inputs: by the key in the model's dict, or by what they are."""
    names = []
    for node, value in zip(module.graph.find_nodes(op="placeholder"), values, strict=True):
        source = node.meta["grapharg"].source.name
        key = re.fullmatch(r"L\['t'\]\['(\w+)'\]", source)
        if key:
            names.append(key[1])
        elif "size()" in source:
            names.append("tokens" if "tokens" not in names else f"tokens_{len(names)}")
        else:
            names.append(f"layer_name_{vllm_compat.traced_layer_name(value).split('.')[2]}")
    return names


def _functionalize_cat_fused(module):
    """Put vLLM's fused op, functionalized, where the functional stand-in was traced."""
    fused = torch.ops.vllm.fused_rope_unified_mla_kv_cache_update.default
    for node in find_all(module, "mla_fusion_tests::rope_update"):
        with module.graph.inserting_before(node):
            new = functionalized(module.graph, fused, node.args, node.meta["val"])
        node.replace_all_uses_with(new)
        module.graph.erase_node(node)


def _bake_layer_names(module, spec):
    for i, name in enumerate(layer_names(spec)):
        placeholder = next(n for n in module.graph.nodes if n.name == f"layer_name_{i}")
        for user in list(placeholder.users):
            user.args = tuple(name if a is placeholder else a for a in user.args)
            user.kwargs = {k: name if a is placeholder else a for k, a in user.kwargs.items()}
        module.graph.erase_node(placeholder)
