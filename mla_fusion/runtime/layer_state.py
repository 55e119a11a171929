"""The state of each MLA layer, made once when the model is loaded, and read in each step."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from mla_fusion import attention, logger
from mla_fusion.config import eligibility, vllm_compat
from mla_fusion.kernels.launches import Kept
from mla_fusion.runtime.decode_choice import Choice, choose
from mla_fusion.runtime.engine import Engine
from mla_fusion.runtime.step_plan import StepPlan

ATTRIBUTE = "mla_fusion_state"  # on an MLA layer of vLLM; `plugin.workers` sets it


@dataclass(frozen=True)
class LayerState:
    """The decisions about one MLA layer of vLLM, with the plan and tables that layers share.

    Attributes:
        facts: eligibility, for the passes; None without the plugin, where each pass reads it from
            the layer.
        choice: who decodes the layer's steps.
        plan: the plan of the persistent decode, shared by layers of one shape; None if vLLM's
            backend decodes every step.
        tables: cosines and sines in the forms of `runtime.tables`, shared by all layers.
        kept: the launches of its ops, alike in layers of one plan, or without one.
    """

    facts: eligibility.LayerFacts | None = None
    choice: Choice = field(default_factory=Choice)
    plan: StepPlan | None = None
    tables: dict[Any, Any] = field(default_factory=dict)
    kept: Kept = field(default_factory=Kept, compare=False)

    def value_weight(self, layer: Any) -> torch.Tensor | None:
        """W_UV [H, L, V] if the decode of this layer multiplies with it itself. It is read in each
        step: a reload may put another tensor there."""
        fused = self.plan is not None and self.facts is not None and not self.facts.plain_output
        return vllm_compat.plain(layer, "W_UV") if fused else None


_without_plugin: WeakKeyDictionary[Any, LayerState] = WeakKeyDictionary()


def of(layer: Any) -> LayerState:
    """The state of a layer. Without the plugin the layers of a forward pass share an empty one."""
    found: LayerState | None = getattr(layer, ATTRIBUTE, None) or _without_plugin.get(layer)
    if found is None:
        layers = vllm_compat.mla_layers(vllm_compat.forward_context().no_compile_layers).values()
        shared = (_without_plugin[each] for each in layers if each in _without_plugin)
        found = _without_plugin[layer] = next(shared, None) or LayerState()
    return found


def make(engine: Engine) -> dict[str, LayerState]:
    """The state of every MLA layer, with the plan of its shape where `decode_choice` leaves it to a
    planner. The log names each plan: how many layers share it, and for what it is."""
    states, plans = {}, dict[tuple[Any, ...], StepPlan]()
    alike = defaultdict[StepPlan | None, dict[Any, Any]](dict)
    options = engine.options
    for name, layer in engine.layers.items():
        facts = eligibility.facts(
            layer, options.provider, engine.activation, options.attention, engine.rows,
            engine.planner, options.layers,
        )  # fmt: skip
        choice, plan = choose(layer, engine, facts), None
        if choice.planner:
            settings = _settings(layer, engine, choice, facts)
            width = layer.kv_lora_rank + layer.qk_rope_head_dim
            key = *settings.items(), choice.runs, choice.slower_from, width, facts.activation
            if key not in plans:
                allocated = attention.PersistentDecodePlan.allocate(**settings)
                plans[key] = StepPlan(allocated, facts.activation, choice)
            plan = plans[key]
        decided = replace(facts, planner=choice.planner)
        if choice.chunks:
            decided = replace(decided, no_product="vLLM's product with W_UV, in every step")
        states[name] = LayerState(decided, choice, plan, engine.tables, Kept(alike[plan]))
    if vllm_compat.is_first_rank():
        shared = Counter(state.plan for state in states.values() if state.plan)
        for plan, count in shared.items():
            logger.info("attention=%s: %s", options.attention, plan.describe(count))
    return states


def _settings(
    layer: Any, engine: Engine, choice: Choice, facts: eligibility.LayerFacts
) -> dict[str, Any]:
    """The arguments of `PersistentDecodePlan.allocate` for a layer that a planner decodes."""
    device, width = layer._k_scale.device, layer.kv_lora_rank + layer.qk_rope_head_dim
    settings = {
        "num_heads": layer.num_heads, "max_query_len": engine.rows, "q_dtype": facts.query,
        "kv_dtype": facts.cache, "v_head_dim": layer.kv_lora_rank, "device": device,
        "max_batch": choice.runs[-1][1], "planner": choice.planner,
    }  # fmt: skip
    if choice.planner != "aiter":
        executor = attention.get_provider(attention.portable_provider(device))
        of = engine.rows, facts.cache, width, device
        if choice.chunks:
            longest = engine.context + engine.rows
            settings |= {"batch_invariant": True, "chunks": choice.chunks, "max_kv_len": longest}
        return settings | executor.plan_settings(layer.num_heads, *of)
    settings["max_split_per_batch"] = engine.options.max_split_per_batch
    if "AITER" not in layer.attn_backend.get_name():  # those list the pages
        settings["max_kv_len"] = engine.context
    return settings


def epilogues(states: Iterable[LayerState]) -> str:
    """For the report: what the decodes with a plan do beyond the attention, or why not, each once;
    empty without plans."""
    reasons = dict.fromkeys(s.facts.plain_output for s in states if s.plan and s.facts)
    return "; ".join(f"none: {why}" if why else "W_UV" for why in reasons)
