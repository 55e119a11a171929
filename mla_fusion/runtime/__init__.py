"""The bodies of the custom ops: what they do in a step.

A compile range counts tokens, so a decode graph also meets mixed batches, short prompts and the
profile run. `_is_fused` decides for all ops of a step: else one reads what none wrote.

    decode-only    the provider prepares the query and writes the cache; the attention op hands
                   the prepared query to the backend's decode, or to the persistent one if it was
                   chosen, and projects the result up; it quantizes it if the graph did
    anything else  q and k_pe are rotated in place and vLLM's own op writes the cache; the
                   attention op calls the layer as vLLM does, then vLLM's quantization
"""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from mla_fusion import kernels, ops
from mla_fusion.config import vllm_compat
from mla_fusion.kernels import arithmetic
from mla_fusion.kernels.inputs import Inputs, padded_batch
from mla_fusion.kernels.launches import places
from mla_fusion.ops import Quantization, Rope, Variant
from mla_fusion.runtime import layer_state, projection, tables
from mla_fusion.runtime.output import QuantizedOutput
from mla_fusion.runtime.step_plan import StepPlan, cache_view, typed_cache


def is_decode_only(metadata: Any) -> bool:
    """Whether every token of the batch is a decode token; False in the profile run (None)."""
    return metadata is not None and metadata.num_actual_tokens == metadata.num_decode_tokens > 0


def _is_fused(metadata: Any, slot_mapping: torch.Tensor | None) -> bool:
    return slot_mapping is not None and is_decode_only(metadata)


def fused_decode_prep(
    q: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, prepared_q: torch.Tensor,
    positions: torch.Tensor | None, cos_sin_cache: torch.Tensor | None,
    q_factor: torch.Tensor | None, k_scale: torch.Tensor, layer_name: Any, kv_cache_dtype: str,
    rope: str, is_neox: bool, provider: str, kv_norm_weight: torch.Tensor | None = None,
    kv_norm_epsilon: float = 0.0,
) -> None:  # fmt: skip
    """Prepare the decode query into `prepared_q` [T, H, L + R], with zeros in padding rows, or
    rotate q and k_pe in place and scale q. Either way the KV cache is written, with kv_c normalized
    if there is a weight.

    k_pe is [T, 1, R]; other shapes as in `mla_fusion.kernels.fused_mla_decode_prep`.
    """
    metadata, layer, kv_cache, slot_mapping = vllm_compat.attention_context(layer_name)
    if not _is_fused(metadata, slot_mapping):
        kv_c = _normalized(kv_c, kv_norm_weight, kv_norm_epsilon)
        rope_and_cache_update(
            q, kv_c, k_pe, positions, cos_sin_cache, q_factor, k_scale, layer_name, kv_cache_dtype,
            rope, is_neox,
        )  # fmt: skip
        return
    assert slot_mapping is not None
    # vLLM may pass fewer slots than padded rows; such rows are padding too.
    rows = slot_mapping.shape[0]
    if rows > q.shape[0]:
        raise ValueError(
            f"{layer.layer_name} has {q.shape[0]} query rows for {rows} slots: tokens of the batch "
            "have no query. That is a fault of vLLM's batch; run it without "
            "pass_config.fuse_aiter_qk_rope_kvcache_mla, and report it"
        )
    if rows < prepared_q.shape[0]:
        prepared_q[rows:].zero_()
    state = layer_state.of(layer)
    if cos_sin_cache is not None:
        cos_sin_cache = tables.in_type(state.tables, cos_sin_cache, rope, q.dtype)
    key = is_neox, kv_norm_epsilon, kv_cache_dtype
    at = places(
        q, kv_c, k_pe, prepared_q, positions, cos_sin_cache, q_factor, slot_mapping, kv_cache,
        k_scale, layer._q_scale, vllm_compat.plain(layer, "W_UK_T"), kv_norm_weight,
    )  # fmt: skip
    try:
        if state.kept.repeat(key, at):
            return
        made: list[Any] = []
        inputs = Inputs(
            q[:rows], _absorb_weight(layer), kv_c[:rows], k_pe[:rows].squeeze(1),
            cache_view(layer, kv_cache), slot_mapping,
            slot_mapping if positions is None else positions[:rows], cos_sin_cache, k_scale,
            layer._q_scale, is_neox, prepared_q[:rows],
            None if q_factor is None else q_factor[:rows],
            vllm_compat.context_parallel_ranks(layer) > 1, state.tables, kv_norm_weight,
            kv_norm_epsilon, kept=made,
        )  # fmt: skip
        kernels.get_provider(provider).fused_mla_decode_prep(inputs)
        state.kept.keep(key, at, made)
    except Exception as error:
        _explain(error, provider, f"in a decode step of {rows} rows, in layer {layer.layer_name}")
        raise


