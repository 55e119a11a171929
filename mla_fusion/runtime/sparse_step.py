"""The decode steps of a sparse layer that this library takes, and the state all layers share.

Each class of layers says which (`mla_fusion_why_not`) and by what (`mla_fusion_shape`): that of the
backend CUSTOM as here, DeepSeek-V4's as in `deepseek_v4`. The decode is `attention.sparse`. The
first layer of a forward pass refreshes its plan; in a captured graph that is a kernel of the graph.
On Hopper the plan depends on the number of tokens alone: every column of a row of slots counts, -1
is none. Nothing here has run on AMD hardware, so there nothing is taken unless an operator asks.
"""

import functools
import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mla_fusion import config, gpu, logger
from mla_fusion.attention import cards
from mla_fusion.attention.plan.inputs import Scope
from mla_fusion.attention.plan.layouts import FP8_DS_MLA, WIDE
from mla_fusion.attention.sparse import sparse_mla_decode, sparse_scratch
from mla_fusion.config import vllm_compat
from mla_fusion.kernels import ProviderUnavailable
from mla_fusion.kernels import triton as provider
from mla_fusion.report.reasons import Decline
from mla_fusion.runtime import measured

# Of the implementation of a layer with the attention backend CUSTOM, or of a layer of V4.
ATTRIBUTE = "mla_fusion_step"
LATENT = FP8_DS_MLA.latent
LONGEST = 2**30  # rows of all numbers of slots count
# By vLLM's cache type, the layout of the entries; None for bf16, as the query.
LAYOUTS = {"fp8_ds_mla": FP8_DS_MLA, "auto": None, "bfloat16": None}
# A JSON file for each GPU, as those of `runtime.measured`, of the decode alone: the sequences are
# tokens, the context their slots, the type is bfloat16 or that of the cache. benchmarks/figures.py
# writes it from the rows of benchmarks/sparse.py. Other Hopper GPUs go by an H200's.
FOLDER = Path(__file__).parent / "sparse_gpus"
HOPPER = "NVIDIA H200"


@functools.cache
def _measured(gpu_name: str) -> dict[measured.Shape, list[measured.Row]]:
    own = measured.read(FOLDER / measured.file_name(gpu_name), gpu_name)
    return own if own or gpu_name == HOPPER else _measured(HOPPER)


def most_tokens(heads: int, cache: str) -> int:
    """Most tokens of a step that this library decodes with `heads` heads of a rank over a type of
    cache, by the rows with that many or the next larger number; 0 for none. FlashMLA pads heads to
    64 or 128.
    """
    dtype = "bfloat16" if cache == "auto" else cache
    rows = {
        shape[1]: each
        for shape, each in _measured(vllm_compat.gpu_name()).items()
        if shape[0] == dtype and shape[1] >= heads
    }
    runs = measured.of_rows(rows[min(rows)], LONGEST) if rows else ()
    return runs[0][1] if runs and runs[0][0] == 1 else 0


