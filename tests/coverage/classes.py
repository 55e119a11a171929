"""Which model classes of an installed vLLM use the MLA layer, read from its sources.

A class uses it if it names the layer, a class or function that uses it, or an architecture of
vLLM's registry that does. Its bases count as well, unless it builds other parts than they do.
Nothing is imported: half of these modules need a GPU.
"""

import ast
import re
from collections import defaultdict
from dataclasses import dataclass

LAYERS = {"MultiHeadLatentAttentionWrapper", "MLAAttention"}
OWN_LAYER = "MLAAttention"  # how the names of layers end that models bring with them
FOLDERS = ("model_executor/models", "models")
REGISTRY = "model_executor/models/registry.py"


@dataclass(frozen=True)
class Architecture:
    """One entry of vLLM's registry whose model has MLA layers.

    Attributes:
        name: as in `architectures` of a config.json.
        compiled: the classes ("module:name") that it reaches, that use MLA and that vLLM compiles;
            empty if no graph pass can see its MLA layers.
    """

    name: str
    compiled: tuple[str, ...]


@dataclass
class _Definition:
    refers: set[str]  # "module:name", "layer:..." or "architecture:..."
    compiled: bool


def architectures(vllm):
    """All architectures with MLA layers of the vLLM package at `vllm`, in the registry's order."""
    registry = _registry(vllm / REGISTRY)
    known = _definitions(vllm, set(registry))
    for name, target in registry.items():
        known[f"architecture:{name}"] = _Definition({target}, compiled=False)
    found = []
    for name in registry:
        reached = set(_reach(f"architecture:{name}", known))
        if not any(node.startswith("layer:") for node in reached):
            continue
        compiled = sorted(
            node.removeprefix("vllm.model_executor.models.")
            for node in reached
            if node in known and known[node].compiled and _uses_mla(node, known)
        )
        found.append(Architecture(name, tuple(compiled)))
    return found


def _uses_mla(node, known):
    return any(seen.startswith("layer:") for seen in _reach(node, known))


def _reach(start, known):
    seen, stack = {start}, [start]
    while stack:
        node = stack.pop()
        yield node
        new = (known[node].refers if node in known else set()) - seen
        seen |= new
        stack += new


def _registry(path):
    """Architecture -> "module:class" from the tables of vLLM's registry."""
    entries = re.findall(r'(?m)^ *"(\w+)": \(\s*"([\w.]+)",\s*"(\w+)",?\s*\)', path.read_text())
    return {
        name: f"{module if '.' in module else f'vllm.model_executor.models.{module}'}:{of_class}"
        for name, module, of_class in entries
    }


def _definitions(vllm, names):
    out: dict[str, _Definition] = {}
    for folder in FOLDERS:
        for path in sorted((vllm / folder).rglob("*.py")):
            if path.name != "registry.py":
                parts = ["vllm", *path.relative_to(vllm).with_suffix("").parts]
                package = parts[-1] == "__init__"
                out.update(
                    _module(path, ".".join(parts[:-1] if package else parts), package, names)
                )
    return out


def _module(path, module, package, architectures):
    text = path.read_text()
    tree, lines = ast.parse(text), text.splitlines()
    scope: dict[str, set[str]] = defaultdict(set)
    out: dict[str, _Definition] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            source = _absolute(node, module, package)
            for alias in node.names:
                target = f"{source}:{alias.name}"
                if alias.name in LAYERS and source.startswith("vllm.model_executor.layers"):
                    target = f"layer:{alias.name}"
                scope[alias.asname or alias.name].add(target)
    for name, targets in scope.items():  # what a package hands on
        out[f"{module}:{name}"] = _Definition(set(targets), compiled=False)
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            scope[node.name].add(f"{module}:{node.name}")
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            refers: set[str] = set()
            first = min(part.lineno for part in (node, *node.decorator_list))
            source = "\n".join(lines[first - 1 : node.end_lineno])
            for inner in _parts(node, source):
                if isinstance(inner, ast.Name):
                    refers |= scope.get(inner.id, set())
                elif isinstance(inner, ast.Constant) and inner.value in architectures:
                    refers.add(f"architecture:{inner.value}")
            # As a decorator, or as a function on the class of another package.
            compiled = isinstance(node, ast.ClassDef) and "support_torch_compile" in source
            if node.name.endswith(OWN_LAYER):
                refers.add(f"layer:{node.name}")
            out[f"{module}:{node.name}"] = _Definition(refers, compiled)
    return out


def _parts(node, text):
    """The nodes below it, less the bases of a class that does not build their parts."""
    bases = node.bases if isinstance(node, ast.ClassDef) and _builds_other_parts(node, text) else []
    left_out = {id(inner) for base in bases for inner in ast.walk(base)}
    return (inner for inner in ast.walk(node) if id(inner) not in left_out)


def _builds_other_parts(node, text):
    """Whether it names its model itself, or sets itself up as a bare module."""
    named = any(
        isinstance(inner, ast.Assign) and ast.unparse(inner.targets[0]) == "model_cls"
        for inner in node.body
    )
    return named or "nn.Module.__init__(self)" in text


def _absolute(node, module, package):
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    base = parts[: len(parts) - node.level + package]
    return ".".join([*base, *([node.module] if node.module else [])])
