"""What a model's configuration and the source of the installed vLLM decide about fusion.

vLLM is read, not imported: its registry says which file has a model class, and the file says
whether the class is compiled. The answer holds for the installed release, and takes no time.
"""

from __future__ import annotations

import ast
import functools
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mla_fusion.report.reasons import Decline

PLATFORMS = ("nvidia", "amd")
_DECORATOR = "@support_torch_compile"


def decide(model: dict[str, Any], architecture: str) -> Decline | None:
    """Why no layer can fuse; None if only an engine can say.

    Args:
        model: the content of config.json; for a multimodal model, its language part.
        architecture: the class that vLLM would run.
    """
    # DeepSeek-V4's latent is compressed along the sequence and goes by another key.
    if not isinstance(model.get("kv_lora_rank"), int) and "compress_ratios" not in model:
        return Decline("no-mla", architecture)
    if where_compiled(architecture) == frozenset():
        return Decline("no-graph", architecture)
    if model.get("index_topk"):
        return Decline("sparse-attention", f"index_topk {model['index_topk']}")
    return None


def where_compiled(architecture: str) -> frozenset[str] | None:
    """The `PLATFORMS` on which vLLM compiles a model class; None if its source does not say.

    A file under vllm/model_executor/models without the decorator may run the class of another
    file. A package under vllm/models is complete, with a folder for each platform.
    """
    module = _registry().get(architecture)
    if module is None:
        return None
    if "." not in module:
        file = _root() / "model_executor" / "models" / f"{module}.py"
        return frozenset(PLATFORMS) if file.exists() and _DECORATOR in file.read_text() else None
    package = _root().joinpath(*module.split(".")[1:])
    return frozenset(
        platform
        for platform in PLATFORMS
        if any(
            _DECORATOR in path.read_text()
            for part in (platform, "common")
            for path in (package / part).rglob("*.py")
        )
    )


def _root() -> Path:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return Path("vllm is missing")
    return Path(spec.origin).parent


@functools.cache
def _registry() -> dict[str, str]:
    """Architecture -> module, from the tables in vLLM's registry.py."""
    file = _root() / "model_executor" / "models" / "registry.py"
    if not file.exists():
        return {}
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.Dict):
            continue
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple):
                first = value.elts[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    found.setdefault(str(key.value), first.value)
    return found
