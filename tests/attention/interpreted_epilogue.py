"""The epilogue under the repaired interpreter, against its formula; test_interpreted.py runs this.

Pieces are random and made here, as many as a case says, so that the order of fp32 sums is the only
freedom of a result.
"""

import dataclasses
import itertools

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from mla_fusion.attention import persistent_mla_decode, reference
from mla_fusion.attention import triton_epilogue as epilogues
from mla_fusion.attention.epilogue import Epilogue
from mla_fusion.attention.triton_epilogue import Shape
from mla_fusion.attention.validate import Inputs
from mla_fusion.cli.compare import agreement, distance, poisoned, steps
from tests.attention import decodes
from tests.attention.decodes import BF16, FN, FNUZ, FP16
from tests.kernels import interpreter

interpreter.install(bounds=True, races=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """A step: for each sequence its query rows and pieces (0: not split), and its layer.

    padding: rows after the last sequence.
    """

    rows: tuple[int, ...]
    pieces: tuple[int, ...]
    shape: Shape
    heads: int = 2
    values: int = 64
    latent: int = 128
    padding: int = 0
    dtype: torch.dtype = BF16
    dense: str = "latent"


ONE, SOME = Shape(1, 16, 1, 4, 4), Shape(2, 64, 1, 4, 4)
# In slices; PARTS has column blocks too.
CUT, PARTS = Shape(2, 64, 4, 4, 4), Shape(2, 32, 2, 4, 4)
CASES = {
    "one piece": Case((1,), (1,), ONE),
    "not split": Case((1,), (0,), ONE),
    "32 pieces at once": Case((1,), (32,), Shape(1, 32, 1, 32, 4), latent=512, values=32),
    "33 pieces": Case((1,), (33,), Shape(1, 16, 4, 16, 4), values=16),
    "ragged": Case((1, 1, 1, 1, 1), (3, 0, 8, 1, 0), SOME),
    "ragged, in slices": Case((1, 1, 1, 1, 1), (3, 0, 8, 1, 0), CUT),
    "tokens of two sequences": Case((1, 1, 1), (2, 0, 5), Shape(4, 32, 1, 2, 4), dense="values"),
    "drafts": Case((4, 1, 0, 3), (3, 0, 0, 9), SOME, heads=3),
    "drafts, in slices and blocks": Case((4, 1, 0, 3), (3, 0, 0, 9), PARTS, heads=3),
    "drafts, one row": Case((2, 0, 2), (5, 0, 0), ONE),
    "padding": Case((2, 1, 2), (2, 0, 1), CUT, padding=4),
    "more padding than slots": Case((1,), (2,), Shape(2, 16, 2, 4, 4), padding=5),
    "folded heads": Case((1, 2), (2, 3), Shape(2, 16, 1, 2, 4), heads=18, values=16, latent=16),
    "256 values": Case((1, 1), (4, 0), Shape(2, 128, 2, 2, 4), values=256, dense="values"),
    "320 latents": Case((1, 1), (4, 0), Shape(2, 64, 4, 2, 4), latent=320),
    "one slice each of 512": Case((1,), (5,), Shape(1, 32, 8, 4, 4), latent=512, values=32),
    "16 rows": Case((1,) * 11, (2, 0, 3, 0, 1, 0, 0, 0, 0, 2, 0), Shape(16, 64, 2, 1, 4)),
    "fp16": Case((1, 1), (2, 3), CUT, dtype=FP16),
}  # fmt: skip


def make(case, quantization="none", fp8=FN, lse=False):
    """The inputs of an epilogue: a plan whose pieces are those of `case`, and random values."""
    g = torch.Generator().manual_seed(len(case.rows) + sum(case.pieces))
    most = max(case.rows)
    plan = decodes.plan_for(
        max_batch=len(case.rows),
        max_query_len=most,
        num_heads=case.heads,
        v_head_dim=case.latent,
        heads_per_work=16,
    )
    tokens = sum(case.rows) + case.padding
    decodes.refresh(plan, case.rows, [n + 9 for n in case.rows], tokens)
    counts = [n for n in case.pieces for _ in range(plan.fold)]
    plan.reduce_indptr = torch.tensor([0, *counts]).cumsum(0).int()
    # In any order, and none in the first rows.
    order = 1 + torch.randperm(sum(counts), generator=g)
    plan.reduce_partial_map = (most * order).int()
    shape = most * (sum(counts) + 1), plan.heads_per_work
    plan.partial_output = torch.randn(*shape, case.latent, generator=g)
    plan.partial_lse = 3 * torch.randn(shape, generator=g)
    blind = torch.rand(shape, generator=g) < 0.3
    plan.partial_lse.masked_fill_(blind, -torch.inf)
    plan.partial_output.masked_fill_(blind[..., None], 0.0)
    for partial in (plan.partial_lse, plan.partial_output):
        partial[:most] = torch.nan  # nobody's

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
    if quantization == "group":
        scale = torch.full((width // 128, tokens), torch.nan).T
    epilogue = Epilogue(w_uv, wide[:, :width], scale)
    out_lse = torch.full((tokens, case.heads), 7.0) if lse else None
    unused = torch.empty(0)
    return wide, Inputs(
        unused, unused, plan, unused, 1.0, None, None, latents, out_lse, epilogue
    )  # fmt: skip


def expected(given):
    """The smallest and the largest result in the activation type, [T, H * V], and the LSE.

    Merged in float64: in fp32 a latent may round to the neighbour. Then the product of any of
    these latents, summed in fp32 in any order: gamma_n as in `absorb_interval`.
    """
    plan, latents, w_uv = given.plan, given.out, given.epilogue.w_uv
    low, high, rows = latents.clone(), latents.clone(), plan.qo_indptr.tolist()
    lse = torch.full(latents.shape[:2], 7.0, dtype=torch.float64)
    for sequence, block in itertools.product(range(plan.step.batch), range(plan.fold)):
        tile = sequence * plan.fold + block
        pieces = plan.reduce_partial_map[slice(*plan.reduce_indptr[tile : tile + 2].tolist())]
        heads = slice(block * plan.heads_per_work, (block + 1) * plan.heads_per_work)
        for i, token in enumerate(range(rows[sequence], rows[sequence + 1])):
            if not len(pieces):
                continue
            count = latents[token, heads].shape[0]
            part = plan.partial_output[pieces + i, :count].double()
            lses = plan.partial_lse[pieces + i, :count].double()
            lse[token, heads] = total = lses.logsumexp(0)
            weight = (lses - total).exp().nan_to_num(nan=0.0)[..., None]
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
    return least, most, lse


@pytest.mark.parametrize("name", CASES)
def test_result(name):
    case = CASES[name]
    wide, given = make(case, lse=True)
    epilogues.launch(given, case.shape)
    least, most, lse = expected(given)
    got = given.epilogue.out
    assert ((least <= got) & (got <= most)).all(), steps(got, least).max()
    # The limits are near: mostly one number, or two neighbours.
    near = (steps(most, least) <= 1).float().mean()
    assert near > (0.85 if case.dtype == BF16 else 0.6)
    torch.testing.assert_close(given.lse.double(), lse, rtol=0, atol=1e-5)
    margin = wide[:, got.shape[1] :]
    assert torch.equal(margin, poisoned(margin)), "columns beside the row are not written"


QUANTIZED = [
    (Case((1, 1, 1), (3, 0, 1), Shape(1, 128, 1, 4, 4), values=128, heads=3), FN),
    (Case((1, 1, 1), (3, 0, 1), Shape(4, 128, 4, 4, 4), values=128, heads=3), FN),
    (Case((2, 0, 1), (3, 0, 1), Shape(2, 128, 2, 4, 4), values=256, padding=2), FNUZ),
    (Case((1, 1), (2, 0), Shape(1, 128, 8, 2, 4), values=128, dtype=FP16), FN),
]


@pytest.mark.parametrize("quantization", ["tensor", "group"])
@pytest.mark.parametrize("case, fp8", QUANTIZED)
def test_quantized(case, fp8, quantization):
    """What a quantization of the result that is not quantized gives, to the bit."""
    _, given = make(case)
    given.out[-1] = 0  # a group whose maximum is zero
    epilogues.launch(given, case.shape)
    _, fused = make(case, quantization, fp8)
    fused.out[-1] = 0
    epilogues.launch(fused, case.shape)
    check_quantized(given.epilogue.out, fused.epilogue, quantization)
    product = given.epilogue.out.contiguous()
    _, separate = make(case, quantization, fp8)
    epilogues.quantize(product, separate.epilogue)
    check_quantized(product, separate.epilogue, quantization)


@pytest.mark.parametrize("quantization", ["none", "group"])
def test_any_slice_may_be_the_last(monkeypatch, quantization):
    """Launch after launch of one plan: the same bits, and counts of zero, whatever the order of the
    programs, and with other shapes in between."""
    shapes = [Shape(1, 128, 4, 4, 4), Shape(4, 128, 8, 2, 4), Shape(2, 128, 2, 4, 4)]
    case = Case((1, 1, 1), (3, 0, 2), shapes[0], values=128)
    _, given = make(case, quantization)
    plan, before = given.plan, decodes.addresses(given.plan)
    # Products that cancel leave what fp32 sums round off, in this order.
    half, w_uv = case.latent // 2, given.epilogue.w_uv
    for latents in (plan.partial_output, given.out):
        latents[..., half:] = latents[..., :half]
    w_uv[:, half:] = -w_uv[:, :half]

    def results():
        for shape in shapes:
            plan.epilogue_sums.fill_(torch.nan)
            given.epilogue.out.copy_(poisoned(given.epilogue.out))
            epilogues.launch(given, shape)
            assert not plan.epilogue_counts.any()
            scale = given.epilogue.scale
            yield given.epilogue.out.clone(), None if scale is None else scale.clone()

    first = list(results())
    set_index = InterpreterBuilder.set_grid_idx
    monkeypatch.setattr(
        InterpreterBuilder,
        "set_grid_idx",
        lambda self, *at: set_index(
            self, *(n - 1 - i for n, i in zip(self.grid_dim, at, strict=True))
        ),
    )
    for (out, scale), (again, same_scale) in zip(first, results(), strict=True):
        assert torch.equal(out.view(torch.uint8), again.view(torch.uint8))
        assert scale is None or torch.equal(scale, same_scale)
    assert decodes.addresses(plan) == before


def check_quantized(product, got, quantization):
    """`got` is `product` [T, H * V] quantized as vLLM would: scales equal, values a step off."""
    want = Epilogue(
        torch.eye(product.shape[1]).to(product.dtype)[None],
        torch.empty(product.shape, dtype=got.out.dtype),
        got.scale.clone() if quantization == "tensor" else torch.empty(got.scale.shape),
    )
    # The product with the identity is exact.
    reference.finish(product[:, None], want)
    assert torch.equal(got.scale, want.scale)
    assert int(steps(got.out, want.out).max()) <= 1
    assert agreement((got.out, want.out))[0] > 0.999


@pytest.mark.parametrize(
    "shape, quantization",
    [(ONE, "none"), (Shape(4, 128, 4, 4, 4), "group"), (None, "none"), (None, "group")],
)
def test_decode(monkeypatch, shape, quantization):
    """The whole decode against that of the reference, in one launch or in separate ones."""
    monkeypatch.setattr(epilogues, "choose", lambda *_: shape)
    rows, lens = [2, 1], [40, 5]
    given = decodes.arguments(rows, lens, 32, num_heads=2, workers=5, overhead=1)
    assert given["plan"].reduce_indptr[-1] > 0
    w_uv = torch.randn(2, 128, 64).to(BF16).transpose(1, 2) / 8
    results = {}
    for provider in ("triton", "reference"):
        out = torch.empty(3, 256, dtype=BF16 if quantization == "none" else FN)
        scale = {"tensor": torch.tensor([0.01]), "group": torch.empty(3, 2)}.get(quantization)
        epilogue = Epilogue(w_uv, out, scale)
        got, lse = persistent_mla_decode(
            **given, epilogue=epilogue, return_lse=True, provider=provider
        )
        assert got is out
        value = out.float()
        if quantization == "group":
            value = (value.view(3, 2, 128) * scale[..., None]).flatten(1)
        results[provider] = value, lse
    (got, lse), (want, want_lse) = results["triton"], results["reference"]
    assert distance(got, want) <= (6e-3 if quantization == "none" else 2e-2)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-3)
