"""The verdict of a model's configuration and of the source of the installed vLLM. vLLM is
read, not imported: that takes no time, and most attention backends need their GPU to be imported.

Where a file of vLLM or Transformers lacks what is looked for, a `UserError` says so: an empty list
would be a wrong answer about every model.
"""

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mla_fusion.cli import UserError
from mla_fusion.cli.check.model_config import Model
from mla_fusion.config import vllm_compat
from mla_fusion.config.eligibility import why_not_here, why_sparse
from mla_fusion.report.reasons import Decline, Declined

PLATFORMS = {"nvidia": "cuda.py", "amd": "rocm.py"}  # and their files in vLLM/platforms
_FOLDER = "v1/attention/backends"
# Members of a backend. An empty list of head sizes stands for any.
_HEAD_SIZES, _CACHES = "get_supported_head_sizes", "supported_kv_cache_dtypes"
# Names that are looked for in the files of model classes, and the files of vLLM that define them.
_DECORATOR = {"@support_torch_compile": "compilation/decorators.py"}
# In the file of a model class: the module of another.
_IMPORT = r"^ *from (?:\.+|vllm\.model_executor\.models\.)([\w.]+) import"
# A file that has one of them builds MLA layers, or the model of a class that its config names.
_MAY_BUILD_MLA = {
    "MLAAttention": "model_executor/layers/attention/mla_attention.py",
    "MultiHeadLatentAttention": "model_executor/layers/mla.py",
    "init_vllm_registered_model": "model_executor/models/utils.py",
}


@dataclass(frozen=True)
class Backend:
    """An MLA attention backend of vLLM. An empty tuple of numbers stands for any."""

    name: str
    heads: tuple[int, ...]  # query heads of a rank that it does not pad [padded-heads]
    head_sizes: tuple[int, ...]  # kv_lora_rank + qk_rope_head_dim
    caches: tuple[str, ...]  # types of --kv-cache-dtype

    def takes(self, heads: int, head_size: int, cache: str) -> bool:
        """True if it takes what the fused op writes, without padding."""
        fits = heads in (self.heads or (heads,)) and head_size in (self.head_sizes or (head_size,))
        return fits and cache in self.caches


def look_up(model: Model) -> dict[str, list[Backend]]:
    """The backends on each of `PLATFORMS` on which vLLM may compile the model's class. Raises
    Declined as `decide`, and a UserError if no engine can have the model."""
    name, compiled = model.architecture, where_compiled(model.architecture)
    if "auto_map" not in model.config and not any(map(knows_type, model.kinds)):
        raise UserError(
            f"{model.path}: neither this vLLM nor Transformers knows the model type "
            f"{model.config['model_type']!r}, and no auto_map names its code"
        )
    if decline := decide(model.config, name):
        raise Declined(decline.code, decline.detail)
    if not is_known(name):
        raise UserError(
            f'{model.path}: "architectures" has to name a class of this vLLM or of Transformers, '
            f"and {name} is none"
        )
    if is_draft_head(name) and not model.facts.target:
        raise UserError(
            f"{name} is a draft head, which vLLM runs beside its target: give the target's config"
        )
    return {at: backends(at) for at in PLATFORMS if compiled is None or at in compiled}


def decide(model: dict[str, Any], architecture: str) -> Decline | None:
    """Why no layer of a `Model` can fuse here; None if only an engine can say."""
    # DeepSeek-V4's latent is compressed along the sequence and goes by another key.
    keys = ("kv_lora_rank", "qk_rope_head_dim", "compress_ratios")
    if all(model.get(key) is None for key in keys):
        return Decline("no-mla", architecture)
    if not may_build_mla(architecture):
        return Decline("no-mla", f"vLLM builds no MLA layer in {architecture}")
    compiled, listed = where_compiled(architecture), architecture in breakable(_folder("vllm"))
    # Before the class: an environment rules out all models, and a sparse attention is declined on
    # every platform and in every release.
    if decline := why_not_here() or why_sparse(architecture, model.get("index_topk")):
        return decline
    if listed:
        graph = " has no other graph" if compiled == frozenset() else ", by vLLM's own choice"
        return Decline("breakable-cudagraph", architecture + graph)
    return Decline("no-graph", architecture) if compiled == frozenset() else None


def breakable(vllm: Path) -> set[str]:
    """The architectures for which a vLLM switches torch.compile off, by the list in its config."""
    pattern = r'[({][^(){}]*"DeepSeekV4MTPModel"[^(){}]*[)}]'
    lists = _find(pattern, vllm / "config/vllm.py", "list of architectures without torch.compile")
    return {name for each in lists for name in re.findall(r'"(\w+)"', each)}


def is_known(architecture: str) -> bool:
    """True if vLLM has a model class of that name, or Transformers, whose classes vLLM can wrap."""
    models = _folder("transformers") / "models/auto/modeling_auto.py"
    return architecture in _registry() or architecture in _find(
        r', "(\w+)"\)', models, "model class"
    )


def may_build_mla(architecture: str) -> bool:
    """True if vLLM's class builds MLA layers, as far as its source says. MiniCPM3's does not,
    although its config has a latent: it expands that and runs multi-head attention."""
    modules = set(_registry().values())
    seen = [_registry().get(architecture, "")]
    for module in seen:
        # No file: a class of another package, or one that vLLM does not know.
        if not _file(module).exists() or _has(_MAY_BUILD_MLA, [_file(module)]):
            return True
        imported = _find(_IMPORT, _file(module), "import of another model's module")
        seen += {*imported} & modules - {*seen}
    return False