def _normalized(
    kv_c: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> torch.Tensor:  # fmt: skip
    """The latents as vLLM's code takes them, of a layer whose fused op has their norm."""
    return kv_c if weight is None else projection.normalize([kv_c], [], [weight], [epsilon])[0]


def _explain(error: Exception, provider: str, when: str) -> None:
    """Note on a provider's error that the engine cannot go on, and what to do."""
    memory = " It needs memory beside vLLM's: lower gpu_memory_utilization."
    error.add_note(
        f"mla_fusion: the {provider} provider failed {when}. The compiled graphs call it, so the "
        "engine cannot go on without it, and nothing falls back silently."
        f"{memory if isinstance(error, torch.OutOfMemoryError) else ''} Or start with another "
        'provider (additional_config={"mla_fusion": {"provider": ...}}), or without '
        "pass_config.fuse_aiter_qk_rope_kvcache_mla."
    )


def rope_and_cache_update(
    q: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, positions: torch.Tensor | None,
    cos_sin_cache: torch.Tensor | None, q_factor: torch.Tensor | None, k_scale: torch.Tensor,
    layer_name: Any, kv_cache_dtype: str, rope: str, is_neox: bool,
) -> torch.Tensor:  # fmt: skip
    """Rotate q [T, H, P + R] and k_pe [T, 1, R] in place, multiply all of q by `q_factor` [T] if
    there is one, and write the cache, as vLLM does.

    Returns an empty tensor: readers of the cache take it, so that they run after the write.

    An in-place spelling calls the op of the unfused graph, so the result is the same to the bit. A
    native rotation is computed in fp32 and rounded once, as Inductor's C++ does; its Triton code
    may contract to FMA and round a tie otherwise.
    """
    q_pe = q[..., q.shape[-1] - k_pe.shape[-1] :]
    if rope == Rope.CAT_FUSED:
        torch.ops.vllm.fused_rope_unified_mla_kv_cache_update(
            positions, q_pe, k_pe.squeeze(1), kv_c, cos_sin_cache, is_neox, kv_cache_dtype,
            k_scale, layer_name,
        )  # fmt: skip
    elif rope in (Rope.NATIVE, Rope.NATIVE_FP32):
        assert positions is not None and cos_sin_cache is not None
        layer = vllm_compat.attention_context(layer_name)[1]
        table = tables.in_type(layer_state.of(layer).tables, cos_sin_cache, rope, q.dtype)
        q_pe.copy_(arithmetic.rotate(q_pe, positions, table, is_neox))
        k_pe.copy_(arithmetic.rotate(k_pe, positions, table, is_neox))
    elif rope != Rope.NONE:
        namespace, name = rope.split(".")
        op = getattr(getattr(torch.ops, namespace), name)
        op(positions, q_pe, k_pe, k_pe.shape[-1], cos_sin_cache, is_neox)
    if q_factor is not None:
        arithmetic.scale(q, q_factor, out=q)
    if rope != Rope.CAT_FUSED:
        torch.ops.vllm.unified_mla_kv_cache_update(kv_c, k_pe, layer_name, kv_cache_dtype, k_scale)
    return kv_c.new_empty(0)


def decode_q_prep(
    q: torch.Tensor, layer_name: Any, kv_lora_rank: int, qk_rope_head_dim: int,
    query_dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Absorb, concatenate and quantize a rotated query, in plain torch: [T, H, L + R].

    The op exists so that each pass leaves a graph that runs; `fused_decode_prep` replaces it.
    """
    out = q.new_empty((*q.shape[:2], kv_lora_rank + qk_rope_head_dim), dtype=query_dtype)
    metadata, layer, _, slot_mapping = vllm_compat.attention_context(layer_name)
    if not _is_fused(metadata, slot_mapping):
        return out
    weight = vllm_compat.weights(layer).w_uk
    assert weight is not None, "the passes decline a layer without it"
    _, nope, latent = weight.shape
    absorbed = arithmetic.absorb(q[..., :nope], weight)
    out[..., :latent] = arithmetic.cast(absorbed, out.dtype, layer._q_scale)
    out[..., latent:] = arithmetic.cast(q[..., nope:], out.dtype, layer._q_scale)
    return out


@functools.cache
def attention() -> Callable[..., None]:
    """The body of the attention op inside the hooks of vLLM's own attention op."""
    return vllm_compat.with_attention_hooks(_attention)


def _quantizing_attention_op(*args: Any) -> None:
    quantized, scale, quantization = args[6:9]
    output = QuantizedOutput(quantized, scale, Quantization(quantization))
    attention()(*args[:6], output, *args[9:])


def _attention(
    q: torch.Tensor, prepared_q: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor,
    output: torch.Tensor, layer_name: Any, quantized: QuantizedOutput | None = None,
    kv_norm_weight: torch.Tensor | None = None, kv_norm_epsilon: float = 0.0,
) -> None:  # fmt: skip
    """Attend, into `output` [T, H * V] or `quantized`; then `output` is a workspace."""
    metadata, layer, kv_cache, slot_mapping = vllm_compat.attention_context(layer_name)
    if not _is_fused(metadata, slot_mapping):
        kv_c = _normalized(kv_c, kv_norm_weight, kv_norm_epsilon)
        layer.forward_impl(q, kv_c, k_pe, kv_cache, metadata, output=output)
        if quantized is not None:
            quantized.quantize(output)
        return
    state = layer_state.of(layer)
    if state.plan is not None and state.plan.serves(metadata):
        weight, kept = state.value_weight(layer), state.kept
        state.plan.decode(prepared_q, kv_cache, metadata, layer, kept, weight, output, quantized)
        return
    rows = metadata.num_actual_tokens
    query = prepared_q[:rows]
    shared = vllm_compat.context_parallel_ranks(layer) > 1
    if shared:
        query = vllm_compat.gather_query_heads(layer, query)
    attended, lse = layer.impl.forward_mqa(query, typed_cache(layer, kv_cache), metadata, layer)
    if shared:
        attended = vllm_compat.combine_context_parallel(layer, attended, lse, metadata)
    layer._v_up_proj(attended, out=output[:rows])
    if quantized is not None:
        quantized.quantize(output)


def register_ops() -> None:
    """Define the ops in this process, with the bodies of this module; see `ops.register`."""
    # The seventh argument only orders; vLLM's KV-transfer hook finds layer_name by its position.
    bodies: dict[str, Callable[..., Any]] = {
        ops.ROPE_UPDATE: rope_and_cache_update, ops.Q_PREP: decode_q_prep,
        ops.FUSED: fused_decode_prep,
        ops.ATTENTION: lambda *args: attention()(*args[:6], None, *args[7:]),
        ops.GROUP_ATTENTION: _quantizing_attention_op,
        ops.TENSOR_ATTENTION: _quantizing_attention_op, ops.PROJECTION: projection.project,
        ops.QKV_A: projection.qkv_a,
        ops.NORM: projection.normalize,
    }  # fmt: skip
    ops.register(vllm_compat.layer_name_type(), bodies)


def warm_up(
    layers: Mapping[str, Any], variants: Iterable[Variant], provider: str, max_tokens: int
) -> None:
    """Let the provider compile what batches of up to `max_tokens` tokens need, if it compiles: for
    each variant with one of the MLA `layers` of each shape, and negative slots, so that no cache
    changes."""
    module = kernels.get_provider(provider)
    if not hasattr(module, "warmup"):
        return
    for batch in batches(layers, variants, lambda layer: layer.kv_cache):
        try:
            module.warmup(batch, max_tokens, progress=_show)
        except Exception as error:
            _explain(error, provider, f"to prepare its kernels for up to {max_tokens} tokens")
            raise


def batches(
    layers: Mapping[str, Any], variants: Iterable[Variant],
    cache_of: Callable[[Any], torch.Tensor],
) -> Iterator[functools.partial[Inputs]]:  # fmt: skip
    """`padded_batch` for each variant and one of the MLA `layers` of each shape with a cache."""
    for variant in variants:
        own = variant.kv_cache_dtype, variant.rope_dim
        alike: dict[Any, Any] = {}  # one layer of each shape
        for layer in layers.values():
            if own == (layer.kv_cache_dtype, layer.qk_rope_head_dim) and cache_of(layer).numel():
                weight = _absorb_weight(layer)
                alike.setdefault((type(weight), tuple(weight.shape)), (layer, weight))
        for layer, weight in alike.values():
            table = None
            if variant.table_dtype:
                dtype = getattr(torch, variant.table_dtype)
                table = torch.zeros((1, variant.rope_dim), dtype=dtype, device=weight.device)
            yield functools.partial(
                padded_batch, w_uk_t=weight, kv_cache=cache_view(layer, cache_of(layer)),
                cos_sin_cache=table, k_scale=layer._k_scale, q_scale=layer._q_scale,
                rope_dim=variant.rope_dim, is_neox=variant.is_neox,
                q_dtype=getattr(torch, variant.query_dtype),
                factor_dtype=getattr(torch, variant.factor_dtype, None),
                context_parallel=vllm_compat.context_parallel_ranks(layer) > 1,
                kv_norm_epsilon=variant.kv_norm_epsilon,
            )  # fmt: skip


def _show(progress: str) -> None:
    """On the console, as vLLM shows its graph capture: the log has only results."""
    if vllm_compat.is_first_rank():
        print(progress, file=sys.stderr, flush=True)


def warm_up_attention(layers: Mapping[str, Any], quantizations: Iterable[str] = ()) -> None:
    """Run every plan of the MLA `layers` once, and once for each kind of W_UV and for each of
    `quantizations` behind it, so that its kernels are compiled or loaded."""
    cached = {name: layer for name, layer in layers.items() if layer.kv_cache.numel()}
    for plan, layer, weight in planned(cached):
        try:
            plan.warm_up(cache_view(layer, layer.kv_cache), layer, weight, quantizations)
        except Exception as error:
            error.add_note(
                f"mla_fusion: the persistent decode of {plan.executor} failed to prepare its "
                'kernels. Start with "attention": "vllm" in additional_config["mla_fusion"].'
            )
            raise


def planned(layers: Mapping[str, Any]) -> list[tuple[StepPlan, Any, torch.Tensor | None]]:
    """Every plan of the MLA `layers` with one of its layers, and W_UV if the decode reads it, for
    each kind of that."""
    found: dict[tuple[StepPlan, Any], tuple[Any, torch.Tensor | None]] = {}
    for layer in layers.values():
        state = layer_state.of(layer)
        if state.plan is not None:
            # Besides the plan, kernels depend on the width and strides of W_UV, if they read it.
            weight = state.value_weight(layer)
            key = weight is not None and (weight.shape[2], *weight.stride())
            found[state.plan, key] = layer, weight
    return [(plan, *of) for (plan, _), of in found.items()]


def _absorb_weight(layer: Any) -> Any:
    """W_UK as vLLM's own product takes it from this layer."""
    found = vllm_compat.weights(layer)
    if found.packed:
        from mla_fusion.kernels.aiter import PackedWeight

        return PackedWeight(found.packed, layer.W_K, layer.W_K_scale)
    return found.w_uk
