"""What the Hopper kernels over byte caches compute, in the doubles of Gluon.

Results are compared with float64 attention over what `pages.py` wrote; all other bytes are NaN.
"""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from mla_fusion.attention import reference
from mla_fusion.attention.hopper import cards, sparse_fp8, sparse_specialized
from mla_fusion.attention.plan.inputs import Inputs as Given
from mla_fusion.attention.plan.inputs import Sparse
from mla_fusion.attention.plan.layouts import read_keys
from mla_fusion.measure.distances import distance
from tests.attention import gluon_warps
from tests.attention.decodes import BF16, FN, SCALE
from tests.attention.gluon_double import Machine
from tests.attention.packed_cases import SLOTS, Case, Inputs, random_case
from tests.attention.pages import V4, V32

TOLERANCE = 3e-3  # outputs are rounded to bf16


def run(case, edit=None):
    """(outputs, LSE, inputs) of a case, with the splits of split tokens merged in torch."""
    inputs = Inputs(case)
    if edit is not None:
        edit(inputs)
    scratch = inputs.scratch()
    plan, first, last = scratch.plan, inputs.scopes[0], inputs.scopes[-1]
    out = torch.full((case.tokens, case.heads, 512), torch.nan, dtype=BF16)
    lse = torch.full((case.tokens, case.heads), torch.nan)
    given = Given(
        inputs.q, first.kv_cache, plan, first.table, SCALE, None, None, out, lse,
        layout=case.layout, sparse=Sparse(last, scratch.first, scratch.first_lens, inputs.sink),
    )  # fmt: skip
    if cards.sparse_fp8(given):
        assert not cards.sparse_specialized(given)
        gluon_warps.Machine(case.seed).launch(sparse_specialized.launch_of(given))
    else:
        Machine().launch(sparse_fp8.launch_of(given))
    merged = dataclasses.replace(given, out=out.float())
    reference.merge(merged, plan.partial_output, plan.partial_lse)
    if inputs.sink is not None:
        splits = plan.reduce_indptr.diff().view(-1, plan.layout.fold)[: case.tokens]
        is_split = (splits > 0).repeat_interleave(plan.layout.per_work, 1)[:, : case.heads]
        factor = torch.where(is_split, torch.sigmoid(lse - inputs.sink), 1.0)
        merged.out.mul_(factor[..., None])
    return merged.out, lse, inputs


def check(case):
    out, lse, inputs = run(case)
    # The kernel of few heads over one scope of V3.2 does not round keys.
    rounds = case.layout is V4 or len(case.widths) == 2 or case.heads > 16
    inputs.check(out, lse, TOLERANCE, BF16 if rounds else torch.double)


CASES = {
    "16 heads": Case(V32, ("full",), (150,), heads=16, tokens=1),
    "8 heads, holes": Case(V32, ("holes",), (300,), ([300, 0, 70],), sink=5, gap=64, page=8),
    "20 heads": Case(V32, ("mixed",), (200,), heads=20, tokens=2, page=1),
    "40 heads": Case(V32, ("same",), (130,), ([0, 65],), heads=40, tokens=2, sink=0),
    "nothing listed": Case(V32, ("none",), (70,), sink=40),
    "32 heads, 512 slots": Case(V32, ("mixed",), (512,), heads=32, tokens=1, sink=0),
    "64 heads": Case(V32, ("holes",), (140,), ([64, 139],), heads=64, tokens=2, page=64),
    "128 heads": Case(V32, ("full",), (70,), heads=128, tokens=1),
    "2048 slots": Case(V32, ("mixed",), (2048,), ([2048, 1, 1999],), heads=16),
    "8 tokens": Case(V32, ("mixed",), (96,), heads=16, tokens=8, sink=5),
    "v4": Case(V4, ("holes",), (150,), ([150, 3, 0],), heads=8, sink=5, page=64, gap=1024),
    "v4 of two scopes": Case(
        V4, ("holes", "mixed"), (70, 150), ([70, 3], [150, 2]), heads=16, tokens=2, sink=5, page=2
    ),
    "v3.2 of two scopes": Case(V32, ("none", "full"), (64, 65), ([64, 0], [65, 0]), tokens=2),
}


@pytest.mark.parametrize("name", CASES)
def test_listed_keys(name):
    check(CASES[name])


