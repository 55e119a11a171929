"""The cache entry of each KV token of a plan, which AITER reads: its pages hold one token.

Written once a refresh for all layers, from the block table and the page size of the first.
"""

import torch

from mla_fusion.attention.plan.buffers import PlanBuffers
from mla_fusion.kernels.capture import capturing


def entries(plan: PlanBuffers, block_table: torch.Tensor, page_size: int) -> torch.Tensor:
    """The entry, int32, of token t of the concatenation of all sequences of the step, for each t.

    The caller's list if there is one; with max_kv_len a buffer of the plan, which keeps its
    address. A graph that did not record the refresh writes its own at every decode: a refresh
    between its replays is not seen.
    """
    companions = plan.aiter
    assert companions is not None  # the plan is AITER's
    if companions.listed is not None:
        return companions.listed
    key = (plan.refreshes, block_table.data_ptr(), block_table.shape, page_size)
    shared = companions.captured or not capturing()
    if shared and companions.expanded is not None and companions.expanded[0] == key:
        return companions.expanded[1]
    if (found := companions.entries) is None:
        # As many as the block table can hold, so nothing waits for the device.
        found = block_table.new_zeros(block_table.numel() * page_size)
    expand(found, plan.kv_indptr[: len(block_table) + 1], block_table, page_size)
    companions.expanded = (key, found) if shared else None
    return found


def expand(
    found: torch.Tensor, kv_indptr: torch.Tensor, block_table: torch.Tensor, page_size: int
) -> None:
    """Write `found` for sequences whose tokens begin at `kv_indptr` [B + 1]."""
    if found.device.type != "cpu":
        # Imported here: a CPU does without Triton.
        from mla_fusion.attention.aiter.entries_kernel import launch

        launch(found, kv_indptr, block_table, page_size)
        return
    batch, columns = block_table.shape
    token = torch.arange(min(block_table.numel() * page_size, len(found)), dtype=torch.int32)
    sequence = torch.searchsorted(kv_indptr[1:], token, right=True).clamp_(max=batch - 1)
    at = (token - kv_indptr[sequence]).clamp_(max=columns * page_size - 1)
    slots = block_table[sequence, at // page_size] * page_size + at % page_size
    live = found[: len(token)]
    torch.where(token < kv_indptr[-1], slots, live, out=live)
