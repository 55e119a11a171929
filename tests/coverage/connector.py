"""A KV connector with a store of its own, which a test can read.

Every cache entry of every layer is saved in the step that computes it, decode steps too. A stored
prompt is loaded up to its last token, so that its first step is a decode step of that token, in a
fused graph, as on the decode side of disaggregated serving. The entries are loaded layer by layer,
when the attention waits for them. Until then they are NaN, which shows a layer that did not wait.
"""

import hashlib
from dataclasses import dataclass, field

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.forward_context import get_forward_context

Prompt = tuple[int, ...]


@dataclass
class Store:
    """(layer, prompt, position) -> the entry; and how many were put in and taken out."""

    entries: dict[tuple[str, Prompt, int], torch.Tensor] = field(default_factory=dict)
    saved: int = 0
    loaded: int = 0

    def has(self, prompt):
        """Whether the last token of the prompt was saved in some layer, and so all before it."""
        return any(key[1:] == (prompt, len(prompt) - 1) for key in self.entries)

    def summary(self):
        """Counts, and one digest of all that is stored."""
        digest = hashlib.sha256()
        for key in sorted(self.entries):
            digest.update(repr(key).encode())
            digest.update(self.entries[key].view(torch.uint8).numpy().tobytes())
        return {"saved": self.saved, "loaded": self.loaded, "digest": digest.hexdigest()[:16]}


store = Store()  # of this process, in which scheduler and worker both run


@dataclass
class Part:
    """Positions of a request, and the slots of the cache where they lie."""

    prompt: Prompt
    positions: range
    slots: list[int]


@dataclass
class Plan(KVConnectorMetadata):
    """The loads and saves of a step."""

    load: list[Part] = field(default_factory=list)
    save: list[Part] = field(default_factory=list)


class Connector(KVConnectorBase_V1):
    """`kv_connector` of the engine."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._block_size = vllm_config.cache_config.block_size
        self._prompts: dict[str, Prompt] = {}
        self._blocks: dict[str, list[int]] = {}

    # In the scheduler.

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        """All but the last token of a prompt that is stored; in the step that asks for it."""
        prompt = tuple(request.prompt_token_ids)
        return (len(prompt) - 1 - num_computed_tokens if store.has(prompt) else 0), False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        """What is loaded follows from the tokens that count as computed."""

    def build_connector_meta(self, scheduler_output):
        """The plan of a step."""
        plan, computed = Plan(), {}
        for new in scheduler_output.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            self._prompts[new.req_id] = tuple(new.prompt_token_ids)
            self._blocks[new.req_id] = list(new.block_ids[0])
            if new.num_computed_tokens:
                plan.load.append(self._part(new.req_id, 0, new.num_computed_tokens))
        cached = scheduler_output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            computed[name] = cached.num_computed_tokens[index]
            self._blocks[name] += (cached.new_block_ids[index] or ([],))[0]
        for name, count in scheduler_output.num_scheduled_tokens.items():
            plan.save.append(self._part(name, computed[name], computed[name] + count))
        return plan

    def _part(self, name, start, end):
        size, positions = self._block_size, range(start, end)
        slots = [self._blocks[name][p // size] * size + p % size for p in positions]
        return Part(self._prompts[name], positions, slots)

    # In the worker.

    def start_load_kv(self, forward_context, **kwargs):
        """What is to be loaded is not there yet. vLLM calls it after steps that load nothing."""
        for layer in forward_context.no_compile_layers.values():
            if hasattr(layer, "kv_cache"):
                for part in self._plan().load:
                    _entries(layer.kv_cache)[part.slots] = torch.nan

    def wait_for_layer_load(self, layer_name):
        """Load a layer."""
        cache = _entries(get_forward_context().no_compile_layers[layer_name].kv_cache)
        for part in self._plan().load:
            for position, slot in zip(part.positions, part.slots, strict=True):
                cache[slot] = store.entries[layer_name, part.prompt, position]
                store.loaded += 1

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        """Save a layer."""
        for part in self._plan().save:
            for position, slot in zip(part.positions, part.slots, strict=True):
                entry = _entries(kv_layer)[slot].clone()
                store.entries[layer_name, part.prompt, position] = entry
                store.saved += 1

    def wait_for_save(self):
        """Nothing is pending."""

    def _plan(self):
        plan = self._get_connector_metadata()
        assert isinstance(plan, Plan)
        return plan


def _entries(cache):
    """An MLA layer's cache, one row for each slot."""
    return cache.view(-1, cache.shape[-1])
