"""Compiled ops hide their arguments but register them with torch, where the library reads them."""

import inspect

import pytest
import torch

from mla_fusion.kernels import ProviderUnavailable
from mla_fusion.kernels import aiter as provider
from tests import aiter_double
from tests.aiter_double.versions import DECODE, FUSED, INFO, PLANNER


def test_the_arguments_of_compiled_ops_are_read_from_their_schemas(double):
    compiled = {FUSED} | ({PLANNER} if not double.at.has("planner_wrapper") else set())
    for name in (FUSED, INFO, PLANNER, DECODE):  # the others are all Python
        published = tuple(double.signatures[name].parameters)
        shown = tuple(inspect.signature(double.ops[name]).parameters)
        assert (shown == ("args", "kwargs")) == (name in compiled), name
        assert hasattr(torch.ops.aiter, name) == (name in compiled), name
        assert provider.parameters(double.ops[name], name) == published


def test_schemas_go_with_their_double():
    with aiter_double.installed():
        assert hasattr(torch.ops.aiter, FUSED)
    assert not hasattr(torch.ops.aiter, FUSED)


def test_capabilities_are_those_of_the_release(double):
    offers = provider.capabilities()
    assert offers == {"compute_all_q_rope": double.at.has("compute_all"), PLANNER: True}


def test_a_capability_that_cannot_be_seen_counts_as_missing():
    with aiter_double.installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops, "aiter", object())
        assert provider.capabilities()["compute_all_q_rope"] is False


def test_a_schema_claims_to_change_every_tensor():
    """This is why no op of AITER's may be in a graph."""
    with aiter_double.installed():
        fused = getattr(torch.ops.aiter, FUSED).default._schema.arguments
    tensors = [a for a in fused if isinstance(a.type, torch.TensorType)]
    assert len(tensors) == 12
    assert all(a.alias_info.is_write for a in tensors)
    assert [str(a.type) for a in fused if a not in tensors] == ["bool"] * 3


def test_arguments_that_cannot_be_read():
    def wrapper_custom(*args, **kwargs):
        pass

    refused = pytest.raises(ProviderUnavailable, match="of AITER's other cannot be read")
    with aiter_double.installed(), refused:
        provider.parameters(wrapper_custom, "other")
