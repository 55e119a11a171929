"""The dense decode kernels for Hopper executed on a CPU: results, masks, waits, and all e4m3."""

import pytest
import torch

pytest.importorskip("triton")

from mla_fusion.attention import reference
from mla_fusion.attention.hopper import cards, common, decode, few_rows, tile, warp_specialized
from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.measure.distances import distance
from tests.attention import gluon_double
from tests.attention.decodes import BF16, FN, arguments, definition, same_lse
from tests.attention.gluon_values import Tensor
from tests.attention.gluon_warps import Machine

# heads, query rows, KV tokens, and the plan.
CASES = {
    "64 heads": (64, [1, 1, 1], [130, 64, 1], {}),
    "pairs": (128, [1, 1], [300, 65], {"heads_per_work": 128}),
    "padded heads": (40, [1, 1], [100, 400], {}),
    "more tiles than buffers": (64, [1], [1300], {"ctas": 2}),
    "drafts": (16, [4, 3, 1], [200, 70, 3], {}),
    "rows that see nothing": (16, [4, 2], [0, 129], {}),
    "padded drafts of 24 heads": (24, [2, 1], [130, 5], {}),
    "folded drafts": (32, [8, 2], [300, 70], {}),
    "a block of 8 heads": (8, [8, 2, 5], [300, 70, 4], {"ctas": 3}),
    "half a block of 8 heads": (8, [4, 1], [200, 3], {}),
    "blocks of 4 padded heads": (4, [9, 2], [130, 70], {}),
    "drafts of 128 heads": (128, [2, 1], [300, 1], {}),
    "splits that begin and end within tiles": (64, [1, 1], [333, 90], {"kv_granularity": 16}),
}


def check(
    dtype, heads, rows, lens, options, loudness=None, module=warp_specialized, machine=None,
    page=64, **scales,
):  # fmt: skip
    """Run the kernel. loudness: what the queries of each head are multiplied by."""
    fields = arguments(
        rows, lens, page, 512, 64, num_heads=heads, q_dtype=dtype, kv_dtype=dtype, overhead=1,
        **{"kv_granularity": 64, **options},
    )  # fmt: skip
    fields |= scales
    if loudness is not None:
        fields["q"] = (fields["q"].float() * loudness[:, None]).to(dtype)
    tokens = len(fields["q"])
    out = torch.full((tokens, heads, 512), torch.nan, dtype=BF16)
    given = Inputs(**fields, out=out, lse=torch.full((tokens, heads), torch.nan))
    (machine or Machine(seed=tokens)).launch(module.launch_of(given))
    want, want_lse = definition(fields, rows, lens)
    reference.merge(given, given.plan.partial_output, given.plan.partial_lse)
    assert distance(given.out, want) <= 3.5e-3
    same_lse(given.lse, want_lse)


@pytest.mark.parametrize("dtype", [BF16, FN])
@pytest.mark.parametrize("name", CASES)
def test_results(name, dtype, monkeypatch):
    """In bf16 as in front of a product that merges."""
    monkeypatch.setattr(cards, "merges", lambda given: dtype == BF16)
    check(dtype, *CASES[name])


@pytest.mark.parametrize("dtype", [BF16, FN])
def test_maxima_that_rise_by_all_amounts(dtype):
    """Up to 60 in base 2 from tile to tile, and by less than raises a peak: scores of each head are
    larger than those of the one before.
    """
    check(dtype, 64, [1, 1], [600, 450], {}, torch.linspace(0, 16, 64))


@pytest.mark.parametrize("name", ["q_scale", "kv_scale"])
def test_scales_of_zero(name):
    """All tokens that a row sees have one weight, and those that it does not see none."""
    check(FN, 16, [4, 2], [200, 70], {}, **{name: torch.zeros(1)})


