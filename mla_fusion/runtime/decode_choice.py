"""Who decodes a layer: what the option `attention` comes to in an engine."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from mla_fusion import config, gpu
from mla_fusion.attention import cards
from mla_fusion.attention.aiter import selection
from mla_fusion.config import eligibility, vllm_compat
from mla_fusion.runtime import measured
from mla_fusion.runtime.engine import Engine


@dataclasses.dataclass(frozen=True)
class Choice:
    """Who decodes the steps of a layer.

    planner: "portable", "aiter", or "": vLLM's backend. runs: from how many to how many sequences
    of a step its decode takes, in order; any other step is left to the backend. why: what the
    report says beyond the option's value, if anything: how `auto` was decided, which steps AITER's
    own table takes from `aiter`. slower_from: from this number of sequences on, a step without
    drafts is left to the backend too; 0: never.
    """

    planner: str = ""
    runs: tuple[measured.Span, ...] = ()
    why: str = ""
    slower_from: int = 0


def choose(layer: Any, engine: Engine, facts: eligibility.LayerFacts) -> Choice:
    """The choice for an MLA layer with these facts."""
    asked = engine.options.attention
    if asked == "auto":
        return _measured(layer, engine, facts)
    if asked not in config.PLANNED or facts.decline:
        return Choice()
    if asked == "aiter" and "AITER" in layer.attn_backend.get_name():
        return _beside_aiters(layer, engine, facts.cache)
    return Choice(asked, ((1, engine.sequences),))


def _beside_aiters(layer: Any, engine: Engine, cache: torch.dtype) -> Choice:
    """AITER's decode, but for the steps that its own table has as slower: they are vLLM's."""
    arch, backend = gpu.of(layer._k_scale.device).arch, layer.attn_backend.get_name()
    rows, most = engine.rows, engine.sequences
    if engine.pads_sequences:
        return Choice(why=f"{backend} (aiter: adaptive verification pads the sequences of a step)")
    first, steps = selection.slow_steps(layer.num_heads, rows, cache, most, arch)
    if not first:
        return Choice("aiter", ((1, most),))
    run = 1, most if rows > 1 else first - 1
    return Choice("aiter", (run,), f"aiter, {backend} for {steps}", slower_from=first)


def _measured(layer: Any, engine: Engine, facts: eligibility.LayerFacts) -> Choice:
    """With `auto`: ours for the batches in which it was measured not slower, on GPUs with rows."""
    found = engine.measured
    if not found.spans:
        return Choice()
    backend, most = layer.attn_backend.get_name(), engine.sequences
    kernel = _name(facts.query), layer.num_heads, engine.rows
    why = found.why_not or _not_measured(layer, engine, facts) or found.why_not_run(kernel)
    if why:
        return Choice(why=f"{backend} (auto: {why})")
    key = *kernel, backend
    runs = tuple((a, min(b, most)) for a, b in found.spans.get(key, ()) if a <= most)
    source = found.source(key)
    if not runs:
        why = "measured slower than it" if key in found.spans else "not measured against it"
        shape = f"{measured.heads_and_rows(kernel)} in {_name(facts.query)}"
        return Choice(why=f"{backend} (auto: {why}{source} with {shape})")
    steps = f"with {measured.words(runs)} sequences"
    steps += "" if runs == ((1, most),) else f", {backend} else"
    return Choice("portable", runs, f"portable {steps} (auto: as measured{source})")


def _not_measured(layer: Any, engine: Engine, facts: eligibility.LayerFacts) -> str:
    """The fact of a layer that the measurements do not cover; empty if they cover it."""
    if (widths := (layer.kv_lora_rank, layer.qk_rope_head_dim)) != measured.WIDTHS:
        return "not measured with {} + {}".format(*widths)
    if engine.page % measured.PAGE:
        return f"not measured with pages of {engine.page} tokens"
    if decline := facts.decline or facts.no_plan:
        return decline.explain()
    if engine.cache.startswith("fp8") and facts.query.itemsize > 1:
        return f"not measured with a query in {_name(facts.query)} and a cache in {engine.cache}"
    return ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def described(choices: Iterable[Choice], options: config.Options) -> str:
    """Who decodes, for the report: each of the choices that were made, once."""
    found = dict.fromkeys(choice.why for choice in choices)
    return "; ".join(filter(None, found)) or options.attention


def page_of(vllm_config: Any, options: config.Options) -> int:
    """Tokens of a page of the KV cache that a kernel of this GPU needs: Hopper's copy engine takes
    a tile from within a page only, and none from the 16 tokens of some backends. 0 where an engine
    needs no such page, or its operator named one."""
    if vllm_config.cache_config.user_specified_block_size:
        return 0
    if options.attention != "portable" and not _may_be_ours(vllm_config, options):
        return 0
    return max(card.page for card in cards.of(gpu.Gpu(arch=vllm_compat.gpu_arch())))


def _may_be_ours(vllm_config: Any, options: config.Options) -> bool:
    """Whether `auto` may come to the portable decode, before the layers and their backend exist."""
    model = vllm_config.model_config
    fp8 = str(vllm_config.cache_config.cache_dtype).startswith("fp8")
    dtype: torch.dtype = vllm_compat.fp8_dtype() if fp8 else model.dtype
    heads = model.get_num_attention_heads(vllm_config.parallel_config)
    sizes = model.hf_text_config
    widths = getattr(sizes, "kv_lora_rank", 0), getattr(sizes, "qk_rope_head_dim", 0)
    kernel = _name(dtype), heads, config.query_rows(vllm_config)
    found = measured.Measurements.of(vllm_config, options)
    return widths == measured.WIDTHS and found.favour(kernel)
