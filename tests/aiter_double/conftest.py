"""The double of AITER in its oldest and its newest release on every architecture."""

import itertools

import pytest

from tests import aiter_double
from tests.aiter_double import ARCHITECTURES, RELEASES


@pytest.fixture(params=itertools.product(ARCHITECTURES, RELEASES), ids="-".join)
def double(request):
    """`import aiter` gives the double of an architecture and a release."""
    with aiter_double.installed(*request.param) as double:
        yield double
