"""One MLA attention call in a functionalized graph, and what is rotated and written before it.

    kv_c ────────────┬───────────────┐
    k_pe (rotated) ──┼──► cache_update ──► dummy ┐
                     ├──────────────────────────►│
    q (rotated) ─────────────────────────────────► attention ──► output
    output buffer ───────────────────────────────┘

Every pass starts at the attention call, so no layer is missed without a reason."""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized

from mla_fusion.ops import Rope
from mla_fusion.patterns import probe
from mla_fusion.patterns.nodes import arguments, dtype_of, schema_of
from mla_fusion.report.reasons import Declined

ATTENTION = "vllm::unified_mla_attention_with_output"
CACHE_UPDATE = "vllm::unified_mla_kv_cache_update"
FUSED_ROPE_UPDATE = "vllm::fused_rope_unified_mla_kv_cache_update"
# What they call the latents and the scale.
_WRITES = {CACHE_UPDATE: ("kv_c_normed", "k_scale"), FUSED_ROPE_UPDATE: ("kv_c", "kv_cache_scale")}
# Arguments of vLLM's attention op that this library's op takes too. A layer that sets any other
# (a quantized output, a query replicated for context parallelism) is declined.
_TAKEN_OVER = {"q", "kv_c_normed", "k_pe", "output", "layer_name", "kv_cache_dummy_dep"}


def called(node: Any) -> str:
    """ "namespace::name" of the op that `node` calls, functionalized or not; empty for others."""
    schema = schema_of(node) if isinstance(node, fx.Node) else None
    return schema.name if schema else ""


def functionalized_op(node: Any) -> str:
    """The op's name if `node` is auto_functionalized(op, ...), else an empty string."""
    return called(node) if getattr(node, "target", None) is auto_functionalized else ""


def made_by(node: Any) -> str:
    """The op's name if `node` is an output of such a call, else an empty string."""
    is_output = isinstance(node, fx.Node) and node.target is operator.getitem
    return functionalized_op(node.args[0]) if is_output else ""


def outputs(node: fx.Node, index: int) -> list[fx.Node]:
    """Every getitem that reads output `index` of `node`: nothing forbids more than one."""
    return [u for u in node.users if u.target is operator.getitem and u.args[1] == index]


def naming(layer_name: Any, after: fx.Node, before: fx.Node) -> Iterator[str]:
    """The ops between two nodes that are given the layer: they may use its cache."""
    node = after.next
    while node is not before and node.op != "root":
        if layer_name in (*node.args, *node.kwargs.values()):
            yield called(node)
        node = node.next


def is_live(node: fx.Node) -> bool:
    """True if what `node` does is seen: by a reader, outside the graph, or in memory."""
    if functionalized_op(node):
        return True  # what it writes need not be among its results: the KV cache is not
    return bool(node.users) or node.is_impure()  # what leaves the graph counts as impure


def same_view(a: Any, b: Any) -> bool:
    """True if two nodes are the same chain of views of the same node."""
    views = isinstance(a, fx.Node) and isinstance(b, fx.Node) and a.target in probe.VIEWS
    alike = views and (a.target, a.args[1:], a.kwargs) == (b.target, b.args[1:], b.kwargs)
    return a is b or (alike and same_view(a.args[0], b.args[0]))


@dataclass(frozen=True)
class Site:
    """The nodes of one MLA attention call; `k_pe` and `q` are rotated."""

    attention: fx.Node
    cache_update: fx.Node
    q: fx.Node
    kv_c: fx.Node
    k_pe: fx.Node
    layer_name: Any
    kv_cache_dtype: str
    k_scale: fx.Node


@dataclass(frozen=True)
class RopeMatch:
    """The values before rotation, and how the graph rotates them: q [T, H, P + R], k_pe [T, 1, R]
    or [T, R]; positions [T], cos_sin_cache [max_position, R], None where nothing is rotated.
    `rotated` are the nodes whose values no longer exist once the rotation is part of another op.
    q_factor, of any shape, multiplies each token of the query after the rotation, unless None."""

    rope: Rope
    is_neox: bool
    q: fx.Node
    k_pe: fx.Node
    positions: fx.Node | None = None
    cos_sin_cache: fx.Node | None = None
    rotated: tuple[fx.Node, ...] = ()
    q_factor: fx.Node | None = None


def attention_calls(graph: fx.Graph) -> list[fx.Node]:
    """Every functionalized call of vLLM's MLA attention op, in graph order."""
    return [node for node in graph.nodes if functionalized_op(node) == ATTENTION]


def read_site(attention: fx.Node) -> Site:
    """The site around one attention call. Raises Declined if the call uses an argument that this
    library's attention op does not take, or its cache update is not one of vLLM's or wrote other
    values than it reads."""
    args = arguments(attention)
    extra = sorted(name for name, v in args.items() if v is not None and name not in _TAKEN_OVER)
    if extra:
        quantized = {"output_scale", "output_block_scale"} & set(extra)
        raise Declined("quantized-output" if quantized else "attention-argument", ", ".join(extra))
    update = args["kv_cache_dummy_dep"]
    if isinstance(update, fx.Node) and update.target is operator.getitem and update.args[1] == 0:
        update = update.args[0]
    name = called(update)
    if name not in _WRITES:
        raise Declined("cache-update", f"written by {name or update}")
    written = arguments(update)
    kv_c, scale = (written[argument] for argument in _WRITES[name])
    if kv_c is not args["kv_c_normed"] or written["layer_name"] != args["layer_name"]:
        raise Declined("cache-update", "the attention reads other values than were written")
    # The fused op of vLLM rotates k_pe itself: the spelling relates the two.
    if name == CACHE_UPDATE and not same_view(written["k_pe"], args["k_pe"]):
        raise Declined("cache-update", "the attention reads another k_pe than was written")
    nodes = args["q"], kv_c, args["k_pe"]
    for node in (*nodes, args["output"]):
        if not isinstance(node.meta.get("val"), torch.Tensor):
            raise Declined("missing-metadata", f"node {node.name}")
    if [node.meta["val"].dim() for node in nodes] != [3, 2, 3]:
        raise Declined("shape", ", ".join(f"{n.name} {list(n.meta['val'].shape)}" for n in nodes))
    return Site(attention, update, *nodes, args["layer_name"], written["kv_cache_dtype"], scale)


def is_rope_table(table: Any, positions: Any, site: Site) -> bool:
    """True if these are the arguments of a rotation of all of k_pe [T, 1, R]: the table
    [max_position, R] is of the activation type or fp32, positions [T] are int64."""
    given = (table, positions, site.k_pe)
    if not all(isinstance(node, fx.Node) and dtype_of(node) for node in given):
        return False
    value, pos, k_pe = (node.meta["val"] for node in given)
    return (
        (value.dim(), value.shape[-1:]) == (2, k_pe.shape[-1:])
        and value.dtype in (k_pe.dtype, torch.float32)
        and (pos.dim(), pos.dtype) == (1, torch.int64)
    )
