"""The flag, the plugin's options and the decode bucket.

Everything in this package reads vLLM's config objects and changes none; the plugin does that. This
module is loaded in every process of vLLM, so it imports only what costs nothing there.
"""

from dataclasses import dataclass
from typing import Any

from mla_fusion.config import vllm_compat

FLAG = "fuse_aiter_qk_rope_kvcache_mla"
THRESHOLD = "aiter_qk_rope_kvcache_fusion_max_token_num"
OPTIONS_KEY = "mla_fusion"
# A prerequisite that the plugin switches on where the operator did not refuse it.
PARTITION = "use_inductor_graph_partition"
# Of torch._inductor.config: a value that is used twice is stored if it has more inputs.
REALIZE = "realize_reads_threshold"
# Of `Options.attention`: those that ask for a persistent decode.
PLANNED = ("portable", "aiter")
ATTENTION = ("auto", *PLANNED, "vllm")
_CAP = "max_split_per_batch"


class OptionError(ValueError):
    """The plugin's entry in additional_config has another name, or holds something unknown."""


@dataclass(frozen=True)
class Options:
    """additional_config["mla_fusion"].

    provider: who computes the fused op: "aiter" (default on ROCm), "triton" (default on CUDA) or
        "reference"; empty on a platform without a default.
    attention: who decodes with the prepared query: "portable", this library's persistent decode;
        "aiter", AITER's by a plan of this library; "vllm", vLLM's backend; or "auto" (default): the
        first where it was measured not slower than the last, else the last.
    max_split_per_batch: with "aiter", a budget of this many splits for each sequence, shared by all
        of a batch; -1 (default) for none.
    """

    provider: str
    attention: str = "auto"
    max_split_per_batch: int = -1


def read_options(additional_config: Any) -> Options:
    """The options of this plugin in vLLM's `additional_config`.

    Raises:
        OptionError: an unknown option, an unknown value of one, or the distribution's name as key.
    """
    from mla_fusion.kernels import PROVIDERS

    choices = {"provider": PROVIDERS, "attention": ATTENTION}
    given = additional_config if isinstance(additional_config, dict) else {}
    if "mla-fusion" in given:
        raise OptionError(
            f'additional_config["mla-fusion"]: the key is "{OPTIONS_KEY}", with an underscore'
        )
    raw = given.get(OPTIONS_KEY, {})
    if not isinstance(raw, dict):
        raise OptionError(
            f'additional_config["{OPTIONS_KEY}"] must be a dictionary such as '
            f'{{"provider": "triton"}}, got {raw!r}'
        )
    unknown = sorted(set(raw) - {*choices, _CAP})
    if unknown:
        known = "; ".join(f"{name} ({', '.join(choices[name])})" for name in choices)
        known += f"; {_CAP} (-1, or a whole number from 1 on)"
        raise OptionError(
            f'unknown option {", ".join(unknown)} in additional_config["{OPTIONS_KEY}"]; '
            f"there are {known}"
        )
    for name in choices.keys() & raw:
        if raw[name] not in choices[name]:
            raise OptionError(
                f"unknown {name} {raw[name]!r} in additional_config["
                f'"{OPTIONS_KEY}"]: choose one of {", ".join(choices[name])}'
            )
    _check_cap(raw)
    return Options(**{"provider": vllm_compat.default_provider(), **raw})


def _check_cap(raw: dict[str, Any]) -> None:
    """Raise OptionError unless the cap on splits is one, and somebody obeys it."""
    if _CAP not in raw:
        return
    cap, where = raw[_CAP], f'{_CAP} in additional_config["{OPTIONS_KEY}"]'
    # True is an int.
    if type(cap) is not int or (cap != -1 and cap < 1):
        raise OptionError(
            f"{where} must be -1, for no cap, or a whole number from 1 on, got {cap!r}"
        )
    if raw.get("attention") != "aiter":
        raise OptionError(
            f'{where} caps the plan of "attention": "aiter", and attention is '
            f'"{raw.get("attention", "auto")}": set both, or leave it out'
        )


def is_on(vllm_config: Any) -> bool:
    """Whether the flag is set; a config built before the plugin was loaded has no such field."""
    return bool(getattr(vllm_config.compilation_config.pass_config, FLAG, False))


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
        query_len = 1 + draft_tokens(vllm_config)
        bucket = scheduler.max_num_seqs * query_len
        sizes = [n for n in compilation.cudagraph_capture_sizes or () if n >= bucket]
        if sizes:  # vLLM also rounds the sizes of decode graphs up to whole queries
            bucket = -(-min(sizes) // query_len) * query_len
    return min(max(bucket, 2), scheduler.max_num_batched_tokens)


def draft_tokens(vllm_config: Any) -> int:
    """Draft tokens that speculative decoding adds to each token of a decode step."""
    speculative = vllm_config.speculative_config
    return (speculative.num_speculative_tokens or 0) if speculative is not None else 0
