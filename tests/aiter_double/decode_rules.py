"""The rules of AITER's planner and decode: what breaks each, and a word of the double's fault.

A word that begins with "!" is a check of AITER, which aborts; any other is a silent assumption.
docs/aiter.md prints the tables; test_decode.py runs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.aiter_double.decode import PLAN

if TYPE_CHECKING:
    from collections.abc import Callable

BF16 = torch.bfloat16


def moved(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda a: {name: a[name].clone()}


# what breaks in a decode of 16 heads in the architecture's fp8: (change, fault)
DECODE_RULES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    **{
        f"missing {name}": (lambda a, name=name: {name: None}, "all six buffers or none")
        for name in PLAN
    },
    "moved work_indptr": (moved("work_indptr"), "a buffer moved"),
    "moved work_info_set": (moved("work_info_set"), "a buffer moved"),
    "stale lengths": (lambda a: {"kv_indptr": a["kv_indptr"] + torch.tensor([0, 1, 1, 1]).int(),
                                 "kv_indices": torch.cat((a["kv_indices"], a["kv_indices"]))},
                      "stale plan"),
    "stale queries": (lambda a: {n: a[n][:-1] for n in ("qo_indptr", "kv_indptr")}, "stale plan"),
    "strided query": (lambda a: {"q": torch.cat((a["q"], a["q"]), 1)[:, :16]}, "packed"),
    "strided output": (lambda a: {"o": torch.cat((a["o"], a["o"]), 1)[:, :16]}, "packed"),
    "fp32 output": (lambda a: {"o": a["o"].float()}, "writes bf16"),
    "fp64 scale": (lambda a: {"q_scale": a["q_scale"].double()}, "fp32"),
    "index -1": (lambda a: {"kv_indices": torch.full_like(a["kv_indices"], -1)}, "outside"),
    # checked by AITER
    "no query scale": (lambda a: {"q_scale": None}, "!needs q_scale"),
    "host scale": (lambda a: {"kv_scale": 0.25}, "!needs kv_scale"),
    "fp16 query": (lambda a: {"q": a["q"].half()}, "!unsupported query type"),
    "fp32 cache": (lambda a: {"kv_buffer": a["kv_buffer"].float()}, "!unsupported cache type"),
    "fp8 query, bf16 cache": (lambda a: {"kv_buffer": a["kv_buffer"].to(BF16)}, "!fp8 cache"),
    "int64 indices": (lambda a: {"kv_indices": a["kv_indices"].long()}, "!int32"),
    "int64 indptr": (lambda a: {"qo_indptr": a["qo_indptr"].long()}, "!int32"),
    "two KV heads": (lambda a: {"nhead_kv": 2}, "!pages"),
    "logit cap": (lambda a: {"logit_cap": 30.0}, "!logit_cap"),
    "12 heads": (lambda a: {"q": a["q"][:, :12].contiguous(), "o": a["o"][:, :12].contiguous()},
                 "!no persistent"),
    "5 tokens": (lambda a: {"max_seqlen_q": 5}, "!no persistent"),
}  # fmt: skip


PLAN_RULES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "int64 indptr": (lambda a: {"seqlens_kv_indptr": a["seqlens_kv_indptr"].long()}, "!int32"),
    "indptr from 1": (lambda a: {"seqlens_kv_indptr": a["seqlens_kv_indptr"] + 1}, "starts at 0"),
    "granularity 24": (lambda a: {"kv_granularity": 24}, "!power of two"),
    "page 3": (lambda a: {"page_size": 3}, "!power of two"),
    "full last pages": (lambda a: {"kv_last_page_lens": a["kv_last_page_lens"] + 1}, "hold one"),
    "longer queries": (lambda a: {"max_seqlen_qo": 0}, "longer than max_seqlen_qo"),
    "uneven queries": (lambda a: {"uni_seqlen_qo": 2}, "all queries are so long"),
    "large work_indptr": (lambda a: {"work_indptr": torch.empty(999, dtype=torch.int32)}, "grid"),
    "int64 works": (lambda a: {"work_info_set": a["work_info_set"].long()}, "as torch.int32"),
    "small reduce_indptr": (lambda a: {"reduce_indptr": a["reduce_indptr"][:2]}, "too small"),
    "swapped works": (lambda a: {"work_info_set": a["work_indptr"],
                                 "work_indptr": a["work_info_set"]}, "grid|small|dense"),
    "fp16 query": (lambda a: {"dtype_q": torch.float16}, "!fp16"),
    "24 heads": (lambda a: {"num_heads_per_head_k": 24}, "!no persistent"),
}  # fmt: skip
