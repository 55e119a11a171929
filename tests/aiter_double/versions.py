"""The releases of AITER that the double imitates, the two architectures, and the ops' arguments."""

import re
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Architecture:
    """One GPU; truncates_key: the opt kernel truncates the rotated key of a bf16 cache."""

    name: str
    fp8: torch.dtype
    compute_units: int
    truncates_key: bool


ARCHITECTURES = {
    "gfx942": Architecture("gfx942", torch.float8_e4m3fnuz, 304, True),
    "gfx950": Architecture("gfx950", torch.float8_e4m3fn, 256, False),
}
RELEASES = ("v0.1.10.post2", "v0.1.20")  # the oldest and the newest

# Feature -> the first release that has it.
SINCE = {
    "many_heads": "v0.1.12",  # the planner's sizes take multiples of 8 heads, before of 16
    "lse_kernels": "v0.1.12",  # persistent kernels write the LSE (inferred from ROCm/aiter#2440)
    "aborts": "v0.1.14",  # a failed check ends the process; before, it raised RuntimeError
    "strict_fp8": "v0.1.14",  # only the architecture's own fp8 type is taken
    "native_64": "v0.1.15",  # gfx942 runs 64 fp8 heads unfolded (inferred from ROCm/aiter#3188)
    "split_budget": "v0.1.16",  # get_mla_metadata_info_v1 takes max_split_per_batch
    "strided_q_nope": "v0.1.17",  # the opt and general kernels honour q_nope's head stride
    "context_parallel": "v0.1.17",  # the decode and the planner know round robin
    # The planner is a Python function with separate nope and rope types, and the persistent
    # decode is skipped for some batches.
    "planner_wrapper": "v0.1.18",
    "compute_all": "v0.1.19.post1",  # compute_all_q_rope exists, and positions are clamped
    "causal": "v0.1.20",  # mla_decode_fwd takes causal
}


def number(release):
    """The parts of a release's name, which order releases."""
    return tuple(int(part) for part in re.findall(r"\d+", release))


@dataclass(frozen=True)
class Place:
    """A release of AITER on an architecture."""

    arch: Architecture
    release: str

    def has(self, feature):
        """Whether the release has a feature of `SINCE`."""
        return number(self.release) >= number(SINCE[feature])

    @property
    def heads_multiple(self):
        """The planner's sizes need a multiple of this many heads."""
        return 8 if self.has("many_heads") else 16


FUSED = "fused_qk_rope_concat_and_cache_mla"
INFO, PLANNER, DECODE = "get_mla_metadata_info_v1", "get_mla_metadata_v1", "mla_decode_fwd"
GLUON, QUANTIZE = "mla_gluon", "dynamic_mxfp4_quant"
FP4_PRODUCT = "batched_gemm_a16wfp4"
FP8_PRODUCT = "batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant"

# The arguments of each op; `name=default @feature` is one that came with a feature of `SINCE`.
_ARGUMENTS = {
    # k_scale comes before q_scale.
    FUSED: """q_nope, q_pe, kv_c, k_pe, kv_cache, q_out, slot_mapping, k_scale, q_scale, positions,
        cos_cache, sin_cache, is_neox, is_nope_first, compute_all_q_rope=False @compute_all""",
    INFO: """batch_size, max_seqlen_qo, num_head_qo, q_dtype, kv_dtype, is_sparse, fast_mode=True,
        num_kv_splits=32, intra_batch_mode=False, max_split_per_batch=-1 @split_budget""",
    # work_info_set comes before work_indptr.
    PLANNER: """seqlens_qo_indptr, seqlens_kv_indptr, kv_last_page_lens, num_heads_per_head_k,
        num_heads_k, is_causal, work_metadata_ptrs, work_info_set, work_indptr, reduce_indptr,
        reduce_final_map, reduce_partial_map, page_size=1, kv_granularity=16, max_seqlen_qo=-1,
        uni_seqlen_qo=-1, fast_mode=True, topk=-1, max_split_per_batch=-1, intra_batch_mode=False,
        is_cp_round_robin=False @context_parallel, mla_version=0 @planner_wrapper,
        dtype_q_nope=None @planner_wrapper, dtype_q_rope=None @planner_wrapper,
        dtype_kv_nope=None @planner_wrapper, dtype_kv_rope=None @planner_wrapper,
        dtype_q=None, dtype_kv=None""",
    DECODE: """q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q,
        page_size=1, nhead_kv=1, sm_scale=None, logit_cap=0.0, num_kv_splits=None,
        num_kv_splits_indptr=None, work_meta_data=None, work_indptr=None, work_info_set=None,
        reduce_indptr=None, reduce_final_map=None, reduce_partial_map=None, q_scale=None,
        kv_scale=None, intra_batch_mode=False, return_logits=False, return_lse=False,
        g_kv_indptr=None @context_parallel, cp_world_size=1 @context_parallel,
        cp_rank=0 @context_parallel, causal=True @causal""",
    GLUON: """q_nope, q_pe, kv_c, o, page_table, seq_info, sm_scale, k_pe=None, kv_pe_offset=512,
        use_2d_view=False, kv_scale=1.0, min_kv_seq_len=1""",
    FP4_PRODUCT: """x, w, w_scales, dtype=None, y=None, config=None, transpose_bm=False,
        prequant=True, y_scale=None""",
    FP8_PRODUCT: """X, WQ, w_scale, group_size=128, bias=None, dtype=None, splitK=None, YQ=None,
        transpose_bm=False, config=None""",
    QUANTIZE: "x",
}


def arguments(op, at):
    """The arguments of an op in a release, as Python writes them."""
    split = (part.strip().partition(" @") for part in _ARGUMENTS[op].split(","))
    return ", ".join(text for text, _, feature in split if not feature or at.has(feature))
