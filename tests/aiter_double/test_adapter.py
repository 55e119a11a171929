"""The AITER adapter of `mla_fusion.attention` on the double: it keeps every rule, and is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_fusion import attention
from mla_fusion.attention import reference, selection
from tests import aiter_double
from tests.aiter_double import RELEASES
from tests.attention.test_aiter import CASES, allocate, step


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("architecture, changes", CASES)
def test_the_adapter_plans_and_decodes(
    monkeypatch: pytest.MonkeyPatch, architecture: str, changes: dict[str, Any], release: str
) -> None:
    attention.get_provider.cache_clear()
    with aiter_double.installed(architecture, release) as double:
        units = double.arch.compute_units
        if not double.release.split_budget:
            changes = {name: changes[name] for name in changes if name != "max_split_per_batch"}
        monkeypatch.setattr(selection, "architecture", lambda device: architecture)
        monkeypatch.setattr(selection, "multiprocessors", lambda device: units)
        given = step(allocate(**changes))
        out, _ = attention.persistent_mla_decode(**given)
        expected, sums = torch.empty_like(out), torch.empty(out.shape[:2])
        reference.persistent_mla_decode(**given, out=expected, lse=sums)
        assert double.counts()["mla_decode_fwd"] == double.counts()["get_mla_metadata_v1"] == 1
    attention.get_provider.cache_clear()
    error = (out.double() - expected.double()).norm() / expected.double().norm()
    assert error < 4e-3  # one rounding to bf16
