"""Who decodes a layer: what the option `attention` comes to in an engine."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from mla_fusion import config, gpu
from mla_fusion.attention import cards
from mla_fusion.attention.aiter import selection
from mla_fusion.attention.plan import buffers
from mla_fusion.config import eligibility, vllm_compat
from mla_fusion.report.reasons import Decline
from mla_fusion.runtime import measured
from mla_fusion.runtime.engine import Engine

# Chunks of a batch-invariant decode with fewer heads than MANY_HEADS, and with as many or more: the
# fastest in the mean of 21 steps on an H200.
CHUNKS, MANY_HEADS = ((256, 512, 1024), (256, 1024, 2048)), 64
MOST_PARTIALS = 2**31  # bytes of the partial rows of a plan, which all layers share


@dataclasses.dataclass(frozen=True)
class Choice:
    """Who decodes the steps of a layer.

    planner: "portable", "aiter", or "": vLLM's backend. runs: from how many to how many sequences
    of a step its decode takes, in order; any other step is left to the backend. why: what the
    report says beyond the option's value, if anything: how `auto` was decided, which steps AITER's
    own table takes from `aiter`. slower_from: from this number of sequences on, a step without
    drafts is left to the backend too; 0: never. chunks: of a batch-invariant plan, which decodes in
    every step; empty where steps differ.
    """

    planner: str = ""
    runs: tuple[measured.Span, ...] = ()
    why: str = ""
    slower_from: int = 0
    chunks: tuple[int, ...] = ()


def choose(layer: Any, engine: Engine, facts: eligibility.LayerFacts) -> Choice:
    """The choice for an MLA layer with these facts."""
    asked = engine.options.attention
    if engine.batch_invariant:
        return _invariant(layer, engine, facts)
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


def _invariant(layer: Any, engine: Engine, facts: eligibility.LayerFacts) -> Choice:
    """With VLLM_BATCH_INVARIANT=1: ours in every step, or in none."""
    why = facts.no_plan
    longest = engine.context + engine.rows
    chunks = chunks_of(layer.num_heads, engine.rows, engine.sequences, longest)
    untried = ""
    if engine.options.attention == "auto":
        untried = _not_measured(layer, engine, dataclasses.replace(facts, decline=None))
        kernel = _name(facts.query), layer.num_heads, engine.rows
        untried = untried or engine.measured.why_not_run(kernel)
    detail = untried if chunks else "partial rows would fill the GPU's memory"
    if detail:
        why = why or Decline(eligibility.INVARIANT, detail)
    if why:
        return Choice(why=f"{layer.attn_backend.get_name()} ({why.explain()})")
    said = "portable in every step, in chunks of {}, {} and {} tokens".format(*chunks)
    return Choice("portable", ((1, engine.sequences),), said, chunks=chunks)


def chunks_of(heads: int, rows: int, sequences: int, context: int) -> tuple[int, ...]:
    """`Settings.chunks` for an engine: those measured best if their partial rows take MOST_PARTIALS
    at most, else longer ones, far from the start first; () if even whole sequences take more."""
    near, middle, far = CHUNKS[heads >= MANY_HEADS]
    size = sequences * rows * (-(-heads // 16) * 16) * (measured.WIDTHS[0] + 1) * 4
    while size * len(buffers.cuts(context, near, middle, far)) > MOST_PARTIALS:
        if near >= context:
            return ()
        if far < context:
            far *= 2
        else:
            near, middle, far = 2 * near, 2 * middle, 2 * far
    return near, middle, far


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
    sure = options.attention == "portable" or vllm_compat.is_batch_invariant()
    if not sure and not _may_be_ours(vllm_config, options):
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
