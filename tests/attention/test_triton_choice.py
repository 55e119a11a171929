"""Which decode kernel and which plan the Triton provider chooses, only from shapes."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from mla_fusion import gpu
from mla_fusion.attention import cards
from mla_fusion.attention import triton as choice
from mla_fusion.attention.card import Decodes
from mla_fusion.attention.cdna import cards as cdna_cards
from mla_fusion.attention.hopper import cards as hopper_cards
from mla_fusion.attention.plan.inputs import Scope, Sparse
from mla_fusion.attention.plan.layouts import FP8_DS_MLA, FP8_DS_MLA_V4
from tests.attention import without_memory
from tests.attention.decodes import BF16, FN, FP16
from tests.gpus import imitate

# Kernel, query rows and warps of a program.
SPECIALIZED, STEP = ("hopper.warp_specialized", 64, 4), ("hopper.decode", 64, 8)
PORTABLE = "triton.decode_kernel", 16, 4
FEW, MANY = "hopper.sparse_fp8", "hopper.sparse_specialized"
DRAFTS = {"max_query_len": 4}


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """A GPU of sm_90 with ten SMs; tensors without memory count as on it."""
    imitate(monkeypatch, "sm_90")


def inputs(q=(8, 64, 576), **options):
    """A decode of a query [tokens, heads, L + 64], by default of 64 heads of DeepSeek's."""
    tokens, heads, width = q
    return without_memory.inputs(heads, tokens=tokens, widths=(width - 64, 64), **options)


