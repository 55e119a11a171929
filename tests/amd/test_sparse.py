"""The sparse decode: the machine code for gfx942 and gfx950, executed."""

import pytest

pytest.importorskip("triton")

import torch

from mla_fusion.attention import triton as provider
from mla_fusion.attention.cdna.fits import why_no_sparse
from mla_fusion.attention.plan.inputs import Scope
from mla_fusion.attention.sparse import sparse_mla_decode, sparse_scratch
from tests import tally
from tests.amd.decode import FP32, HALF_STEP, LSE_TOLERANCE
from tests.amd.provider import machine
from tests.attention.decodes import BF16
from tests.kernels.compiled import FP8

# heads, cache, page size, columns of each scope, how many of the last count, CTAs, sink
CASES = {
    "fp8 cache": (16, "fp8", 1, (70,), (70, 0, 33), 3, False),
    "bf16": (12, "bf16", 64, (64,), (64, 21, 0), 2, False),
    "two scopes, sink": (16, "bf16", 16, (20, 40), (40, 7, 0), 2, True),
}
SCALE, KV_SCALE, ENTRIES = 0.1, 0.5, 128


class Case:
    """The arguments of a decode and its refreshed scratch. Every fifth slot is -1."""

    def __init__(self, target, name):
        self.heads, cache, page, widths, self.counts, ctas, sink = CASES[name]
        kv_dtype = FP8[target] if cache == "fp8" else BF16
        rng = torch.Generator().manual_seed(len(name))
        tokens, self.scopes = len(self.counts), []
        for width in widths:
            stored = torch.randn(ENTRIES // page, page, 576, generator=rng).to(kv_dtype)
            table = [torch.randperm(ENTRIES, generator=rng)[:width] for _ in self.counts]
            self.scopes.append(Scope(stored, torch.stack(table).int()))
            self.scopes[-1].table[:, 3::5] = -1
        self.q = torch.randn(tokens, self.heads, 576, generator=rng).to(BF16)
        self.sink = torch.randn(self.heads, generator=rng) if sink else None
        self.kv_scale = torch.tensor(KV_SCALE) if cache == "fp8" else None
        self.scratch = sparse_scratch(
            max_tokens=tokens, num_heads=self.heads, widths=widths, q_dtype=BF16, kv_dtype=kv_dtype,
            device="cpu", ctas=ctas,
        )  # fmt: skip
        last = torch.tensor(self.counts, dtype=torch.int32)
        self.scratch.refresh(tokens, [*[None] * (len(widths) - 1), last])

    def keys(self, token):
        """What a token attends to, in float64."""
        found = []
        for scope in self.scopes:
            row = scope.table[token]
            row = row[: self.counts[token]] if scope is self.scopes[-1] else row
            found.append(scope.kv_cache.flatten(0, 1)[row[row >= 0].long()].double())
        return torch.cat(found) * (1 if self.kv_scale is None else KV_SCALE)

    def expected(self, token):
        """Latents, their sum of magnitudes, and the log-sum-exp without the sink."""
        keys = self.keys(token)
        scores = self.q[token].double() @ keys.T * SCALE
        lse = scores.logsumexp(-1)
        total = lse if self.sink is None else torch.logaddexp(lse, self.sink.double())
        weights = (scores - total[:, None]).exp()
        return weights @ keys[:, :512], weights @ keys[:, :512].abs(), lse


@pytest.mark.skipif(bool(why_no_sparse()), reason=why_no_sparse())
@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize(
    "name", [each if i == 0 else pytest.param(each, marks=pytest.mark.nightly)
             for i, each in enumerate(CASES)],
)  # fmt: skip
def test_sparse(target, name, monkeypatch):
    monkeypatch.setattr(provider, "require", lambda: None)
    case = Case(target, name)
    out = torch.full((*case.q.shape[:2], 512), torch.nan, dtype=BF16)
    with machine(target) as launches:
        _, lse = sparse_mla_decode(
            case.q, case.scopes, case.scratch, softmax_scale=SCALE, sink=case.sink,
            kv_scale=case.kv_scale, out=out, return_lse=True,
        )  # fmt: skip
    assert [each.kernel.program.name for each in launches] == ["decode_kernel", "reduce_kernel"]
    assert launches[0].constants["FORM"].SPARSE
    for token in range(len(out)):
        latents, magnitudes, sums = case.expected(token)
        bound = (HALF_STEP + FP32) * magnitudes + HALF_STEP * latents.abs()
        assert ((out[token].double() - latents).abs() <= bound).all(), token
        if len(case.keys(token)):
            assert ((lse[token].double() - sums).abs() <= LSE_TOLERANCE).all(), token
        else:
            assert lse[token].isneginf().all()
    tally.add("AMD machine code", bytes_compared=2 * out.numel() + 4 * lse.numel())
