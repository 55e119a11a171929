"""The Triton kernel that lists the cache entry of each KV token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK, CTAS = 1024, 8  # tokens of a turn; CTAs of a sequence


@triton.jit
def mla_entries(
    found, kv_indptr, block_table, table_stride, capacity,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, CTAS: tl.constexpr,
):  # fmt: skip
    """CTA (b, p) writes the entries of sequence b, of every CTAS-th BLOCK from the p-th on."""
    sequence = tl.program_id(0)
    begin = tl.load(kv_indptr + sequence)
    length = tl.load(kv_indptr + sequence + 1) - begin
    for first in range(tl.program_id(1) * BLOCK, length, CTAS * BLOCK):
        token = first + tl.arange(0, BLOCK)
        live = (token < length) & (begin + token < capacity)
        block = tl.load(block_table + sequence * table_stride + token // PAGE, mask=live, other=0)
        tl.store(found + begin + token, block * PAGE + token % PAGE, mask=live)


def write_entries(
    found: torch.Tensor, kv_indptr: torch.Tensor, block_table: torch.Tensor, page_size: int
) -> None:
    """Write `found` for sequences whose tokens begin at `kv_indptr` [B + 1]; nothing waits."""
    mla_entries[(len(block_table), CTAS)](
        found=found, kv_indptr=kv_indptr, block_table=block_table,
        table_stride=block_table.stride(0), capacity=len(found), PAGE=page_size, BLOCK=BLOCK,
        CTAS=CTAS, num_warps=4,
    )  # fmt: skip
