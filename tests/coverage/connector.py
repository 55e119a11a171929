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


@dataclass
class Store:
    """(layer, prompt, position) -> the entry; and how many were put in and taken out."""

    entries: dict = field(default_factory=dict)
    saved: int = 0
    loaded: int = 0

    def summary(self):
        """Counts, and one digest of all that is stored."""
        digest = hashlib.sha256()
        for key in sorted(self.entries):
            digest.update(repr(key).encode())
            digest.update(self.entries[key].view(torch.uint8).numpy().tobytes())
        return {"saved": self.saved, "loaded": self.loaded, "digest": digest.hexdigest()[:16]}


store = Store()  # of this process, in which scheduler and worker both run


@dataclass
class Plan(KVConnectorMetadata):
    """What a step loads and saves: (prompt, position, slot of the cache) each."""

    load: list = field(default_factory=list)
    save: list = field(default_factory=list)


class Connector(KVConnectorBase_V1):
    """`kv_connector` of the engine."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._block_size = vllm_config.cache_config.block_size
        self._prompts, self._blocks = {}, {}

    # In the scheduler.

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        """All but the last token of a prompt that is stored; in the step that asks for it."""
        prompt, last = tuple(request.prompt_token_ids), len(request.prompt_token_ids) - 1
        known = any(key[1:] == (prompt, last) for key in store.entries)
        return (last - num_computed_tokens if known else 0), False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        """What is loaded follows from the tokens that count as computed."""

    def build_connector_meta(self, scheduler_output):
        """The plan of a step."""
        plan, computed = Plan(), {}
        for new in scheduler_output.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            self._prompts[new.req_id] = tuple(new.prompt_token_ids)
            self._blocks[new.req_id] = list(new.block_ids[0])
            plan.load += self._entries(new.req_id, 0, new.num_computed_tokens)
        cached = scheduler_output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            computed[name] = cached.num_computed_tokens[index]
            self._blocks[name] += (cached.new_block_ids[index] or ([],))[0]
        for name, count in scheduler_output.num_scheduled_tokens.items():
            plan.save += self._entries(name, computed[name], computed[name] + count)
        return plan

    def _entries(self, name, start, end):
        size, blocks = self._block_size, self._blocks[name]
        return [(self._prompts[name], p, blocks[p // size] * size + p % size)
                for p in range(start, end)]  # fmt: skip

    # In the worker.

    def start_load_kv(self, forward_context, **kwargs):
        """What is to be loaded is not there yet. vLLM calls it after steps that load nothing."""
        for layer in forward_context.no_compile_layers.values():
            if hasattr(layer, "kv_cache"):
                for _, _, slot in self._get_connector_metadata().load:
                    rows(layer.kv_cache)[slot] = torch.nan

    def wait_for_layer_load(self, layer_name):
        """Load a layer."""
        cache = rows(get_forward_context().no_compile_layers[layer_name].kv_cache)
        for prompt, position, slot in self._get_connector_metadata().load:
            cache[slot] = store.entries[layer_name, prompt, position]
            store.loaded += 1

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        """Save a layer."""
        for prompt, position, slot in self._get_connector_metadata().save:
            store.entries[layer_name, prompt, position] = rows(kv_layer)[slot].clone()
            store.saved += 1

    def wait_for_save(self):
        """Nothing is pending."""


def rows(cache):
    """An MLA layer's cache, one row for each slot."""
    return cache.view(-1, cache.shape[-1])
