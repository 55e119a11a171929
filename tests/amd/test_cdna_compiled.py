"""The decode kernel for CDNA 3 and 4, compiled: registers, and what its loop over tiles has."""

import pytest
import torch

pytest.importorskip("triton")

from mla_fusion.attention import triton as provider
from mla_fusion.attention.cdna import cards as cdna_cards
from mla_fusion.attention.cdna import decode as cdna_kernel
from mla_fusion.attention.plan.inputs import Inputs
from tests.amd import compile, execute
from tests.amd.provider import WRITABLE
from tests.attention.decodes import BF16, arguments
from tests.gpus import imitated
from tests.kernels.compiled import FP8, LDS, compile_report

TARGETS = pytest.mark.parametrize("target", ["gfx942", "gfx950"])
SOME = [("fp8", 16, 64), ("bf16", 16, 64), ("fp8", 64, 16)]
MORE = [(kind, heads, page) for kind in ("fp8", "bf16", "cache") for heads in (16, 32)
        for page in (64, 16, 1, 48) if (kind, heads, page) not in SOME]  # fmt: skip


def launch_of(target, kind, heads, page):
    """The launch of a decode of 3072 tokens by one CU, for blocks of `page` tokens."""
    query, cache = (BF16 if kind in of else FP8[target] for of in (("bf16", "cache"), ("bf16",)))
    with imitated(target, sms=1):
        settings = provider.plan_settings(heads, 1, cache, 576, "cuda")
    types = {"q_dtype": query, "kv_dtype": cache}
    fields = arguments([1], [3072], page, 512, 64, num_heads=heads, **types, **settings)
    out, lse = torch.empty(1, heads, 512, dtype=BF16), torch.empty(1, heads)
    given = Inputs(**fields, out=out, lse=lse)
    assert not cdna_cards.decode(given)
    with imitated(target):
        return cdna_kernel.launch_of(given)


@TARGETS
@pytest.mark.parametrize(
    ("kind", "heads", "page"),
    [*SOME, *(pytest.param(*each, marks=pytest.mark.nightly) for each in MORE)],
)
def test_resources(target, kind, heads, page):
    launch = launch_of(target, kind, heads, page)
    kernel, _, arguments, options = launch
    report = compile_report(target, kernel, launch.positional, options)
    assert report.spills == 0 and report.narrow_loads == 0, report
    assert report.shared <= LDS[target] and report.wide_loads > 0, report
    given = compile.launch(target, kernel, launch.positional, options, (1, 1))
    code = given.kernel.program.instructions
    # What the compiler was asked for, unless the query leaves LDS for fewer.
    fit = LDS[target] // (arguments["ROWS"] * (576 * arguments["q_ptr"].itemsize + 128))
    assert compile.waves(given.kernel) >= min(options["waves_per_eu"], fit)

    outcome = execute.run(given, WRITABLE[given.kernel.program.name])
    assert not outcome.faults, outcome.first
    counts = outcome.counts
    loop = [each for each, number in zip(code, counts, strict=True) if number == counts.max()]
    names = [each.name for each in loop]
    # Each product once: 576 columns of 16 tokens, and 64 tokens of 128 latents, for 16 rows each.
    depth = {"gfx942": 16, "gfx950": 32}[target]
    scores = 576 // (32 if kind == "fp8" else depth)
    matrix = [name for name in names if name.startswith("v_mfma")]
    assert len(matrix) == arguments["ROWS"] // 16 * (scores + 64 // depth * 8)
    assert sum("fp8_fp8" in name for name in matrix) == (
        arguments["ROWS"] // 16 * scores if kind == "fp8" else 0
    )
    assert names.count("s_barrier") <= 4
    # One number of the block table if a tile lies in one block.
    numbers = [name for name in names if name.endswith("_load_dword")]
    assert len(numbers) == 1 or page % 64
    stores = [each.name for each in code if "_store_" in each.name]
    assert sum("dwordx4" in name for name in stores) >= 12 * arguments["ROWS"] // 16
    assert {name.rpartition("_")[2] for name in stores} == {"dword", "dwordx4"}  # the LSE
