#!/usr/bin/env python3
"""List rows of benchmarks/results/ that are older than the kernels they time.

    python tools/stale_rows.py

A row is old if code has changed since its commit that a kernel of the row runs: a jitted function
of the kernel's file, or what one calls, in any file of this library. The checkout needs git and its
history.
"""

import ast
import csv
import functools
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOW = ""  # in place of a commit: the checkout
ATTENTION = "mla_fusion/attention"
REGION = ("mla_fusion/kernels/triton_kernels.py",)
PLANNED = (f"{ATTENTION}/triton/reduce_kernel.py", f"{ATTENTION}/hopper/product.py")
SPARSE = (f"{ATTENTION}/hopper/sparse_fp8.py", f"{ATTENTION}/hopper/sparse_specialized.py")
PLANNER, PRODUCTS = f"{ATTENTION}/plan/planner_triton.py", "mla_fusion/projections/kernel.py"
MAX_TOKENS = 16  # of a product; of PRODUCTS, steps of more tokens run the norm alone
# Query rows of a sequence from which on a kernel decodes it, in bf16 and in fp8.
DECODES = {"warp_specialized": (33, 33), "few_rows": (17, 1), "decode": (1, 1)}

Place = tuple[str, str]  # a file, and a name in it; the name is empty for the module itself
Definitions = dict[str, ast.stmt | Place]


def source(commit: str, path: str) -> str:
    """The source of a file in a commit; empty if it is not there."""
    if commit == NOW:
        return (ROOT / path).read_text() if (ROOT / path).exists() else ""
    found = subprocess.run(["git", "show", f"{commit}:{path}"], cwd=ROOT, capture_output=True)
    return found.stdout.decode()


@functools.cache
def definitions(commit: str, path: str) -> Definitions:
    """What a file defines, by name, or imports from this library."""
    found: Definitions = {}
    for node in ast.parse(source(commit, path)).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name.id: node for target in targets for name in ast.walk(target)
                      if isinstance(name, ast.Name)}  # fmt: skip
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mla_fusion"):
            folder = (node.module or "").replace(".", "/")
            for name in node.names:
                module = f"{folder}/{name.name}.py"
                place = (module, "") if source(commit, module) else (f"{folder}.py", name.name)
                found[name.asname or name.name] = place
    return found


def code(node: ast.stmt) -> str:
    """A definition without docstring and annotations of arguments."""
    node = ast.parse(ast.unparse(node)).body[0]
    if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
        node.body = node.body[1:]
    for each in ast.walk(node):
        if isinstance(each, ast.arg):
            each.annotation = None
    return ast.dump(node)


def reached(commit: str, path: str) -> dict[Place, str]:
    """The code that the jitted functions of a file run, or of FILE:NAME that one, by place."""
    found: dict[Place, str] = {}
    path, _, only = path.partition(":")
    todo = [
        (path, name)
        for name, node in definitions(commit, path).items()
        if isinstance(node, ast.FunctionDef) and "jit" in ast.unparse(node).partition("def ")[0]
        and (not only or name == only)
    ]  # fmt: skip
    while todo:
        if (place := todo.pop()) in found:
            continue
        node = definitions(commit, place[0]).get(place[1])
        if isinstance(node, tuple):
            todo.append(node)
        elif node is not None:
            found[place] = code(node)
            todo += called(commit, place[0], node)
    return found


def called(commit: str, path: str, node: ast.stmt) -> Iterator[Place]:
    """The places of the names of a definition that are of this library."""
    known = definitions(commit, path)
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and each.id in known:
            yield path, each.id
        elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
            of = known.get(each.value.id)
            if isinstance(of, tuple) and not of[1]:
                yield of[0], each.attr


@functools.cache
def changed(commit: str, path: str) -> frozenset[str]:
    """The files of which a kernel runs other code than in a commit."""
    now, then = reached(NOW, path), reached(commit, path)
    return frozenset(Path(file).name for (file, name), text in now.items()
                     if then.get((file, name)) != text)  # fmt: skip


def kernels(name: str, row: dict[str, str]) -> tuple[str, ...]:
    """The files of the kernels that a row of a result times."""
    if row.get("arm", "").startswith("default") or row.get("batch") == "0":  # a prefill has none
        return ()
    candidate = row.get("candidate", "ours")
    if name.startswith("region"):
        return REGION if "triton" in candidate else ()
    if candidate != "ours":
        return ()
    if "sparse" in name:
        return SPARSE
    if name.startswith("epilogue"):
        return PLANNED
    if not name.startswith(("step", "batch_invariant", "complete", "serve")):
        return ()  # no kernel's time
    fp8 = "fp8" in (row.get("dtype") or row.get("cache") or "fp8")
    heads = int(row.get("heads") or (128 if row.get("model") == "r1-dp" else 16))
    queries = int(row.get("queries") or 1) + int(row.get("drafts") or 0)
    rows = heads * queries
    decode = next(kernel for kernel, least in DECODES.items() if rows >= least[fp8])
    files = (f"{ATTENTION}/hopper/{decode}.py", *PLANNED)
    if "dtype" in row:
        return files
    few = int(row.get("batch") or 1) * queries <= MAX_TOKENS
    return (*REGION, *files, PLANNER, PRODUCTS if few else f"{PRODUCTS}:rms_norm")


def main() -> None:
    """Print a line for each file and commit with old rows."""
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.csv")):
        old: dict[str, list[frozenset[str]]] = {}
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                commit = row.get("commit", "")
                files = frozenset().union(*(changed(commit, k) for k in kernels(path.name, row)))
                old.setdefault(commit, []).extend([files] if files else [])
        for commit, rows in old.items():
            if rows:
                names = ", ".join(sorted(frozenset().union(*rows)))
                print(f"{path.name}: {len(rows)} rows of {commit}: {names}")


if __name__ == "__main__":
    main()
