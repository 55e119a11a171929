"""Where the portable decode was measured against vLLM's own: for `attention=auto`.

The times are those of `mla-fusion bench decode --values` in `benchmarks/results/step_h200.csv`: a
decode and the product with W_UV behind it, since a layer runs both; contexts of 1024 to 65,536
tokens, even and ragged, for 1 to 1024 sequences. Those with drafts are of the decode alone, in
`decode_drafts_h200.csv`. A test derives SEQUENCES from these rows.

The table holds for all releases of vLLM, and of Triton with which the kernels have run on a GPU,
whichever the rows are of: an engine that brings a newer one should not lose what was measured.
"""

from __future__ import annotations

import torch

from mla_fusion.attention.plan.device import triton_version

WIDTHS = 512, 64  # latent and rotated part of a cache entry
PAGE = 64  # tokens of a page of the cache, or a multiple of it
# Of the time in a context of the rows. Which contexts a step has is not known when it is captured:
# it may lose so much in one where it gains in the mean of all.
MOST_LOST = 0.07

_BF16, _FP8 = torch.bfloat16, torch.float8_e4m3fn
# More query rows (heads x rows of a sequence) have a kernel of their own, which has run with Triton
# up to this one.
FEW_ROWS, NEWEST_TRITON = 32, (3, 8)

# (GPU, type of query and cache, heads of a rank, query rows of a sequence, vLLM's backend) -> from
# how many to how many sequences of a step ours was not slower, the longest such range; None: slower
# with any number.
SEQUENCES: dict[tuple[str, torch.dtype, int, int, str], tuple[int, int] | None] = {
    ("NVIDIA H200", _BF16, 8, 1, "FLASH_ATTN_MLA"): (1, 1024),
    ("NVIDIA H200", _BF16, 16, 1, "FLASH_ATTN_MLA"): (1, 1024),
    ("NVIDIA H200", _BF16, 20, 1, "FLASH_ATTN_MLA"): (1, 128),
    ("NVIDIA H200", _BF16, 32, 1, "FLASH_ATTN_MLA"): (1, 512),
    ("NVIDIA H200", _BF16, 64, 1, "FLASH_ATTN_MLA"): (1, 512),
    ("NVIDIA H200", _BF16, 128, 1, "FLASH_ATTN_MLA"): (1, 1024),
    ("NVIDIA H200", _BF16, 16, 2, "FLASH_ATTN_MLA"): (1, 128),
    ("NVIDIA H200", _BF16, 16, 4, "FLASH_ATTN_MLA"): (1, 32),
    ("NVIDIA H200", _BF16, 128, 2, "FLASH_ATTN_MLA"): (128, 256),
    ("NVIDIA H200", _BF16, 128, 4, "FLASH_ATTN_MLA"): (1, 1),
    ("NVIDIA H200", _FP8, 8, 1, "FLASHMLA"): (1, 1024),
    ("NVIDIA H200", _FP8, 16, 1, "FLASHMLA"): (1, 1024),
    ("NVIDIA H200", _FP8, 20, 1, "FLASHMLA"): (1, 2),
    ("NVIDIA H200", _FP8, 32, 1, "FLASHMLA"): (1, 2),
    ("NVIDIA H200", _FP8, 64, 1, "FLASHMLA"): (128, 1024),
    ("NVIDIA H200", _FP8, 128, 1, "FLASHMLA"): (32, 1024),
}


def has_measurements(gpu: str) -> bool:
    """Whether anything was measured on a GPU of this name."""
    return any(name == gpu for name, *_ in SEQUENCES)


def why_not_run(heads: int, rows: int) -> str:
    """What has not run on a GPU with the installed Triton, of the kernel for a query; or empty."""
    if heads * rows <= FEW_ROWS or triton_version() <= NEWEST_TRITON:
        return ""
    shape = f"{heads} heads x {rows} query rows" if rows > 1 else f"{heads} heads"
    return "the kernel for {} has not run with Triton {}.{}".format(shape, *triton_version())


def is_listed(gpu: str, dtype: torch.dtype, heads: int, rows: int) -> bool:
    """Whether ours is to be used against some backend."""
    listed = any(found and key[:4] == (gpu, dtype, heads, rows) for key, found in SEQUENCES.items())
    return listed and not why_not_run(heads, rows)
