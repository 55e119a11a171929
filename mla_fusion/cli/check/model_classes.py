"""What a model's configuration and the source of the installed vLLM decide about fusion. vLLM is
read, not imported: that takes no time, and most attention backends need their GPU to be imported.
"""

import functools
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mla_fusion.report.reasons import Decline, sparse

PLATFORMS = {"nvidia": "cuda.py", "amd": "rocm.py"}  # and their files in vLLM/platforms
_FOLDER = "v1/attention/backends"
_HEAD_SIZES = r"def get_supported_head_sizes.*?return \[(.*?)\]"  # of any if the list is empty
_CACHES = r"supported_kv_cache_dtypes[^=]*= \[(.*?)\]"
_DECORATOR = "@support_torch_compile"
# In the file of a model class: the module of another.
_IMPORT = r"^ *from (?:\.+|vllm\.model_executor\.models\.)([\w.]+) import"
# A file that has one of them builds MLA layers, or the model of a class that its config names.
_MAY_BUILD_MLA = ("MLAAttention", "MultiHeadLatentAttention", "init_vllm_registered_model")


def decide(model: dict[str, Any], architecture: str) -> Decline | None:
    """Why no layer of a `Model` can fuse; None if only an engine can say."""
    # DeepSeek-V4's latent is compressed along the sequence and goes by another key.
    keys = ("kv_lora_rank", "qk_rope_head_dim", "compress_ratios")
    if all(model.get(key) is None for key in keys):
        return Decline("no-mla", architecture)
    if not may_build_mla(architecture):
        return Decline("no-mla", f"vLLM builds no MLA layer in {architecture}")
    # Before the class: this reason holds on every platform and in every release.
    if decline := sparse(architecture, model.get("index_topk")):
        return decline
    compiled = where_compiled(architecture)
    if architecture in breakable(_folder("vllm")):
        graph = " has no other graph" if compiled == frozenset() else ", by vLLM's own choice"
        return Decline("breakable-cudagraph", architecture + graph)
    return Decline("no-graph", architecture) if compiled == frozenset() else None


def breakable(vllm: Path) -> set[str]:
    """The architectures for which a vLLM switches torch.compile off, by the list in its config."""
    text = (vllm / "config" / "vllm.py").read_text()
    lists = re.findall(r'[({][^(){}]*"DeepSeekV4MTPModel"[^(){}]*[)}]', text)
    return {name for each in lists for name in re.findall(r'"(\w+)"', each)}


def is_known(architecture: str) -> bool:
    """True if vLLM has a model class of that name, or Transformers, whose classes vLLM can wrap."""
    models = _folder("transformers") / "models/auto/modeling_auto.py"
    return architecture in _registry() or f', "{architecture}")' in models.read_text()


def may_build_mla(architecture: str) -> bool:
    """True if vLLM's class builds MLA layers, as far as its source says. MiniCPM3's does not,
    although its config has a latent: it expands that and runs multi-head attention."""
    modules = set(_registry().values())
    seen = [_registry().get(architecture, "")]
    for module in seen:
        text = _source(module)
        # No text: a class of another package, or one that vLLM does not know.
        if not text or any(name in text for name in _MAY_BUILD_MLA):
            return True
        seen += {*re.findall(_IMPORT, text, re.M)} & modules - {*seen}
    return False


def knows_type(name: str) -> bool:
    """True if vLLM or Transformers names a model type where they keep their configurations."""
    named = re.compile(rf'"{re.escape(name)}"|\b{re.escape(name)}="')
    folders = [_folder("vllm") / each for each in ("transformers_utils", "config")]
    folders.append(_folder("transformers") / "models/auto")
    files = (file for folder in folders for file in folder.rglob("*.py"))
    return any(named.search(file.read_text()) for file in files)


def is_draft_head(architecture: str) -> bool:
    """True if vLLM lists a class among those for speculative decoding."""
    _, _, table = _source("registry").partition("\n_SPECULATIVE_DECODING_MODELS = {\n")
    return f'"{architecture}"' in table.partition("\n}\n")[0]


def where_compiled(architecture: str) -> frozenset[str] | None:
    """The `PLATFORMS` on which vLLM compiles a model class; None if its source does not say: a file
    under vllm/model_executor/models without the decorator may run the class of another. A package
    under vllm/models is complete, with a folder for each platform."""
    module = _registry().get(architecture, "")
    if "." not in module:
        return frozenset(PLATFORMS) if _DECORATOR in _source(module) else None
    package = _folder("vllm").parent.joinpath(*module.split("."))
    return frozenset(
        platform
        for platform in PLATFORMS
        for part in (platform, "common")
        if any(_DECORATOR in path.read_text() for path in (package / part).rglob("*.py"))
    )


def _folder(package: str) -> Path:
    spec = find_spec(package)
    assert spec and spec.origin  # the command asks for vLLM, which brings Transformers
    return Path(spec.origin).parent


def _source(module: str) -> str:
    """The source of a module of vLLM's models; empty if there is none."""
    file = _folder("vllm") / f"model_executor/models/{module}.py"
    return file.read_text() if file.exists() else ""


@functools.cache
def _registry() -> dict[str, str]:
    """Architecture -> module, from the tables in vLLM's registry.py; of two entries the first."""
    entries = re.findall(r'^    "(\w+)": \(\s*"([\w.]+)",', _source("registry"), re.M)
    return dict(reversed(entries))


def backends(platform: str, heads: int, head_size: int, cache: str) -> list[str]:
    """The MLA attention backends of one of `PLATFORMS` that take what the fused op writes, sorted:
    none that pads the query heads of a rank [padded-heads]. head_size: kv_lora_rank +
    qk_rope_head_dim; cache: as --kv-cache-dtype."""
    registry = (_folder("vllm") / _FOLDER / "registry.py").read_text()
    paths = dict(re.findall(r'^    (\w+) = \(?\s*"vllm\.([\w.]+)"', registry, re.M))
    chosen_from = (_folder("vllm") / "platforms" / PLATFORMS[platform]).read_text()
    names = set(re.findall(r"AttentionBackendEnum\.(\w*MLA)\b", chosen_from))
    return sorted(name for name in names if _takes(paths[name], heads, head_size, cache))


def _takes(path: str, heads: int, head_size: int, cache: str) -> bool:
    *folders, file, backend = path.split(".")
    sizes, caches = _inherited(backend, _HEAD_SIZES), _inherited(backend, _CACHES)
    text = _folder("vllm").joinpath(*folders, f"{file}.py").read_text()
    named = re.search(r"q_pad_num_heads=(\w+)", text)
    padded = named and re.search(rf"^{named[1]} = {heads}$", text, re.M) is None
    known = re.findall(r"\d+", sizes)
    return not padded and f'"{cache}"' in caches and (not known or str(head_size) in known)


def _inherited(name: str, pattern: str) -> str:
    """What a pattern finds in a class, or in the nearest of its bases that has it."""
    while name in _classes():
        name, text = _classes()[name]
        if found := re.search(pattern, text, re.S):
            return found[1]
    return ""


@functools.cache
def _classes() -> dict[str, tuple[str, str]]:
    """Class -> (its first base, its source)."""
    files = [*(_folder("vllm") / _FOLDER / "mla").glob("*.py")]
    files.append(_folder("vllm") / "model_executor/layers/attention/mla_attention.py")
    text = "\n".join(file.read_text() for file in files)
    found = re.findall(r"^class (\w+Backend)\((\w+).*?:\n((?: .*\n|\n)+)", text, re.M)
    return {name: (base, source) for name, base, source in found}
