"""What a test is parametrized with, part of it for `make test-full` alone."""

import pytest


def daily(names, *chosen):
    """`names` as parameters of a test; all but those `chosen` run nightly."""
    names = list(names)
    assert all(each in names for each in chosen), chosen
    return [
        pytest.param(name, id=str(name), marks=() if name in chosen else pytest.mark.nightly)
        for name in names
    ]
