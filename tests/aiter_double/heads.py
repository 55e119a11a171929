"""Which decode kernels exist for a head count, query length and type, by architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.aiter_double.faults import check

if TYPE_CHECKING:
    from tests.aiter_double.versions import Architecture, Release


def kinds(q: torch.dtype, kv: torch.dtype) -> str:
    """The types of query and cache as the manifests name them: "bf16", "fp8" or "mixed"."""
    if q == torch.bfloat16 and kv == torch.bfloat16:
        return "bf16"
    return "fp8" if q == kv else "mixed"


def folded(arch: Architecture, heads: int, qlen: int, kind: str) -> int:
    """The heads the kernel runs at: other multiples of 16 become 16 heads of more batches."""
    native = heads == 16
    if arch.name == "gfx942":
        native |= kind == "fp8" and (heads == 128 or (heads == 64 and qlen == 1))
    else:
        native |= kind == "bf16" or (kind == "fp8" and heads in (32, 64, 128))
    return heads if native or heads % 16 else 16


def check_persistent(
    arch: Architecture, release: Release, heads: int, qlen: int, kind: str
) -> None:
    """Fail where the manifest has no persistent kernel."""
    run = folded(arch, heads, qlen, kind)
    if arch.name == "gfx950" and kind == "bf16":
        ok = heads >= 16 and (qlen <= 4 or heads * qlen >= 64)
    elif run == 16:
        ok = qlen <= 4
    else:
        ok = run in (32, 64, 128) and (run != 64 or qlen == 1 or arch.name == "gfx950")
    ok |= run == 8 and (arch.name, kind, qlen) in (("gfx942", "bf16", 2), ("gfx950", "fp8", 4))
    check(release, ok, f"no persistent {kind} kernel for {heads} heads, {qlen} query tokens")


# (heads, query lengths) without a plan
_PLAIN = {
    "bf16": {8: (1,), 16: (1, 4, 8), 32: (1,), 64: (1,), 128: (1,)},
    "fp8": {8: (1,), 16: (1, 2, 4), 128: (1,)},
    "mixed": {},
}
_PLAIN_GFX950 = {8: (1, 2)}


def check_plain(arch: Architecture, release: Release, heads: int, qlen: int, kind: str) -> None:
    """Fail where there is no kernel without a plan."""
    lengths = _PLAIN[kind].get(heads, ())
    if arch.name == "gfx950" and kind == "bf16":
        lengths = _PLAIN_GFX950.get(heads, lengths)
    check(release, qlen in lengths, f"no plain {kind} kernel for {heads} heads, {qlen} tokens")


def skips_plan(
    arch: Architecture, release: Release, batch: int, heads: int, qlen: int, kind: str
) -> bool:
    """Whether the decode silently ignores a plan."""
    small = (arch.name, kind, heads, qlen) == ("gfx950", "bf16", 16, 1)
    return release.planner_wrapper and small and batch >= 32
