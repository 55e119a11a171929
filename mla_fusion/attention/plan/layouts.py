"""The byte caches of sparse models: what an entry holds, and its key in plain torch.

Both are `fp8_ds_mla` to vLLM, uint8 [blocks, page_size, bytes], as the note on top of its
`v1/attention/backends/mla/flashmla_sparse.py` (0.32) and `tests/quant.py` of FlashMLA define it:

    FP8_DS_MLA, of DeepSeek-V3.2 and GLM-5: 656 bytes a token, one after the other
        0 ... 511      512 e4m3 values, the latent
        512 ... 527    4 fp32 scales, of 128 values each
        528 ... 655    64 bf16 values, the rotated part

    FP8_DS_MLA_V4, of DeepSeek-V4: 584 bytes a token; a page has all its data first
        576 * i        448 e4m3 values and 64 bf16 rotated ones of its token i
        576 * page_size + 8 * i
                       7 ue8m0 scales of token i, of 64 values each, and a byte of padding

V4 has no columns beside the latent: its 512 values, the 64 rotated ones too, are what is summed.
Blocks may be further apart than page_size * bytes, by a multiple of 16 bytes.
"""

import dataclasses

import torch

from mla_fusion.attention.plan.buffers import Settings
from mla_fusion.kernels.arithmetic import FP8_DTYPES
from mla_fusion.kernels.inputs import check

WIDE = 64  # bf16 values of an entry
EXPONENTS = 8  # bytes of the scales of an entry behind the data of its page


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """The parts of an entry in a cache of bytes. The first `quantized` of its bytes are e4m3
    values, and each `group` of them shares a scale: stored = value / scale. latent: the latent
    width, the values that are summed. behind: scales are ue8m0, behind the data of all tokens of
    the page; else fp32, behind the entry's own e4m3 values."""

    bytes: int
    quantized: int
    group: int
    latent: int
    behind: bool

    @property
    def width(self) -> int:
        """Columns of a key, and of the query."""
        return self.quantized + WIDE

    def entry_stride(self, cache: torch.Tensor) -> int:
        """Bytes from the data of a token to that of the next one of its page."""
        return self.bytes - EXPONENTS if self.behind else cache.stride(1)


FP8_DS_MLA = CacheLayout(bytes=656, quantized=512, group=128, latent=512, behind=False)
FP8_DS_MLA_V4 = CacheLayout(bytes=584, quantized=448, group=64, latent=512, behind=True)


def validate(q: torch.Tensor, cache: torch.Tensor, settings: Settings, layout: CacheLayout) -> None:
    """Raise ValueError unless kernels can read the cache, of checked shape and type, in place, and
    query and scratch have the widths and types of its entries."""
    size, align = layout.bytes, (cache.data_ptr(), cache.stride(0), layout.entry_stride(cache))
    of, widths = f"entries of {size} bytes", (q.shape[2], settings.v_head_dim)
    want = f"({layout.width}, {layout.latent}), as {of} have them"
    ok = widths == (layout.width, layout.latent)
    check("the width of q and the latent width of the scratch", ok, want, widths)
    types = f"{q.dtype} over {settings.kv_dtype}"
    ok = q.dtype == torch.bfloat16 and settings.kv_dtype in FP8_DTYPES
    check("the scratch", ok, f"for a bf16 query over the fp8 (e4m3) values of {of}", types)
    if layout.behind:
        whole = f"{size} bytes apart: pass the whole pages, which have all scales behind all data"
        check("entries", cache.stride(1) == size, whole, cache.stride(1))
    want = "multiples of 16 bytes, which a thread reads at once: align or pad each block"
    name = "the address of kv_cache and the strides of its blocks and entries"
    check(name, not any(n % 16 for n in align), want, align)


def read_keys(
    cache: torch.Tensor, slots: torch.Tensor, layout: CacheLayout, dtype: torch.dtype
) -> torch.Tensor:
    """Keys [n, width] in fp32 of `slots` [n], block * page_size + entry; `dtype`: which e4m3."""
    page, count = cache.shape[1], layout.quantized
    block, entry = slots // page, slots % page
    if layout.behind:
        whole, each = cache[block].flatten(1), torch.arange(len(slots), device=slots.device)
        data, exponents = whole.split([page * (layout.bytes - EXPONENTS), page * EXPONENTS], 1)
        row = data.unflatten(1, (page, -1))[each, entry]
        exponents = exponents.unflatten(1, (page, -1))[each, entry]
        scales = torch.exp2(exponents[:, : count // layout.group].float() - 127)
    else:
        row = cache[block, entry]
        scales = row[:, count : -2 * WIDE].contiguous().view(torch.float32)
    values = row[:, :count].view(dtype).float().unflatten(1, (-1, layout.group))
    wide = row[:, -2 * WIDE :].contiguous().view(torch.bfloat16).float()
    return torch.cat(((values * scales[:, :, None]).flatten(1), wide), 1)
