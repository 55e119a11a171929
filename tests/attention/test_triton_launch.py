"""How the Triton decode is launched on a GPU, only from shapes, and what it refuses before."""

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from mla_fusion import attention
from mla_fusion.attention import cards
from mla_fusion.attention import triton as provider
from mla_fusion.attention.hopper import cards as hopper_cards
from mla_fusion.attention.hopper import decode as hopper_decode
from mla_fusion.attention.hopper.common import cache_boxes
from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.attention.triton import decode_kernel, reduce_kernel
from tests.attention.decodes import (
    BF16,
    FN,
    FNUZ,
    FP16,
    FP32,
    Launches,
    arguments,
    plan_for,
    refresh,
)
from tests.attention.without_memory import inputs


@pytest.mark.parametrize(
    "latent, rope, taken",
    [
        (512, 64, True), (256, 64, True), (256, 32, True),
        # Tiles that are no power of two wide, or too wide beside 64 query rows.
        (320, 64, False), (576, 64, False), (512, 128, False), (1024, 64, False),
    ],
)  # fmt: skip
def test_the_kernel_for_hopper_is_for_some_widths(latent, rope, taken):
    given = inputs(16, BF16, widths=(latent, rope))
    assert (not hopper_cards.decode(given)) is taken
    assert not provider.unsupported(BF16, BF16, latent, rope)


def cache(blocks, page, block_rows=0, dtype=BF16):
    """A cache without memory whose blocks are `block_rows` rows apart, by default its page size."""
    step = int((block_rows or page) * 576)
    return torch.empty(blocks * step, dtype=dtype, device="meta").as_strided(
        (blocks, page, 576), (step, 576, 1)
    )


@pytest.mark.parametrize("dtype", [BF16, FN])
def test_the_copy_engine_sees_a_cache_as_rows(dtype):
    latent, rotated, step = cache_boxes(cache(10, 64, dtype=dtype), (512, 64))
    assert (latent.shape, latent.strides, step) == ([640, 576], [576, 1], 64)
    assert (latent.block_shape, rotated.block_shape) == ([64, 512], [64, 64])
    # Half of each block is another layer's: the last row is inside the memory all the same.
    latent, _, step = cache_boxes(cache(10, 128, block_rows=256, dtype=dtype), (512, 64))
    assert (latent.shape, step) == ([9 * 256 + 128, 576], 256)


@pytest.mark.parametrize("strange", [cache(9, 16), cache(9, 96), cache(9, 64, block_rows=64.5)])
def test_tiles_in_several_pages_are_copied_by_threads(strange):
    assert cache_boxes(strange, (512, 64))[2] == 0


@pytest.mark.parametrize(
    ("heads", "most", "batches"),
    [(16, 256, [1, 9, 33, 129]), (128, 256, [1, 2, 5, 17, 33]), (128, 16, [1, 2, 5]),
     (128, 1, [1])],
)  # fmt: skip
def test_a_warm_up_compiles_every_reduction(heads, most, batches):
    plan = plan_for(max_batch=most, num_heads=heads, ctas=132)
    assert provider.warm_up_batches(plan, None) == batches


def launch(plan, batch, refreshed=True):
    """One decode of `batch` sequences, if so after a refresh of the plan."""
    if refreshed:
        refresh(plan, [1] * batch, range(10, 10 + batch))
    table = torch.empty(batch, 9, dtype=torch.int32)
    q = torch.empty(batch, plan.settings.num_heads, 576, dtype=BF16)
    given = Inputs(q, cache(9, 64), plan, table, 0.1, None, None, q[..., :512], None)
    provider.launch(given)


