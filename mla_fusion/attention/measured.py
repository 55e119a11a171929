"""Where the portable decode was measured against vLLM's own: for `attention=auto`.

The times are those of `mla-fusion bench decode` in `benchmarks/results/decode*_h200.csv`: contexts
of 1024 to 65,536 tokens, even and ragged, for 1 to 128 sequences, and 1024 tokens for 256, 512 and
1024. A test derives SEQUENCES from these rows.

The table holds for all releases of vLLM, and of Triton with which the kernels have run on a GPU,
whichever the rows are of: an engine that brings a newer one should not lose what was measured.
"""

from __future__ import annotations

import torch

from mla_fusion.attention.triton_choice import triton_version

WIDTHS = 512, 64  # latent and rotated part of a cache entry
PAGE = 64  # tokens of a page of the cache, or a multiple of it
# Medians of two equal graphs of one run differ by less.
NOISE = 0.02

# A bf16 query of more heads has a kernel of its own, which has run with Triton up to this one.
FEW_HEADS, NEWEST_TRITON = 32, (3, 6)

_BF16, _FP8 = torch.bfloat16, torch.float8_e4m3fn
# (GPU, type of query and cache, heads of a rank, query rows of a sequence, vLLM's backend) -> the
# most sequences of a step up to which ours was not slower in any shape; 0: slower with one already.
SEQUENCES = {
    ("NVIDIA H200", _BF16, 8, 1, "FLASH_ATTN_MLA"): 1024,
    ("NVIDIA H200", _BF16, 16, 1, "FLASH_ATTN_MLA"): 1024,
    ("NVIDIA H200", _BF16, 20, 1, "FLASH_ATTN_MLA"): 64,
    ("NVIDIA H200", _BF16, 32, 1, "FLASH_ATTN_MLA"): 4,
    ("NVIDIA H200", _BF16, 64, 1, "FLASH_ATTN_MLA"): 4,
    ("NVIDIA H200", _BF16, 128, 1, "FLASH_ATTN_MLA"): 4,
    ("NVIDIA H200", _FP8, 8, 1, "FLASHMLA"): 1024,
    ("NVIDIA H200", _FP8, 16, 1, "FLASHMLA"): 1024,
    ("NVIDIA H200", _FP8, 20, 1, "FLASHMLA"): 0,
    ("NVIDIA H200", _FP8, 32, 1, "FLASHMLA"): 0,
    ("NVIDIA H200", _FP8, 64, 1, "FLASHMLA"): 0,
    ("NVIDIA H200", _FP8, 128, 1, "FLASHMLA"): 0,
}


def has_measurements(gpu: str) -> bool:
    """Whether anything was measured on a GPU of this name."""
    return any(name == gpu for name, *_ in SEQUENCES)


def why_not_run(dtype: torch.dtype, heads: int) -> str:
    """What has not run on a GPU with the installed Triton, of the kernel for a query; or empty."""
    if dtype != _BF16 or heads <= FEW_HEADS or triton_version() <= NEWEST_TRITON:
        return ""
    return "the kernel for {} heads has not run with Triton {}.{}".format(heads, *triton_version())


def is_listed(gpu: str, dtype: torch.dtype, heads: int, rows: int) -> bool:
    """Whether ours is to be used against some backend."""
    listed = any(most and key[:4] == (gpu, dtype, heads, rows) for key, most in SEQUENCES.items())
    return listed and not why_not_run(dtype, heads)


def most_sequences(gpu: str, dtype: torch.dtype, heads: int, rows: int, backend: str) -> int | None:
    """Sequences of a step up to which ours was not slower than a backend; None: not measured."""
    return SEQUENCES.get((gpu, dtype, heads, rows, backend))