class Shared:
    """The scratch that layers of one shape and engine share, and the forward pass of its plan."""

    def __init__(
        self, most: int, heads: int, widths: tuple[int, ...], layout: Any, kv_dtype: torch.dtype,
        device: torch.device, kind: str = "",
    ) -> None:  # fmt: skip
        self.heads, self.most, self.layout, self.kind = heads, most, layout, kind
        self.scratch = sparse_scratch(
            max_tokens=most, num_heads=heads, widths=widths, q_dtype=torch.bfloat16,
            kv_dtype=kv_dtype, device=device, layout=layout,
        )  # fmt: skip
        self._planned: tuple[Any, int] = (None, 0)

    def begins(self, tokens: int) -> bool:
        """True if its plan is of another forward pass, drafts' too, or of another size."""
        before, self._planned = self._planned, (vllm_compat.forward_context(), tokens)
        return before[0] is not self._planned[0] or before[1] != tokens

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that it keeps at fixed addresses."""
        held = [x for x in vars(self).values() if isinstance(x, torch.Tensor)]
        return [*self.scratch.plan.tensors().values(), *held]


class Step(Shared):
    """The state that all layers of a shape share, with query and latents of the running layer."""

    def __init__(self, most: int, heads: int, *shape: Any) -> None:
        super().__init__(most, heads, *shape)
        plan = self.scratch.plan
        self.kv_dtype = plan.settings.kv_dtype
        self.q, self.out = (
            torch.zeros(most, heads, columns, dtype=torch.bfloat16, device=plan.device)
            for columns in (LATENT + WIDE, LATENT)
        )

    def serves(self, tokens: int, metadata: Any) -> bool:
        """True if this library decodes the step: few tokens, and none of them of a prefill."""
        return 0 < tokens <= self.most and tokens == metadata.num_decode_tokens

    def decode(
        self, q: Any, cache: torch.Tensor, chosen: torch.Tensor, metadata: Any, layer: Any,
        scale: float,
    ) -> torch.Tensor:  # fmt: skip
        """Latents [T, H, 512] of a step, at an address that the next layer writes again.

        q: [T, H, 512 + 64], or its two parts. chosen: [T, n] int32, positions within a token's own
        sequence, -1 for none. layer: whose `_k_scale` an fp8 cache without a layout has.
        """
        tokens = chosen.shape[0]
        if self.begins(tokens):
            self.scratch.refresh(tokens, [self.lengths(tokens, metadata)])
        if isinstance(q, tuple):
            latent, rotated = q
            q = self.q[:tokens]
            vllm_compat.join_query(latent, rotated, q)
        scaled = self.layout is None and self.kv_dtype.itemsize == 1
        stored = cache.view(self.kv_dtype if self.layout is None else torch.uint8)
        out = self.out[:tokens]
        sparse_mla_decode(
            q, [Scope(stored, self.slots(metadata, chosen), self.layout)], self.scratch,
            softmax_scale=scale, kv_scale=layer._k_scale if scaled else None, out=out,
        )  # fmt: skip
        return out

    def lengths(self, tokens: int, metadata: Any) -> torch.Tensor | None:
        """[T]: columns of each token that count; None: all."""
        return None

    def slots(self, metadata: Any, chosen: torch.Tensor) -> torch.Tensor:
        """[T, n]: slots of the positions in `chosen`; columns that do not count hold any."""
        return vllm_compat.cache_slots(metadata, chosen)


class StepOnRocm(Step):
    """A step with rows of slots from the metadata of ROCM_AITER_MLA_SPARSE.

    Row t has indptr[t + 1] - indptr[t] chosen positions in its first columns, with indptr
    `paged_kv_indptr`; a row of padding has none. vLLM lists their slots without gaps, as pages of
    one token. Here vLLM's kernel writes the slots in rows of one width, and the plan counts the
    chosen ones of each row: both decodes read the same entries.
    """

    def __init__(self, most: int, heads: int, widths: tuple[int, ...], *shape: Any) -> None:
        super().__init__(most, heads, widths, *shape)
        ends = torch.arange(most + 1, dtype=torch.int32, device=self.q.device)
        self.starts, self.lens = ends * widths[0], 0 * ends[1:]
        self.rows = ends.new_zeros(most, widths[0])

    def lengths(self, tokens: int, metadata: Any) -> torch.Tensor:
        """As the metadata's tensors have them now."""
        ends = metadata.paged_kv_indptr
        return torch.sub(ends[1 : tokens + 1], ends[:tokens], out=self.lens[:tokens])

    def slots(self, metadata: Any, chosen: torch.Tensor) -> torch.Tensor:
        """As those of any step."""
        tokens = chosen.shape[0]
        out = self.rows[:tokens]
        vllm_compat.write_cache_slots(metadata, chosen, self.starts[: tokens + 1], out.view(-1))
        return out


def shape(impl: Any, vllm_config: Any) -> tuple[Any, ...]:
    """For a layer that this library decodes: the class of what it shares, and its arguments."""
    heads, chosen, cache = impl.num_heads, impl.topk_indices_buffer, impl.kv_cache_dtype
    widths, device = (chosen.shape[1],), chosen.device
    if vllm_compat.is_rocm():
        most, kv_dtype = config.decode_bucket(vllm_config), _rocm_caches()[cache]
        return StepOnRocm, most, heads, widths, None, kv_dtype, device
    layout = LAYOUTS[cache]
    kv_dtype = torch.bfloat16 if layout is None else torch.float8_e4m3fn
    return Step, most_tokens(heads, cache), heads, widths, layout, kv_dtype, device


def _rocm_caches() -> dict[str, torch.dtype]:
    """vLLM's cache type -> type of the entries: the query's bf16, or fp8 with the layer's scale."""
    fp8 = vllm_compat.fp8_dtype()
    return {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "fp8": fp8, "fp8_e4m3": fp8}


