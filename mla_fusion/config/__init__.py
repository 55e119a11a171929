"""The flag, the plugin's options and the decode bucket.

This package reads vLLM's config objects and changes none. This module is loaded in every process
of vLLM, so it imports only what costs nothing there.
"""

import difflib
import re
from dataclasses import dataclass
from typing import Any

from mla_fusion.config import vllm_compat

FLAG = "fuse_aiter_qk_rope_kvcache_mla"
THRESHOLD = "aiter_qk_rope_kvcache_fusion_max_token_num"
OPTIONS_KEY = "mla_fusion"
# torch._inductor.config: a value that is used twice is stored if it reads more buffers than this.
REALIZE = "realize_reads_threshold"
# Of `Options.attention`: those that ask for a persistent decode.
PLANNED = ("portable", "aiter")
ATTENTION = ("auto", *PLANNED, "vllm")
PROJECTIONS = ("auto", "vllm")
_CAP, _LAYERS = "max_split_per_batch", "layers"
_SUCH_AS = '"0-30", "5" or "0-3,7"'


class OptionError(ValueError):
    """The plugin's entry in additional_config has another name, or holds something unknown."""


@dataclass(frozen=True)
class Options:
    """additional_config["mla_fusion"].

    Attributes:
        provider: who computes the fused op: "aiter" (default on ROCm), "triton" (default on CUDA)
            or "reference"; empty on a platform without a default.
        attention: who decodes with the prepared query: "portable", this library's persistent
            decode; "aiter", AITER's by a plan of this library; "vllm", vLLM's backend; or "auto"
            (default): the first where it was measured not slower than the last, else the last.
        projections: who computes products of up to 16 tokens, and norms beside them: "vllm", or
            "auto" (default): this library where it was measured faster.
        max_split_per_batch: with "aiter", a budget of this many splits for each sequence, shared by
            all of a batch; -1 (default) for none.
        layers: the layers that fuse, by vLLM's index: "0-30", "5" or "0-3,7"; empty (default) for
            all.
    """

    provider: str
    attention: str = "auto"
    projections: str = "auto"
    max_split_per_batch: int = -1
    layers: str = ""


def _choices() -> dict[str, tuple[str, ...]]:
    """The values of each option that is a name."""
    from mla_fusion.kernels import PROVIDERS

    return {"provider": tuple(PROVIDERS), "attention": ATTENTION, "projections": PROJECTIONS}


def read_options(additional_config: Any) -> Options:
    """The options of this plugin in vLLM's `additional_config`.

    Raises:
        OptionError: an unknown option, an unknown value of one, or the distribution's name as key.
    """
    where, choices = f'additional_config["{OPTIONS_KEY}"]', _choices()
    given = additional_config if isinstance(additional_config, dict) else {}
    raw = given.get(OPTIONS_KEY, {})
    if "mla-fusion" in given:
        raise OptionError(
            f'additional_config["mla-fusion"]: the key is "{OPTIONS_KEY}", with an underscore'
        )
    if not isinstance(raw, dict):
        example = '{"provider": "triton"}'
        raise OptionError(f"{where} must be a dictionary such as {example}, got {raw!r}")
    if unknown := sorted(raw.keys() - {*choices, _CAP, _LAYERS}):
        known = "; ".join(f"{name} ({', '.join(values)})" for name, values in choices.items())
        raise OptionError(
            f"unknown option {', '.join(unknown)} in {where}; there are {known}; {_CAP} (-1, or a "
            f"whole number from 1 on); {_LAYERS} (such as {_SUCH_AS})"
        )
    for name, values in choices.items():
        if name in raw and raw[name] not in values:
            asked = f"unknown {name} {raw[name]!r} in {where}"
            raise OptionError(f"{asked}: choose one of {', '.join(values)}")
    options = Options(**{"provider": vllm_compat.default_provider(), **raw})
    cap = options.max_split_per_batch
    if type(cap) is not int or (cap != -1 and cap < 1):  # True is an int
        must = "must be -1, for no cap, or a whole number from 1 on"
        raise OptionError(f"{_CAP} in {where} {must}, got {cap!r}")
    if _CAP in raw and options.attention != "aiter":
        raise OptionError(
            f'{_CAP} in {where} caps the plan of "attention": "aiter", and attention is '
            f'"{options.attention}": set both, or leave it out'
        )
    if _LAYERS in raw and not _names_layers(raw[_LAYERS]):
        must = f"must be a string of indices and ranges of them, such as {_SUCH_AS}"
        raise OptionError(f"{_LAYERS} in {where} {must}, got {raw[_LAYERS]!r}")
    return options


