"""The supported window of vLLM releases, and every name or behaviour that moved inside it.

CONTRIBUTING.md has the steps that admit a release. Other files import nothing from vLLM; here it is
imported where it is needed.
"""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mla_fusion import __version__
from mla_fusion.config import models

# vLLM 0.26 is the first release whose MLA layer has the split KV-update and attention ops this
# library rewrites together with `VllmFusionPatternMatcherPass`; 0.33 is the last one read.
OLDEST, NEWEST = (0, 26), (0, 33)
# Methods of a worker after which weights and buffers may be others; a release may lack one.
LOADS_WEIGHTS = ("reload_weights", "finish_weight_update", "wake_up")
# What vLLM's registry of attention backends holds as CUSTOM.
SPARSE_BACKEND = "mla_fusion.runtime.sparse_backend.SparseBackend"


def installed_version() -> str:
    """The version string of the vLLM in this environment."""
    import vllm

    return str(vllm.__version__)


def _platform() -> Any:
    from vllm.platforms import current_platform

    return current_platform


def _envs() -> Any:
    from vllm import envs

    return envs


def versions() -> dict[str, str]:
    """The releases that compile a graph together, and the device they compile it for."""
    device = _platform().get_device_name() if is_gpu() else _platform().device_name
    found = {"mla-fusion": __version__, "vLLM": installed_version(), "torch": torch.__version__}
    return {name: str(each) for name, each in (found | {"device": device}).items()}


def is_rocm() -> bool:
    """True if vLLM's platform is ROCm."""
    return bool(_platform().is_rocm())


def is_gpu() -> bool:
    """True if vLLM's platform is CUDA or ROCm."""
    return bool(_platform().is_cuda_alike())


def default_provider() -> str:
    """Who computes the fused op on vLLM's platform if none is named; empty where there is none."""
    from mla_fusion.kernels.card import serving

    platform = "rocm" if is_rocm() else "cuda" if _platform().is_cuda() else ""
    return next(iter(serving(platform)), "")


def gpu_arch() -> str:
    """The architecture of the NVIDIA GPU that vLLM runs on; empty on another platform."""
    found = _platform().get_device_capability() if _platform().is_cuda() else None
    return "" if found is None else f"sm_{found.major}{found.minor}"


def gpu_name() -> str:
    """The name of the NVIDIA GPU that vLLM runs on; empty on another platform."""
    return str(_platform().get_device_name()) if _platform().is_cuda() else ""


def compile_environment() -> str:
    """The environment variables that vLLM's compile cache depends on, as text."""
    return repr(sorted(_envs().compile_factors().items()))


def cache_root() -> Path:
    """The folder in which vLLM keeps its compile cache."""
    return Path(_envs().VLLM_CACHE_ROOT)


def is_supported(version: str) -> bool:
    """True if a version such as "0.32.0+cpu" lies in the supported window."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and OLDEST <= (int(numbers[1]), int(numbers[2])) <= NEWEST


def window() -> str:
    """The supported window as text."""
    return "{}.{} to {}.{}".format(*OLDEST, *NEWEST)


def uses_mla(model_config: Any) -> bool:
    """True if a vLLM `ModelConfig` is of a model with MLA layers; `use_mla` lacks one class, and
    all of them if `switched_off` names VLLM_MLA_DISABLE: then the config's latent width decides."""
    if "VLLM_MLA_DISABLE" in switched_off():
        return getattr(model_config.hf_text_config, "kv_lora_rank", None) is not None
    return bool(model_config.use_mla) or models.facts(model_config.architecture).uses_mla


def is_batch_invariant() -> bool:
    """True if vLLM promises that a sequence's result does not depend on the rest of its batch."""
    return bool(getattr(_envs(), "VLLM_BATCH_INVARIANT", False))  # doctor asks any release


def switched_off() -> list[str]:
    """The variables of this process's environment that switch MLA or torch.compile off."""
    mla = ["VLLM_MLA_DISABLE"] if getattr(_envs(), "VLLM_MLA_DISABLE", False) else []
    # torch reads both as text: "true" switches nothing off.
    compiler = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
    return mla + [name for name in compiler if os.environ.get(name) == "1"]


def layer_name_type() -> str:
    """Type of `layer_name` in the schemas of vLLM's ops: an opaque class (torch >= 2.11) or str."""
    from vllm.utils.torch_utils import LayerNameType

    if LayerNameType is str:
        return "str"
    from torch._library.opaque_object import get_opaque_type_name

    return get_opaque_type_name(LayerNameType)


def attention_context(layer_name: Any) -> tuple[Any, Any, torch.Tensor, torch.Tensor | None]:
    """(metadata or None, layer, KV cache, slot mapping or None) of one layer in this step, whose
    name is a string or vLLM's opaque LayerName."""
    from vllm.model_executor.layers.attention.attention import get_attention_context

    return get_attention_context(getattr(layer_name, "value", layer_name))


