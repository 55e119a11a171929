"""A table that is computed once must not be computed during graph capture."""

from types import SimpleNamespace

import pytest
import torch

from mla_fusion.kernels import aiter
from mla_fusion.ops import Rope
from mla_fusion.runtime import tables


@pytest.fixture
def capturing(monkeypatch):
    """A mocked GPU whose stream is being captured while the list is not empty."""
    state = [True]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(state))
    return state


KEPT = {}


def runtime_table(cosines):
    return (tables.in_type(KEPT, cosines, Rope.NATIVE, torch.bfloat16),)


def aiter_tables(cosines):
    given = {"q": torch.zeros(1, dtype=torch.bfloat16), "derived": KEPT}
    return aiter.halves(SimpleNamespace(cos_sin_cache=cosines, k_pe=cosines, **given))[1:]


KINDS = {
    runtime_table: "the cosines and sines in the type of the query",
    aiter_tables: "the cosines and the sines in the form AITER takes",
}


@pytest.mark.parametrize("convert", KINDS)
def test_a_table_met_first_in_capture_is_refused(capturing, convert):
    cosines, words = torch.rand(4, 8), f"mla_fusion has to compute {KINDS[convert]} once, and was f"
    with pytest.raises(RuntimeError, match=words):
        convert(cosines)
    capturing.clear()
    converted = convert(cosines)
    capturing.append(True)
    assert all(a is b for a, b in zip(converted, convert(cosines), strict=True))


@pytest.mark.parametrize("convert", KINDS)
def test_a_part_of_a_table_is_another_table(convert):
    """It begins at the same address; its rows would be read beyond its end, or not found."""
    whole = torch.rand(4, 8)
    for table in (whole[:2], whole):
        assert all(len(half) == len(table) for half in convert(table))


def test_a_table_that_needs_no_conversion_is_served_in_capture(capturing):
    cosines = torch.rand(4, 8)
    assert tables.in_type(KEPT, cosines, Rope.NATIVE_FP32, torch.bfloat16) is cosines
