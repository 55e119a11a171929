"""Pass 8: norms beside a launch of this library become one too.

    before   x ─► mm ─► kv ─► split ─► norm ─► kv_c ─► fused op
             h, residual ─► add + norm ─► projection

    after    x ─► mm ─► kv ─► split ─► rms_norm ─► kv_c ─► fused op
             h, residual ─► rms_norm ─► projection

A launch of this library begins before the kernel in front has ended, if that lets it, and loads
weights meanwhile; a kernel of Inductor's does not. Norms of one value, as of the query's latents
and of kv_c, go together or not at all: Inductor has one kernel for both.

Safe because the op is a function of the same values, rounded once as in Inductor's code, whose sum
of squares has another order."""

import operator
from collections.abc import Sequence, Set
from dataclasses import dataclass

from torch import fx

from mla_fusion import gpu, ops
from mla_fusion.passes.rewrite import PassResult, call
from mla_fusion.patterns.norms import Norm, read_norm, source
from mla_fusion.patterns.site import called, functionalized_op

_PRODUCT = f"{ops.NAMESPACE}::{ops.PROJECTION}"


@dataclass
class MLANormPass:
    """`provider` is who computes the fused op; the nodes `kept` stay as they are."""

    provider: str
    kept: Set[fx.Node] = frozenset()

    def __call__(self, graph: fx.Graph) -> PassResult:
        result, groups = PassResult(), dict[fx.Node, list[Norm]]()
        for node in graph.nodes:
            if norm := read_norm(node):
                of = source(norm.x) if norm.residual is None else node
                groups.setdefault(of, []).append(norm)
        for group in groups.values():
            if len(group) <= 2 and self._gains(group):
                new = _rewrite(graph, group)
                result.rewritten |= {norm.node.name: new for norm in group}
                result.dead += [norm.node for norm in group]
        return result

    def _gains(self, group: Sequence[Norm]) -> bool:
        """True if a launch of this library on this GPU lies in front of the norms or behind one."""
        first = group[0]
        early = gpu.of(first.x.meta["val"].device).capability >= (9, 0)
        if not early or any(norm.node in self.kept for norm in group):
            return False
        made = source(first.x)
        if made.target is operator.getitem and called(made.args[0]) == _PRODUCT:
            return True
        return any(
            called(reader) == _PRODUCT or (len(group) == 1 and self._is_region(reader, normed))
            for norm in group for normed in norm.normed for reader in normed.users
        )  # fmt: skip

    def _is_region(self, reader: fx.Node, kv_c: fx.Node) -> bool:
        """True if the fused op reads it as kv_c, and begins early."""
        is_fused = functionalized_op(reader) == f"{ops.NAMESPACE}::{ops.FUSED}"
        return is_fused and self.provider == "triton" and reader.kwargs["kv_c"] is kv_c


def _rewrite(graph: fx.Graph, group: Sequence[Norm]) -> fx.Node:
    """One op in front of the first norm."""
    residual = group[0].residual
    of = [norm.x for norm in group]
    values = [node.meta["val"].new_empty(node.meta["val"].shape) for node in of]
    if residual is not None:
        values.append(values[0].new_empty(values[0].shape))
    given = of, residual, [norm.weight for norm in group], [norm.epsilon for norm in group]
    with graph.inserting_before(group[0].node):
        new = call(graph, ops.get(ops.NORM), given, values)
        results = [
            call(graph, operator.getitem, (new, index), value) for index, value in enumerate(values)
        ]
    if residual is None:
        for norm, made in zip(group, results, strict=True):
            norm.node.replace_all_uses_with(made)
    else:
        for read in list(group[0].node.users):
            read.replace_all_uses_with(results[read.args[1]])  # type: ignore[index]
    return new
