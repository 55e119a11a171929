"""Pass 8: the norm of the latents goes into the fused op, those beside a product of this library
become a launch of it.

    before   h, residual ─► add + norm ─► projection ─► kv ─► split ─► norm ─┬► fused op
                                                                             └► attention

    after    h, residual ─► rms_norm ─► projection ─► kv ─► split, weight, epsilon ─┬► fused op
                                                                                    └► attention

A product loads its weights before the launch in front has ended, if that lets it begin, as a kernel
of Inductor's does not; so does vLLM's op of DeepSeek-V3's qkv_a where it can be told to. Norms of
one value, as of the query's latents and of kv_c, go together or not at all, and neither into the
fused op: Inductor has one kernel for both.

Safe because the ops compute what the norms do, rounded once as in Inductor's code, whose sum of
squares has another order. Like that, a sum for the next norm of the graph is not rounded. The
attention normalizes for a batch that is not decode-only, as the fused op does: for any other the
cache has what it reads. Nothing else may read a norm that goes into them."""

import operator
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mla_fusion import gpu, ops
from mla_fusion.passes.fix_functionalization import apart
from mla_fusion.passes.rewrite import PassResult, call_of_several
from mla_fusion.patterns.nodes import dtype_of
from mla_fusion.patterns.norms import Norm, read_norm, source
from mla_fusion.patterns.products import QKV_A
from mla_fusion.patterns.site import called, functionalized_op, is_live, outputs
from mla_fusion.runtime import projection

_PRODUCT, _NORM, _FUSED = (
    f"{ops.NAMESPACE}::{name}" for name in (ops.PROJECTION, ops.NORM, ops.FUSED)
)


@dataclass
class MLANormPass:
    """`provider` is who computes the fused op; the nodes `kept` stay as they are."""

    provider: str
    kept: Set[fx.Node] = frozenset()

    def __call__(self, graph: fx.Graph) -> PassResult:
        result, groups = PassResult(), dict[fx.Node, list[fx.Node]]()
        for node in graph.nodes:
            if norm := read_norm(node):
                groups.setdefault(node if norm.added else source(norm.x), []).append(node)
        for nodes in groups.values():
            # Read again: its residual may be a new launch's.
            group = [norm for node in nodes if (norm := read_norm(node))]
            if any(norm.node in self.kept for norm in group):
                continue
            region = self._region(group[0]) if len(group) == 1 else ()
            if region:
                new = _absorb(group[0], region)
            elif len(group) <= 2 and _begins_early(group):
                new = _rewrite(graph, group)
            else:
                continue
            result.rewritten |= {norm.node.name: new for norm in group}
            result.dead += [norm.node for norm in group]
        for new in dict.fromkeys(result.rewritten.values()):
            _widen(new, result.dead)
        return result

    def _region(self, norm: Norm) -> Sequence[fx.Node]:
        """The fused op and the attention that read a norm alone; empty if the op cannot take it."""
        readers = [user for user in norm.node.users if is_live(user)]
        fused = next((user for user in readers if functionalized_op(user) == _FUSED), None)
        if fused is None or self.provider != "triton":
            return ()
        k_pe: Any = fused.kwargs["k_pe"]
        prepared = outputs(fused, 3)
        region = [n for n in readers if n is fused or n.kwargs.get("prepared_q") in prepared]
        # Else the op would write what the attention reads.
        return region if region == readers and apart(norm.x, k_pe) else ()


def _begins_early(group: Sequence[Norm]) -> bool:
    """True if a product of this library, which begins early on this GPU, lies beside the norms, or
    vLLM's qkv_a behind them: of its input, 7168 wide, ours makes the norm in half the time of
    Inductor's kernel."""
    if gpu.of(group[0].x.meta["val"].device).capability < (9, 0):
        return False
    made = source(group[0].x)
    if made.target is operator.getitem and called(made.args[0]) == _PRODUCT:
        return True
    readers = (user for norm in group for normed in norm.normed for user in normed.users)
    return any(called(reader) in (_PRODUCT, QKV_A) for reader in readers)


def _widen(launch: fx.Node, dead: Collection[fx.Node]) -> None:
    """Let a sum that only other launches of the op read be fp32, if this one makes a sum: Inductor
    rounds none within a graph."""
    if called(launch) != _NORM or not launch.args[1]:
        return
    sums = outputs(launch, len(launch.meta["val"]) - 1)
    readers = [user for node in sums for user in node.users if user not in dead]
    if not readers or any(called(user) != _NORM for user in readers):
        return
    launch.args = (*launch.args, True)
    wide = launch.meta["val"][-1].float()
    launch.meta["val"] = [*launch.meta["val"][:-1], wide]
    for node in sums:
        node.meta["val"] = wide


def _absorb(norm: Norm, region: Sequence[fx.Node]) -> fx.Node:
    """The fused op and the attention with the norm's input, weight and epsilon."""
    given: dict[str, Any] = {"kv_norm_weight": norm.weight, "kv_norm_epsilon": norm.epsilon}
    for node in region:
        node.kwargs = {**node.kwargs, "kv_c": norm.x, **given}
    return region[0]


def _rewrite(graph: fx.Graph, group: Sequence[Norm]) -> fx.Node:
    """One op in front of the first norm."""
    of, added = [norm.x for norm in group], [*group[0].added]
    values = [node.meta["val"].new_empty(node.meta["val"].shape) for node in (*of, *added[:1])]
    given = (of, added, [norm.weight for norm in group], [norm.epsilon for norm in group],
             group[0].factor)  # fmt: skip
    with graph.inserting_before(group[0].node):
        new, results = call_of_several(graph, ops.get(ops.NORM), given, values)
    if not added:
        for norm, made in zip(group, results, strict=True):
            norm.node.replace_all_uses_with(made)
    else:
        for read in list(group[0].node.users):
            read.replace_all_uses_with(results[read.args[1]])  # type: ignore[index]
    for reader in [user for result in results for user in result.users]:
        if called(reader) == QKV_A and projection.has_qkv_a():
            reader.target = ops.get(ops.QKV_A)
    return new


def described(node: fx.Node) -> ops.Norm | None:
    """The sizes and types of a launch of norms, as `ops.Norm`; None for any other node."""
    if node.target != ops.get(ops.NORM):
        return None
    args: Any = node.args
    sizes, added = tuple(x.meta["val"].shape[1] for x in args[0]), args[1]
    one = torch.float32 in map(dtype_of, added[-1:])
    return ops.Norm(sizes, 1 + len(added), one, bool(args[5:]))
