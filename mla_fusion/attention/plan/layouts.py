"""The byte caches of sparse models: what an entry holds, and its key in plain torch.

Both are `fp8_ds_mla` to vLLM, uint8 [blocks, page_size, bytes]; the note on top of its
`v1/attention/backends/mla/flashmla_sparse.py` (0.32) and `tests/quant.py` of FlashMLA define them:

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

WIDE = 64  # bf16 values of an entry
EXPONENTS = 8  # bytes of the scales of an entry behind the data of its page


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """Where an entry of a byte cache has its parts.

    Attributes:
        bytes: of an entry: the last dimension of the cache.
        quantized: e4m3 values, at the start of the entry's data.
        group: values that share a scale: stored = value / scale.
        latent: values that are summed, `v_head_dim` of the scratch.
        behind: scales are ue8m0, behind the data of all tokens of the page; else fp32, behind the
            entry's own e4m3 values.
    """

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


def check(q: torch.Tensor, cache: torch.Tensor, settings: Settings, layout: CacheLayout) -> None:
    """Raise ValueError unless kernels can read the cache, of checked shape and type, in place, and
    query and scratch have the widths and types of its entries.
    """
    size, align = layout.bytes, (cache.data_ptr(), cache.stride(0), layout.entry_stride(cache))
    if settings.v_head_dim != layout.latent or q.shape[2] != layout.width:
        raise ValueError(
            f"entries of {size} bytes hold keys of {layout.width} columns, of which "
            f"{layout.latent} are summed, got a query of {q.shape[2]} and v_head_dim "
            f"{settings.v_head_dim}"
        )
    if q.dtype != torch.bfloat16 or settings.kv_dtype not in FP8_DTYPES:
        raise ValueError(
            f"entries of {size} bytes hold fp8 (e4m3) and bf16 values: the scratch must be for a "
            f"bf16 query and that fp8 type, got {q.dtype} over {settings.kv_dtype}"
        )
    if layout.behind and cache.stride(1) != size:
        raise ValueError(
            f"pages of {size} bytes a token hold all scales behind all data, so entries must be "
            f"{size} bytes apart, got {cache.stride(1)}: pass the whole pages"
        )
    if any(n % 16 for n in align):
        raise ValueError(
            "the address of kv_cache and the strides of its blocks and entries must be multiples "
            f"of 16 bytes, which a thread reads at once, got {cache.data_ptr():#x} and "
            f"{cache.stride()[:2]}: align it, with padding behind each block if need be"
        )


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
