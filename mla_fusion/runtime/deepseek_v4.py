"""The decode steps of DeepSeek-V4's and V4.1's layers that this library takes, and their plans.

vLLM's class gives decode tokens, each draft a row of its own, to `_forward_decode`: over a window
of the last tokens, and in most layers over entries that stand for several tokens each, all of them
or those that an indexer chose. A model has up to three kinds of layer. In a step all layers of a
kind read as many entries, so each kind has a scratch. `plugin.sparse` replaces vLLM's class.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from mla_fusion import config, gpu
from mla_fusion.attention.plan.inputs import Scope
from mla_fusion.attention.plan.layouts import FP8_DS_MLA_V4, WIDE
from mla_fusion.attention.sparse import TILE, sparse_mla_decode
from mla_fusion.config import vllm_compat
from mla_fusion.report.reasons import Decline
from mla_fusion.runtime import sparse_step

WINDOW_ONLY, LISTED = "swaonly", "c128a"  # LISTED: vLLM's metadata has the slots of all entries
# Kinds with rows of their own in `sparse_step.FOLDER`. LISTED: pages of two entries.
ROWS = {WINDOW_ONLY: "_window", LISTED: "_128"}


class Step(sparse_step.Shared):
    """The state that layers of one kind share: in a forward pass they have the same lengths,
    although vLLM's metadata of each group of caches has its own."""

    def decode(
        self, layer: Any, q: torch.Tensor, cache: Any, window: Any, entries: Any, output: Any
    ) -> None:
        """Write the attention of a step into the real heads of `output` [T, padded heads, 512].

        cache: of the compressed entries; None where there are none. window, entries: vLLM's
        metadata of the window and of the compressed entries.
        """
        tokens, heads = q.shape[0], self.heads
        slots = window.decode_swa_indices.squeeze(1)
        scopes = [Scope(layer.swa_cache_layer.kv_cache, slots, self.layout)]
        lengths = [window.decode_swa_lens]
        if self.kind == LISTED:
            slots = entries.c128a_global_decode_topk_indices.squeeze(1)
            counts = entries.c128a_decode_topk_lens
        elif self.kind != WINDOW_ONLY:
            slots, counts = layer.mla_fusion_slots(
                layer.topk_indices_buffer[:tokens], window.token_to_req_indices,
                entries.block_table[: window.num_decodes],
                entries.block_size // layer.compress_ratio, window.is_valid_token[:tokens],
            )  # fmt: skip
        if self.kind != WINDOW_ONLY:
            scopes.append(Scope(cache, slots, self.layout))
            lengths.append(counts)
        if self.begins(tokens):
            self.scratch.refresh(tokens, lengths)
        sparse_mla_decode(
            q[:, :heads], scopes, self.scratch, softmax_scale=layer.scale,
            sink=layer.attn_sink[:heads], out=output[:, :heads],
        )  # fmt: skip


@functools.cache
def decoded_here(base: Any, kinds: tuple[tuple[int, str], ...], slots: Callable[..., Any]) -> Any:
    """vLLM's class of attention layers with this library's decode of small steps; until layers are
    loaded, and where their step is None, vLLM decodes.

    kinds: of layers, by compression. slots: vLLM's kernel that makes slots of an indexer's choice.
    """

    class Layer(base):
        mla_fusion_step: Step | None = None
        mla_fusion_shape, mla_fusion_why_not = shape, why_not
        mla_fusion_kinds: ClassVar[dict[int, str]] = dict(kinds)
        mla_fusion_slots = staticmethod(slots)

        def _forward_decode(
            self, q: Any, kv_cache: Any, swa_metadata: Any, attn_metadata: Any, swa_only: bool,
            output: Any,
        ) -> None:  # fmt: skip
            step = self.mla_fusion_step
            if step is None or not 0 < q.shape[0] <= step.most:
                super()._forward_decode(q, kv_cache, swa_metadata, attn_metadata, swa_only, output)
            else:
                step.decode(self, q, kv_cache, swa_metadata, attn_metadata, output)

    Layer.__name__, Layer.__qualname__ = base.__name__, base.__qualname__
    return Layer


def shape(layer: Any, vllm_config: Any) -> tuple[Any, ...]:
    """As `sparse_step.shape`."""
    kind, window = layer.mla_fusion_kinds[layer.compress_ratio], layer.window_size
    if kind == WINDOW_ONLY:
        # Drafts that see each other (DSpark) count beside the window; vLLM rounds that up.
        seen = window + config.query_rows(vllm_config) - 1
        widths: tuple[int, ...] = (TILE * -(-seen // TILE),)
    elif kind == LISTED:
        longest = -(-vllm_config.model_config.max_model_len // layer.compress_ratio)
        widths = window, 2 * TILE * -(-longest // (2 * TILE))
    else:
        widths = window, layer.topk_indices_buffer.shape[1]
    stored = FP8_DS_MLA_V4, torch.float8_e4m3fn, layer.attn_sink.device
    return Step, _most_tokens(layer), layer.n_local_heads, widths, *stored, kind


def _most_tokens(layer: Any) -> int:
    """As `sparse_step.most_tokens`; V4.1 goes by V4."""
    kind = layer.mla_fusion_kinds[layer.compress_ratio]
    return sparse_step.most_tokens(layer.n_local_heads, "fp8_ds_mla_v4" + ROWS.get(kind, ""))


def why_not(layer: Any, vllm_config: Any) -> Decline | None:
    """Why no decode of a layer is this library's."""
    if vllm_compat.gpu_arch() not in gpu.HOPPER:
        return Decline("sparse-platform")
    size = getattr(layer, "swa_bytes_per_token", FP8_DS_MLA_V4.bytes)  # V4.1 has another on sm_100
    widths, cache = (layer.head_dim, layer.rope_head_dim), layer.kv_cache_dtype
    found = {
        "heads of {}, {} of them rotated".format(*widths): widths != (FP8_DS_MLA_V4.latent, WIDE),
        f"kv_cache_dtype {cache}": cache != "fp8_ds_mla",
        f"entries of {size} bytes": size != FP8_DS_MLA_V4.bytes,
    }
    heads = layer.n_local_heads
    slower = "" if _most_tokens(layer) else f"{heads} heads of a rank"
    return sparse_step.declined(vllm_config, found, slower)
