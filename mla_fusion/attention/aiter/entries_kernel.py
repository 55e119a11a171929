"""The Triton kernel of `entries.expand`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK, PROGRAMS = 1024, 8  # tokens of a turn; programs of a sequence


@triton.jit
def expand_kernel(
    found, kv_indptr, block_table, table_stride, capacity,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Program (b, p) writes the entries of sequence b, of every PROGRAMS-th BLOCK from the p-th."""
    sequence = tl.program_id(0)
    begin = tl.load(kv_indptr + sequence)
    length = tl.load(kv_indptr + sequence + 1) - begin
    for first in range(tl.program_id(1) * BLOCK, length, PROGRAMS * BLOCK):
        token = first + tl.arange(0, BLOCK)
        live = (token < length) & (begin + token < capacity)
        block = tl.load(block_table + sequence * table_stride + token // PAGE, mask=live, other=0)
        tl.store(found + begin + token, block * PAGE + token % PAGE, mask=live)


def launch(
    found: torch.Tensor, kv_indptr: torch.Tensor, block_table: torch.Tensor, page_size: int
) -> None:
    """See `entries.expand`; nothing waits for the device."""
    kernel: Any = expand_kernel
    kernel[(len(block_table), PROGRAMS)](
        found, kv_indptr, block_table, block_table.stride(0), len(found),
        PAGE=page_size, BLOCK=BLOCK, PROGRAMS=PROGRAMS, num_warps=4,
    )  # fmt: skip
