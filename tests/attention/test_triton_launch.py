"""How the Triton decode is launched on a GPU, only from shapes, and what it refuses before."""

import contextlib
import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from mla_fusion import attention
from mla_fusion.attention import cards, sparse
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


@pytest.mark.parametrize("widths, reduced", [((192,), 0), ((193,), 1), ((64, 64), 1)])
def test_a_window_alone_is_not_split(monkeypatch, widths, reduced):
    """So no reduction follows: it would take longer than a tile."""
    reductions = Launches(reduce_kernel.mla_reduce.arg_names)
    monkeypatch.setattr(reduce_kernel, "mla_reduce", reductions)
    decodes = Launches(decode_kernel.mla_decode_triton.arg_names)
    monkeypatch.setattr(decode_kernel, "mla_decode_triton", decodes)
    monkeypatch.setattr(provider, "require", lambda: None)
    made = sparse.sparse_scratch(
        max_tokens=1, num_heads=16, widths=widths, q_dtype=BF16, kv_dtype=BF16, device="cpu",
        ctas=99,
    )  # fmt: skip
    made.refresh(1, [None] * len(widths))
    scopes = [
        sparse.Scope(torch.empty(3, 64, 576, dtype=BF16), torch.zeros(1, n).int()) for n in widths
    ]
    sparse.sparse_mla_decode(torch.empty(1, 16, 576, dtype=BF16), scopes, made, softmax_scale=1.0)
    assert (len(decodes.grids), len(reductions.grids)) == (1, reduced)


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


TYPES = BF16, FP16, FP32, FN, FNUZ, torch.float8_e5m2
TAKEN = {
    (BF16, BF16), (FP16, FP16), (FN, FN), (FNUZ, FNUZ),
    (BF16, FN), (BF16, FNUZ), (FP16, FN), (FP16, FNUZ),
}  # fmt: skip
WIDTHS = [*itertools.product((*range(64, 1025, 64), 16), (32, 64, 96, 128))]


def test_types_and_widths_that_are_taken():
    for types in itertools.product(TYPES, TYPES):
        assert (not provider.unsupported(*types, 512, 64)) == (types in TAKEN), types
    assert not any(provider.unsupported(BF16, BF16, *widths) for widths in WIDTHS)


@pytest.mark.parametrize(
    ("types", "latent", "rope", "why"),
    [
        ((BF16, FN), 16, 32, ""), ((FP16, FP16), 1024, 128, ""),
        ((FP16, BF16), 512, 64, "got torch.float16 over torch.bfloat16"),
        ((BF16, BF16), 1088, 64, "a kv_lora_rank that is a multiple of 16 up to 1024, not 1088"),
        ((BF16, BF16), 200, 64, "a kv_lora_rank that is a multiple of 16 up to 1024, not 200"),
        ((BF16, BF16), 512, 0, "a qk_rope_head_dim that is a multiple of 16 up to 128, not 0"),
        ((BF16, BF16), 512, 192, "a qk_rope_head_dim that is a multiple of 16 up to 128, not 192"),
    ],
)  # fmt: skip
def test_a_decode_that_is_not_taken_is_not_launched(monkeypatch, types, latent, rope, why):
    launches: list[Any] = []
    attention.get_provider.cache_clear()
    monkeypatch.setattr(provider, "require", lambda: None)
    monkeypatch.setattr(provider, "launch", launches.append)
    kinds = dict(zip(("q_dtype", "kv_dtype"), types, strict=True))
    given = arguments([1], [3], v_head_dim=latent, rope=rope, **kinds)
    given |= {"out": torch.empty(1, 20, latent, dtype=BF16), "provider": "triton"}
    refused = pytest.raises(ValueError, match=f"{why}; convert, or use provider 'reference'")
    with refused if why else contextlib.nullcontext():
        attention.persistent_mla_decode(**given)
    assert bool(launches) != bool(why)
