"""The releases of AITER that the double imitates, and the two architectures."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Architecture:
    """One GPU: its fp8 type, its compute units, and how it rounds to bf16.

    Attributes:
        truncates_key: the opt kernel truncates the rotated key of a bf16 cache.
    """

    name: str
    fp8: torch.dtype
    compute_units: int
    truncates_key: bool


ARCHITECTURES = {
    "gfx942": Architecture("gfx942", torch.float8_e4m3fnuz, 304, True),
    "gfx950": Architecture("gfx950", torch.float8_e4m3fn, 256, False),
}


def number(release: str) -> tuple[int, ...]:
    """The parts of a release's name, which order releases."""
    return tuple(int(part) for part in re.findall(r"\d+", release))


# What a release has from which one on; see `Release`.
SINCE = {
    "many_heads": "v0.1.12",
    "lse_kernels": "v0.1.12",
    "aborts": "v0.1.14",
    "strict_fp8": "v0.1.14",
    "native_64": "v0.1.15",
    "split_budget": "v0.1.16",
    "reduce_splits": "v0.1.16",
    "strided_q_nope": "v0.1.17",
    "context_parallel": "v0.1.17",
    "planner_wrapper": "v0.1.18",
    "compute_all": "v0.1.19.post1",
    "causal": "v0.1.20",
}


@dataclass(frozen=True)
class Release:
    """What one release has.

    Attributes:
        many_heads: the planner's sizes take multiples of 8 heads, before of 16.
        lse_kernels: persistent kernels write the log-sum-exp (inferred from ROCm/aiter#2440).
        aborts: a failed check ends the process; before, it raised RuntimeError.
        strict_fp8: only the architecture's own fp8 type is taken.
        native_64: gfx942 runs 64 heads in fp8 as they are (inferred from ROCm/aiter#3188).
        split_budget: get_mla_metadata_info_v1 takes max_split_per_batch.
        reduce_splits: mla_reduce_v1 takes num_kv_splits.
        strided_q_nope: the opt and the general kernel honour the head stride of q_nope.
        context_parallel: the decode and the planner know about round robin.
        planner_wrapper: the planner is a Python function with separate nope and rope types, and
            the persistent decode is skipped for some batches.
        compute_all: compute_all_q_rope exists and positions are clamped.
        causal: mla_decode_fwd takes causal.
    """

    name: str
    many_heads: bool
    lse_kernels: bool
    aborts: bool
    strict_fp8: bool
    native_64: bool
    split_budget: bool
    reduce_splits: bool
    strided_q_nope: bool
    context_parallel: bool
    planner_wrapper: bool
    compute_all: bool
    causal: bool

    @property
    def heads_multiple(self) -> int:
        """Of what the planner's sizes want the head count to be a multiple."""
        return 8 if self.many_heads else 16


RELEASES = {
    name: Release(name, **{has: number(name) >= number(since) for has, since in SINCE.items()})
    for name in ("v0.1.10.post2", "v0.1.16", "v0.1.18", "v0.1.19.post1", "v0.1.20")
}


def fused_signature(release: Release) -> str:
    """The arguments of fused_qk_rope_concat_and_cache_mla; k_scale comes before q_scale."""
    base = (
        "q_nope, q_pe, kv_c, k_pe, kv_cache, q_out, slot_mapping, k_scale, q_scale, positions, "
        "cos_cache, sin_cache, is_neox, is_nope_first"
    )
    return base + ", compute_all_q_rope=False" * release.compute_all


def info_signature(release: Release) -> str:
    """The arguments of get_mla_metadata_info_v1."""
    base = (
        "batch_size, max_seqlen_qo, num_head_qo, q_dtype, kv_dtype, is_sparse, fast_mode=True, "
        "num_kv_splits=32, intra_batch_mode=False"
    )
    return base + ", max_split_per_batch=-1" * release.split_budget


def plan_signature(release: Release) -> str:
    """The arguments of get_mla_metadata_v1; work_info_set comes before work_indptr."""
    base = (
        "seqlens_qo_indptr, seqlens_kv_indptr, kv_last_page_lens, num_heads_per_head_k, "
        "num_heads_k, is_causal, work_metadata_ptrs, work_info_set, work_indptr, reduce_indptr, "
        "reduce_final_map, reduce_partial_map, page_size=1, kv_granularity=16, max_seqlen_qo=-1, "
        "uni_seqlen_qo=-1, fast_mode=True, topk=-1, max_split_per_batch=-1, intra_batch_mode=False"
    )
    base += ", is_cp_round_robin=False" * release.context_parallel
    separate = ", mla_version=0, dtype_q_nope=None, dtype_q_rope=None"
    separate += ", dtype_kv_nope=None, dtype_kv_rope=None"
    return base + separate * release.planner_wrapper + ", dtype_q=None, dtype_kv=None"


def decode_signature(release: Release) -> str:
    """The arguments of aiter.mla.mla_decode_fwd."""
    base = (
        "q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, "
        "page_size=1, nhead_kv=1, sm_scale=None, logit_cap=0.0, num_kv_splits=None, "
        "num_kv_splits_indptr=None, work_meta_data=None, work_indptr=None, work_info_set=None, "
        "reduce_indptr=None, reduce_final_map=None, reduce_partial_map=None, q_scale=None, "
        "kv_scale=None, intra_batch_mode=False, return_logits=False, return_lse=False"
    )
    parallel = ", g_kv_indptr=None, cp_world_size=1, cp_rank=0"
    return base + parallel * release.context_parallel + ", causal=True" * release.causal


def reduce_signature(release: Release) -> str:
    """The arguments of mla_reduce_v1; num_kv_splits was inserted before final_output."""
    splits = "num_kv_splits, " * release.reduce_splits
    return (
        "partial_output, partial_lse, reduce_indptr, reduce_final_map, reduce_partial_map, "
        f"max_seqlen_q, {splits}final_output, final_lse=None"
    )
