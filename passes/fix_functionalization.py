"""Pass 5: in-place ops leave `auto_functionalized`.

    before   out = auto_functionalized(op, q=view(x), ...); y = out[1]
             z = slice_scatter(view(x), copy(slice(view(x)), y))
    after    op(view(x), ...); y is view(x), z is x's view
    or, if the old value of q is read later,
             c = clone(view(x)); op(c, ...); y is c, z is slice_scatter(view(x), copy(.., c))

`LastStep` of `passes.pipeline` runs it before vLLM's own last pass, which serves every op that is
not named here. vLLM's pass raises on `fused_rope_unified_mla_kv_cache_update` unless getitem 1,
copy and slice_scatter are all there; here each may be missing.

Safe because an op writes in place only to memory whose old value nothing reads after it, through
any alias that `patterns.nodes` knows or cannot exclude, and of which no two elements are one. A
value that is computed before the op and read after it counts as such a reader: Inductor computes
what no op needs stored as late as its reader. Any other argument is cloned first, and the op writes
to the clone. No call is left to the copies that Inductor makes for `auto_functionalized`: it
rebuilds an argument from the strides of its metadata, which a view of a value that was never stored
does not have."""

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from mla_fusion import ops
from mla_fusion.passes.rewrite import PassResult, drop_dead, mutated, replace
from mla_fusion.patterns import site
from mla_fusion.patterns.nodes import Memory, arguments, is_aten, is_number, is_view, walk
from mla_fusion.patterns.probe import concrete
from mla_fusion.patterns.site import FUSED_ROPE_UPDATE, functionalized_op, outputs, same_view

aten = torch.ops.aten
OWN = {f"{ops.NAMESPACE}::{ops.ROPE_UPDATE}", *ops.RUNTIME_OPS, FUSED_ROPE_UPDATE}


class MLAFixFunctionalizationPass:
    """The ops in `OWN` become in-place."""

    def __call__(self, graph: fx.Graph) -> PassResult:
        result, memory = PassResult(), Memory(graph)
        for node in list(graph.nodes):
            if functionalized_op(node) in OWN:
                result.rewritten[node.name] = _make_in_place(graph, node, memory)
        if result.rewritten:
            drop_dead(graph)
        return result


def _make_in_place(graph: fx.Graph, node: fx.Node, memory: Memory) -> fx.Node:
    """Replace `node` by a call of its op, which writes to clones where it must."""
    op: Any = node.args[0]
    written = []
    for index, name in enumerate(mutated(op), start=max(len(op._schema.returns), 1)):
        target: Any = node.kwargs[name]
        reads = outputs(node, index)
        scatters = [scatter for read in reads for scatter in _scatters_back(read, target)]
        if _read_later(memory, target, node, scatters) or _overlaps(target):
            target, scatters = _clone(graph, node, target), []
            node.update_kwarg(name, target)
        written.append((target, reads, scatters))
    with graph.inserting_before(node):
        call = graph.call_function(op, (), dict(node.kwargs))
    if "val" in node.meta:
        call.meta["val"] = node.meta["val"][0] if op._schema.returns else None
    for target, _, scatters in written:
        replace(graph, scatters, target.args[0])
    for value, reads, _ in (*written, (call, outputs(node, 0), ())):
        replace(graph, reads, value)
    graph.erase_node(node)
    return call


def _clone(graph: fx.Graph, node: fx.Node, source: fx.Node) -> fx.Node:
    """A dense copy of `source`, made right before `node`."""
    with graph.inserting_before(node):
        copy = graph.call_function(
            aten.clone.default, (source,), {"memory_format": torch.contiguous_format}
        )
    if "val" in source.meta:
        copy.meta["val"] = source.meta["val"].new_empty(source.meta["val"].shape)
    return copy