def chosen(given):
    """What decodes: kernel, query rows and warps of a program, and waves of a SIMD on AMD."""
    card = cards.chosen(gpu.of(given.q.device), given)
    _, (_, blocks), arguments, options = card.module.launch_of(given)
    rows = arguments.get("ROWS", 64)
    assert blocks == -(-given.rows // rows)
    waves = [options[name] for name in ("waves_per_eu",) if name in options]
    return card.name, rows, options["num_warps"], *waves


def sparse(given):
    scope = Scope(given.kv_cache, given.block_table)
    return dataclasses.replace(given, sparse=Sparse(scope, 0, given.plan.kv_indptr, None))


@pytest.mark.parametrize(
    ("q", "options", "wanted"),
    [
        ((8, 64, 576), {}, SPECIALIZED), ((8, 128, 576), {}, SPECIALIZED),
        ((8, 128, 576), {"heads_per_work": 128}, SPECIALIZED),
        ((8, 40, 576), {"page": 128}, SPECIALIZED), ((8, 16, 576), DRAFTS, SPECIALIZED),
        ((8, 128, 576), {"max_query_len": 2}, SPECIALIZED),
        ((8, 64, 576), {"dtype": FN}, SPECIALIZED),
        ((8, 16, 576), {"dtype": FN, **DRAFTS}, SPECIALIZED),
        ((8, 32, 576), {"dtype": FN}, ("hopper.few_rows", 32, 8)),
        ((8, 16, 576), {"dtype": FN}, ("hopper.few_rows", 16, 8)),
        ((8, 16, 576), {"dtype": FN, "page": 16}, ("hopper.few_rows", 16, 8)),
        ((8, 16, 576), {"dtype": FN, "page": 8}, ("hopper.decode", 16, 4)),
        ((8, 64, 576), {"dtype": FN, "page": 96}, STEP),
        # Fewer than 33 query rows.
        ((8, 16, 576), {}, ("hopper.decode", 16, 4)),
        ((8, 32, 576), {}, ("hopper.few_rows", 32, 8)),
        ((8, 8, 576), {"max_query_len": 2}, ("hopper.decode", 16, 4)),
        ((8, 8, 576), DRAFTS, ("hopper.few_rows", 32, 8)),
        ((8, 32, 576), {"page": 8}, ("hopper.decode", 32, 8)),
        # Other types and widths.
        ((8, 64, 576), {"dtype": FP16}, STEP), ((8, 64, 320), {}, STEP),
        # Tiles span pages, also with the plan of pairs.
        ((8, 64, 576), {"page": 16}, STEP), ((8, 64, 576), {"page": 96}, STEP),
        ((8, 128, 576), {"page": 1, "heads_per_work": 128}, STEP),
        # Padded heads between query rows, and several rows of 32 heads.
        ((8, 24, 576), {"max_query_len": 8}, SPECIALIZED),
        ((8, 8, 576), {"max_query_len": 8}, SPECIALIZED),
        ((8, 32, 576), {"max_query_len": 8}, SPECIALIZED),
        # 48 heads of two tokens are no box.
        ((8, 40, 576), {"max_query_len": 2}, STEP),
        # No rows to describe to the copy engine.
        ((0, 64, 576), {}, STEP),
        # An MI300X: the kernel for CDNA does not take all types and widths.
        ((8, 16, 576), {"arch": "gfx942", "dtype": FN}, ("cdna.decode", 16, 4, 3)),
        ((8, 16, 576), {"arch": "gfx942"}, ("cdna.decode", 16, 4, 2)),
        ((8, 16, 576), {"arch": "gfx942", "dtype": FN, "page": 1}, ("cdna.decode", 16, 4, 2)),
        ((8, 128, 576), {"arch": "gfx942"}, ("cdna.decode", 32, 4, 1)),
        ((8, 128, 576), {"arch": "gfx942", "dtype": FN}, ("cdna.decode", 32, 4, 2)),
        ((8, 16, 576), {"arch": "gfx942", "dtype": FP16}, PORTABLE),
        ((8, 16, 544), {"arch": "gfx942"}, PORTABLE),
    ],
)  # fmt: skip
def test_the_kernel_of_a_decode(monkeypatch, q, options, wanted):
    options = dict(options)
    imitate(monkeypatch, options.pop("arch", "sm_90"))
    given = inputs(q, **options)
    assert chosen(given) == wanted
    if wanted is STEP:
        assert hopper_cards.warp_specialized(given).detail.startswith(("it copies", "it takes"))
    if wanted is PORTABLE:
        assert cdna_cards.decode(given).detail.startswith(("it takes", "it multiplies"))


def test_other_scales_types_and_strides():
    given = inputs(dtype=FN)
    for scale in (0.0, -0.1):
        tilted = dataclasses.replace(given, softmax_scale=scale)
        assert chosen(tilted) == STEP
        assert "it takes a positive scale" in hopper_cards.warp_specialized(tilted).detail
    other = dataclasses.replace(given, q=given.q.to(BF16))
    assert "query and cache of one type" in hopper_cards.warp_specialized(other).detail
    # A query with gaps between tokens; blocks of a cache that are no whole entries apart.
    gaps, cache = without_memory.meta(8, 65, 576)[:, :64], without_memory.meta(9 * 65 * 576)
    apart = cache.as_strided((9, 64, 576), (64 * 576 + 288, 576, 1))
    assert chosen(dataclasses.replace(inputs(), q=gaps)) == SPECIALIZED
    assert chosen(dataclasses.replace(inputs(), kv_cache=apart)) == STEP
    assert chosen(sparse(inputs())) == STEP


@pytest.mark.parametrize(
    ("heads", "layout", "first", "name"),
    # A second scope, and scales behind the page.
    [(16, FP8_DS_MLA, 0, FEW), (40, FP8_DS_MLA, 0, MANY), (16, FP8_DS_MLA, 64, MANY),
     (16, FP8_DS_MLA_V4, 0, MANY)],
)  # fmt: skip
def test_byte_caches(monkeypatch, heads, layout, first, name):
    given = without_memory.inputs(
        heads, sparse=True, widths=(512, layout.width - 512), kv_dtype=FN, layout=layout
    )
    given = dataclasses.replace(given, sparse=dataclasses.replace(given.sparse, first=first))
    assert chosen(given)[0] == name
    tilted = dataclasses.replace(given, softmax_scale=-1.0, sparse=given.sparse)
    assert chosen(tilted)[0] == (FEW if name == FEW else "triton.decode_kernel")
    imitate(monkeypatch, "sm_100")
    assert chosen(given)[0] == "triton.decode_kernel"


@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "gfx90a"])
def test_another_gpu(monkeypatch, arch):
    imitate(monkeypatch, arch)
    assert chosen(inputs())[0] == "triton.decode_kernel"
    settings = choice.plan_settings(128, 1, BF16, 576, "cuda")
    # Both blocks of 32 rows at once; two CTAs an SM of NVIDIA with 16 rows.
    assert settings == {"ctas": 5, "kv_granularity": 64, "overhead": 4}
    settings = choice.plan_settings(16, 1, BF16, 576, "cuda")
    assert settings["ctas"] == (10 if arch == "gfx90a" else 20)


