"""Compiled ops hide their arguments and say them to torch; the library reads them there."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from mla_fusion.kernels import ProviderUnavailable
from mla_fusion.kernels import aiter as provider
from tests import aiter_double
from tests.aiter_double import ARCHITECTURES, RELEASES
from tests.aiter_double.module import FUSED

PLANNER, REDUCE = "get_mla_metadata_v1", "mla_reduce_v1"


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_what_is_compiled_is_read_from_its_schema(arch: str, release: str) -> None:
    with aiter_double.installed(arch, release) as double:
        compiled = [FUSED, REDUCE, *[PLANNER] * (not double.release.planner_wrapper)]
        for name, published in double.signatures.items():
            module = "aiter.mla" if name == "mla_decode_fwd" else "aiter"
            function = getattr(double.modules[module], name, None)
            if function is None:
                continue  # of the Triton package, all Python
            shown = tuple(inspect.signature(function).parameters)
            assert (shown == ("args", "kwargs")) == (name in compiled), name
            assert hasattr(torch.ops.aiter, name) == (name in compiled), name
            assert provider.parameters(function, name) == tuple(published.parameters)
    assert not hasattr(torch.ops.aiter, FUSED), "the schema of one release stays for the next"


@pytest.mark.parametrize("release", RELEASES)
def test_capabilities_are_those_of_the_release(release: str) -> None:
    with aiter_double.installed("gfx942", release) as double:
        offers = provider.capabilities()
        assert offers == {"compute_all_q_rope": double.release.compute_all, PLANNER: True}


def test_a_capability_that_cannot_be_seen_counts_as_missing() -> None:
    with aiter_double.installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops, "aiter", object())
        assert provider.capabilities()["compute_all_q_rope"] is False


def test_a_schema_claims_to_change_every_tensor() -> None:
    """Why no op of AITER's may stand in a graph."""
    with aiter_double.installed():
        given = {a.name: a for a in torch.ops.aiter.mla_reduce_v1.default._schema.arguments}
        fused = getattr(torch.ops.aiter, FUSED).default._schema.arguments
    tensors = [a for a in fused if isinstance(a.type, torch.TensorType)]
    assert len(tensors) == 12
    assert all(a.alias_info.is_write for a in tensors)
    assert [str(a.type) for a in fused if a not in tensors] == ["bool"] * 3
    assert str(given["num_kv_splits"].type) == "int"
    assert given["final_lse"].default_value is None


def test_arguments_that_nothing_tells() -> None:
    def wrapper_custom(*args: Any, **kwargs: Any) -> None:
        pass

    with (
        aiter_double.installed(),
        pytest.raises(ProviderUnavailable, match="of AITER's other cannot be read"),
    ):
        provider.parameters(wrapper_custom, "other")
