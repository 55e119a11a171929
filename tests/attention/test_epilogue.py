"""The epilogue of the reference against the formula, its arguments, and how Triton launches it."""

import dataclasses

import pytest
import torch

from mla_fusion.attention import Epilogue, persistent_mla_decode
from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.attention.reference import power_of_two
from mla_fusion.cli.bench.kit import distance, steps
from tests.attention import decodes
from tests.attention.decodes import BF16, FN, FNUZ, FP16, arguments, definition, plan_for, refresh

HEADS, LATENT, VALUES = 4, 64, 32
WIDTH = HEADS * VALUES


def layer(dtype=BF16, dense="latent", values=VALUES):
    """W_UV [H, L, V]."""
    g = torch.Generator().manual_seed(3)
    w_uv = torch.randn(HEADS, LATENT, values, generator=g).to(dtype)
    return w_uv.transpose(1, 2).contiguous().transpose(1, 2) if dense == "latent" else w_uv


def epilogue(**change):
    """An epilogue of two rows, with `change`."""
    return Epilogue(**{"w_uv": layer(), "out": torch.zeros(2, WIDTH, dtype=BF16), **change})


@pytest.mark.parametrize("dense", ["latent", "values"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_attention_times_w_uv(dtype, dense):
    rows, lens = [3, 1, 2], [500, 33, 1]  # one row of the last sees no key
    given = arguments(rows, lens, num_heads=HEADS, q_dtype=dtype, kv_dtype=dtype, overhead=1)
    want, want_lse = definition(given, rows, lens)
    w_uv = layer(dtype, dense)
    # Columns of something else beside the result.
    wide = torch.full((6, WIDTH + 8), 7.0, dtype=dtype)
    epilogue = Epilogue(w_uv, wide[:, :WIDTH])
    out, lse = persistent_mla_decode(**given, epilogue=epilogue, return_lse=True)
    assert out is epilogue.out and (wide[:, WIDTH:] == 7).all()
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    # Rounded twice: the latent, then its product.
    product = torch.einsum("thl,hlv->thv", want.to(dtype).double(), w_uv.double()).flatten(1)
    assert distance(out, product) <= 4e-3
    assert (out.view(6, HEADS, VALUES)[want_lse.isneginf()] == 0).all()
    assert want_lse.isneginf().any()


@pytest.mark.parametrize("fp8, most", [(FN, 448.0), (FNUZ, 224.0)])
def test_groups_have_vllms_scales(fp8, most):
    given = arguments([1, 1], [20, 0], num_heads=HEADS)
    y = persistent_mla_decode(**given, epilogue=epilogue())[0].double()
    assert y[0].any() and not y[1].any()
    column_major = torch.empty(WIDTH // 128, 2).T
    for scale in (torch.empty(2, WIDTH // 128), column_major):
        group = epilogue(out=torch.empty(2, WIDTH, dtype=fp8), scale=scale)
        out, _ = persistent_mla_decode(**given, epilogue=group)
        amax = y.abs().view(2, -1, 128).amax(-1).clamp(min=1e-10)
        assert torch.equal(scale, (amax.float() / torch.tensor(most)))
        value = out.double() * scale.double()
        # Half a step of three bits of mantissa.
        assert ((value - y).abs() <= y.abs() / 16 + scale.double() * 2**-9).all()
        assert out.double().abs().max() == most


@pytest.mark.parametrize("most", [448.0, 224.0])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_scales_are_rounded_to_vllms_powers_of_two(dtype, most):
    """For every maximum that a group can have, as csrc/quantization/w8a8/fp8 computes in fp32."""
    maxima = torch.arange(1 << 15, dtype=torch.int16).view(dtype)
    maxima = maxima[maxima.isfinite()].float().clamp(min=1e-10)
    scale = maxima / torch.tensor(most)
    want = scale.clamp(min=1e-10).log2().ceil().exp2()
    got = power_of_two(scale)
    assert torch.equal(got, want) and got.min() == 2.0**-33
    exact = got.double() >= scale.double()
    assert exact.all() and (got.double() < 2 * scale.double().clamp(min=1e-10)).all()
    assert (got == scale).any()  # a maximum of 448, or of 224


def test_a_tensor_scale_is_given():
    given = arguments([1, 1], [20, 90], num_heads=HEADS)
    y = persistent_mla_decode(**given, epilogue=epilogue())[0]
    scale = y.abs().amax().float().view(1) / 300
    want = (y.float() * (1 / scale)).to(FN)
    # What is too large is stored as the largest.
    fine, small = (epilogue(out=torch.empty(2, WIDTH, dtype=FN), scale=scale / n) for n in (1, 10))
    assert torch.equal(persistent_mla_decode(**given, epilogue=fine)[0], want)
    out = persistent_mla_decode(**given, epilogue=small)[0]
    assert out.float().abs().max() == 448 and int(steps(out, want).max()) > 1


def test_rows_behind_the_batch_are_products_of_what_out_holds():
    given = arguments([1, 1], [20, 30], num_heads=HEADS)
    refresh(given["plan"], [1, 1], [20, 30], num_tokens=4)
    given["q"] = torch.cat((given["q"], given["q"]))
    out = torch.zeros(4, HEADS, LATENT, dtype=BF16)
    out[3] = 1
    epilogue = Epilogue(layer(), torch.full((4, WIDTH), 7.0, dtype=BF16))
    persistent_mla_decode(**given, out=out, epilogue=epilogue)
    assert epilogue.out[:2].any() and not epilogue.out[2].any()
    want = layer().double().sum(1).flatten()
    torch.testing.assert_close(epilogue.out[3].double(), want, rtol=2**-8, atol=1e-3)


FP8_OUT = torch.zeros(2, WIDTH).to(FN)
BAD = [
    (epilogue(w_uv=layer()[:3]), r"w_uv must be \[4, 64, V\]"),
    (epilogue(w_uv=layer().float()), "w_uv must be bf16 or fp16"),
    (epilogue(w_uv=layer(dense="values")[..., ::2]), "w_uv must be dense in L or in V"),
    (epilogue(w_uv=layer(FP16)), "epilogue.out must be torch.float16 without a scale"),
    (epilogue(out=torch.zeros(2, 64).to(BF16)), r"epilogue.out must be \[2, 128\]"),
    (epilogue(out=torch.zeros(128, 2).to(BF16).T), "epilogue.out must be dense in its last"),
    (epilogue(out=FP8_OUT), "epilogue.out must be torch.bfloat16 without a scale"),
    (epilogue(scale=torch.ones(1)), r"epilogue.out must be fp8 \(e4m3\) with a scale"),
    (epilogue(out=FP8_OUT, scale=torch.ones(1).double()), "epilogue.scale must be fp32"),
    (epilogue(ue8m0=True), "epilogue.ue8m0 must be False without scales of groups"),
    (epilogue(out=FP8_OUT, scale=torch.ones(1), ue8m0=True), "epilogue.ue8m0 must be False"),
    (epilogue(out=FP8_OUT, scale=torch.ones(2)), r"epilogue.scale must be \[1\], or"),
    (epilogue(out=FP8_OUT, scale=torch.ones(1, 2)), r"epilogue.scale must be \[1\], or"),
    (epilogue(out=torch.zeros(2, WIDTH, device="meta").to(BF16)), "epilogue.out must be on cpu"),
]


@pytest.mark.parametrize("change, message", BAD)
def test_refused(change, message):
    given = arguments([1, 1], [20, 30], num_heads=HEADS)
    persistent_mla_decode(**given, epilogue=epilogue())
    with pytest.raises(ValueError, match=message):
        persistent_mla_decode(**given, epilogue=change)


def test_the_latents_are_of_the_type_of_w_uv():
    given = arguments([1, 1], [20, 30], num_heads=HEADS)
    with pytest.raises(ValueError, match=r"out must be torch\.bfloat16, as w_uv"):
        out = torch.zeros(2, HEADS, LATENT)
        persistent_mla_decode(**given, out=out, epilogue=epilogue())


triton = pytest.importorskip("triton")
from mla_fusion.attention import triton as provider  # noqa: E402
from mla_fusion.attention.hopper.fits import product_rows  # noqa: E402
from mla_fusion.attention.triton import decode_kernel, epilogue_kernel, reduce_kernel  # noqa: E402
from mla_fusion.attention.triton import epilogue as epilogues  # noqa: E402
from tests.attention.epilogue_cases import Case, make  # noqa: E402


def test_measured_shapes_suit_what_they_are_for():
    for row in epilogues.MEASURED:
        quantization = "group" if row.group else "none"
        assert not row.shape.unsuited(row.slots, 512, 128, quantization)
    # The first row that holds is that of the fewest slots, then heads.
    rows = [(row.slots, row.heads) for row in epilogues.MEASURED if not row.group]
    groups = [(row.slots, row.heads) for row in epilogues.MEASURED if row.group]
    assert rows == sorted(rows) and groups == sorted(groups)


def test_the_first_measured_row_that_holds_is_chosen(monkeypatch):
    wide, narrow = epilogues.Shape(2, 128, 4, 8, 4), epilogues.Shape(2, 64, 4, 8, 4)
    rows = [(1, 16, True, wide), (4, 16, False, wide), (4, 64, False, narrow)]
    monkeypatch.setattr(epilogues, "MEASURED", [epilogues.Faster(*row) for row in rows])
    assert epilogues.choose(1, 16, 512, 128, "group") == wide
    assert epilogues.choose(2, 16, 512, 128, "group") is None
    assert epilogues.choose(3, 16, 512, 128) == wide
    assert epilogues.choose(4, 17, 512, 128) == narrow
    # 64 columns have no block of 128; 96 latents are not 4 slices of 16 or 32.
    assert epilogues.choose(3, 16, 512, 64) == narrow
    assert epilogues.choose(3, 16, 96, 128) is None


@pytest.mark.parametrize(
    "shape, latent, values, quantization, why",
    [
        ((1, 96, 1, 4, 4), 512, 96, "none", "powers of two"),
        ((1, 8, 1, 4, 4), 512, 128, "none", "columns must be 16 or more and divide the 128"),
        ((1, 128, 1, 4, 4), 512, 192, "none", "divide the 192 of a head"),
        ((1, 64, 2, 4, 4), 512, 128, "group", "columns must be 128: a CTA finds the maximum"),
        ((1, 128, 8, 4, 4), 320, 128, "none", r"16 \* slices must divide the 320 latents"),
        ((1, 128, 4, 4, 4, 24), 512, 128, "none", "whole .or 0. must be powers of two"),
        ((1, 128, 1, 4, 4, 8), 512, 128, "none", "slices must be 2 or more"),
        ((1, 64, 8, 4, 4, 8), 512, 128, "none", "columns / slices 16 or more"),
        ((2, 128, 4, 4, 4, 8), 512, 128, "none", "rows must be 1"),
        ((8, 128, 8, 4, 4), 512, 256, "none", "32768 sums of a head wait .* a plan holds 16384"),
    ],
)
def test_a_shape_that_does_not_suit_is_refused(shape, latent, values, quantization, why):
    shape = epilogues.Shape(*shape)
    _, given = make(Case((1,) * 9, (0,) * 9, shape, values=values, latent=latent), quantization)
    with pytest.raises(ValueError, match=f"does not suit 9 query rows: .*{why}"):
        epilogues.launch(given, shape)


def test_latents_that_are_not_aligned_are_not_loaded_in_vectors():
    shape = epilogues.Shape(1, 128, 4, 4, 4)
    _, given = make(Case((1,), (3,), shape, values=128))
    odd = torch.zeros(1, 2, 129, dtype=BF16)[..., 1:]
    for out, vectors in (given.out, 512), (odd, 0):
        _, options = epilogues.arguments(dataclasses.replace(given, out=out), shape)
        found = options["FORM"].VECTORS
        assert found == vectors


def test_a_warm_up_runs_every_launch():
    """Each that a step of up to 3 query rows a sequence makes, each reduction and product."""
    plan = plan_for(max_batch=40, max_query_len=3, num_heads=16, ctas=132)

    def launches(rows, batches):
        """What follows the decode of so many sequences of `rows` query rows."""
        for batch in batches:
            shape = epilogues.choose(batch * rows, 16, 512, 128)
            reduction = reduce_kernel.reduction(batch * plan.layout.fold, 16 * 3)
            yield shape or (reduction, product_rows(batch * rows))

    batches = provider.warm_up_batches(plan, 128, "none")
    for rows in (1, 2, 3):
        assert set(launches(rows, batches)) == set(launches(rows, range(1, 41)))


@pytest.mark.parametrize("batch, kernels", [(1, ["epilogue"]), (64, ["reduce"])])
def test_the_launches(monkeypatch, batch, kernels):
    """One behind the decode, with programs for all rows, heads and columns; or the reduction."""
    made = {name: decodes.Launches() for name in ("decode", "reduce", "epilogue")}
    shape = epilogues.Shape(1, 16, 4, 32, 8) if batch == 1 else None
    if shape:
        monkeypatch.setattr(torch.Tensor, "new_empty", None)  # nothing is allocated
    monkeypatch.setattr(epilogues, "choose", lambda *_: shape)
    monkeypatch.setattr(decode_kernel, "kernel", made["decode"])
    monkeypatch.setattr(reduce_kernel, "kernel", made["reduce"])
    monkeypatch.setattr(epilogue_kernel, "epilogue_kernel", made["epilogue"])
    plan = plan_for(max_batch=64, num_heads=HEADS, v_head_dim=LATENT, ctas=132)
    refresh(plan, [1] * batch, [9] * batch, batch + (batch == 1))
    tokens = batch + (batch == 1)
    q, table = torch.zeros(tokens, HEADS, 80, dtype=BF16), torch.zeros(batch, 9).int()
    out = torch.full((tokens, WIDTH), torch.nan, dtype=BF16)
    latents = torch.ones(tokens, HEADS, LATENT, dtype=BF16)
    given = Inputs(
        q, torch.zeros(9, 16, 80, dtype=BF16), plan, table, 0.1, None, None, latents, None,
        Epilogue(layer(), out),
    )  # fmt: skip
    provider.launch(given)
    grids = {name: each.grids for name, each in made.items() if each.grids}
    assert list(grids) == ["decode", *kernels] and not plan.fresh
    if batch == 1:
        # Two rows: one of a sequence, one behind the last. Two blocks of columns, four slices.
        assert grids["epilogue"] == [(2, 8, HEADS)]
    else:
        torch.testing.assert_close(out[5].double(), layer().double().sum(1).flatten(), rtol=0.01,
                                   atol=0.05)  # fmt: skip