def knows_type(name: str) -> bool:
    """True if vLLM or Transformers names a model type where they keep their configurations."""
    named = re.compile(rf'"{re.escape(name)}"|\b{re.escape(name)}="')
    folders = [_folder("vllm") / each for each in ("transformers_utils", "config")]
    folders.append(_folder("transformers") / "models/auto")
    return any(named.search(file.read_text()) for each in folders for file in _files(each))


def is_draft_head(architecture: str) -> bool:
    """True if vLLM lists a class among those for speculative decoding."""
    pattern = r"^_SPECULATIVE_DECODING_MODELS = \{\n(.*?)^\}"
    [table] = _find(pattern, _file("registry"), "table of classes for speculative decoding")
    return f'"{architecture}"' in table


def where_compiled(architecture: str) -> frozenset[str] | None:
    """The `PLATFORMS` on which vLLM compiles a model class; None if its source does not say: a file
    under vllm/model_executor/models without the decorator may run the class of another. A package
    under vllm/models is complete, with a folder for each platform."""
    module = _registry().get(architecture, "")
    if "." not in module:
        return frozenset(PLATFORMS) if _has(_DECORATOR, [_file(module)]) else None
    package = _folder("vllm").parent.joinpath(*module.split("."))
    return frozenset(
        platform
        for platform in PLATFORMS
        for part in (platform, "common")
        if _has(_DECORATOR, (package / part).rglob("*.py"))
    )


def _folder(package: str) -> Path:
    spec = find_spec(package)
    assert spec and spec.origin  # the command asks for vLLM, which brings Transformers
    return Path(spec.origin).parent


def _file(module: str) -> Path:
    """The file of a module of vLLM's models, which need not exist."""
    return _folder("vllm") / f"model_executor/models/{module}.py"


def _find(pattern: str, file: Path, what: str) -> list[Any]:
    """Every match of a pattern in a file; a UserError if there is none."""
    found = re.findall(pattern, file.read_text(), re.M | re.S) if file.exists() else []
    return found or _fail(file, what)


def _fail(place: Path, what: str) -> Any:
    """Raise a UserError that says what a file or folder does not have."""
    raise UserError(
        f"found no {what} in {place}: mla-fusion reads the sources of vLLM {vllm_compat.window()}"
    )


def _files(folder: Path) -> list[Path]:
    """Every Python file below a folder; a UserError if there is none."""
    return [*folder.rglob("*.py")] or _fail(folder, "Python file")


def _has(names: Mapping[str, str], files: Iterable[Path]) -> bool:
    """Whether a file has one of `names`, each of which vLLM must define; a file need not exist."""
    for name, definition in names.items():
        defined = rf"^(?:class|def) {name.removeprefix('@')}"
        _find(defined, _folder("vllm") / definition, f"definition of {name}")
    texts = [file.read_text() for file in files if file.exists()]
    return any(name in text for text in texts for name in names)


@functools.cache
def _registry() -> dict[str, str]:
    """Architecture -> module, from the tables in vLLM's registry.py; of two entries the first."""
    pattern = r'^    "(\w+)": \(\s*"([\w.]+)",'
    return dict(reversed(_find(pattern, _file("registry"), "table of architectures")))


def backends(platform: str) -> list[Backend]:
    """The MLA attention backends that vLLM chooses from on one of `PLATFORMS`, by name."""
    registry = _folder("vllm") / _FOLDER / "registry.py"
    paths = dict(_find(r'^    (\w+) = \(?\s*"vllm\.([\w.]+)"', registry, "table of backends"))
    chosen_from = _folder("vllm") / "platforms" / PLATFORMS[platform]
    names = {*_find(r"AttentionBackendEnum\.(\w*MLA)\b", chosen_from, "MLA attention backend")}
    return [_backend(name, paths.get(name) or _fail(registry, name)) for name in sorted(names)]


def _backend(name: str, path: str) -> Backend:
    *folders, module, backend = path.split(".")
    file = _folder("vllm").joinpath(*folders, f"{module}.py")
    [text] = _find(rf".*^class {backend}\b.*", file, f"class {backend}")
    named = re.search(r"q_pad_num_heads=(\w+)", text)
    heads = _find(rf"^{named[1]} = (\d+)$", file, f"value of {named[1]}") if named else []
    sizes = re.findall(r"\d+", _inherited(backend, _HEAD_SIZES, file))
    caches = re.findall(r'"(\w+)"', _inherited(backend, _CACHES, file))
    return Backend(name, tuple(map(int, heads)), tuple(map(int, sizes)), tuple(caches))


def _inherited(name: str, member: str, file: Path) -> str:
    """Content of the list in a member of the class `name` of `file`, or of its nearest base."""
    wanted, body = f"list in {member} of {name}", None
    while body is None and name in _classes():
        name, text, file = _classes()[name]
        body = re.search(rf"^    (?:def )?{member}\b(.*?)(?=^    [\w@]|\Z)", text, re.M | re.S)
    found = body and re.search(r"(?:=|return) \[(.*?)\]", body[1], re.S)
    return found[1] if found else str(_fail(file, wanted))


@functools.cache
def _classes() -> dict[str, tuple[str, str, Path]]:
    """Class -> (its first base, its source, its file)."""
    files = [*(_folder("vllm") / _FOLDER / "mla").glob("*.py")]
    files.append(_folder("vllm") / _MAY_BUILD_MLA["MLAAttention"])
    pattern = re.compile(r"^class (\w+Backend)\((\w+).*?:\n((?: .*\n|\n)+)", re.M)
    found = [(*each, file) for file in files for each in pattern.findall(file.read_text())]
    return {name: (base, source, file) for name, base, source, file in found}
