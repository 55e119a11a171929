"""The decode kernel over byte caches under the repaired interpreter; test_interpreted.py runs this.

Results are compared with float64 attention over what `pages.py` wrote; all other bytes are NaN.
The kernel rounds keys to bf16: it is held to TOLERANCE with keys so rounded, to ROUNDING without.
"""

import pytest
import torch

from mla_fusion.attention.sparse import sparse_mla_decode, sparse_scratch
from mla_fusion.cli.bench.kit import distance
from tests.attention.decodes import BF16, SCALE, same_lse
from tests.attention.packed_cases import SLOTS, Case, Inputs, random_case
from tests.attention.pages import V4, V32
from tests.kernels import interpreter
from tests.nightly import daily

interpreter.install()
TOLERANCE, ROUNDING = 4e-3, 1e-2
LENGTHS = ([1, 0, 70], [9, 0, 0])

CASES = {
    "v3.2": Case(V32, ("full",), (50,), heads=16),
    "v4": Case(V4, ("full",), (50,), heads=16),
    "v3.2 of two scopes": Case(V32, ("holes", "full"), (70, 9), LENGTHS, gap=64, page=8, sink=5),
    "v4 of two scopes": Case(V4, ("holes", "full"), (70, 9), LENGTHS, gap=1152, page=8, sink=5),
    "v3.2 fnuz": Case(V32, ("mixed",), (20,), heads=24, fnuz=True, page=1),
    "v4 fnuz": Case(V4, ("mixed",), (20,), heads=24, fnuz=True, page=2, sink=40),
    "all -1": Case(V4, ("none", "none"), (9, 5), sink=5),
    "last scope empty": Case(V32, ("same", "none"), (20, 70), sink=5),
}


def decode(case, inputs, scratch):
    """The decode of a case, whose plan is refreshed."""
    scratch.plan.partial_output.fill_(torch.nan)
    out = torch.full((case.tokens, case.heads, 512), torch.nan, dtype=BF16)
    return sparse_mla_decode(
        inputs.q, inputs.scopes, scratch, softmax_scale=SCALE, sink=inputs.sink, out=out,
        return_lse=True,
    )  # fmt: skip


def check(case):
    """Decode a case; its inputs and its scratch."""
    inputs = Inputs(case)
    scratch = sparse_scratch(
        max_tokens=4, num_heads=case.heads, widths=case.widths, q_dtype=BF16,
        kv_dtype=case.kv_dtype, device="cpu", ctas=7,
    )  # fmt: skip
    scratch.refresh(case.tokens, inputs.lengths)
    out, lse = decode(case, inputs, scratch)
    assert distance(out, inputs.expected()[0]) <= ROUNDING
    want, want_lse = inputs.expected(BF16)
    assert distance(out, want) <= TOLERANCE
    same_lse(lse, want_lse)
    for row, keys in zip(out, inputs.listed, strict=True):
        assert len(keys) or (row == 0).all()
    return inputs, scratch


@pytest.mark.parametrize(
    "name", daily(CASES, "v3.2 of two scopes", "v4 of two scopes", "v3.2 fnuz", "all -1")
)
def test_byte_caches(name):
    check(CASES[name])


@pytest.mark.parametrize("layout", [V32, V4], ids=["v3.2", "v4"])
def test_a_read_of_an_unlisted_slot_is_seen(layout):
    """Each byte that nobody wrote is NaN: one slot too many, of any scope, spoils its token."""
    case = Case(layout, ("full", "full"), (5, 6), sink=5)
    inputs, scratch = check(case)
    for scope in inputs.scopes:
        listed, row = int(scope.table[1, 2]), scope.table[1]
        row[2] = SLOTS
        out, lse = decode(case, inputs, scratch)
        assert out[1].isnan().all() and not lse[1].isfinite().any()
        assert out[0].isfinite().all() and out[2].isfinite().all()
        row[2] = listed


@pytest.mark.parametrize(
    "seeds", [range(3), pytest.param(range(3, 403), marks=pytest.mark.nightly)], ids=len
)
def test_random_cases(seeds):
    for seed in seeds:
        case = random_case(seed)
        print(f"case {seed}: {case}")  # shown where it fails
        check(case)