def _overlaps(target: fx.Node) -> bool:
    """True if two elements of `target` may share memory, as those of an expanded value do. They do
    not if each dimension, in order of stride, steps beyond all elements of those before it."""
    value, reach = target.meta.get("val"), 0
    if value is None:
        return True
    steps = zip(map(concrete, value.stride()), map(concrete, value.shape), strict=True)
    for stride, size in sorted(step for step in steps if step[1] > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def apart(a: fx.Node, b: fx.Node) -> bool:
    """True if no memory is shown by both: each is a view of another part of one split, of a value
    of which no two elements are one."""
    return any(
        split is other and index != part and not _overlaps(split.args[0])  # type: ignore[arg-type]
        for split, index in _parts(a)
        for other, part in _parts(b)
    )


def _parts(node: fx.Node) -> list[tuple[fx.Node, Any]]:
    """Every split of which `node` is a view of one part, and the index of that part."""
    found = []
    while is_view(node) and node.all_input_nodes:
        source = node.all_input_nodes[0]
        if node.target is operator.getitem:
            if source.target not in (aten.split_with_sizes.default, aten.split.Tensor):
                break
            found.append((source, node.args[1]))
        node = source
    return found


def _scatters_back(mutated: fx.Node, target: fx.Node) -> list[fx.Node]:
    """Each slice_scatter that only puts a mutated slice back where it lies: `target` is
    slice(whole, dim, start, ...), and it writes to the same place of a value equal to `whole`."""
    if target.target is not aten.slice.Tensor:
        return []
    copies = [user for user in mutated.users if _copies(user, mutated, aten.copy.default)]
    sources = [mutated, *(copy for copy in copies if _alike(copy, mutated))]
    scatters = [
        user for source in sources for user in source.users
        if _copies(user, source, aten.slice_scatter.default)
    ]  # fmt: skip
    there = [node for node in scatters if _place(node) == _place(target)]
    return [node for node in there if same_view(node.args[0], target.args[0])]


def _copies(node: fx.Node, source: fx.Node, op: Any) -> bool:
    """True if `node` is `op`, a copy or a scatter, with `source` as its second argument alone: of
    the first one it takes the type, the shape, and what it does not overwrite."""
    given = arguments(node) if node.target is op else {}
    return bool(given) and given["src"] is source and given["self"] is not source


def _alike(copy: fx.Node, source: fx.Node) -> bool:
    """True if a copy neither casts nor expands its source."""
    values = [node.meta.get("val") for node in (copy, source)]
    known = [(value.dtype, str(value.shape)) for value in values if value is not None]
    return len(known) == 2 and known[0] == known[1]


def _place(node: fx.Node) -> tuple[Any, ...]:
    """dim, start, end and step of a slice, or of a scatter into one."""
    given = arguments(node)
    return given["dim"], given["start"] or 0, given["end"], given["step"]


def _read_later(memory: Memory, target: fx.Node, node: fx.Node, ignored: list[fx.Node]) -> bool:
    """True if a later node, or `node` by another argument, may read the old memory of `target`."""
    origins = memory.origins(target)
    if any(origin.op in ("placeholder", "get_attr") for origin in origins):
        return True  # the caller's memory: somebody else may read it
    shown = memory.viewers(origins, {node, *node.users, *ignored})
    given: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), given.append)
    shown = {value for value in shown if not apart(value, target)}
    if sum(value in shown for value in given) > 1:
        return True
    readers = {
        user for value in shown for user in value.users
        if user not in ignored and not (user in shown and is_view(user))
    }  # fmt: skip
    stored = set().union(*(memory.origins(value) for value in given))
    return any(
        user > node and site.is_live(user) and not _feeds_only(user, ignored)
        # Sorted: an error is raised at the same call in every run.
        for user in walk(sorted(readers), lambda read: _computed_late(read, node, stored))
    )


def _computed_late(value: fx.Node, node: fx.Node, stored: set[fx.Node]) -> Iterable[fx.Node]:
    """The readers of `value` if it precedes `node`, and Inductor may compute it as late as they
    read it: it may compute every op of torch late whose result `node` does not need in memory."""
    lazy = is_aten(value) or value.target is operator.getitem
    late = lazy and value < node and value not in stored and not is_number(value)
    return value.users if late else ()


def _feeds_only(node: fx.Node, ignored: list[fx.Node]) -> bool:
    """A `copy` into a slice that only feeds a scatter about to be removed."""
    is_copy = node.target is aten.copy.default
    return is_copy and bool(node.users) and node.users.keys() <= {*ignored}
