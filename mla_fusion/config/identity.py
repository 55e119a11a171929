"""A hash of this library's source: compiled graphs must not outlive the code that wrote them."""

from __future__ import annotations

import functools
import hashlib
from importlib import import_module
from pathlib import Path

# What can change a compiled graph or a kernel. The commands and the report cannot: who edits them,
# or upgrades to a release in which only they changed, keeps the compiled graphs.
_PACKAGES = (
    "mla_fusion",
    "mla_fusion.attention",
    "mla_fusion.config",
    "mla_fusion.kernels",
    "mla_fusion.passes",
    "mla_fusion.patterns",
    "mla_fusion.runtime",
)


@functools.cache
def source_hash() -> str:
    """The first 12 hex digits of SHA-256 over every source and data file of `_PACKAGES`."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        module_file = import_module(package).__file__
        assert module_file is not None
        for path in sorted(Path(module_file).parent.glob("*")):
            if path.is_file():
                digest.update(f"{package}/{path.name}".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
