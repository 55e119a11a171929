"""The decode kernel over byte caches under the repaired interpreter; test_interpreted.py runs this.

Results are compared with float64 attention over what `pages.py` wrote; all other bytes are NaN.
The kernel rounds keys to bf16: it is held to TOLERANCE with keys so rounded, to ROUNDING without.
"""

import pytest
import torch

from mla_fusion.attention.sparse import sparse_mla_decode
from mla_fusion.cli.bench.kit import distance
from tests.attention.decodes import BF16, SCALE
from tests.attention.packed_cases import Inputs, random_case
from tests.kernels import interpreter

interpreter.install()
TOLERANCE, ROUNDING = 4e-3, 1e-2


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, 412), marks=pytest.mark.nightly)], ids=len
)
def test_random_cases(seeds):
    for seed in seeds:
        case = random_case(seed)
        print(f"case {seed}: {case}")  # shown where it fails
        inputs = Inputs(case)
        out = torch.full((case.tokens, case.heads, 512), torch.nan, dtype=BF16)
        _, lse = sparse_mla_decode(
            inputs.q, inputs.scopes, inputs.scratch(), softmax_scale=SCALE, sink=inputs.sink,
            out=out, return_lse=True,
        )  # fmt: skip
        assert distance(out, inputs.expected()[0]) <= ROUNDING
        inputs.check(out, lse, TOLERANCE, BF16)