def _spans(layers: str) -> list[tuple[int, int]]:
    """The ranges in `Options.layers`: (first, last) of each."""
    ends = (span.split("-") for span in layers.split(","))
    return [(int(first), int((last or [first])[0])) for first, *last in ends]


def _names_layers(value: Any) -> bool:
    text = isinstance(value, str) and re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", value, re.ASCII)
    return bool(text) and all(first <= last for first, last in _spans(value))


def is_chosen(layers: str, layer_name: str) -> bool:
    """True if `layers`, as in `Options` but not empty, has the layer that vLLM gives this name."""
    return any(first <= layer_index(layer_name) <= last for first, last in _spans(layers))


def layer_index(layer_name: str) -> int:
    """The first whole number in a name such as "model.layers.3.self_attn.attn", or -1."""
    return next((int(part) for part in layer_name.split(".") if part.isdecimal()), -1)


def misplaced(additional_config: Any) -> list[str]:
    """Keys of vLLM's `additional_config` that are probably meant for this plugin and are not read:
    a name close to `OPTIONS_KEY`, or an option at the top level.

    A key of another plugin is neither: its name differs, or it holds options, none of them ours.
    """
    given = additional_config if isinstance(additional_config, dict) else {}
    choices = _choices()
    options = [*choices, _CAP, _LAYERS]

    def near(name: Any, names: list[str]) -> bool:
        return bool(difflib.get_close_matches(str(name).lower().replace("-", "_"), names, 1, 0.8))

    def is_ours(key: Any, value: Any) -> bool:
        if key == OPTIONS_KEY or not isinstance(key, str):
            return False
        if key in options:
            return key == _CAP or (
                _names_layers(value) if key == _LAYERS else value in choices[key]
            )
        others = isinstance(value, dict) and value and not any(near(k, options) for k in value)
        return near(key, [OPTIONS_KEY]) and not others

    return [key for key, value in given.items() if is_ours(key, value)]


def is_on(vllm_config: Any) -> bool:
    """True if the flag is set; a config built before the plugin was loaded has no such field."""
    return getattr(vllm_config.compilation_config.pass_config, FLAG, False) is True


def rewrites(compilation_config: Any) -> bool:
    """True if the passes run: the flag is set, and vLLM does not promise results that ignore the
    batch. There every step has vLLM's graphs: kernels of another graph sum in another order."""
    on = getattr(compilation_config.pass_config, FLAG, False) is True
    return on and not vllm_compat.is_batch_invariant()


def in_one_graph(compilation_config: Any) -> bool:
    """True if an operator let vLLM compile RoPE, cache write and attention in one graph, by
    Inductor's graph partition or by empty splitting ops: then the passes run in that graph, and
    else in a graph of decode steps alone."""
    partition = compilation_config.use_inductor_graph_partition
    return bool(partition) or compilation_config.splitting_ops == []


def decode_bucket(vllm_config: Any) -> int:
    """The largest number of tokens of a graph in which the passes run.

    It is max_num_seqs * (1 + num_speculative_tokens), vLLM's own bound of a decode CUDA graph, or
    the size of the CUDA graph that vLLM pads such a batch to, unless the operator overrides it; and
    never more than max_num_batched_tokens. vLLM has no compile range for a single token, so the
    smallest bucket is 2.
    """
    scheduler = vllm_config.scheduler_config
    compilation = vllm_config.compilation_config
    bucket = getattr(compilation.pass_config, THRESHOLD, None)
    if bucket is None:
        rows = query_rows(vllm_config)
        bucket = scheduler.max_num_seqs * rows
        sizes = [n for n in compilation.cudagraph_capture_sizes or () if n >= bucket]
        if sizes:  # vLLM also rounds the sizes of decode graphs up to whole queries
            bucket = -(-min(sizes) // rows) * rows
    return min(max(bucket, 2), scheduler.max_num_batched_tokens)


def query_rows(vllm_config: Any) -> int:
    """Most query rows of a sequence in a decode step: its newest token and the drafts after it."""
    return 1 + (getattr(vllm_config.speculative_config, "num_speculative_tokens", 0) or 0)
