"""Is AMD's AITER here? Every way in which it is not, and what the user reads."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
import torch

from mla_fusion.kernels import ProviderUnavailable
from mla_fusion.kernels import aiter as provider
from tests import aiter_double
from tests.aiter_double.module import FUSED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder from which `aiter` is imported; nothing of that name stays behind."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [n for n in sys.modules if n.split(".")[0] == "aiter"]:
        monkeypatch.delitem(sys.modules, name)
    yield tmp_path
    for name in [n for n in sys.modules if n.split(".")[0] == "aiter"]:
        del sys.modules[name]


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / "aiter" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def refusal() -> str:
    with pytest.raises(ProviderUnavailable) as caught:
        provider.require()
    return str(caught.value)


@pytest.mark.parametrize("release", aiter_double.RELEASES)
def test_present(release: str) -> None:
    with aiter_double.installed("gfx950", release):
        provider.require()


def test_missing(on_path: Path) -> None:
    assert "missing: install ROCm's AITER" in refusal()


@pytest.mark.parametrize(
    "files",
    [
        {"__init__.py": "from .map_filter import map_aiter\n", "map_filter.py": "map_aiter = 1\n"},
        {"__init__.py": "raise RuntimeError('another project')\n"},
    ],
    ids=["imports", "raises"],
)
def test_a_package_of_that_name_which_is_not_amds(on_path: Path, files: dict[str, str]) -> None:
    write(on_path, files)
    assert "not AMD's" in refusal()
    assert "uninstall it" in refusal()
    assert "aiter" not in sys.modules, "another project's code was run"


def test_a_single_file_of_that_name_is_not_amds(on_path: Path) -> None:
    (on_path / "aiter.py").write_text("answer = 42\n")
    assert "not AMD's" in refusal()


@pytest.mark.parametrize(
    "error",
    ["ImportError('libamdhip64.so.7: no such file')", "RuntimeError('no GPU found by rocminfo')"],
)
def test_half_installed(on_path: Path, error: str) -> None:
    write(on_path, {"__init__.py": f"raise {error}\n", "jit/__init__.py": "", "jit/core.py": ""})
    message = refusal()
    assert "importing aiter fails" in message
    assert error.split("'")[1] in message
    assert "reinstall" in message


def test_half_installed_without_its_types(on_path: Path) -> None:
    write(on_path, {"__init__.py": f"{FUSED} = print\n", "jit/__init__.py": ""})
    assert "aiter.dtypes" in refusal()


def test_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    with aiter_double.installed() as double:
        monkeypatch.delattr(double.modules["aiter"], FUSED)
        assert "install v0.1.8 or newer" in refusal()


def test_an_architecture_without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    with aiter_double.installed() as double:
        monkeypatch.setattr(double.modules["aiter"].dtypes, "fp8", torch.uint8)
        assert "fp8" in refusal()
