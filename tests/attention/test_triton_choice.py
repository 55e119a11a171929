"""Which decode kernel and which plan the Triton provider chooses, only from shapes."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from mla_fusion.attention.cdna import decode as cdna_kernel
from mla_fusion.attention.hopper import warp_specialized as hopper_specialized
from mla_fusion.attention.plan.layouts import FP8_DS_MLA, FP8_DS_MLA_V4
from mla_fusion.attention.triton import choice as triton_choice
from tests.attention.decodes import BF16, FN, FP16
from tests.attention.test_decode_compiled import decode_inputs
from tests.attention.test_specialized_compiled import inputs

SPECIALIZED, STEP = triton_choice.SPECIALIZED, triton_choice.Config(True, 64, 64, 8)
DRAFTS = {"max_query_len": 4}


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """A GPU of sm_90 with ten multiprocessors; tensors without memory count as on it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    properties = SimpleNamespace(multi_processor_count=10, gcnArchName="gfx90a")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    real = triton_choice.is_hopper

    def on_gpu(q, caches, latent):
        def aligned(tensor):
            names = ("device", "dtype", "itemsize", "shape", "stride")
            fields = {name: getattr(tensor, name) for name in names}
            return SimpleNamespace(is_cuda=True, data_ptr=lambda: 0, **fields)

        return real(aligned(q), [aligned(cache) for cache in caches], latent)

    monkeypatch.setattr(triton_choice, "is_hopper", on_gpu)


@pytest.mark.parametrize(
    ("q", "options", "wanted"),
    [
        ((8, 64, 576), {}, SPECIALIZED),
        ((8, 128, 576), {}, SPECIALIZED),
        ((8, 128, 576), {"heads_per_work": 128}, SPECIALIZED),
        ((8, 40, 576), {"page": 128}, SPECIALIZED),
        ((8, 16, 576), DRAFTS, SPECIALIZED),
        ((8, 128, 576), {"max_query_len": 2}, SPECIALIZED),
        ((8, 64, 576), {"dtype": FN}, SPECIALIZED),
        ((8, 16, 576), {"dtype": FN, **DRAFTS}, SPECIALIZED),
        ((8, 32, 576), {"dtype": FN}, triton_choice.Config(True, 32, 64, 8)),
        ((8, 64, 576), {"dtype": FN, "page": 96}, STEP),
        # Fewer than 33 query rows.
        ((8, 16, 576), {}, triton_choice.Config(True, 16, 64, 4)),
        ((8, 32, 576), {}, triton_choice.Config(True, 32, 64, 8)),
        ((8, 8, 576), {"max_query_len": 2}, triton_choice.Config(True, 16, 64, 4)),
        ((8, 8, 576), DRAFTS, triton_choice.Config(True, 32, 64, 8)),
        # Other types and widths.
        ((8, 64, 576), {"dtype": FP16}, STEP),
        ((8, 64, 320), {}, STEP),
        # Tiles span pages, also with the plan of pairs.
        ((8, 64, 576), {"page": 16}, STEP),
        ((8, 64, 576), {"page": 96}, STEP),
        ((8, 128, 576), {"page": 1, "heads_per_work": 128}, STEP),
        # Padded heads between query rows, and several rows of 32 heads.
        ((8, 24, 576), {"max_query_len": 8}, SPECIALIZED),
        ((8, 8, 576), {"max_query_len": 8}, SPECIALIZED),
        ((8, 32, 576), {"max_query_len": 8}, SPECIALIZED),
        # 48 heads of two tokens are no box.
        ((8, 40, 576), {"max_query_len": 2}, STEP),
        # No rows to describe to the copy engine.
        ((0, 64, 576), {}, STEP),
    ],
)
def test_the_kernel_of_a_decode(q, options, wanted):
    given = inputs(q, **options)
    assert triton_choice.chosen(given) == wanted
    if wanted is STEP:
        with pytest.raises(ValueError, match=r"the specialized kernel: it (copies|takes)"):
            hopper_specialized.arguments(given)


@pytest.mark.parametrize("dtype", [BF16, FN])
@pytest.mark.parametrize("scale", [0.0, -0.1])
def test_a_scale_that_is_not_positive(dtype, scale):
    given = dataclasses.replace(inputs(dtype=dtype), softmax_scale=scale)
    assert triton_choice.chosen(given) == STEP
    with pytest.raises(ValueError, match="it takes a positive scale"):
        hopper_specialized.arguments(given)


def test_a_query_of_another_type():
    given = inputs(dtype=FN)
    other = dataclasses.replace(given, q=given.q.to(BF16))
    with pytest.raises(ValueError, match="query and cache of one type"):
        hopper_specialized.arguments(other)


def test_a_query_with_gaps_between_tokens():
    gaps = torch.empty(8, 65, 576, dtype=BF16, device="meta")[:, :64]
    given = dataclasses.replace(inputs(), q=gaps)
    assert triton_choice.chosen(given) == SPECIALIZED


def test_blocks_that_are_no_whole_entries_apart():
    cache = torch.empty(9 * 65 * 576, dtype=BF16, device="meta")
    apart = dataclasses.replace(
        inputs(), kv_cache=cache.as_strided((9, 64, 576), (64 * 576 + 288, 576, 1))
    )
    assert triton_choice.chosen(apart) == STEP