@pytest.mark.parametrize(
    "seeds", [range(3), pytest.param(range(3, 203), marks=pytest.mark.nightly)], ids=len
)
def test_random_cases(seeds):
    for seed in seeds:
        case = dataclasses.replace(random_case(seed), fnuz=False)
        print(f"case {seed}: {case}")  # shown where it fails
        check(case)


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("byte", [5, 514, 600])
def test_a_spoilt_entry_spoils_its_token(byte, heads):
    """A NaN in the values, the scales or the rotated values of a listed entry spoils its token."""

    def spoil(inputs):
        slot, scope = int(inputs.scopes[0].table[1, 3]), inputs.scopes[0]
        start = byte // 4 * 4
        scope.kv_cache[slot // case.page, slot % case.page, start : start + 4] = 0xFF

    case = Case(V32, ("full",), (9,), tokens=3, heads=heads)
    out, lse, _ = run(case, edit=spoil)
    assert out[1].isnan().all() and not lse[1].isfinite().any()
    assert out[0].isfinite().all() and out[2].isfinite().all()


def against_entries(inputs, out, lse, columns=512):
    """Compare with float64 attention over the cache as it is now, so many columns at a time."""
    scope = inputs.scopes[0]
    for t, row in enumerate(scope.table.long()):
        keys = read_keys(scope.kv_cache, row[(row >= 0) & (row < SLOTS)], V32, FN).double()
        # Not `decodes.attention`: the LSE of two equal scores of 2^99 is that of one.
        scores = SCALE * inputs.q[t].double() @ keys.T
        want = scores.softmax(-1) @ keys[:, :512]
        for got, part in zip(out[t].split(columns, -1), want.split(columns, -1), strict=True):
            assert distance(got, part) <= TOLERANCE
        torch.testing.assert_close(lse[t].double(), scores.logsumexp(-1), rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("most", [-130, -60, 0, 50])
def test_scales_may_be_of_any_size(most):
    """Those of a token's groups, and of tokens, are far apart; the largest is about 2^most."""
    generator = torch.Generator().manual_seed(most + 200)
    exponents = most - torch.randint(0, 12, (SLOTS, 4), generator=generator)
    exponents[torch.rand(SLOTS, 4, generator=generator) < 0.2] -= 20

    def edit(inputs):
        inputs.q *= 2.0 ** -max(most, -20)
        inputs.q[..., 512:] *= 2.0 ** max(most, -20)
        cache, page = inputs.scopes[0].kv_cache, case.page
        for slot, scales in enumerate(torch.exp2(exponents.float()).view(torch.uint8)):
            cache[slot // page, slot % page, 512:528] = scales

    case = Case(V32, ("holes",), (130,), heads=16, page=8)
    out, lse, inputs = run(case, edit=edit)
    if most == -130:
        # Nothing of a value that small is left of a mean beside the bound of 2^-60.
        assert (out == 0).all() and lse.isfinite().all()
    else:
        against_entries(inputs, out, lse)


@pytest.mark.parametrize("what", ["a group is far below", "a scale of zeros is far above"])
def test_latents_keep_their_precision_up_to_a_ratio_of_scales(what):
    """Of 2^26: those of a smaller group, and those beside a scale that nothing is multiplied by."""

    def edit(inputs):
        cache, ratio = inputs.scopes[0].kv_cache, 2.0**26
        slots = inputs.scopes[0].table[0].unique().tolist()
        entries = [cache[slot // cache.shape[1], slot % cache.shape[1]] for slot in slots]
        if what == "a group is far below":
            for entry in entries:
                entry[516:520].view(torch.float32).div_(ratio)
        else:
            entries[0][:128] = 0
            entries[0][512:516].view(torch.float32).mul_(ratio)

    out, lse, inputs = run(Case(V32, ("full",), (130,), heads=16, tokens=1, page=8), edit=edit)
    against_entries(inputs, out, lse, columns=128)


@pytest.mark.parametrize(
    "power, latents",
    [(0.0, 1), (2.0**-115, 1), (2.0**-70, 1), (2.0**-30, 1), (2.0**15, 1), (2.0**99, 1), (1.0, 0)],
)
def test_queries_may_be_of_any_size(power, latents):
    """Scores of a query of 2^99 are far apart: one key is left of the softmax. With `latents` of 0
    a query has rotated values alone.
    """

    def edit(inputs):
        inputs.q *= power
        inputs.q[..., :512] *= latents

    out, lse, inputs = run(Case(V32, ("full",), (20,), heads=16, page=8), edit=edit)
    against_entries(inputs, out, lse)


@pytest.mark.parametrize("name", ["16 heads", "64 heads"])
@pytest.mark.parametrize("left_out", ["fence_async_shared", "barrier"])
def test_a_product_before_fence_and_barrier_is_refused(left_out, name, monkeypatch):
    for machine in (Machine, gluon_warps.Machine):
        monkeypatch.setattr(machine, left_out, lambda self: None)
    with pytest.raises(AssertionError, match=r"without fence and barrier|before the others have"):
        run(CASES[name])
