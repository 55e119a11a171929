"""A hash of this library's source: compiled graphs must not outlive the code that wrote them."""

import contextlib
import functools
import hashlib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from mla_fusion.config import vllm_compat
from mla_fusion.files import read_bounded

# A checkout has the latter two beside the first, an installation inside it.
_PACKAGES = ("mla_fusion", "mla_fusion.passes", "mla_fusion.patterns")
# What cannot change a compiled graph or a kernel: a change of these alone keeps compiled graphs.
_LEFT_OUT = ("mla_fusion/cli/", "mla_fusion/measure/", "mla_fusion/report/")


@functools.cache
def source_hash() -> str:
    """`hash_of` the library that is imported."""
    modules = {package: import_module(package).__file__ for package in _PACKAGES}
    return hash_of({name: Path(file).parent for name, file in modules.items() if file})


def tables_folder() -> Path:
    """The folder in which `mla-fusion calibrate` keeps what it measures."""
    return vllm_compat.cache_root() / "mla_fusion" / "tables"


def graphs_hash() -> str:
    """`source_hash`, and what `mla-fusion calibrate` measured: who decodes may change a graph."""
    files, tables = sorted(tables_folder().glob("*.json")), hashlib.sha256()
    for path in files:
        with contextlib.suppress(OSError):  # attention=auto warns of it, and goes by the shipped
            tables.update(read_bounded(path))
    return f"{source_hash()}-{tables.hexdigest()[:12]}" if files else source_hash()


def hash_of(packages: Mapping[str, Path]) -> str:
    """The first 12 hex digits of SHA-256 over the name and content of every file in the folder of
    each package."""
    files = {
        f"{package.replace('.', '/')}/{path.relative_to(folder).as_posix()}": path
        for package, folder in packages.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        if not name.startswith(_LEFT_OUT):
            digest.update(f"{name}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]