def forward_context() -> Any:
    """vLLM's context of the running forward pass: a new object for each."""
    from vllm.forward_context import get_forward_context

    return get_forward_context()


def with_attention_hooks(body: Callable[..., None]) -> Callable[..., None]:
    """`body` with the decorators of vLLM's own MLA attention op, in vLLM's order: the KV-transfer
    hook waits for and saves the layer's cache, the other ends a breakable CUDA graph."""
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture
    from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer

    return eager_break_during_capture(maybe_transfer_kv_layer(body))


def runs_breakable_cudagraphs() -> bool:
    """True if vLLM captures breakable CUDA graphs, for which it switches torch.compile off: by
    VLLM_USE_BREAKABLE_CUDAGRAPH, which it sets itself for a list of architectures."""
    from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled

    return bool(is_breakable_cudagraph_enabled())


def stores_compiled_code(backend: Any) -> bool:
    """True if vLLM stores a backend's compiled code, not a graph; from 0.33 on each one knows."""
    return bool(getattr(backend, "use_mega_artifact", _envs().VLLM_USE_MEGA_AOT_ARTIFACT))


def gather(value: Any) -> list[Any]:
    """`value` of every rank of this engine, in their order. All ranks must call it."""
    if not torch.distributed.is_initialized():
        return [value]
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    values = [value] * group.world_size
    torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values


def is_first_rank() -> bool:
    """True if this worker is the one of its engine that prints for all of them."""
    from vllm.distributed.parallel_state import is_global_first_rank

    return bool(is_global_first_rank())


def _dcp_group() -> Any:
    from vllm.distributed.parallel_state import get_dcp_group

    return get_dcp_group()


def context_parallel_ranks(layer: Any) -> int:
    """Ranks that each keep a part of every sequence's cache. vLLM 0.26 sets the number in the first
    `forward_impl`, which fused steps skip: so it is set here."""
    if layer.impl.dcp_world_size == -1:
        layer.impl.dcp_world_size = _dcp_group().world_size
    return int(layer.impl.dcp_world_size)


def pads_sequences(vllm_config: Any) -> bool:
    """True if AITER's backend lengthens the sequences of a step by queries left out: from 0.33."""
    return bool(getattr(vllm_config.speculative_config, "enable_adaptive_verification", False))


def gather_query_heads(layer: Any, q: torch.Tensor) -> torch.Tensor:
    """The prepared query [T, H, L + R] of all ranks, as [T, ranks * H, L + R]; from 0.29 on a layer
    has a manager of these collectives."""
    manager = getattr(layer, "dcp_manager", None)
    return manager.query_gather(q) if manager else _dcp_group().all_gather(q, dim=1)


def combine_context_parallel(
    layer: Any, attended: torch.Tensor, lse: torch.Tensor, metadata: Any
) -> torch.Tensor:
    """Attention [T, H, L] of this rank's heads over all ranks' caches, from that of all heads over
    this one's: [T, ranks * H, L], with the log-sum-exp that `forward_mqa` returned."""
    if manager := getattr(layer, "dcp_manager", None):
        starts = metadata.query_start_loc[: metadata.num_decodes + 1]
        lens = metadata.decode.seq_lens
        return manager.combine(attended, lse, seq_lens=lens, query_start_loc=starts)
    from vllm.v1.attention.ops.common import cp_lse_ag_out_rs
    from vllm.v1.attention.ops.dcp_alltoall import dcp_a2a_lse_reduce

    combine = dcp_a2a_lse_reduce if layer.dcp_a2a else cp_lse_ag_out_rs
    return combine(attended, lse, _dcp_group(), is_lse_base_on_e=layer.impl.lse_base_on_e)


def fp8_dtype() -> torch.dtype:
    """The fp8 type of vLLM's platform: e4m3fnuz on gfx942, else e4m3fn."""
    return _platform().fp8_dtype()


class Weights(NamedTuple):
    """The weights with which an MLA layer decodes; None where it holds no plain tensor."""

    packed: str  # format in which AITER's products take both; empty if vLLM's own do
    w_uk: torch.Tensor | None  # [H, P, L]
    w_uv: torch.Tensor | None  # [H, L, V]; None with a packed format


def weights(layer: Any) -> Weights:
    """The weights of an MLA layer as they are now: a reload may put other tensors there."""
    formats = ("fp4", "fp8")  # in vLLM's precedence
    packed = next((k for k in formats if getattr(layer, f"is_aiter_triton_{k}_bmm_enabled", 0)), "")
    return Weights(packed, plain(layer, "W_UK_T"), None if packed else plain(layer, "W_UV"))


