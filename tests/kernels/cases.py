"""Inputs and comparisons that the tests of all providers share."""

import functools

import torch

from mla_fusion.cli.bench.region_cases import Call as Call
from mla_fusion.cli.bench.region_cases import Case as Case
from mla_fusion.cli.bench.region_cases import build as build
from mla_fusion.cli.bench.region_cases import run as run
from mla_fusion.cli.selftest.outcome import different_bytes as different_bytes
from mla_fusion.cli.selftest.region import absorb_interval as absorb_interval
from mla_fusion.cli.selftest.region import judge as judge
from mla_fusion.kernels import reference
from mla_fusion.kernels.inputs import padded_batch


def padded(call):
    """What makes padded batches for the layer of `call`, as a warm-up takes it."""
    names = ("w_uk_t", "kv_cache", "cos_sin_cache", "k_scale", "q_scale", "is_neox")
    layer = {name: getattr(call.inputs, name) for name in names}
    rope, query = call.inputs.k_pe.shape[1], call.inputs.q_out.dtype
    factor = None if call.inputs.q_factor is None else call.inputs.q_factor.dtype
    return functools.partial(
        padded_batch, **layer, rope_dim=rope, q_dtype=query, factor_dtype=factor
    )


def check_against_reference(module, call, **extra):
    """Query as `judge` wants it, cache equal to the reference's, no stray bytes."""
    got, got_cache = run(module, call, **extra)
    want, want_cache = run(reference, call)
    assert judge(call.inputs, got, want)[0] == 0
    assert different_bytes(got_cache, want_cache) == 0
    if not call.inputs.context_parallel:
        assert not got.view(torch.uint8)[call.inputs.slot_mapping < 0].any()