def test_lists_of_slots():
    given = inputs()
    assert triton_choice.chosen(given, given.kv_cache) == STEP


@pytest.mark.parametrize(
    ("heads", "layout", "first", "rows"),
    [
        (16, FP8_DS_MLA, 0, 16),
        (40, FP8_DS_MLA, 0, 32),
        (128, FP8_DS_MLA, 0, 32),
        # A second scope, and scales behind the page.
        (16, FP8_DS_MLA, 64, None),
        (16, FP8_DS_MLA_V4, 0, None),
    ],
)
def test_byte_caches(monkeypatch, heads, layout, first, rows):
    given, sparse = decode_inputs(
        heads, BF16, sparse=True, widths=(512, layout.width - 512), kv_dtype=FN, layout=layout
    )
    gpu = dataclasses.replace(
        given, q=SimpleNamespace(device=torch.device("cuda"), shape=given.q.shape)
    )
    config = triton_choice.chosen(gpu, sparse.extra.kv_cache, first)
    assert (config.rows if config.hopper else None) == rows
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    assert not triton_choice.chosen(gpu, sparse.extra.kv_cache, first).hopper


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_another_gpu(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert not triton_choice.chosen(inputs()).hopper
    settings = triton_choice.plan_settings(128, 1, BF16, 576, "cuda")
    assert settings == {"workers": 10, "kv_granularity": 64, "overhead": 4}


def test_an_amd_gpu(monkeypatch):
    """Its capability may be (9, 0) too: that of gfx90a."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not triton_choice.chosen(inputs()).hopper
    assert "heads_per_work" not in triton_choice.plan_settings(128, 1, BF16, 576, "cuda")


@pytest.fixture
def cdna(monkeypatch):
    """An MI300X, as far as the choice asks."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(triton_choice, "architecture", lambda device: "gfx942")


@pytest.mark.parametrize(
    ("q", "options", "wanted"),
    [
        ((8, 16, 576), {"dtype": FN}, triton_choice.Config(False, 16, 64, 4, cdna=3, waves=3)),
        ((8, 16, 576), {}, triton_choice.Config(False, 16, 64, 4, cdna=3, waves=2)),
        ((8, 16, 576), {"dtype": FN, "page": 1},
         triton_choice.Config(False, 16, 64, 4, cdna=3, waves=2)),
        ((8, 128, 576), {}, triton_choice.Config(False, 32, 64, 4, cdna=3, waves=1)),
        ((8, 128, 576), {"dtype": FN}, triton_choice.Config(False, 32, 64, 4, cdna=3, waves=2)),
        # Types, widths and strides that it does not take.
        ((8, 16, 576), {"dtype": FP16}, triton_choice.Config(False, 16, 16, 4)),
        ((8, 16, 544), {}, triton_choice.Config(False, 16, 16, 4)),
    ],
)  # fmt: skip
def test_the_kernel_for_cdna(cdna, q, options, wanted):
    given = inputs(q, **options)
    assert triton_choice.chosen(given) == wanted
    if not wanted.cdna:
        with pytest.raises(ValueError, match=r"the kernel for CDNA: it (takes|multiplies)"):
            cdna_kernel.arguments(given, wanted)


def test_the_kernel_for_cdna_is_not_for_lists_of_slots_and_odd_strides(cdna):
    given = inputs((8, 16, 576))
    assert not triton_choice.chosen(given, given.kv_cache).cdna
    apart = torch.empty(8, 16, 580, dtype=BF16, device="meta")[..., :576]
    assert not triton_choice.chosen(dataclasses.replace(given, q=apart)).cdna


@pytest.mark.parametrize(
    ("heads", "rows", "dtype", "workers"),
    [(16, 1, FN, 30), (16, 1, BF16, 20), (128, 1, FN, 10), (128, 1, BF16, 5), (8, 3, FN, 20)],
)
def test_plans_for_cdna(cdna, heads, rows, dtype, workers):
    """As many programs as fit ten CUs: one to three waves a SIMD, of one or two row blocks."""
    assert triton_choice.plan_settings(heads, rows, dtype, 576, "cuda")["workers"] == workers


@pytest.mark.parametrize(
    ("heads", "rows", "dtype", "width", "workers"),
    [
        (128, 1, BF16, 576, 5),
        (128, 2, BF16, 576, 5),
        (16, 8, BF16, 576, 5),
        (32, 3, BF16, 576, 5),
        (16, 24, BF16, 576, 1),
        (64, 1, BF16, 576, 10),
        (16, 4, BF16, 576, 10),
        (8, 8, BF16, 576, 10),
        (128, 1, FN, 576, 10),
        (128, 2, FN, 576, 10),
        (128, 1, FP16, 576, 10),
        (128, 1, BF16, 320, 10),
    ],
)
def test_items_of_several_row_blocks(heads, rows, dtype, width, workers):
    """So few workers that the programs of all blocks fill the GPU once."""
    settings = triton_choice.plan_settings(heads, rows, dtype, width, "cuda")
    assert settings["workers"] == workers
    wide = (heads, rows) == (128, 1) and workers == 5
    assert settings.get("heads_per_work") == (128 if wide else None)
