"""Which decode kernels exist, as AITER's kernel manifests name them, and how heads are folded.

The manifests were read at v0.1.20; what an older release lacks is in `versions.SINCE`. They name no
query lengths for 64 and 128 heads in fp8: those that vLLM asks for are taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.aiter_double.faults import check

if TYPE_CHECKING:
    from tests.aiter_double.versions import Architecture, Release

# (architecture, types) -> {heads: query lengths} of the kernels that follow a plan; bf16 on gfx950
# has two kernels for any number of heads, see `check_persistent`.
PERSISTENT = {
    ("gfx942", "bf16"): {8: (2,), 16: (1, 2, 3, 4)},
    ("gfx942", "mixed"): {16: (1, 2, 3, 4)},
    ("gfx942", "fp8"): {16: (1, 2, 4), 64: (1,), 128: (1, 2, 4)},
    ("gfx950", "mixed"): {},
    ("gfx950", "fp8"): {8: (4,), 16: (1, 2, 4), 32: (1, 4), 64: (1, 2, 4), 128: (1, 2, 4)},
}
# The same for kernels that also write the log-sum-exp.
LSE = {
    ("gfx942", "fp8"): {64: (1,)},
    ("gfx950", "fp8"): {8: (4,), 16: (1, 4), 32: (1, 4)},
}
# And for those that hide nothing of a draft from its first token.
NON_CAUSAL = {("gfx950", "fp8"): {8: (4,), 16: (1, 4), 32: (4,)}}
# Kernels without a plan.
PLAIN = {
    ("gfx942", "bf16"): {8: (1,), 16: (1, 4, 8), 32: (1,), 64: (1,), 128: (1,)},
    ("gfx950", "bf16"): {8: (1, 2), 16: (1, 4, 8), 32: (1,), 64: (1,), 128: (1,)},
    **{(arch, "fp8"): {8: (1,), 16: (1, 2, 4), 128: (1,)} for arch in ("gfx942", "gfx950")},
}
# heads x query length for which the number of splits of an fp8 decode without a plan is known
SPLITS = (8, 16, 24, 32, 48, 64, 128, 256, 384, 512)


def kinds(q: torch.dtype, kv: torch.dtype) -> str:
    """The types of query and cache as the manifests name them: "bf16", "fp8" or "mixed"."""
    if q == torch.bfloat16 and kv == torch.bfloat16:
        return "bf16"
    return "fp8" if q == kv else "mixed"


def native(arch: Architecture, release: Release, heads: int, qlen: int, kind: str) -> bool:
    """Whether the planner and the decode run so many heads as they are."""
    if heads == 16 or (arch.name, kind) == ("gfx950", "bf16"):
        return True
    if arch.name == "gfx950":
        return kind == "fp8" and heads in (32, 64, 128)
    return kind == "fp8" and (heads == 128 or (heads == 64 and qlen == 1 and release.native_64))


def folded(arch: Architecture, release: Release, heads: int, qlen: int, kind: str) -> int:
    """The heads the kernel runs at: other multiples of 16 become 16 heads of more batches."""
    return heads if native(arch, release, heads, qlen, kind) or heads % 16 else 16


def check_supported(arch: Architecture, release: Release, heads: int, qlen: int, kind: str) -> None:
    """The head counts that the Python side of the decode lets through."""
    ok = native(arch, release, heads, qlen, kind) or heads == 8 or heads in range(16, 129, 16)
    assert ok, f"nhead={heads} not supported"


def check_planned(arch: Architecture, release: Release, heads: int, qlen: int, kind: str) -> None:
    """The planner folds what is not native, and then knows few shapes."""
    run = folded(arch, release, heads, qlen, kind)
    eight = (arch.name, kind, qlen) in (("gfx942", "bf16", 2), ("gfx950", "fp8", 4))
    ok = native(arch, release, run, qlen, kind) or (run == 8 and eight)
    check(release, ok, f"the planner knows no {kind} of {heads} heads, {qlen} query tokens")


def check_persistent(
    arch: Architecture, release: Release, heads: int, qlen: int, kind: str, lse: bool, causal: bool
) -> None:
    """Fail where the manifest has no persistent kernel."""
    run, key = folded(arch, release, heads, qlen, kind), (arch.name, kind)
    if key == ("gfx950", "bf16"):
        # A kernel of 32 x 4 rows, and one of 64 that can do more.
        wide = run * qlen >= 128 or run > 64
        exists = wide or run * qlen >= 64 or run >= 16
        writes_lse = sees_all = not wide
    else:
        exists, writes_lse, sees_all = (
            qlen in table.get(key, {}).get(run, ()) for table in (PERSISTENT, LSE, NON_CAUSAL)
        )
    what = f"persistent {kind} kernel for {heads} heads, {qlen} query tokens"
    check(release, exists, f"no {what}")
    check(release, not lse or (writes_lse and release.lse_kernels), f"no LSE from the {what}")
    check(release, causal or qlen == 1 or sees_all, f"no non-causal {what}")


def check_plain(
    arch: Architecture, release: Release, heads: int, qlen: int, kind: str, splits: int | None
) -> None:
    """Fail where there is no kernel without a plan, or nothing that says its splits."""
    if kind == "fp8" and splits is None and heads * qlen not in SPLITS:
        raise KeyError(f"no splits are known for {heads * qlen} rows")
    ok = qlen in PLAIN.get((arch.name, kind), {}).get(heads, ())
    check(release, ok, f"no plain {kind} kernel for {heads} heads, {qlen} tokens")


def skips_plan(
    arch: Architecture, release: Release, batch: int, heads: int, qlen: int, kind: str
) -> bool:
    """Whether the decode silently ignores a plan."""
    small = (arch.name, kind, heads, qlen) == ("gfx950", "bf16", 16, 1)
    return release.planner_wrapper and small and batch >= 32
