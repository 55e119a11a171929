"""The facts of `models.toml` about a model class or a model type.

Python's standard library suffices: every process of vLLM may ask."""

import functools
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Facts:
    """Facts of a model class or a model type that vLLM's config of the model does not give.

    Of a class:
        since: first release of vLLM with the class; empty for the oldest supported release.
        uses_mla: the class has MLA layers, although `ModelConfig.use_mla` of vLLM is false.
        sparse: "custom" if the backend CUSTOM serves the class where a config has `index_topk`;
            "own" if its layers choose keys whatever the config says, by code of their own.
        package: vLLM's package of the class, for layers of DeepSeek-V4, which this library decodes.
        kinds: (compression ratio, kind) of each kind of layer in that package.
        select: "module:function" in the package; it returns the class of the layers.
        slots: "module:function" in the package; it makes slots of an indexer's choice.
        target: (class, type) of the model beside which a draft head runs.
    Of a type:
        wide_router: the weights of its routers are fp32.
    Of a type, for a small model of it in an engine of a command:
        needs_experts: vLLM refuses the model without a layer of experts.
        skipped_on_cpu: "module:class" of a layer in vLLM's models for which a CPU has no kernel.
        unaligned_on_cpu: vLLM must not align the pages of the model's cache on a CPU.
        mla_settings_on_cpu: vLLM's CPU platform leaves out what it sets for other MLA models.
    """

    since: str = ""
    uses_mla: bool = False
    sparse: str = ""
    package: str = ""
    kinds: tuple[tuple[int, str], ...] = ()
    select: str = ""
    slots: str = ""
    target: tuple[str, ...] = ()
    wide_router: bool = False
    needs_experts: bool = False
    skipped_on_cpu: str = ""
    unaligned_on_cpu: bool = False
    mla_settings_on_cpu: bool = False


@functools.cache
def facts(name: str) -> Facts:
    """The facts of a model class or a model type; the defaults where the file has no entry."""
    content = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    found: dict[str, Any] = {}
    for pattern, entry in content.items():
        if fnmatchcase(name, pattern):
            found |= entry
    return Facts(**{field: _frozen(value) for field, value in found.items()})


def _frozen(value: Any) -> Any:
    """`value` with a tuple for each list: facts are hashable."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