def test_the_kernel_for_cdna_is_not_for_lists_of_slots_and_odd_strides(monkeypatch):
    imitate(monkeypatch, "gfx942")
    given = inputs((8, 16, 576))
    assert chosen(sparse(given))[0] == "triton.decode_kernel"
    apart = torch.empty(8, 16, 580, dtype=BF16, device="meta")[..., :576]
    assert chosen(dataclasses.replace(given, q=apart))[0] == "triton.decode_kernel"


@pytest.mark.parametrize(
    ("heads", "rows", "dtype", "width", "ctas"),
    [
        # Several row blocks: the programs of all fill the GPU once.
        (128, 1, BF16, 576, 5), (128, 2, BF16, 576, 5), (16, 8, BF16, 576, 5),
        (32, 3, BF16, 576, 5), (16, 24, BF16, 576, 1), (64, 1, BF16, 576, 10),
        (16, 4, BF16, 576, 10), (8, 8, BF16, 576, 10), (128, 1, FN, 576, 10),
        (128, 2, FN, 576, 5), (16, 8, FN, 576, 5), (128, 1, FP16, 576, 10),
        (128, 1, BF16, 320, 10),
        # 17 to 32 query rows in fp8 have tiles of 128 tokens.
        (32, 1, FN, 576, 10), (16, 2, FN, 576, 10), (20, 1, FN, 576, 10),
        # Two programs where shared memory holds the tiles of both, but 32 rows of bf16 take all
        # registers.
        (16, 1, BF16, 576, 10), (16, 1, FN, 576, 10), (8, 1, FN, 576, 10), (8, 2, FN, 576, 10),
        (16, 1, BF16, 320, 20), (16, 2, BF16, 320, 10), (16, 2, FN, 1088, 10),
        (16, 1, BF16, 448, 10), (16, 1, FN, 1152, 10),
    ],
)  # fmt: skip
def test_plans_for_hopper(heads, rows, dtype, width, ctas):
    settings = choice.plan_settings(heads, rows, dtype, width, "cuda")
    wide_tiles = dtype == FN and width == 576 and 16 < heads * rows <= 32
    assert (settings["ctas"], settings["overhead"]) == (ctas, 3 if wide_tiles else 4)
    wide = (heads, rows) == (128, 1) and ctas == 5
    assert settings.get("heads_per_work") == (128 if wide else None)


def test_plans_for_cdna(monkeypatch):
    """As many programs as fit ten CUs: one to three waves a SIMD, of one or two row blocks."""
    imitate(monkeypatch, "gfx942")
    for *of, ctas in ((16, 1, FN, 30), (16, 1, BF16, 20), (128, 1, FN, 10), (128, 1, BF16, 5),
                      (8, 3, FN, 20)):  # fmt: skip
        assert choice.plan_settings(*of, 576, "cuda")["ctas"] == ctas, of


def test_plans_for_byte_caches(monkeypatch):
    assert cards.of(gpu.of("cuda"))[0].name == FEW

    def settings_of(heads, scopes, layout):
        return cards.settings(gpu.of("cuda"), Decodes(heads, 1, FN, 0, scopes, layout))

    for heads, scopes, layout, ctas in (
        (16, 1, FP8_DS_MLA, 20), (16, 2, FP8_DS_MLA, 10), (16, 1, FP8_DS_MLA_V4, 10),
        (32, 1, FP8_DS_MLA, 10), (64, 1, FP8_DS_MLA, 10), (128, 1, FP8_DS_MLA, 5),
    ):  # fmt: skip
        settings = settings_of(heads, scopes, layout)
        assert (settings["ctas"], settings["overhead"]) == (ctas, 2 if layout is FP8_DS_MLA else 4)
        assert settings.get("heads_per_work") == (128 if heads == 128 else None)
    assert "ctas" not in settings_of(16, 1, None)
    imitate(monkeypatch, "sm_100")
    assert cards.of(gpu.of("cuda")) == [cards.PORTABLE]
    assert "ctas" not in settings_of(16, 1, FP8_DS_MLA)
