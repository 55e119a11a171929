"""The double of AITER in every release on every architecture; nightly, those between oldest and
newest."""

import itertools

import pytest

from mla_fusion.kernels import aiter as provider
from tests import aiter_double
from tests.aiter_double import ARCHITECTURES, RELEASES


@pytest.fixture(
    params=[
        pytest.param(each, marks=[pytest.mark.nightly] if each[1] in RELEASES[1:-1] else [])
        for each in itertools.product(ARCHITECTURES, RELEASES)
    ],
    ids="-".join,
)
def double(request):
    """`import aiter` gives the double of an architecture and a release."""
    provider._halves.clear()
    with aiter_double.installed(*request.param) as double:
        yield double
