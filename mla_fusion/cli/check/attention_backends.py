"""The MLA attention backends of the installed vLLM that take what the fused op writes.

As in mla_fusion/cli/model_classes.py, vLLM's source is read: most backends cannot be imported
without their GPU.
"""

import functools
import re

from mla_fusion.cli.check.model_classes import root

_PLATFORM_FILES = {"nvidia": "cuda.py", "amd": "rocm.py"}
_FOLDER = "v1/attention/backends"
_HEAD_SIZES = r"def get_supported_head_sizes.*?return \[(.*?)\]"  # of any if the list is empty
_CACHES = r"supported_kv_cache_dtypes[^=]*= \[(.*?)\]"


def that_take(platform: str, heads: int, head_size: int, cache: str) -> list[str]:
    """The names of those that vLLM chooses from on a platform, sorted.

    Args:
        platform: one of `model_classes.PLATFORMS`.
        heads: the query heads of a rank. A backend that pads them is left out [padded-heads].
        head_size: kv_lora_rank + qk_rope_head_dim.
        cache: as --kv-cache-dtype.
    """
    registry = (root() / _FOLDER / "registry.py").read_text()
    paths = dict(re.findall(r'^    (\w+) = \(?\s*"vllm\.([\w.]+)"', registry, re.M))
    file = root() / "platforms" / _PLATFORM_FILES[platform]
    names = set(re.findall(r"AttentionBackendEnum\.(\w*MLA)\b", file.read_text()))
    return sorted(name for name in names if _takes(paths[name], heads, head_size, cache))


def _takes(path: str, heads: int, head_size: int, cache: str) -> bool:
    module, _, backend = path.rpartition(".")
    sizes, caches = _inherited(backend, _HEAD_SIZES), _inherited(backend, _CACHES)
    text = root().joinpath(*module.split(".")).with_suffix(".py").read_text()
    named = re.search(r"q_pad_num_heads=(\w+)", text)
    padded = named and re.search(rf"^{named[1]} = {heads}$", text, re.M) is None
    return not padded and f'"{cache}"' in caches and str(head_size) in (sizes or str(head_size))


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
    files = [*(root() / _FOLDER / "mla").glob("*.py")]
    files += [root() / "model_executor/layers/attention/mla_attention.py"]
    found = {}
    for file in files:
        for name, base, text in re.findall(
            r"^class (\w+Backend)\((\w+).*?:\n((?: .*\n|\n)+)", file.read_text(), re.M
        ):
            found[name] = base, text
    return found
