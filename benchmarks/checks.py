"""Checks of a GPU script: each is printed and counted, and a failure sets the exit status."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

import torch

if TYPE_CHECKING:
    from mla_fusion.cli.bench_decode_peers import Inputs

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
