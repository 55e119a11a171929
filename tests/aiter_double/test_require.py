"""Is AMD's AITER here? Every way in which it is not, and what the user reads."""

import sys

import pytest
import torch

from mla_fusion.kernels import ProviderUnavailable
from mla_fusion.kernels import aiter as provider
from tests import aiter_double
from tests.aiter_double.versions import FUSED


@pytest.fixture
def on_path(tmp_path, monkeypatch):
    """A folder from which `aiter` is imported; nothing of that name stays behind."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [n for n in sys.modules if n.split(".")[0] == "aiter"]:
        monkeypatch.delitem(sys.modules, name)
    yield tmp_path
    for name in [n for n in sys.modules if n.split(".")[0] == "aiter"]:
        del sys.modules[name]


NOT_AMDS = ("is not AMD's", "uninstall it and install ROCm's AITER")
# Why AITER cannot serve: (files on the path, parts of what the user reads).
ABSENT = {
    "missing": ({}, ("the module aiter is missing", "install ROCm's AITER")),
    "another project's": (
        {"aiter/__init__.py": "raise SystemExit('another project was run')\n"}, NOT_AMDS,
    ),
    "another project's package": (
        {"aiter/__init__.py": "from .map import run\n", "aiter/map.py": "run = 1\n"}, NOT_AMDS,
    ),
    "another project's jit": (
        {"aiter/__init__.py": "", "aiter/jit/map.py": "run = 1\n"}, NOT_AMDS,
    ),
    "another project's file": ({"aiter.py": "answer = 42\n"}, NOT_AMDS),
    "too old": (
        {"aiter/__init__.py": "", "aiter/jit/__init__.py": ""},
        (f"has no {FUSED}", "install v0.1.8 or newer"),
    ),
    "half-installed": (
        {"aiter/__init__.py": "raise ImportError('no libhip.so')\n", "aiter/jit/__init__.py": ""},
        ("importing aiter fails (ImportError: no libhip.so)", "reinstall AITER"),
    ),
    "without a GPU": (
        {"aiter/__init__.py": "raise RuntimeError('no rocminfo')\n", "aiter/jit/__init__.py": ""},
        ("importing aiter fails (RuntimeError: no rocminfo)", "reinstall AITER"),
    ),
    "without its types": (
        {"aiter/__init__.py": f"{FUSED} = print\n", "aiter/jit/__init__.py": ""},
        ("aiter.dtypes",),
    ),
}  # fmt: skip


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def refusal():
    with pytest.raises(ProviderUnavailable) as caught:
        provider.require()
    return str(caught.value)


@pytest.mark.parametrize("release", aiter_double.RELEASES)
def test_present(release):
    with aiter_double.installed("gfx950", release):
        provider.require()


@pytest.mark.parametrize("files, words", ABSENT.values(), ids=ABSENT)
def test_an_aiter_that_cannot_serve_is_refused(on_path, files, words):
    write(on_path, files)
    message = refusal()
    assert all(said in message for said in words)
    if words is NOT_AMDS:
        assert "aiter" not in sys.modules, "another project's code was run"


def test_an_architecture_without_fp8(monkeypatch):
    with aiter_double.installed() as double:
        monkeypatch.setattr(double.modules["aiter"].dtypes, "fp8", torch.uint8)
        assert "fp8" in refusal()
