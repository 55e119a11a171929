"""Is AMD's AITER here, and with which arguments? Compiled ops hide them but have schemas. Every way
in which it is not, and what the user reads.
"""

import inspect
import sys

import pytest
import torch

from mla_fusion.kernels import ProviderUnavailable
from mla_fusion.kernels import aiter as provider
from tests import aiter_double
from tests.aiter_double.versions import DECODE, FUSED, INFO, PLANNER


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


def test_the_arguments_of_compiled_ops_are_read_from_their_schemas(double):
    compiled = {FUSED} | ({PLANNER} if not double.at.has("planner_wrapper") else set())
    for name in (FUSED, INFO, PLANNER, DECODE):  # the others are all Python
        published = tuple(double.signatures[name].parameters)
        shown = tuple(inspect.signature(double.ops[name]).parameters)
        assert (shown == ("args", "kwargs")) == (name in compiled), name
        assert hasattr(torch.ops.aiter, name) == (name in compiled), name
        assert provider.parameters(double.ops[name], name) == published


def test_capabilities_are_those_of_the_release(double):
    offers = provider.capabilities()
    assert offers == {"compute_all_q_rope": double.at.has("compute_all"), PLANNER: True}


def test_a_capability_that_cannot_be_seen_counts_as_missing():
    with aiter_double.installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops, "aiter", object())
        assert provider.capabilities()["compute_all_q_rope"] is False


def test_arguments_that_cannot_be_read():
    def wrapper_custom(*args, **kwargs):
        pass

    refused = pytest.raises(ProviderUnavailable, match="of AITER's other cannot be read")
    with aiter_double.installed(), refused:
        provider.parameters(wrapper_custom, "other")
