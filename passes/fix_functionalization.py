"""Pass 5: in-place ops leave `auto_functionalized` without a copy.

    before   out = auto_functionalized(op, q=view(x), ...); y = out[1]
             z = slice_scatter(view(x), copy(slice(view(x)), y))
    after    op(view(x), ...); y is view(x), z is x's view

It replaces vLLM's own last pass, and calls it for every op that is not named here. vLLM's pass
raises on `fused_rope_unified_mla_kv_cache_update` unless getitem 1, copy and slice_scatter are all
there; here each may be missing.

Safe because an op is made in-place only if nothing reads the old value after it, through any alias
that `patterns.nodes` knows or cannot exclude. If something may, an op of this library stays
functional, and Inductor copies. vLLM's pass makes vLLM's op in-place in any case, so that op writes
to copies made here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import fx

from mla_fusion import ops
from mla_fusion.passes.rewrite import PassResult, drop_dead, fake_like, mutated, replace
from mla_fusion.patterns import site
from mla_fusion.patterns.nodes import Memory, is_view
from mla_fusion.patterns.site import FUSED_ROPE_UPDATE, functionalized_op, outputs, same_view

aten = torch.ops.aten
OWN = {f"{ops.NAMESPACE}::{ops.ROPE_UPDATE}", *ops.RUNTIME_OPS, FUSED_ROPE_UPDATE}


@dataclass
class MLAFixFunctionalizationPass:
    """`rest` is vLLM's own pass for all other ops; None where it cannot run (CPU builds)."""

    rest: Callable[[fx.Graph], None] | None

    def __call__(self, graph: fx.Graph) -> PassResult:
        result, memory = PassResult(), Memory(graph)
        for node in list(graph.nodes):
            name = functionalized_op(node)
            if name in OWN and (call := _make_in_place(graph, node, memory)):
                result.rewritten[node.name] = call
            elif name == FUSED_ROPE_UPDATE:
                _copy_mutated(graph, node)
                _make_in_place(graph, node, memory)
        if result.rewritten:
            drop_dead(graph)
        if self.rest is not None:
            self.rest(graph)
        return result


def _copy_mutated(graph: fx.Graph, node: fx.Node) -> None:
    """Let the op of `node` write to copies, which nothing else reads."""
    for name in mutated(node.args[0]):
        source: Any = node.kwargs[name]
        with graph.inserting_before(node):
            copy = graph.call_function(aten.clone.default, (source,))
        if "val" in source.meta:
            copy.meta["val"] = fake_like(source.meta["val"])
        node.update_kwarg(name, copy)


def _make_in_place(graph: fx.Graph, node: fx.Node, memory: Memory) -> fx.Node | None:
    """Replace `node` by a call of its op; None, and no change, if an old value is read later."""
    op: Any = node.args[0]
    written = []
    for index, name in enumerate(mutated(op), start=max(len(op._schema.returns), 1)):
        target: Any = node.kwargs[name]
        reads = outputs(node, index)
        scatters = [scatter for read in reads for scatter in _scatters_back(read, target)]
        if _read_later(memory, target, node, scatters):
            return None
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


def _scatters_back(mutated: fx.Node, target: fx.Node) -> list[fx.Node]:
    """Each slice_scatter that only puts a mutated slice back where it lies: `target` is
    slice(whole, dim, start, ...), and it writes to the same place of a value equal to `whole`."""
    if target.target is not aten.slice.Tensor:
        return []
    whole, *place = target.args
    copied = [user for user in mutated.users if user.target is aten.copy.default]
    readers = dict.fromkeys(chain(mutated.users, *(copy.users for copy in copied)))
    scatters = [node for node in readers if node.target is aten.slice_scatter.default]
    there = [node for node in scatters if _normal(node.args[2:]) == _normal(place)]
    return [node for node in there if same_view(node.args[0], whole)]


def _normal(place: Sequence[Any]) -> tuple[Any, ...]:
    """dim, start, end, step of a slice, with defaults filled in."""
    dim, start, end, step = list(place) + [0, None, None, 1][len(place) :]
    return (dim, start or 0, end, step)


def _read_later(memory: Memory, target: fx.Node, node: fx.Node, ignored: list[fx.Node]) -> bool:
    """Whether a later node, or `node` by another argument, may read the old memory of `target`."""
    origins = memory.origins(target)
    if any(origin.op in ("placeholder", "get_attr") for origin in origins):
        return True  # the caller's memory: somebody else may read it
    shown = memory.viewers(origins, {node, *node.users, *ignored})
    given: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), given.append)
    if sum(value in shown for value in given) > 1:
        return True
    return any(
        user > node and site.is_live(user) and not _feeds_only(user, ignored)
        for value in shown
        for user in value.users
        if user not in ignored and not (user in shown and is_view(user))
    )


def _feeds_only(node: fx.Node, ignored: list[fx.Node]) -> bool:
    """A `copy` into a slice that only feeds a scatter about to be removed."""
    is_copy = node.target is aten.copy.default
    return is_copy and bool(node.users) and node.users.keys() <= {*ignored}
