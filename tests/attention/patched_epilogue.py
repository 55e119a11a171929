"""What has to hold with the patch epilogue_groups_few, under the repaired interpreter;
test_patched_copies.py runs this."""

import dataclasses

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from mla_fusion.attention import triton_epilogue as epilogues
from mla_fusion.attention.triton_epilogue import Shape
from tests.attention.decodes import FN, FNUZ, FP16
from tests.attention.epilogue_cases import Case, check_quantized, make
from tests.kernels import interpreter

interpreter.install(bounds=True, races=True)

# Rows of up to `whole` pieces beside rows of more, rows behind the last, drafts, two groups a head.
CASES = [
    (Case((1,) * 5, (5, 4, 0, 9, 1), Shape(1, 128, 4, 2, 4, 4), 2, 128, padding=2), FN, "group"),
    (Case((2, 0, 1), (3, 0, 6), Shape(1, 128, 2, 4, 4, 4), 1, 256), FNUZ, "group_ue8m0"),
    (Case((1, 1), (9, 3), Shape(1, 128, 8, 2, 4, 8), 1, 128, dtype=FP16), FN, "group"),
]
ORDERS = {"forwards": lambda n, i: i, "backwards": lambda n, i: n - 1 - i}


def product(case, shape):
    """The result of `shape`, not quantized."""
    _, given = make(case)
    epilogues.launch(given, shape)
    return given.epilogue.out.contiguous()


def check(monkeypatch, case, fp8, quantization, want):
    """The shape of `case` quantizes `want` in groups, whichever program is the last, and leaves
    counts of zero."""
    set_index, results = InterpreterBuilder.set_grid_idx, []
    for order in ORDERS.values():
        _, given = make(case, quantization, fp8)
        given.plan.epilogue_sums.fill_(torch.nan)
        with monkeypatch.context() as patch:
            patch.setattr(
                InterpreterBuilder,
                "set_grid_idx",
                lambda self, *at, order=order: set_index(
                    self, *(order(n, i) for n, i in zip(self.grid_dim, at, strict=True))
                ),
            )
            epilogues.launch(given, case.shape)
        assert not given.plan.epilogue_counts.any()
        check_quantized(want, given.epilogue, quantization)
        results.append(given.epilogue.out.view(torch.uint8))
    assert torch.equal(*results)


@pytest.mark.parametrize("case, fp8, quantization", CASES)
def test_few(monkeypatch, case, fp8, quantization):
    """Rows of few pieces as slices that load `whole` at once, others as slices of `pieces`."""
    few, many = (
        product(case, dataclasses.replace(case.shape, pieces=pieces, whole=0))
        for pieces in (case.shape.whole, case.shape.pieces)
    )
    pieces = torch.zeros(len(few))
    pieces[: sum(case.rows)] = torch.tensor(case.pieces).repeat_interleave(torch.tensor(case.rows))
    want = torch.where((pieces <= case.shape.whole)[:, None], few, many)
    check(monkeypatch, case, fp8, quantization, want)
