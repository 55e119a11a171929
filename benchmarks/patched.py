"""Copies of the package with patches of benchmarks/patches/ applied, beside it in one process.

A variant is the names of patches, in order, joined by +. Its kernels are launched by a module
specialized_launch of its own (`Copy.launch`). The package imports some modules when it launches:
`Copy.imported` gives it those of the copy.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
PATCHES = ROOT / "benchmarks" / "patches"
UNPATCHED = "unpatched"
# Imported anew with each copy.
OWN = ("mla_fusion", "specialized_launch")


def variants(kind: str) -> list[str]:
    """Of a kind, such as bf16: each of its patches, then the stacks that are listed."""
    names = [path.stem for path in sorted(PATCHES.glob(f"{kind}_*.patch"))]
    stacks = (PATCHES / "stacks.txt").read_text().split()
    return names + [stack for stack in stacks if stack.startswith(f"{kind}_")]


def copy_package(variant: str, folder: Path) -> Path:
    """A folder below `folder` that holds the package with the patches of `variant`.

    Raises:
        ValueError: there is no such patch, or it does not apply.
    """
    target = folder / variant
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "mla_fusion", target / "mla_fusion", ignore=ignored)
    for name in variant.split("+") if variant != UNPATCHED else ():
        apply(PATCHES / f"{name}.patch", target)
    return target


def apply(patch: Path, target: Path) -> None:
    """Apply a patch to the copy below `target`: exactly, as a line that moved may be another."""
    git = shutil.which("git") is not None
    # Some machines with a GPU have no git.
    tool = ["git", "apply"] if git else ["patch", "-p1", "--fuzz=0", "-i"]
    # A repository around the folder would be the place where git applies it.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    outside["GIT_CEILING_DIRECTORIES"] = str(target.resolve().parent)
    done = subprocess.run(
        [*tool, patch], cwd=target, env=outside, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = (done.stdout + done.stderr).strip()
        raise ValueError(f"{patch.name} does not apply: {said}; make it again, or delete it")


class Copy:
    """A variant's modules, imported from the folder that `copy_package` made."""

    def __init__(self, target: Path) -> None:
        self.modules: dict[str, ModuleType] = {}
        sys.path.insert(0, str(target))
        try:
            with self.imported():
                self.launch = importlib.import_module("specialized_launch")
                self.choice = importlib.import_module("mla_fusion.attention.triton_choice")
                self.kernels = importlib.import_module("mla_fusion.attention.hopper_specialized")
        finally:
            sys.path.remove(str(target))
        found = Path(str(self.kernels.__file__))
        assert found.is_relative_to(target), f"{found} was imported, not the copy in {target}"

    @contextlib.contextmanager
    def imported(self) -> Iterator[None]:
        """Meanwhile the modules of this copy are those that imports find."""
        others = {name: sys.modules.pop(name) for name in [*sys.modules] if is_own(name)}
        sys.modules.update(self.modules)
        try:
            yield
        finally:
            self.modules = {name: sys.modules.pop(name) for name in [*sys.modules] if is_own(name)}
            sys.modules.update(others)


def is_own(module: str) -> bool:
    """Whether a copy has a module of that name of its own."""
    return module.split(".")[0] in OWN
