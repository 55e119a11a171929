"""The decode kernel for CDNA 3 and 4, compiled: registers, and what its loop over tiles has."""

import amd_roofline
import pytest

pytest.importorskip("triton")

from mla_fusion.attention.cdna import cards as cdna_cards
from mla_fusion.attention.cdna import decode as cdna_kernel
from mla_fusion.attention.cdna.cards import converts_e4m3fn
from tests.amd import compile, decode
from tests.gpus import imitated
from tests.kernels.compiled import LDS, compile_report

TARGETS = pytest.mark.parametrize("target", ["gfx942", "gfx950"])
SOME = [("fp8", 16, 64), ("bf16", 16, 64), ("fp8", 64, 16)]
MORE = [(kind, heads, page) for kind in ("fp8", "bf16", "cache") for heads in (16, 32)
        for page in (64, 16, 1, 48) if (kind, heads, page) not in SOME]  # fmt: skip


def launch_of(target, kind, heads, page):
    """What a decode launches: arguments and options, for blocks of `page` tokens."""
    given = decode.made(target, heads, kind, 1, 3072, units=1, page=page)
    assert not cdna_cards.decode(given)
    with imitated(target):
        _, args, options = cdna_kernel.arguments(given)
    return args, options


@TARGETS
@pytest.mark.parametrize(
    ("kind", "heads", "page"),
    [*SOME, *(pytest.param(*each, marks=pytest.mark.nightly) for each in MORE)],
)
def test_resources(target, kind, heads, page):
    args, options = launch_of(target, kind, heads, page)
    kernel = cdna_kernel.kernel
    report = compile_report(target, kernel, args, options)
    assert report.spills == 0 and report.narrow_loads == 0, report
    assert report.shared <= LDS[target] and report.wide_loads > 0, report
    given = compile.launch(target, kernel, args, options, (1, 1))
    code = given.kernel.program.instructions
    # What the compiler was asked for, unless the query leaves LDS for fewer.
    query, gpu = options["ROWS"] * 576 * args[0].itemsize, amd_roofline.GPUS[target]
    fit = gpu.lds // (query + 128 * options["ROWS"])
    assert amd_roofline.waves(given.kernel, gpu) >= min(options["waves_per_eu"], fit)

    counts = amd_roofline.executed(given)
    loop = [each for each, number in zip(code, counts, strict=True) if number == counts.max()]
    names = [each.name for each in loop]
    # Each product once: 576 columns of 16 tokens, and 64 tokens of 128 latents, for 16 rows each.
    depth = {"gfx942": 16, "gfx950": 32}[target]
    scores = 576 // (32 if kind == "fp8" else depth)
    matrix = [name for name in names if name.startswith("v_mfma")]
    assert len(matrix) == options["ROWS"] // 16 * (scores + 64 // depth * 8)
    assert sum("fp8_fp8" in name for name in matrix) == (
        options["ROWS"] // 16 * scores if kind == "fp8" else 0
    )
    assert names.count("s_barrier") <= 4
    # One number of the block table if a tile lies in one block.
    numbers = [name for name in names if name.endswith("_load_dword")]
    assert len(numbers) == 1 or page % 64
    stores = [each.name for each in code if "_store_" in each.name]
    assert sum("dwordx4" in name for name in stores) >= 12 * options["ROWS"] // 16
    assert {name.rpartition("_")[2] for name in stores} == {"dword", "dwordx4"}  # the LSE


@TARGETS
@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_16_heads_are_bound_by_memory(target, kind):
    """At 64 sequences of 8192 tokens; no product is repeated."""
    got = amd_roofline.decode(target, 16, kind)
    assert got.repeats == pytest.approx(1)
    # One wave has to do where Triton converts in software.
    is_slow = target == "gfx950" and kind == "fp8" and not converts_e4m3fn()
    assert got.share("memory") >= (0.5 if is_slow else 0.7), got
    assert got.waves >= (1 if is_slow else 2)
