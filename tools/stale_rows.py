#!/usr/bin/env python3
"""List rows of benchmarks/results/ that are older than the kernels they time.

    python tools/stale_rows.py

A row is old if a kernel's code, as `code` compares it, has changed since the row's commit. The
checkout needs git and its history.
"""

import ast
import csv
import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ATTENTION = "mla_fusion/attention"
REGION = ("mla_fusion/kernels/triton_*.py",)
DECODE = (f"{ATTENTION}/hopper/[dptw]*.py", f"{ATTENTION}/triton/*_kernel.py",
          f"{ATTENTION}/plan/planner_triton.py")  # fmt: skip
SPARSE = (f"{ATTENTION}/hopper/sparse_*.py",)
MODEL = (*REGION, *DECODE, "mla_fusion/projections/kernel.py")
# How the name of a file with times begins -> the kernels that it times.
TIMED = {
    "region": REGION, "step": DECODE, "epilogue": DECODE, "sparse": SPARSE,
    "engine_sparse": SPARSE, "complete": MODEL, "serve": MODEL,
}  # fmt: skip


def code(source: str) -> str:
    """A kernel's file without comments, docstrings, annotations of arguments and imports."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:]
        if isinstance(node, ast.arg):
            node.annotation = None
    kept = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    return ast.dump(ast.Module(kept, []))


def at(commit: str, path: str) -> str:
    """The source of a file in a commit; empty if it was not there."""
    found = subprocess.run(["git", "show", f"{commit}:{path}"], cwd=ROOT, capture_output=True)
    return found.stdout.decode()


def changed(commit: str, patterns: tuple[str, ...]) -> list[str]:
    """Names of the kernels' files whose code is another than in a commit."""
    paths = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return [
        path.name
        for path in paths
        if code(path.read_text()) != code(at(commit, str(path.relative_to(ROOT))))
    ]


def main() -> None:
    """Print a line for each file and commit with old rows."""
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.csv")):
        kernels = next((TIMED[name] for name in TIMED if path.name.startswith(name)), ())
        with path.open(newline="") as file:
            rows = Counter(row.get("commit", "") for row in csv.DictReader(file))
        for commit, count in rows.items():
            if files := changed(commit, kernels):
                print(f"{path.name}: {count} rows of {commit}: {', '.join(files)}")


if __name__ == "__main__":
    main()
