"""What mkdocs needs to know of this repository: the packages under their installed names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typecheck import link_tree

ROOT = Path(__file__).resolve().parent.parent


def on_startup(**event: Any) -> None:
    """Lay out the source of the API page; mkdocstrings drops a path that does not exist yet."""
    link_tree(ROOT / "build" / "docs-source")
