"""A persistent decode inside vLLM: one plan for the layers of an engine that are shaped alike.

A layer that `decode_choice` leaves to a planner has a `StepPlan`, which `layer_state` allocates
before vLLM measures free memory. The first attention of a forward pass refreshes it from the
batch's metadata; the others read it.

In the CUDA graph of a whole decode step, which runs no Python at replay, the refresh is one or
several kernels. They read lengths and query positions at the addresses that vLLM keeps for all
steps, so every replay makes the plan again; the padded batch and the longest query are constants.
"""

import itertools
from collections.abc import Iterable
from typing import Any

import torch

from mla_fusion import attention, gpu
from mla_fusion.attention.plan.epilogue import GROUP, in_groups
from mla_fusion.config import vllm_compat
from mla_fusion.kernels.launches import Kept, places
from mla_fusion.runtime.decode_choice import Choice
from mla_fusion.runtime.output import QuantizedOutput


class StepPlan:
    """A plan for the steps of a choice, the step it was refreshed for, and the buffer for the
    latents of a decode, whose padding rows, of no sequence, stay zero: so do their products.
    """

    def __init__(
        self, plan: attention.PersistentDecodePlan, out_dtype: torch.dtype,
        choice: Choice,
    ) -> None:  # fmt: skip
        settings = plan.settings
        rows = settings.max_batch * settings.max_query_len
        shape = (rows, settings.num_heads, settings.v_head_dim)
        self.plan, self.choice, self.executor = plan, choice, plan.planner.PROVIDERS[0]
        self.out = torch.zeros(shape, dtype=out_dtype, device=plan.device)
        self._planned: tuple[Any, Any] = (None, None)

    def describe(self, layers: int) -> str:
        """A line of the log: the steps that it decodes, and the layers that share it."""
        plan, settings = self.plan, self.plan.settings
        cap, pages = settings.max_split_per_batch, ""
        if plan.aiter is not None and plan.aiter.entries is not None:
            pages = f", {plan.aiter.entries.nbytes / 2**20:.1f} of them for a list of pages"
        elif plan.aiter is not None:
            pages = "; pages as vLLM's backend lists them, which plans each step for itself too"
        splits = f"at most {cap} splits a sequence on average" if cap > 0 else "no cap on splits"
        if settings.batch_invariant:
            splits = "splits of {}, {} and {} tokens".format(*settings.chunks)
        size = sum(x.nbytes for x in plan.tensors().values()) / 2**20
        return (
            f"{layers} layers share a plan, {self.executor} decodes: up to {settings.max_batch} "
            f"sequences of up to {settings.max_query_len} query tokens, {settings.num_heads} heads "
            f"as {plan.layout.fold} x {plan.layout.per_work}, {plan.rules.ctas} CTAs, "
            f"{splits}, {size:.1f} MiB{pages}"
        )

    def serves(self, metadata: Any) -> bool:
        """Whether the plan decodes this decode-only batch. Queries may be too long for it: for some
        backends vLLM counts short prompts as decodes."""
        sequences, rows = metadata.decode.seq_lens.shape[0], int(metadata.max_query_len)
        slower = rows == 1 and 0 < self.choice.slower_from <= sequences
        chosen = not slower and any(a <= sequences <= b for a, b in self.choice.runs)
        return chosen and rows <= self.plan.settings.max_query_len

    def decode(
        self, q: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, layer: Any, kept: Kept,
        weight: torch.Tensor | None, output: torch.Tensor,
        quantized: QuantizedOutput | None = None,
    ) -> None:  # fmt: skip
        """Write what follows from the prepared query [T, H, L + R] of a decode-only batch into
        `output` [T, H * V], or into `quantized`: its attention, times W_UV. The decode multiplies
        with `weight` [H, L, V] itself; None leaves the product to the layer."""
        rows, plan, table = metadata.num_actual_tokens, self.plan, metadata.decode.block_table
        self._refresh(metadata, rows, int(metadata.max_query_len))
        if plan.aiter is not None:
            # Of vLLM's backend for AITER, whose graphs find it at one address.
            plan.aiter.listed = getattr(metadata.decode, "paged_kv_indices", None)
        values, scale = (quantized.values, quantized.scale) if quantized else (None, None)
        used = q, kv_cache, table, layer._q_scale, layer._k_scale, weight, output, values, scale
        key, at = (rows, plan.fresh, layer.impl.scale, layer.kv_cache_dtype), places(*used)
        if quantized is not None and weight is not None:
            quantized.clear_padding(rows)
        if kept.repeat(key, at):
            plan.fresh = False
        else:
            made: list[Any] = []
            cache = cache_view(layer, kv_cache)
            self._attend(q[:rows], cache, layer, weight, table, output, quantized, made)
            kept.keep(key, at, made)
        if weight is None:
            layer._v_up_proj(self.out[:rows], out=output[:rows])
            if quantized is not None:
                quantized.quantize(output)

    def _refresh(self, metadata: Any, tokens: int, max_query_len: int) -> None:
        """Plan the decode rows of a forward pass, the first `tokens`, unless a layer has."""
        # A new context for each forward pass: drafts change the lengths in one metadata object.
        context = vllm_compat.forward_context()
        if self._planned[0] is context and self._planned[1] is metadata:
            return
        if not getattr(metadata, "causal", True):
            raise RuntimeError(
                "the batch is not causal, which the persistent decode cannot compute: set "
                '"attention": "vllm" in additional_config["mla_fusion"]'
            )
        seq_lens = metadata.decode.seq_lens
        self.plan.refresh(
            qo_indptr=metadata.query_start_loc[: seq_lens.shape[0] + 1], seq_lens=seq_lens,
            num_tokens=tokens, max_query_len=max_query_len,
        )  # fmt: skip
        self.out[:tokens].zero_()
        self._planned = context, metadata

    def forward_mqa(
        self, q: torch.Tensor | tuple[torch.Tensor, ...], kv_cache: torch.Tensor, metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """In place of that of a layer's backend: attend with the decode rows of any step.

        Args:
            q: [T, H, L + R], or its parts [T, H, L] and [T, H, R].

        Returns:
            The latents [T, H, L], valid until the next layer, and None for the log-sum-exp."""
        query = q if isinstance(q, torch.Tensor) else torch.cat(q, dim=-1)
        most = self.plan.settings.max_query_len
        if metadata.num_prefills == 0 and metadata.max_query_len > most:
            raise RuntimeError(f"a decode of {metadata.max_query_len} tokens, planned are {most}")
        # One bound for all steps, whatever drafts stand beside a row.
        self._refresh(metadata, query.shape[0], most)
        cache = kv_cache.squeeze(1) if kv_cache.dim() == 4 else kv_cache
        return self._decode(query, cache, layer, metadata.decode.block_table), None

    def _decode(
        self, q: torch.Tensor, kv_cache: torch.Tensor, layer: Any, block_table: torch.Tensor,
        epilogue: attention.Epilogue | None = None, kept: list[Any] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        out = self.out[: q.shape[0]]
        attention.persistent_mla_decode(
            q, kv_cache, self.plan, block_table=block_table, softmax_scale=layer.impl.scale,
            q_scale=layer._q_scale.view(1), kv_scale=layer._k_scale.view(1), out=out,
            epilogue=epilogue, kept=kept,
        )  # fmt: skip
        return out

    def _attend(
        self, q: torch.Tensor, kv_cache: torch.Tensor, layer: Any, weight: torch.Tensor | None,
        block_table: torch.Tensor, output: torch.Tensor, quantized: QuantizedOutput | None,
        kept: list[Any] | None = None,
    ) -> None:  # fmt: skip
        rows, epilogue = q.shape[0], None
        if weight is not None and quantized is not None:
            epilogue = quantized.epilogue(weight, rows)
        elif weight is not None:
            epilogue = attention.Epilogue(weight, output[:rows])
        self._decode(q, kv_cache, layer, block_table, epilogue, kept)

    def warm_up(
        self, kv_cache: torch.Tensor, layer: Any, weight: torch.Tensor | None,
        quantizations: Iterable[str] = (),
    ) -> None:  # fmt: skip
        """Run it on the first block, for queries of every length, until every kernel that a step
        can launch is compiled or loaded; with the outputs of `quantizations` too."""
        settings, device, kinds, values = self.plan.settings, self.plan.device, {"none"}, None
        if weight is not None:
            kinds, values = {"none", *quantizations}, layer.v_head_dim
        columns = settings.num_heads * layer.v_head_dim
        if columns % GROUP:
            kinds = set(itertools.filterfalse(in_groups, kinds))  # some other layer's
        executor = attention.get_provider(self.executor)
        fp8 = gpu.of(device).fp8 or torch.float8_e4m3fn
        lengths = range(1, settings.max_query_len + 1)
        for length, kind in itertools.product(lengths, sorted(kinds)):
            for batch in executor.warm_up_batches(self.plan, values):
                tokens = batch * length
                # Two tensors: part of one would be less aligned than those of a request.
                qo_indptr = length * torch.arange(batch + 1, dtype=torch.int32, device=device)
                seq_lens = torch.full((batch,), length, dtype=torch.int32, device=device)
                shape = (tokens, settings.num_heads, kv_cache.shape[-1])
                q = torch.zeros(shape, dtype=settings.q_dtype, device=device)
                self.plan.refresh(
                    qo_indptr=qo_indptr, seq_lens=seq_lens, num_tokens=tokens, max_query_len=length
                )
                # A block may hold a single token.
                table = torch.zeros((batch, length), dtype=torch.int32, device=device)
                output = self.out.new_empty((tokens, columns))
                quantized = QuantizedOutput.for_warm_up(output, kind, fp8)
                self._attend(q, kv_cache, layer, weight, table, output, quantized)
        self._planned = (None, None)


def typed_cache(layer: Any, kv_cache: torch.Tensor) -> torch.Tensor:
    """vLLM keeps an fp8 cache as bytes; kernels want the platform's fp8 type."""
    fp8 = layer.kv_cache_dtype.startswith("fp8")
    return kv_cache.view(vllm_compat.fp8_dtype()) if fp8 else kv_cache


def cache_view(layer: Any, kv_cache: torch.Tensor) -> torch.Tensor:
    """The cache as [blocks, block_size, L + R]; some releases keep a head dimension of one."""
    cache = typed_cache(layer, kv_cache)
    return cache.squeeze(1) if cache.dim() == 4 else cache
