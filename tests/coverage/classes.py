"""Which model classes of an installed vLLM use the MLA layer, read from its sources.

A class uses it if it names the layer, a class or function that uses it, or an architecture of
vLLM's registry that does. Its bases count as well, unless it builds other parts than they do.
Nothing is imported: half of these modules need a GPU.

A node is "module:name" of a class or function, "architecture:..." or "layer:...".
"""

import ast
import re
from collections import defaultdict
from importlib.util import resolve_name

LAYERS = {"MultiHeadLatentAttentionWrapper", "MLAAttention"}
OWN_LAYER = "MLAAttention"  # how the names of layers end that models bring with them
FOLDERS = ("model_executor/models", "models")
REGISTRY = "model_executor/models/registry.py"


def architectures(vllm):
    """All architectures with MLA layers of the vLLM package at `vllm`, in the registry's order.

    For each the classes ("module:name") that it reaches, that use MLA and that vLLM compiles; none
    if no graph pass can see its MLA layers.
    """
    registry = _registry(vllm / REGISTRY)
    refers: dict[str, set[str]] = {f"architecture:{n}": {to} for n, to in registry.items()}
    compiled: set[str] = set()
    for folder in FOLDERS:
        for path in sorted((vllm / folder).rglob("*.py")):
            if path.name != "registry.py":
                parts = ["vllm", *path.relative_to(vllm).with_suffix("").parts]
                _read(path, ".".join(parts).removesuffix(".__init__"), registry, refers, compiled)
    found = {}
    for name, target in registry.items():
        reached = _reach(target, refers)
        if _has_layer(reached):
            found[name] = sorted(
                node.removeprefix("vllm.model_executor.models.")
                for node in reached & compiled
                if _has_layer(_reach(node, refers))
            )
    return found


def _has_layer(nodes):
    return any(node.startswith("layer:") for node in nodes)


def _reach(start, refers):
    """All nodes that one refers to, over any others, and itself."""
    seen, stack = {start}, [start]
    while stack:
        new = refers.get(stack.pop(), set()) - seen
        seen |= new
        stack += new
    return seen


def _registry(path):
    """Architecture -> "module:class" from the tables of vLLM's registry."""
    entries = re.findall(r'(?m)^ *"(\w+)": \(\s*"([\w.]+)",\s*"(\w+)",?\s*\)', path.read_text())
    return {
        name: f"{module if '.' in module else f'vllm.model_executor.models.{module}'}:{of_class}"
        for name, module, of_class in entries
    }


def _read(path, module, architectures, refers, compiled):
    """Add what a module defines, and hands on, to `refers` and `compiled`."""
    text = path.read_text()
    tree, lines = ast.parse(text), text.splitlines()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    scope: dict[str, set[str]] = defaultdict(set)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                target = f"{source}:{alias.name}"
                if alias.name in LAYERS and source.startswith("vllm.model_executor.layers"):
                    target = f"layer:{alias.name}"
                scope[alias.asname or alias.name].add(target)
    refers.update({f"{module}:{name}": set(targets) for name, targets in scope.items()})
    defined = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    for node in defined:
        scope[node.name].add(f"{module}:{node.name}")
    for node in defined:
        own: set[str] = {f"layer:{node.name}"} if node.name.endswith(OWN_LAYER) else set()
        first = min(part.lineno for part in (node, *node.decorator_list))
        source = "\n".join(lines[first - 1 : node.end_lineno])
        for inner in _parts(node, source):
            if isinstance(inner, ast.Name):
                own |= scope.get(inner.id, set())
            elif isinstance(inner, ast.Constant) and inner.value in architectures:
                own.add(f"architecture:{inner.value}")
        refers[f"{module}:{node.name}"] = own
        # As a decorator, or as a function on the class of another package.
        if isinstance(node, ast.ClassDef) and "support_torch_compile" in source:
            compiled.add(f"{module}:{node.name}")


def _parts(node, text):
    """The nodes below it, less the bases of a class that does not build their parts: it names its
    model itself, or sets itself up as a bare module."""
    names_model = any(
        isinstance(inner, ast.Assign) and ast.unparse(inner.targets[0]) == "model_cls"
        for inner in node.body
    )
    builds_others = names_model or "nn.Module.__init__(self)" in text
    bases = node.bases if builds_others and isinstance(node, ast.ClassDef) else []
    left_out = {id(inner) for base in bases for inner in ast.walk(base)}
    return (inner for inner in ast.walk(node) if id(inner) not in left_out)
