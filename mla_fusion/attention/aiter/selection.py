"""The shapes that AITER's persistent decode serves, and what the installed AITER has.

The tables follow AITER's kernel manifests and planner up to v0.1.20, and public reports on them,
which were read: nothing here has run on AMD hardware.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from mla_fusion.attention.plan import heads
from mla_fusion.attention.plan.heads import HeadLayout
from mla_fusion.kernels import ProviderUnavailable
from mla_fusion.kernels import aiter as fused_region
from mla_fusion.kernels.arithmetic import FP8_DTYPES

LATENT = 512  # the output of all its kernels is this wide
WIDTHS = LATENT, 64  # of a cache entry: the latent, and the rotated part behind it
FP8_OF = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}

# (architecture, query and cache, heads of a work item, 0 for any number) -> query lengths with a
# kernel, ascending, and those whose kernel also writes the log-sum-exp.
_QUERY_LENS: dict[tuple[str, str, int], tuple[tuple[int, ...], tuple[int, ...]]] = {
    ("gfx942", "bf16", 16): ((1, 2, 3, 4), ()),
    ("gfx942", "bf16 over fp8", 16): ((1, 2, 3, 4), ()),
    ("gfx942", "fp8", 16): ((1, 2, 4), ()),
    ("gfx942", "fp8", 64): ((1,), (1,)),
    ("gfx950", "bf16", 0): ((1, 2, 3, 4), (1, 2, 3, 4)),
    ("gfx950", "fp8", 16): ((1, 2, 4), (1, 4)),
    ("gfx950", "fp8", 32): ((1, 4), (1, 4)),
    ("gfx950", "fp8", 64): ((1, 2, 4), ()),
    ("gfx950", "fp8", 128): ((1, 2, 4), ()),
}
_SLOW_BATCH = 32  # padded sequences of a step


class Verdict(NamedTuple):
    """AITER's persistent decode for one shape. layout: how its heads are padded and folded.
    query_len: the rows of a sequence that the kernel is for, as many as there are or the next for
    which there is one; 0 without a kernel. unsupported: why there is no kernel, or empty."""

    layout: HeadLayout
    query_len: int = 0
    unsupported: str = ""


def aiter_verdict(
    num_heads: int, query_len: int, q_dtype: torch.dtype, kv_dtype: torch.dtype, arch: str,
    *, return_lse: bool = False,
) -> Verdict:  # fmt: skip
    """Whether AITER serves sequences of up to `query_len` rows on a GPU of `arch`."""
    kind = _kind(q_dtype, kv_dtype)
    layout = heads.aiter_layout(num_heads, query_len, kind, arch)
    any_heads = (arch, kind, 0) in _QUERY_LENS
    key = (arch, kind, 0 if any_heads else layout.per_work)
    lens, lse_lens = _QUERY_LENS.get(key, ((), ()))
    runs = next((n for n in lens if n >= query_len), 0)
    # Of the two bf16 kernels of gfx950, the one for many rows writes no log-sum-exp.
    wide = any_heads and (layout.padded > 64 or layout.padded * runs >= 128)
    shape, why = f"for {layout.per_work} heads and queries of", ""
    if arch not in FP8_OF:
        why = f"AITER's persistent decode has kernels for {' and '.join(FP8_OF)}"
    elif not kind:
        why = f"no kernel takes a {q_dtype} query over a {kv_dtype} cache: queries are bf16, or "
        why += "fp8 over an fp8 cache"
    elif wrong := {q_dtype, kv_dtype} & set(FP8_DTYPES) - {FP8_OF[arch]}:
        why = f"{arch} computes in {FP8_OF[arch]}, not in {wrong.pop()}"
    elif layout.padded > 128:
        why = f"{layout.padded} heads are more than the 128 of the largest kernel"
    elif (arch, kind, layout.per_work) == ("gfx942", "fp8", 128):
        why = "fp8 with 128 heads faults on gfx942 (vllm-project/vllm#43067)"
    elif not runs:
        why = f"{arch} has no persistent {kind} kernel {shape} {query_len} tokens"
    elif return_lse and (wide or runs not in lse_lens):
        why = f"the persistent {kind} kernel of {arch} {shape} {runs} tokens writes no log-sum-exp"
    return Verdict(layout, 0 if why else runs, why)


def aiter_verdict_up_to(
    num_heads: int, query_len: int, q_dtype: torch.dtype, kv_dtype: torch.dtype, arch: str
) -> Verdict:
    """The first verdict against queries of 1 to `query_len` tokens; without one, the longest's."""
    for length in range(1, query_len + 1):
        verdict = aiter_verdict(num_heads, length, q_dtype, kv_dtype, arch)
        if verdict.unsupported:
            break
    return verdict


def slow_steps(
    num_heads: int, query_len: int, dtype: torch.dtype, most: int, arch: str
) -> tuple[int, str]:
    """From how many sequences on, padded ones too and up to `most`, another decode is faster over a
    cache of `dtype`, and which steps those are and why; (0, "") if it never is. The table has no
    step with drafts, but an engine with them may have steps without."""
    if (arch, dtype) != ("gfx950", torch.bfloat16) or num_heads > 16 or most < _SLOW_BATCH:
        return 0, ""
    drafts = " without drafts" if query_len > 1 else ""
    return _SLOW_BATCH, (
        f"{_SLOW_BATCH} sequences or more{drafts} (by AITER's table, with bf16 and up to 16 heads "
        "its other kernel is 1.4 to 1.6 times faster there, ROCm/aiter#4144)"
    )


def unsupported_widths(latent: int, rope: int) -> str:
    """Why AITER's persistent decode does not take a cache of these widths; empty if it does."""
    why = f"its kernels are for latents of {LATENT} and {WIDTHS[1]} rotated"
    return "" if (latent, rope) == WIDTHS else f"{why}, got {latent} and {rope}"


def _kind(q_dtype: torch.dtype, kv_dtype: torch.dtype) -> str:
    """AITER's name of the pair of types; empty if no kernel takes it."""
    if q_dtype == torch.bfloat16 and kv_dtype in FP8_DTYPES:
        return "bf16 over fp8"
    same = {torch.bfloat16: "bf16", **dict.fromkeys(FP8_DTYPES, "fp8")}
    return same.get(q_dtype, "") if q_dtype == kv_dtype else ""


def require() -> None:
    """Raise ProviderUnavailable unless AITER is here and plans as the adapter expects."""
    fused_region.require()
    _, _, names = installed_planner()
    if "kv_last_page_lens" not in names:
        why = "this AITER's get_mla_metadata_v1 has no kv_last_page_lens"
        raise ProviderUnavailable(f"{why}: install v0.1.10.post2 or newer")


def installed_planner() -> tuple[Callable[..., Any], Callable[..., Any], tuple[str, ...]]:
    """(what sizes the buffers, what fills them, the argument names of the latter)."""
    aiter = importlib.import_module("aiter")
    try:
        size, write = aiter.get_mla_metadata_info_v1, aiter.get_mla_metadata_v1
        importlib.import_module("aiter.mla")
    except (AttributeError, ImportError) as error:
        raise ProviderUnavailable(
            f"this AITER has no persistent MLA decode ({error}): install v0.1.10.post2 or newer"
        ) from error
    return size, write, fused_region.parameters(write, "get_mla_metadata_v1")


def sizes_with_cap() -> bool:
    """True if the buffers can be sized for max_split_per_batch: v0.1.16 or newer."""
    name = "get_mla_metadata_info_v1"
    return "max_split_per_batch" in fused_region.parameters(installed_planner()[0], name)
