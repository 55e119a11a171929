"""The dense decode kernels for Hopper executed on a CPU: results, masks and waits."""

import pytest
import torch

pytest.importorskip("triton")

from mla_fusion.attention.hopper import decode
from tests.attention import gluon_double, specialized
from tests.attention.decodes import BF16, FN
from tests.attention.gluon_warps import Machine
from tests.attention.specialized import check

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


@pytest.mark.parametrize("dtype", [BF16, FN])
@pytest.mark.parametrize("name", CASES)
def test_results(name, dtype):
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
def test_what_the_kernel_may_not_leave_out(name, dtype, monkeypatch):
    spoil, message = LEFT_OUT[name]

    def spoilt(seed):
        machine = Machine(seed)
        spoil(machine)
        return machine

    monkeypatch.setattr(specialized, "Machine", spoilt)
    with pytest.raises(AssertionError, match=message):
        check(dtype, *CASES["64 heads"])


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


@pytest.mark.parametrize("dtype", [BF16, FN])
@pytest.mark.parametrize(
    ("heads", "rows", "lens", "options"),
    [(20, [1, 1, 1], [130, 64, 1], {}), (32, [1], [1300], {"ctas": 3}), (16, [2, 1], [200, 70], {}),
     (16, [1, 1], [200, 129], {}), (16, [1, 1], [500, 129], {"ctas": 4, "half_below": 3})],
)  # fmt: skip
def test_tiles_of_one_box_and_of_two(dtype, heads, rows, lens, options, monkeypatch):
    monkeypatch.setattr(specialized, "Machine", InStep)
    check(dtype, heads, rows, lens, options, module=decode)