def keep_nothing(machine):
    """Waits for products keep none of the registers that these read."""
    wait = machine.warpgroup_mma_wait
    machine.warpgroup_mma_wait = lambda outstanding, deps: (
        wait(outstanding, []),
        deps[0] if len(deps) == 1 else tuple(deps),
    )[1]


LEFT_OUT = {
    "fence": (lambda m: setattr(m, "fence_async_shared", lambda: None), "fence|still load"),
    "barrier": (lambda m: setattr(m, "barrier", lambda: None), "before the others"),
    "kept": (keep_nothing, "does not keep"),
    "wait": (lambda m: setattr(m.gdc, "gdc_wait", lambda: None), "before the kernel in front"),
}


@pytest.mark.parametrize("dtype", [BF16, FN])
@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_the_kernel_may_not_leave_out(name, dtype):
    (spoil, message), machine = LEFT_OUT[name], Machine(seed=3)
    spoil(machine)
    with pytest.raises(AssertionError, match=message):
        check(dtype, *CASES["64 heads"], machine=machine)


class InStep(Machine, gluon_double.Machine):
    """All warps go in step. The compiler puts a barrier behind each fence."""

    own = (*Machine.own, *gluon_double.Machine.own)
    warpgroup_mma = gluon_double.Machine.warpgroup_mma
    warpgroup_mma_wait = gluon_double.Machine.warpgroup_mma_wait

    def switch(self):
        for barrier, phase in self.waiting.values():
            while barrier.phases % 2 == phase:
                self.land()

    def fence_async_shared(self):
        super().fence_async_shared()
        self.barrier()


class Copied(Machine, gluon_double.Machine):
    """Warps that compute and a warp that copies, each at its own pace."""

    own = InStep.own
    warpgroup_mma = gluon_double.Machine.warpgroup_mma
    warpgroup_mma_wait = gluon_double.Machine.warpgroup_mma_wait


FEW_ROWS = [
    (20, [1, 1, 1], [130, 64, 1], {}, 64), (32, [1], [1300], {"ctas": 3}, 64),
    (16, [2, 1], [200, 70], {}, 64), (16, [1, 1], [70, 129], {}, 16),
    (16, [1, 1], [500, 129], {"ctas": 2}, 96), (8, [4, 2, 0], [0, 129, 65], {}, 64),
    (16, [1, 1], [333, 90], {"kv_granularity": 16}, 64),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, FN])
@pytest.mark.parametrize("case", FEW_ROWS)
def test_few_rows(dtype, case, monkeypatch):
    """In fp8 as in front of a product that merges."""
    monkeypatch.setattr(cards, "merges", lambda given: dtype == FN)
    heads, rows, lens, options, page = case
    check(dtype, heads, rows, lens, options, module=decode, machine=InStep(seed=0), page=page)
    machine = Copied(seed=heads)
    check(dtype, heads, rows, lens, options, module=few_rows, machine=machine, page=page)


CODES = torch.arange(256, dtype=torch.uint8)
PAIRS = Tensor(torch.stack([CODES, CODES.flip(0)], 1).view(torch.int16))
WANTED = [each.view(FN).to(torch.float16)[:, None] for each in (CODES, CODES.flip(0))]


def test_both_bytes_are_converted():
    """NaN stays NaN."""
    found = gluon_double.Machine().python(common.widen_pairs)(PAIRS)
    for each, want in zip(found, WANTED, strict=True):
        torch.testing.assert_close(each.data, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("at", [0, 1])
def test_a_byte_is_moved(at):
    """2^-8 of its value, and a NaN becomes 480."""
    moves = (tile.LOW, tile.HIGH)[at].value
    found = gluon_double.Machine().python(tile.widen)(PAIRS, moves).data * 256
    signs = torch.where((CODES if at == 0 else CODES.flip(0)) < 128, 480.0, -480.0)[:, None]
    want = torch.where(WANTED[at].isnan(), signs.to(torch.float16), WANTED[at])
    torch.testing.assert_close(found, want, rtol=0, atol=0)
