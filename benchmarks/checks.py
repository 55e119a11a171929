"""Checks of a GPU script: each is printed and counted, and a failure sets the exit status."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

import torch

if TYPE_CHECKING:
    from mla_fusion.attention import PersistentDecodePlan
    from mla_fusion.cli.bench.decode_peers import Inputs

failures: list[str] = []


def expect(name: str, ok: bool, detail: str) -> None:
    """Record one check."""
    if not ok:
        failures.append(f"{name}: {detail}")
    print(f"{'ok  ' if ok else 'FAIL'} {name}: {detail}", flush=True)


def finish() -> NoReturn:
    """Print how many failed, and which; exit with 1 if one did."""
    print(f"{len(failures)} failures")
    for line in failures:
        print(line)
    sys.exit(bool(failures))


def poison(inputs: Inputs, lengths: list[int]) -> None:
    """NaN wherever no token of a sequence is."""
    cache, page = inputs.caches[0], inputs.case.page
    used = torch.zeros(cache.shape[0] * page, dtype=torch.bool, device="cuda")
    for b, length in enumerate(lengths):
        at = torch.arange(length, device="cuda")
        used[inputs.table[b, at // page].long() * page + at % page] = True
    # As bytes, because fp8 has no such operation: all bits set are NaN in both types.
    cache.view(torch.uint8).view(len(used), -1)[~used] = 0xFF


def where(
    values: torch.Tensor, lses: torch.Tensor, plan: PersistentDecodePlan, queries: list[int]
) -> str:
    """Which results of two decodes differ: values [rows, heads, L] and LSEs [rows, heads], of
    sequences of so many query rows, which the plan may have split.

    In a kernel of specialized warps the LSE is of those that score; in fp8 another group has half
    of the latents, and each warp of it 32 of every 128.
    """
    rows = values.any(-1)
    pieces = plan.reduce_indptr.diff()[: len(queries) * plan.fold].view(len(queries), -1)
    split = (pieces > 0).any(1).repeat_interleave(torch.tensor(queries, device=pieces.device))
    latents = values.sum((0, 1)).view(-1, 32).sum(1).tolist()
    heads = sorted(set(rows.nonzero()[:, 1].tolist()))
    return (
        f"{int(values.sum())} values differ, of {int(rows.sum())} rows x heads, "
        f"{int(rows[split].sum())} of split sequences; {int(lses.sum())} LSEs; heads {heads}; "
        f"values by 32 latents {latents}"
    )
