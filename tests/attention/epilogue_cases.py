"""Inputs of what follows a decode, made without one, and what it should make of them.

Splits are random and made here, as many as a case says, so that the order of fp32 sums is the only
freedom of a result.
"""

import dataclasses
import itertools

import torch

from mla_fusion.attention import reference
from mla_fusion.attention.plan.epilogue import Epilogue, in_groups
from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.measure.distances import agreement, poisoned, steps
from tests.attention import decodes
from tests.attention.decodes import BF16, FN

LSE_TOLERANCE = 1e-5
NOT_WRITTEN = 7.0  # an LSE that the decode has written, not the reduction


@dataclasses.dataclass(frozen=True)
class Case:
    """A step: for each sequence its query rows and splits (0: not split), and its layer.

    padding: rows after the last sequence. per_work: heads of a work item, where not the default.
    outweighed: in head 0, all but the first split of a row, by more than fp32 holds: a merge around
    another maximum overflows.
    """

    rows: tuple[int, ...]
    splits: tuple[int, ...]
    heads: int = 2
    values: int = 64
    latent: int = 128
    padding: int = 0
    dtype: torch.dtype = BF16
    dense: str = "latent"
    per_work: int | None = None
    outweighed: bool = False


def make(case, quantization="none", fp8=FN, lse=False):
    """The inputs of an epilogue: a plan whose splits are those of `case`, and random values."""
    g = torch.Generator().manual_seed(len(case.rows) + sum(case.splits))
    most = max(case.rows)
    per_work = case.per_work or (16 if case.heads > 16 else None)
    plan = decodes.plan_for(
        max_batch=len(case.rows), max_query_len=most, num_heads=case.heads,
        v_head_dim=case.latent, heads_per_work=per_work,
    )  # fmt: skip
    tokens = sum(case.rows) + case.padding
    decodes.refresh(plan, case.rows, [n + 9 for n in case.rows], tokens)
    counts = [n for n in case.splits for _ in range(plan.layout.fold)]
    plan.reduce_indptr = torch.tensor([0, *counts]).cumsum(0).int()
    tiles = [(0, n) for n in case.rows for _ in range(plan.layout.fold)]
    plan.reduce_final_map = torch.tensor(tiles).int()
    # As in every plan, with room for two. The rows behind them are nobody's.
    plan.reduce_partial_map = (most * torch.arange(max(2, sum(counts)))).int()
    shape = most * (sum(counts) + 1), plan.layout.per_work
    plan.partial_output = torch.randn(*shape, case.latent, generator=g)
    # In the first head weights differ, and some are 0; in the others each split counts.
    plan.partial_lse = 1.5 * torch.randn(shape, generator=g)
    plan.partial_lse[:, 0] *= 2
    blind = torch.rand(shape, generator=g) < 0.3
    blind[:, 1:] = False
    if case.outweighed:
        begin = plan.reduce_indptr[:-1][torch.tensor(counts) > 0]
        first = (plan.reduce_partial_map[begin, None] + torch.arange(most)).flatten()
        blind[first, 0] = False
        plan.partial_lse[:, 0] -= 200
        plan.partial_lse[first, 0] += 200
    plan.partial_lse.masked_fill_(blind, -torch.inf)
    plan.partial_output.masked_fill_(blind[..., None], 0.0)
    for partial in (plan.partial_lse, plan.partial_output):
        partial[-most:] = torch.nan

    # What sees no key is zero, and so are rows of a sequence that was split, before the merge.
    latents = torch.randn(tokens, case.heads, case.latent, generator=g).to(case.dtype)
    latents[:, 0] = 0
    w_uv = torch.randn(case.heads, case.latent, case.values, generator=g).to(case.dtype)
    if case.dense == "latent":
        w_uv = w_uv.transpose(1, 2).contiguous().transpose(1, 2)
    width = case.heads * case.values
    stored = case.dtype if quantization == "none" else fp8
    # The neighbours of a row are not its columns.
    wide = poisoned(torch.empty(tokens, width + 16, dtype=stored))
    scale = {"none": None, "tensor": torch.tensor([0.37])}.get(quantization)
    if in_groups(quantization):
        scale = torch.full((width // 128, tokens), torch.nan).T
    epilogue = Epilogue(w_uv, wide[:, :width], scale, quantization == "group_ue8m0")
    out_lse = torch.full((tokens, case.heads), NOT_WRITTEN) if lse else None
    q, cache = torch.empty(tokens, case.heads, case.latent), torch.empty(1, 1, case.latent)
    return wide, Inputs(
        q, cache, plan, torch.empty(0), 1.0, None, None, latents, out_lse, epilogue
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Expected:
    """The smallest and the largest result in the activation type, [T, H * V], and the LSE."""

    least: torch.Tensor
    most: torch.Tensor
    lse: torch.Tensor

    def wrong(self, wide, given):
        """How many elements are wrong after a launch, by part; empty if none is."""
        got = given.epilogue.out
        margin = wide[:, got.shape[1] :]
        near = (given.lse.double() - self.lse).abs() <= LSE_TOLERANCE
        parts = {
            "result": ~((self.least <= got) & (got <= self.most)),
            "LSE": ~(near | (given.lse == self.lse)),
            "columns beside a row": margin.view(torch.uint8) != poisoned(margin).view(torch.uint8),
        }
        return {name: int(part.sum()) for name, part in parts.items() if part.any()}

    def is_near(self, dtype):
        """Whether the limits are near each other: mostly one number, or two neighbours."""
        near = (steps(self.most, self.least) <= 1).float().mean()
        return near > (0.85 if dtype == BF16 else 0.6)


def expected(given):
    """What the inputs of a launch should give.

    Merged in float64: in fp32 a latent may round to the neighbour. Then the product of any of
    these latents, summed in fp32 in any order: gamma_n as in `absorb_interval`.
    """
    plan, latents, w_uv = given.plan, given.out, given.epilogue.w_uv
    low, high, rows = latents.clone(), latents.clone(), plan.qo_indptr.tolist()
    lse = torch.full(latents.shape[:2], NOT_WRITTEN, dtype=torch.float64)
    for sequence, block in itertools.product(range(plan.step.batch), range(plan.layout.fold)):
        tile = sequence * plan.layout.fold + block
        splits = plan.reduce_partial_map[slice(*plan.reduce_indptr[tile : tile + 2].tolist())]
        heads = slice(block * plan.layout.per_work, (block + 1) * plan.layout.per_work)
        for i, token in enumerate(range(rows[sequence], rows[sequence + 1])):
            if not len(splits):
                continue
            count = latents[token, heads].shape[0]
            part = plan.partial_output[splits + i, :count].double()
            lses = plan.partial_lse[splits + i, :count].double()
            lse[token, heads] = total = lses.logsumexp(0)
            weight = (lses - total).exp().masked_fill(total == -torch.inf, 0.0)[..., None]
            exact, bound = (weight * part).sum(0), 2e-6 * (weight * part.abs()).sum(0)
            low[token, heads] = (exact - bound).to(latents.dtype)
            high[token, heads] = (exact + bound).to(latents.dtype)
    low, high, w = low.double().transpose(0, 1), high.double().transpose(0, 1), w_uv.double()
    terms = w.shape[1] * 2.0**-24
    slack = torch.bmm((high - low) / 2, w.abs())
    slack += terms / (1 - terms) * torch.bmm(high.abs(), w.abs())
    exact = torch.bmm((high + low) / 2, w)
    least, most = (
        (exact + sign * slack).transpose(0, 1).flatten(1).to(w_uv.dtype) for sign in (-1, 1)
    )
    return Expected(least, most, lse)


def check_quantized(product, got, quantization):
    """`got` is `product` [T, H * V] quantized as vLLM would: scales equal, values a step off."""
    want = Epilogue(
        torch.eye(product.shape[1]).to(product.dtype)[None],
        torch.empty(product.shape, dtype=got.out.dtype),
        got.scale.clone() if quantization == "tensor" else torch.empty(got.scale.shape),
        got.ue8m0,
    )
    # The product with the identity is exact.
    reference.finish(product[:, None], want)
    assert torch.equal(got.scale, want.scale)
    assert int(steps(got.out, want.out).max()) <= 1
    assert agreement((got.out, want.out))[0] > 0.999