def test_the_grid_of_the_reduction_is_that_of_the_step(monkeypatch):
    """Not that of the largest batch of the plan, whose tiles would be empty programs."""
    reductions = Launches(reduce_kernel.mla_reduce.arg_names)
    decodes = Launches(decode_kernel.mla_decode_triton.arg_names)
    monkeypatch.setattr(decode_kernel, "mla_decode_triton", decodes)
    monkeypatch.setattr(reduce_kernel, "mla_reduce", reductions)
    plan = plan_for(max_batch=256, max_query_len=4, num_heads=16, ctas=132)
    for batch in (1, 4, 64):
        launch(plan, batch)
    # Two programs for each row of few tiles, one for two rows of many.
    assert reductions.grids == [(1, 64, 2), (4, 64, 1), (64, 32, 1)]


def test_the_first_decode_of_a_refreshed_plan_waits_for_it(monkeypatch):
    """The others may read the plan before the kernel in front of them has ended."""
    decodes = Launches(hopper_decode.mla_decode_hopper.arg_names)
    monkeypatch.setattr(cards, "chosen", lambda *_: hopper_cards.CARDS[-1])
    monkeypatch.setattr(hopper_decode, "mla_decode_hopper", decodes)
    monkeypatch.setattr(reduce_kernel, "mla_reduce", Launches(reduce_kernel.mla_reduce.arg_names))
    plan = plan_for(num_heads=16)
    for refreshed in (True, False, False) * 2:
        launch(plan, 4, refreshed)
    assert [given["fresh"] for given in decodes.arguments] == [1, 0, 0, 1, 0, 0]


E5M2 = torch.float8_e5m2
TAKEN = {
    (BF16, BF16), (FP16, FP16), (FN, FN), (FNUZ, FNUZ),
    (BF16, FN), (BF16, FNUZ), (FP16, FN), (FP16, FNUZ),
}  # fmt: skip


@pytest.fixture
def launches(monkeypatch):
    """The arguments of each launch, which is not made."""
    made: list[Any] = []
    attention.get_provider.cache_clear()
    monkeypatch.setattr(provider, "require", lambda: None)
    monkeypatch.setattr(provider, "launch", lambda *args: made.append(args))
    return made


def decode_of(q_dtype, kv_dtype, **widths):
    given = arguments([1], [3], q_dtype=q_dtype, kv_dtype=kv_dtype, **widths)
    out = torch.empty(1, 20, given["plan"].settings.v_head_dim, dtype=BF16)
    attention.persistent_mla_decode(**given, out=out, provider="triton")


@pytest.mark.parametrize("kv_dtype", [BF16, FP16, FP32, FN, FNUZ, E5M2])
@pytest.mark.parametrize("q_dtype", [BF16, FP16, FP32, FN, FNUZ, E5M2])
def test_types(launches, q_dtype, kv_dtype):
    if (q_dtype, kv_dtype) in TAKEN:
        decode_of(q_dtype, kv_dtype)
        assert len(launches) == 1
        return
    with pytest.raises(ValueError, match=f"got {q_dtype} over {kv_dtype}; convert, or use"):
        decode_of(q_dtype, kv_dtype)
    assert not launches


@pytest.mark.parametrize("latent, rope", [(1088, 64), (200, 64), (512, 0), (512, 192)])
def test_widths_that_are_refused(launches, latent, rope):
    why = f"a kv_lora_rank that is a multiple of 16 up to 1024, not {latent}"
    if latent == 512:
        why = f"a qk_rope_head_dim that is a multiple of 16 up to 128, not {rope}"
    with pytest.raises(ValueError, match=f"{why}; convert, or use provider 'reference'"):
        decode_of(BF16, BF16, v_head_dim=latent, rope=rope)
    assert not launches


def test_widths_that_are_taken(launches):
    for latent, rope in itertools.product((*range(64, 1025, 64), 16), (32, 64, 96, 128)):
        assert not provider.unsupported(BF16, BF16, latent, rope)
    for latent, rope in ((16, 32), (1024, 128)):
        decode_of(BF16, BF16, v_head_dim=latent, rope=rope)
    assert len(launches) == 2