def plain(layer: Any, name: str) -> torch.Tensor | None:
    """W_UK_T or W_UV if it is a plain tensor; vllm#55741 (open) has one with a `weight`."""
    kept = getattr(layer, name, None)
    weight = getattr(kept, "weight", kept)
    plain = isinstance(weight, torch.Tensor) and weight.dtype.itemsize > 1
    return weight if plain else None


def mla_layers(layers: Mapping[str, Any]) -> dict[str, Any]:
    """The MLA attention layers of vLLM's `static_forward_context`, by name."""
    from vllm.model_executor.layers.attention import MLAAttention

    return {name: layer for name, layer in layers.items() if isinstance(layer, MLAAttention)}


def other_layers(layers: Mapping[str, Any]) -> int:
    """Number of layers of `static_forward_context` that keep a state and are not MLA attention."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    stateful = sum(isinstance(layer, AttentionLayerBase) for layer in layers.values())
    return stateful - len(mla_layers(layers))


def traced_layer_name(layer_name: Any) -> str | None:
    """The layer's name in an argument of a graph, a string or an input that holds vLLM's opaque
    LayerName; None if it is unknown."""
    if isinstance(layer_name, str):
        return layer_name
    traced = getattr(layer_name, "meta", {}).get("val", layer_name)
    return getattr(getattr(traced, "real_obj", traced), "value", None)


def chose_sparse_backend(vllm_config: Any) -> bool:
    """True if an operator chose `--attention-backend CUSTOM`, and it is `SPARSE_BACKEND`."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    custom = AttentionBackendEnum.CUSTOM
    asked = vllm_config.attention_config.backend is custom and custom.is_overridden()
    return bool(asked and custom.get_path() == SPARSE_BACKEND)


def sparse_backend() -> tuple[Any, Any]:
    """vLLM's sparse MLA of this platform, the backend and its layers' implementation:
    FLASHMLA_SPARSE, or ROCM_AITER_MLA_SPARSE, which up to 0.26 fails in its first step
    (vllm#50064) and from 0.31 on is named in DeepSeek-V3.2's class for ROCm."""
    if is_rocm():
        from vllm.v1.attention.backends.mla import rocm_aiter_mla_sparse as rocm

        return rocm.ROCMAiterMLASparseBackend, rocm.ROCMAiterMLASparseImpl
    from vllm.v1.attention.backends.mla import flashmla_sparse as cuda

    return cuda.FlashMLASparseBackend, cuda.FlashMLASparseImpl


def sparse_widths(impl: Any) -> tuple[int, int]:
    """Latent and rotated part of a sparse layer; on ROCm 0.27 to 0.29 do not keep the latter."""
    latent = impl.kv_lora_rank
    return latent, getattr(impl, "qk_rope_head_dim", impl.head_size - latent)


def keeps_cache_on_host(vllm_config: Any) -> bool:
    """True if sparse layers fetch entries from the host (HiSparse, which 0.26 does not have)."""
    return getattr(vllm_config.attention_config, "hisparse_config", None) is not None


def cache_slots(metadata: Any, chosen: torch.Tensor) -> torch.Tensor:
    """Slots [T, n], block * page size + entry, of the positions [T, n] that an indexer chose for
    the first T tokens of a batch, -1 for none; newer kernels also count rows between blocks."""
    from vllm.v1.attention.backends.mla import sparse_utils

    tokens, width = chosen.shape
    return sparse_utils.triton_convert_req_index_to_global_index(
        metadata.req_id_per_token[:tokens], metadata.block_table, chosen,
        BLOCK_SIZE=metadata.block_size, NUM_TOPK_TOKENS=width,
    )  # fmt: skip


def write_cache_slots(
    metadata: Any, chosen: torch.Tensor, starts: torch.Tensor, out: torch.Tensor
) -> None:
    """Write the slots of such positions into `out`, by the kernel of vLLM's ROCM_AITER_MLA_SPARSE,
    which allocates nothing: those of token t to starts[t]:starts[t + 1], for -1 slot 0. From 0.32
    on it also counts rows between blocks: not here."""
    from vllm.v1.attention.backends.mla import rocm_aiter_mla_sparse as module

    tokens, width = chosen.shape
    rows = {"BLOCK_STRIDE_ROWS": metadata.block_size} if hasattr(module, "flat_kv_row_view") else {}
    module.triton_convert_req_index_to_global_index(
        metadata.req_id_per_token[:tokens], metadata.block_table, chosen, starts, out,
        BLOCK_SIZE=metadata.block_size, NUM_TOPK_TOKENS=width, **rows,
    )  # fmt: skip


def join_query(latent: torch.Tensor, rotated: torch.Tensor, out: torch.Tensor) -> None:
    """Write latent [T, H, 512] and rotated [T, H, 64] side by side into `out` [T, H, 576]."""
    from vllm import _custom_ops

    _custom_ops.concat_mla_q(latent, rotated, out)
