"""Pass 8: the RMSNorm of the latents goes into the fused op.

    before   x ─► norm ─► kv_c ─┬► fused op
                                └► attention

    after    x, weight, epsilon, an empty buffer ─► fused op
                                                     [4] kv_c ─► attention

So no launch of its own is left of a norm between a projection and the fused op. For a decode-only
batch the op writes normalized latents into the KV cache alone, and the attention reads no others.
For any other batch it runs vLLM's norm into the buffer first.

Safe because `patterns.norms` proves that the op rounds as the graph does, and because nothing but
the fused op and its attention reads the latents. A norm that stays has a reason; that is no decline
of the layer."""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mla_fusion import ops
from mla_fusion.kernels import PROVIDERS
from mla_fusion.passes.fix_functionalization import apart
from mla_fusion.passes.rewrite import PassResult, call, empty, fake_like
from mla_fusion.patterns.norms import RmsNorm, read_rms_norm
from mla_fusion.patterns.site import functionalized_op, is_live, outputs
from mla_fusion.report.reasons import Declined

_ATTENTION = {f"{ops.NAMESPACE}::{name}" for name in ops.ATTENTION_OPS}


@dataclass
class MLALatentNormFusionPass:
    """`provider` is who computes the fused op."""

    provider: str

    def __call__(self, graph: fx.Graph) -> PassResult:
        result = PassResult()
        for fused in list(graph.nodes):
            if functionalized_op(fused) != f"{ops.NAMESPACE}::{ops.FUSED}":
                continue
            if fused.kwargs["kv_norm_weight"] is not None:
                continue
            try:
                norm, attention = self._read(fused)
            except Declined as declined:
                result.declined.append(declined.decline)
                continue
            _rewrite(graph, fused, attention, norm)
            result.rewritten[fused.name] = fused
            result.dead += norm.results
        return result

    def _read(self, fused: fx.Node) -> tuple[RmsNorm, list[fx.Node]]:
        """The norm of the latents, and the attention calls that read it."""
        kv_c: Any = fused.kwargs["kv_c"]
        norm = read_rms_norm(kv_c)
        if norm is None:
            raise Declined("norm-form", f"{kv_c.name}: {getattr(kv_c.target, '__name__', kv_c)}")
        if not PROVIDERS[self.provider].norms:
            raise Declined("norm-provider", self.provider)
        value: torch.Tensor = norm.x.meta["val"]
        if value.dim() != 2 or value.stride(1) != 1 or not norm.weight.meta["val"].is_contiguous():
            raise Declined("norm-form", f"{norm.x.name} has strides {tuple(value.stride())}")
        if not 0 <= norm.epsilon < 1:
            raise Declined("norm-form", f"epsilon {norm.epsilon}")
        if not apart(norm.x, fused.kwargs["k_pe"]):  # type: ignore[arg-type]
            # The op writes k_pe: pass 5 would copy it first.
            raise Declined("norm-form", f"{norm.x.name} and k_pe are no two parts of one split")
        readers = {user for each in norm.results for user in each.users if is_live(user)} - {fused}
        prepared = outputs(fused, 3)
        attention = [
            node for node in sorted(readers)
            if functionalized_op(node) in _ATTENTION and node.kwargs["prepared_q"] in prepared
        ]  # fmt: skip
        if others := readers - {*attention}:
            raise Declined("norm-shared", ", ".join(sorted(node.name for node in others)))
        return norm, attention


def _rewrite(graph: fx.Graph, fused: fx.Node, attention: list[fx.Node], norm: RmsNorm) -> None:
    value = norm.results[0].meta["val"]
    with graph.inserting_before(fused):
        buffer = empty(graph, value, norm.x)
    given: dict[str, Any] = {
        "kv_c": norm.x,
        "kv_norm_weight": norm.weight,
        "kv_norm_epsilon": norm.epsilon,
    }
    fused.kwargs = {**fused.kwargs, **given, "normed_kv_c": buffer}
    made = fake_like(buffer.meta["val"])
    fused.meta["val"] = (*fused.meta["val"][:-1], made)
    with graph.inserting_after(fused):
        normed = call(graph, operator.getitem, (fused, len(fused.meta["val"]) - 1), made)
    for node in attention:
        node.kwargs = {**node.kwargs, "kv_c": normed}
