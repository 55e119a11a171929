"""The epilogue of the reference against the formula, its arguments, and how Triton launches it."""

import pytest
import torch

from mla_fusion.attention import Epilogue, persistent_mla_decode
from mla_fusion.attention.reference import power_of_two
from mla_fusion.measure.distances import distance, steps
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


@pytest.mark.parametrize("name, value", [("w_uv", None), ("scale", 1.0), ("ue8m0", "yes")])
def test_a_part_of_another_kind_is_refused(name, value):
    with pytest.raises(ValueError, match=f"epilogue.{name} must be "):
        epilogue(**{name: value})


def test_the_latents_are_of_the_type_of_w_uv():
    given = arguments([1, 1], [20, 30], num_heads=HEADS)
    with pytest.raises(ValueError, match=r"out must be torch\.bfloat16, as w_uv"):
        out = torch.zeros(2, HEADS, LATENT)
        persistent_mla_decode(**given, out=out, epilogue=epilogue())


triton = pytest.importorskip("triton")
from mla_fusion.attention import triton as provider  # noqa: E402
from mla_fusion.attention.hopper import cards  # noqa: E402
from mla_fusion.attention.triton import reduce_kernel  # noqa: E402


@pytest.mark.parametrize(
    ("heads", "most", "batches"),
    [(16, 256, [1, 9, 17, 65]), (128, 256, [1, 2, 3, 9, 33]), (128, 16, [1, 2, 3, 9])],
)
def test_a_warm_up_without_an_epilogue_runs_every_reduction(heads, most, batches):
    plan = plan_for(max_batch=most, num_heads=heads, ctas=132)
    assert provider.warm_up_batches(plan, None) == batches


@pytest.mark.parametrize(("heads", "most"), [(64, 40), (20, 80)])
def test_a_warm_up_runs_every_launch(heads, most):
    """Each that a step of up to 3 query rows a sequence makes, each reduction and product."""
    plan = plan_for(max_batch=most, max_query_len=3, num_heads=heads, ctas=132)

    def launches(rows, batches):
        """What follows the decode of so many sequences of `rows` query rows."""
        for batch in batches:
            tiles, of_work = batch * plan.layout.fold, 3 * plan.layout.per_work
            yield reduce_kernel.reduction(tiles, of_work)
            of = batch * rows, heads, 128
            for limit in (cards.PRODUCT_SIZE, 2 * cards.PRODUCT_SIZE):
                alone = "torch" if cards.product_size(*of) > limit else cards.product_rows(*of)
                yield limit, cards.merged_rows(tiles, *of) or alone

    batches = provider.warm_up_batches(plan, 128)
    for rows in (1, 2, 3):
        assert set(launches(rows, batches)) == set(launches(rows, range(1, most + 1)))
    quantized = {8, 16, 32, "torch"}
    assert {*launches(3, batches)} >= {(2 * cards.PRODUCT_SIZE, each) for each in quantized}