def why_not(impl: Any, vllm_config: Any) -> Decline | None:
    """Why no decode of a layer is this library's."""
    here = gpu.of(vllm_config.device_config.device_type)
    rocm = here.arch in gpu.CDNA
    if not (rocm or vllm_compat.gpu_arch() in gpu.HOPPER):
        return Decline("sparse-platform")
    if rocm and config.read_options(vllm_config.additional_config).attention != "portable":
        return Decline("sparse-unmeasured")
    if decline := cards.why_no_sparse(here):
        return decline
    cache, heads, chosen = impl.kv_cache_dtype, impl.num_heads, impl.topk_indices_buffer
    widths, slower = vllm_compat.sparse_widths(impl), ""
    found = {
        f"latents and rotated part of {widths}": widths != (LATENT, WIDE),
        f"kv_cache_dtype {cache}": cache not in (_rocm_caches() if rocm else LAYOUTS),
        "no list of chosen tokens": chosen is None,
    }
    if rocm:
        model = vllm_config.model_config
        most = model.hf_text_config.index_topk
        columns = most if chosen is None else chosen.shape[1]
        found |= {
            f"activations of {model.dtype}": model.dtype != torch.bfloat16,
            "attention sinks": getattr(impl, "sinks", None) is not None,
            "a quantized query": bool(impl.supports_quant_query_input),
            f"{columns} columns for {most} chosen tokens": columns != most,
        }
    elif cache in LAYOUTS and not most_tokens(heads, cache):
        slower = f"{cache}, {heads} heads of a rank"
    return declined(vllm_config, found, slower)


def declined(vllm_config: Any, found: dict[str, bool], slower: str) -> Decline | None:
    """Why layers are vLLM's where the platform is served: this process has no kernels, they have
    what is `found`, by whether it holds, or vLLM is faster with what `slower` names."""
    try:
        provider.require()
    except ProviderUnavailable as error:
        return Decline("provider-unavailable", str(error))
    parallel = vllm_config.parallel_config
    found = found | {
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "HiSparse": vllm_compat.keeps_cache_on_host(vllm_config),
        "dual batch overlap": bool(getattr(parallel, "use_ubatching", False)),
    }
    if named := [what for what, holds in found.items() if holds]:
        return Decline("sparse-layer", ", ".join(named))
    return Decline("sparse-slower", slower) if slower else None


def attach(layers: Mapping[str, Any], vllm_config: Any, chosen: bool) -> None:
    """Give each layer of the backend CUSTOM, or its implementation, what it shares with those of
    its shape in `layers`, which own it; None where vLLM decodes every step. The log says both, and
    each reason, once; if CUSTOM was `chosen`, also of sparse layers with another backend."""
    said: Counter[tuple[int, str]] = Counter()
    shared: dict[tuple[Any, ...], Shared] = {}
    for layer in layers.values():
        v4 = hasattr(layer, "swa_cache_layer")
        owner: Any = layer if v4 else getattr(layer, "impl", None)
        ours = hasattr(owner, ATTRIBUTE)
        if not ours and not (chosen and (v4 or getattr(owner, "is_sparse", False))):
            continue
        backend = layer.backend_cls if v4 else layer.attn_backend
        decline = owner.mla_fusion_why_not(vllm_config) if ours else Decline("sparse-unasked")
        if ours and vllm_compat.is_batch_invariant():  # vLLM refuses most of them before
            decline = Decline("batch-invariant")
        if decline:
            left = f"every step is left to {backend.get_name()}: {decline.explain()}"
            said[logging.WARNING, left] += 1
            continue
        key = owner.mla_fusion_shape(vllm_config)
        if key not in shared:
            shared[key] = key[0](*key[1:])
        setattr(owner, ATTRIBUTE, shared[key])
        said[logging.INFO, describe(shared[key], backend.get_name())] += 1
    if said and vllm_compat.is_first_rank():
        for (level, what), count in said.items():
            logger.log(level, "attention backend CUSTOM, %d layers: %s", count, what)


def describe(step: Shared, backend: str) -> str:
    """A line of the log on a step; `backend` takes the other steps."""
    settings = step.scratch.plan.settings
    size = sum(x.nbytes for x in step.tensors()) / 2**20
    plain = "bf16" if settings.kv_dtype.itemsize == 2 else "fp8"
    cache = plain if step.layout is None else f"{step.layout.bytes} bytes an entry"
    slots = " + ".join(map(str, step.scratch.widths))
    kind = f"{step.kind}, " if step.kind else ""
    return (
        f"decode steps of up to {settings.max_batch} tokens are this library's "
        f"({kind}{settings.num_heads} heads, {slots} slots, {cache}, {size:.1f} MiB "
        f"for all layers), larger ones are {backend}'s"
    )
