"""Who decodes a layer: what the option `attention` comes to in an engine."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import torch

from mla_fusion import config
from mla_fusion.attention.aiter import selection
from mla_fusion.attention.plan import device
from mla_fusion.config import eligibility, vllm_compat
from mla_fusion.runtime import measured

logger = logging.getLogger("vllm.mla_fusion")

ATTRIBUTE = "mla_fusion_decode_choice"  # of a layer: the choice that was made for it


@dataclasses.dataclass(frozen=True)
class Choice:
    """Who decodes the steps of a layer.

    planner: "portable", "aiter", or "": vLLM's backend. runs: from how many to how many sequences
    of a step its decode takes, in order; any other step is left to the backend. why: what the
    report says beyond the option's value, if anything: how `auto` was decided, which steps AITER's
    own table takes from `aiter`. slower_from: from so many sequences on, a step without drafts is
    left to the backend too; 0: never.
    """

    planner: str = ""
    runs: tuple[measured.Span, ...] = ()
    why: str = ""
    slower_from: int = 0


def choose(layer: Any, options: config.Options, vllm_config: Any) -> Choice:
    """The choice for an MLA layer whose weights are loaded."""
    most = int(vllm_config.scheduler_config.max_num_seqs)
    if options.attention == "auto":
        return _measured(layer, options, vllm_config, most)
    planned = options.attention in config.PLANNED
    if not planned or _facts(layer, options, vllm_config, options.attention).decline:
        return Choice()
    if options.attention == "aiter" and backend_is_aiters(layer):
        return _beside_aiters(layer, vllm_config, most)
    return Choice(options.attention, ((1, most),))


def _beside_aiters(layer: Any, vllm_config: Any, most: int) -> Choice:
    """AITER's decode, but for the steps in which its own table has another as faster, which vLLM's
    backend for AITER takes."""
    rows = config.query_rows(vllm_config)
    cache = eligibility.cache_dtype(layer, vllm_config.model_config.dtype)
    arch, backend = device.architecture(layer._k_scale.device), layer.attn_backend.get_name()
    if vllm_compat.pads_sequences(vllm_config):
        return Choice(why=f"{backend} (aiter: adaptive verification pads the sequences of a step)")
    first, steps = selection.slow_steps(layer.num_heads, rows, cache, most, arch)
    if not first:
        return Choice("aiter", ((1, most),))
    run = 1, most if rows > 1 else first - 1
    return Choice("aiter", (run,), f"aiter, {backend} for {steps}", slower_from=first)


def backend_is_aiters(layer: Any) -> bool:
    """Whether vLLM's backend of a layer decodes with AITER, and lists the pages for it."""
    return "AITER" in layer.attn_backend.get_name()


def _measured(layer: Any, options: config.Options, vllm_config: Any, most: int) -> Choice:
    """With `auto`: ours for the batches in which it was measured not slower, on GPUs with rows."""
    gpu = vllm_compat.gpu_name()
    if not measured.has_measurements(gpu):
        return Choice()
    backend = layer.attn_backend.get_name()
    facts = _facts(layer, options, vllm_config, "portable")
    dtype = facts.query_dtype(vllm_config.model_config.dtype)
    kernel = _name(dtype), layer.num_heads, config.query_rows(vllm_config)
    why = _engine_not_measured(options, vllm_config) or _not_measured(layer, vllm_config, facts)
    if why := why or measured.why_not_run(gpu, kernel):
        return Choice(why=f"{backend} (auto: {why})")
    key, spans = (*kernel, backend), measured.spans(gpu, vllm_config.model_config.max_model_len)
    runs = tuple((a, min(b, most)) for a, b in spans.get(key, ()) if a <= most)
    if not runs:
        found = "measured slower than it" if key in spans else "not measured against it"
        if (where := measured.decided_by(gpu, key)) != "as measured":
            found += f", {where.removeprefix('as measured, ')}"
        shape = f"{measured.heads_and_rows(kernel)} in {_name(dtype)}"
        return Choice(why=f"{backend} (auto: {found} with {shape})")
    steps = f"with {measured.words(runs)} sequences"
    steps += "" if runs == ((1, most),) else f", {backend} else"
    return Choice("portable", runs, f"portable {steps} (auto: {measured.decided_by(gpu, key)})")


def _engine_not_measured(options: config.Options, vllm_config: Any) -> str:
    """What of an engine the measurements do not cover; empty if they do."""
    if vllm_config.parallel_config.decode_context_parallel_size > 1:
        return "ranks share the cache"
    portable = dataclasses.replace(options, attention="portable")
    decline = eligibility.why_no_plan(vllm_config, portable)
    return decline.explain() if decline else ""


def _not_measured(layer: Any, vllm_config: Any, facts: eligibility.LayerFacts) -> str:
    """What of a layer the measurements do not cover; empty if they do."""
    if (widths := (layer.kv_lora_rank, layer.qk_rope_head_dim)) != measured.WIDTHS:
        return "not measured with {} + {}".format(*widths)
    if (page := vllm_config.cache_config.block_size) % measured.PAGE:
        return f"not measured with pages of {page} tokens"
    if facts.decline:
        return facts.decline.explain()
    dtype = facts.query_dtype(vllm_config.model_config.dtype)
    cache = str(vllm_config.cache_config.cache_dtype)
    if cache.startswith("fp8") and dtype.itemsize > 1:
        return f"not measured with a query in {_name(dtype)} and a cache in {cache}"
    return ""


def _facts(
    layer: Any, options: config.Options, vllm_config: Any, attention: str
) -> eligibility.LayerFacts:
    activation, rows = vllm_config.model_config.dtype, config.query_rows(vllm_config)
    return eligibility.facts(layer, options.provider, activation, attention, rows)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def described(layers: Mapping[str, Any], options: config.Options) -> str:
    """Who decodes, for the report: each choice that was made for one of `layers`, once."""
    made = (getattr(layer, ATTRIBUTE, None) for layer in layers.values())
    found = dict.fromkeys(choice.why for choice in made if choice is not None)
    return "; ".join(filter(None, found)) or options.attention


def choose_page(vllm_config: Any) -> None:
    """Let a page of the KV cache hold a tile of the portable decode on Hopper, whose copy engine
    takes a tile from within a page only; with the 16 tokens of some backends it copies none."""
    cache = vllm_config.cache_config
    options = config.read_options(vllm_config.additional_config)
    attention = options.attention
    ours = attention == "portable" or (attention == "auto" and _is_listed(options, vllm_config))
    if ours and vllm_compat.is_hopper() and not cache.user_specified_block_size:
        # As if the operator had asked: else vLLM asks the backend when the model is loaded.
        cache.block_size, cache.user_specified_block_size = measured.PAGE, True
        logger.debug("attention=%s: block_size is %d", attention, measured.PAGE)


def _is_listed(options: config.Options, vllm_config: Any) -> bool:
    """Whether `auto` may come to the portable decode, before the layers and their backend exist."""
    model = vllm_config.model_config
    fp8 = str(vllm_config.cache_config.cache_dtype).startswith("fp8")
    dtype: torch.dtype = vllm_compat.fp8_dtype() if fp8 else model.dtype
    heads = model.get_num_attention_heads(vllm_config.parallel_config)
    sizes = model.hf_text_config
    widths = getattr(sizes, "kv_lora_rank", 0), getattr(sizes, "qk_rope_head_dim", 0)
    kernel = _name(dtype), heads, config.query_rows(vllm_config)
    listed = measured.is_listed(vllm_compat.gpu_name(), model.max_model_len, kernel)
    return listed and widths == measured.WIDTHS and not _engine_not_measured(options, vllm_config)
