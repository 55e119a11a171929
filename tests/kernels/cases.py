"""Inputs and comparisons that the tests of all providers share."""

import torch

from mla_fusion.cli.selftest.region import absorb_interval as absorb_interval
from mla_fusion.cli.selftest.region import judge as judge
from mla_fusion.cli.selftest.region import judge_cache as judge_cache
from mla_fusion.kernels import reference
from mla_fusion.measure.outcome import different_bytes as different_bytes
from mla_fusion.measure.region_cases import Case as Case
from mla_fusion.measure.region_cases import build as build
from mla_fusion.measure.region_cases import run as run


def check_against_reference(module, call, **extra):
    """Query as `judge` wants it, cache equal to the reference's, no stray bytes."""
    got, got_cache = run(module, call, **extra)
    want, want_cache = run(reference, call)
    assert judge(call, got, want)[0] == 0
    assert judge_cache(call, got_cache, want_cache) == 0
    if not call.context_parallel:
        assert not got.view(torch.uint8)[call.slot_mapping < 0].any()
