"""The epilogue under the repaired interpreter; test_interpreted.py runs this."""

import dataclasses

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from mla_fusion.attention.triton import epilogue as epilogues
from mla_fusion.attention.triton.epilogue import Shape
from mla_fusion.cli.bench.kit import poisoned
from tests.attention import decodes
from tests.attention.decodes import FN, FNUZ, FP16
from tests.attention.epilogue_cases import Case, check_quantized, expected, make
from tests.kernels import interpreter
from tests.nightly import daily

interpreter.install()

ONE, SOME = Shape(1, 16, 1, 4, 4), Shape(2, 64, 1, 4, 4)
# In slices; PARTS has column blocks too.
CUT, PARTS = Shape(2, 64, 4, 4, 4), Shape(2, 32, 2, 4, 4)
# Whole rows up to 4 splits, of several slices and column blocks.
FEW = Shape(1, 64, 4, 4, 4, 4)
CASES = {
    "one split": Case((1,), (1,), ONE),
    "not split": Case((1,), (0,), ONE),
    "32 splits at once": Case((1,), (32,), Shape(1, 32, 1, 32, 4), latent=512, values=32),
    "33 splits": Case((1,), (33,), Shape(1, 16, 4, 16, 4), values=16),
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
    "whole rows, not split": Case((1,), (0,), FEW),
    "whole rows, one split": Case((1,), (1,), FEW),
    "whole rows, as many splits": Case((1,), (4,), FEW),
    "in slices, one split more": Case((1,), (5,), FEW),
    "whole rows beside slices": Case((1,) * 5, (5, 4, 0, 9, 1), FEW, 1, values=128, padding=2),
    "whole drafts beside slices": Case((3, 1, 0, 2), (3, 0, 0, 9), FEW, heads=1),
    "whole rows, folded heads": Case((1, 1), (3, 6), Shape(1, 32, 2, 2, 4, 4), 18, 32, latent=32),
    "whole rows of 320": Case((1, 1), (3, 5), Shape(1, 64, 4, 2, 4, 4), latent=320),
    "whole rows in turns": Case((1, 1), (17, 32), Shape(1, 32, 2, 8, 4, 32), latent=512, values=32),
    "fp16": Case((1, 1), (2, 3), CUT, dtype=FP16),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    daily(CASES, "33 splits", "ragged", "ragged, in slices", "drafts, in slices and blocks",
          "more padding than slots", "320 latents", "whole drafts beside slices", "fp16"),
)  # fmt: skip
def test_result(name):
    case = CASES[name]
    wide, given = make(case, lse=True)
    epilogues.launch(given, case.shape)
    want = expected(given)
    assert not (wrong := want.wrong(wide, given)), wrong
    assert want.is_near(case.dtype) and not given.plan.epilogue_counts.any()


def test_whole_rows_leave_nothing_for_others():
    """What waits in the plan for the last slice is that of sliced rows; no other row is counted."""
    case = Case((1, 2, 1, 1), (4, 5, 0, 1), FEW, heads=1, values=128)
    _, given = make(case)
    _, fused = make(case, "tensor")
    # Of 8 slots those of the sequence with five splits.
    sliced = torch.tensor([False, False, True, True, False, False, False, False])
    blocks = case.values // FEW.columns
    for each in (given, fused):
        sums, counts = each.plan.epilogue_sums, each.plan.epilogue_counts
        before = torch.where(sliced, 0, 7).repeat_interleave(blocks).int()
        counts[: len(before)] = before
        sums.fill_(torch.nan)
        epilogues.launch(each, FEW)
        stored = ~sums[: 8 * FEW.sums(1, case.values)].view(8, -1).isnan()
        assert torch.equal(stored.all(1), sliced) and torch.equal(stored.any(1), sliced)
        assert torch.equal(counts[: len(before)], before)
    check_quantized(given.epilogue.out, fused.epilogue, "tensor")


QUANTIZED = {
    "whole": (Case((1, 1, 1), (3, 0, 1), Shape(1, 128, 1, 4, 4), values=128, heads=3), FN),
    "slices": (Case((1, 1, 1), (3, 0, 1), Shape(4, 128, 4, 4, 4), values=128, heads=3), FN),
    "fnuz": (Case((2, 0, 1), (3, 0, 1), Shape(2, 128, 2, 4, 4), values=256, padding=2), FNUZ),
    "fp16": (Case((1, 1), (2, 0), Shape(1, 128, 8, 2, 4), values=128, dtype=FP16), FN),
}


@pytest.mark.parametrize("quantization", ["tensor", "group", "group_ue8m0"])
@pytest.mark.parametrize("name", daily(QUANTIZED, "slices"))
def test_quantized(name, quantization):
    """What a quantization of the result that is not quantized gives, to the bit."""
    case, fp8 = QUANTIZED[name]
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


@pytest.mark.parametrize(
    "case, fp8, quantization",
    [
        (Case((1,) * 4, (5, 4, 0, 9), Shape(1, 128, 4, 2, 4, 4), 2, 128, padding=2), FN, "group"),
        pytest.param(Case((2, 0, 1), (3, 0, 6), Shape(1, 128, 2, 4, 4, 4), 1, 256), FNUZ,
                     "group_ue8m0", marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_rows_of_few_pieces_in_groups(case, fp8, quantization):
    """They are slices that load `whole` splits at once; others are slices of `splits`."""

    def product(splits):
        _, given = make(case)
        epilogues.launch(given, dataclasses.replace(case.shape, splits=splits, whole=0))
        return given.epilogue.out.contiguous()

    few, many = product(case.shape.whole), product(case.shape.splits)
    splits = torch.zeros(len(few))
    splits[: sum(case.rows)] = torch.tensor(case.splits).repeat_interleave(torch.tensor(case.rows))
    _, given = make(case, quantization, fp8)
    given.plan.epilogue_sums.fill_(torch.nan)
    epilogues.launch(given, case.shape)
    assert not given.plan.epilogue_counts.any()
    want = torch.where((splits <= case.shape.whole)[:, None], few, many)
    check_quantized(want, given.epilogue, quantization)


@pytest.mark.parametrize("quantization", daily(["none", "group"], "none"))
def test_any_slice_may_be_the_last(monkeypatch, quantization):
    """Launch after launch of one plan: the same bits, and counts of zero, whatever the order of the
    programs, and with other shapes in between."""
    shapes = [Shape(1, 128, 4, 4, 4), Shape(4, 128, 8, 2, 4), Shape(2, 128, 2, 4, 4)]
    shapes.append(Shape(1, 128, 4, 4, 4, 2))
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
