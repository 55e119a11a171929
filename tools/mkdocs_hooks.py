"""What mkdocs needs to know of this repository: its home page and the packages' installed names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from typecheck import link_tree

ROOT = Path(__file__).resolve().parent.parent


def on_startup(**event: Any) -> None:
    """Lay out the source of the API page; mkdocstrings drops a path that does not exist yet."""
    link_tree(ROOT / "build" / "docs-source")


def on_files(files: Any, *, config: Any) -> None:
    """Make the README the site's home. A link to a file outside `docs/` becomes its plain text."""
    text = (ROOT / "README.md").read_text().replace("](docs/", "](")
    text = re.sub(r"\[([^\]]+)\]\((?:[A-Z]+|examples/README)\.md\)", r"\1", text)
    files.append(File.generated(config, "index.md", content=text))
