"""Which decode steps of DeepSeek-V4's and V4.1's layers this library takes, and by which plans.

vLLM's class gives decode tokens, each draft a row of its own, to `_forward_decode`: over a window
of the last tokens, and in most layers over entries that stand for several tokens each, all of them
or those that an indexer chose. A model has up to three kinds of layer. In a step all layers of a
kind read as many entries, so each kind has a scratch. `plugin.deepseek_v4` replaces vLLM's class.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from mla_fusion import config
from mla_fusion.attention.plan.inputs import Scope
from mla_fusion.attention.plan.layouts import FP8_DS_MLA_V4, WIDE
from mla_fusion.attention.sparse import TILE, sparse_mla_decode
from mla_fusion.config import vllm_compat
from mla_fusion.report.reasons import Decline
from mla_fusion.runtime import sparse_step

LATENT = FP8_DS_MLA_V4.latent
WINDOW_ONLY, LISTED = "swaonly", "c128a"  # LISTED: vLLM's metadata has the slots of all entries
# Most query heads of a rank, and most tokens of a step, that this library decodes in layers of any
# kind; FlashMLA pads heads to 64. Measured on an H200 in vLLM's class of V4: 1.08 to 1.91 times as
# fast. With 128 tokens the kernel alone was 0.80 to 1.04 times as fast. V4.1 goes by V4.
MOST_HEADS, MOST_TOKENS = 16, 64


class Step(sparse_step.Shared):
    """What layers of one kind share: in a forward pass they have the same lengths, although vLLM's
    metadata of each group of caches has its own."""

    def __init__(
        self, most: int, heads: int, kind: str, widths: tuple[int, ...], device: torch.device
    ) -> None:
        super().__init__(most, heads, widths, FP8_DS_MLA_V4, torch.float8_e4m3fn, device)
        self.kind = kind

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
        if self.kind != WINDOW_ONLY:
            slots, counts = self._compressed(layer, tokens, window, entries)
            scopes.append(Scope(cache, slots, self.layout))
            lengths.append(counts)
        if self.begins(tokens):
            self.scratch.refresh(tokens, lengths)
        sparse_mla_decode(
            q[:, :heads], scopes, self.scratch, softmax_scale=layer.scale,
            sink=layer.attn_sink[:heads], out=output[:, :heads],
        )  # fmt: skip

    def _compressed(
        self, layer: Any, tokens: int, window: Any, entries: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots [T, n] of compressed entries, and how many of each row count."""
        if self.kind == LISTED:
            listed = entries.c128a_global_decode_topk_indices.squeeze(1)
            return listed, entries.c128a_decode_topk_lens
        slots, counts = layer.mla_fusion_slots(
            layer.topk_indices_buffer[:tokens], window.token_to_req_indices,
            entries.block_table[: window.num_decodes],
            entries.block_size // layer.compress_ratio, window.is_valid_token[:tokens],
        )  # fmt: skip
        return slots, counts


@functools.cache
def decoded_here(base: Any, kinds: tuple[tuple[int, str], ...], slots: Callable[..., Any]) -> Any:
    """vLLM's class of attention layers with this library's decode of small steps; until layers are
    loaded, and where their step is None, vLLM decodes.

    kinds: of layers, by compression. slots: vLLM's kernel that makes slots of an indexer's choice.
    """

    class Layer(base):
        mla_fusion_step: Step | None = None
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
    """The arguments of `Step` for a layer that this library decodes."""
    kind, heads = layer.mla_fusion_kinds[layer.compress_ratio], layer.n_local_heads
    window = layer.window_size
    if kind == WINDOW_ONLY:
        # Drafts that see each other (DSpark) count beside the window; vLLM rounds that up.
        widths: tuple[int, ...] = (_up(window + config.query_rows(vllm_config) - 1, TILE),)
    elif kind == LISTED:
        longest = -(-vllm_config.model_config.max_model_len // layer.compress_ratio)
        widths = window, _up(longest, 2 * TILE)
    else:
        widths = window, layer.topk_indices_buffer.shape[1]
    return MOST_TOKENS, heads, kind, widths, layer.attn_sink.device


def why_not(layer: Any, vllm_config: Any) -> Decline | None:
    """Why no decode of a layer is this library's."""
    if not vllm_compat.is_hopper():
        return Decline("sparse-platform")
    if decline := sparse_step.unavailable():
        return decline
    size = getattr(layer, "swa_bytes_per_token", FP8_DS_MLA_V4.bytes)  # V4.1 has another on sm_100
    widths = layer.head_dim, layer.rope_head_dim
    found = {
        "heads of {}, {} of them rotated".format(*widths): widths != (LATENT, WIDE),
        f"kv_cache_dtype {layer.kv_cache_dtype}": layer.kv_cache_dtype != "fp8_ds_mla",
        f"entries of {size} bytes": size != FP8_DS_MLA_V4.bytes,
        **sparse_step.unserved(vllm_config),
    }
    if named := [what for what, holds in found.items() if holds]:
        return Decline("sparse-layer", ", ".join(named))
    if layer.n_local_heads > MOST_HEADS:
        return Decline("sparse-slower", f"{layer.n_local_heads} heads of a rank")
    return None


def _up(number: int, multiple: int) -> int:
    """The least multiple that is not below a number."""
    return -(-number // multiple) * multiple
