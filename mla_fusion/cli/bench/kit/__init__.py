"""What every benchmark does: time candidates in turns, compare results, say on what it ran.

`mla-fusion bench` and `benchmarks/` import it from here.
"""

from mla_fusion.cli.bench.kit.compare import (
    POISON,
    agreement,
    distance,
    exact_attention,
    poisoned,
    steps,
)
from mla_fusion.cli.bench.kit.device import Ceilings, fp8_type, measure_ceilings
from mla_fusion.cli.bench.kit.precompile import compile_ahead
from mla_fusion.cli.bench.kit.rows import FACTS, environment, write
from mla_fusion.cli.bench.kit.timing import capture_calls, interleave, quantiles

__all__ = [
    "FACTS",
    "POISON",
    "Ceilings",
    "agreement",
    "capture_calls",
    "compile_ahead",
    "distance",
    "environment",
    "exact_attention",
    "fp8_type",
    "interleave",
    "measure_ceilings",
    "poisoned",
    "quantiles",
    "steps",
    "write",
]
