"""Run mypy over the project under the names its modules have when installed.

The folders `passes/` and `patterns/` are installed as `mla_fusion.passes` and
`mla_fusion.patterns`, but lie beside `mla_fusion/` in a checkout, and mypy does not read the
import hook of an editable install. So it checks a tree of links in which they lie inside.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "types"
INSIDE = ("passes", "patterns")
BESIDE = ("tools",)


def link_tree(tree: Path) -> None:
    """Make the tree anew, so that no link of a file that is gone stays behind.

    Files are linked and folders made: some tools do not descend into a linked folder.
    """
    shutil.rmtree(tree, ignore_errors=True)
    folders = {"mla_fusion": "mla_fusion"} | {name: f"mla_fusion/{name}" for name in INSIDE}
    for source, target in (folders | {name: name for name in BESIDE}).items():
        for file in (ROOT / source).rglob("*.*"):
            if "__pycache__" in file.parts:
                continue
            link = tree / target / file.relative_to(ROOT / source)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)


def main() -> int:
    """Check, and report each error at the path the file has in the checkout."""
    link_tree(TREE)
    command = [sys.executable, "-m", "mypy", f"--config-file={ROOT / 'pyproject.toml'}"]
    command += [f"--cache-dir={ROOT / '.mypy_cache'}", "mla_fusion", *BESIDE, *sys.argv[1:]]
    done = subprocess.run(command, cwd=TREE, stdout=subprocess.PIPE, text=True)
    for line in done.stdout.splitlines():
        inside = line.startswith(tuple(f"mla_fusion/{name}/" for name in INSIDE))
        print(line.removeprefix("mla_fusion/") if inside else line)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
