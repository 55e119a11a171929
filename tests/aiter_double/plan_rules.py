"""The rules of AITER's planner. test_rules.py and test_adapter.py run them.

`direct` changes a good call of the planner for 16 heads in fp8; it gets the arguments. `hostile` is
a use of the adapter.
"""

import torch

from tests.aiter_double.rule import ABORTS, ASSERTS, SILENT, Rule
from tests.aiter_double.uses import Use, replace

REPLACED = "or none; {} is another tensor: allocate a new plan"


def twice(x):
    """A buffer of twice the size."""
    return torch.cat((x, x))


INFO_RULES = [
    Rule("head-multiple", "heads are a multiple of 8, before v0.1.12 of 16", ASSERTS,
         words="num_head_qo must be a multiple of",
         direct=lambda a: {"num_head_qo": 12}, hostile=Use({"num_heads": 12})),
]  # fmt: skip

PLAN_RULES = [
    Rule("int64-indptr", "the indptr tensors are int32", ABORTS,
         words="seqlens_qo_indptr is a dense int32 tensor",
         refused="qo_indptr must be a dense int32 tensor",
         direct=lambda a: {"seqlens_qo_indptr": a["seqlens_qo_indptr"].long()},
         hostile=Use(refresh=lambda a: {"qo_indptr": a["qo_indptr"].long()})),
    Rule("int64-page-lengths", "the lengths of the last pages are int32", ABORTS,
         words="page lengths are int32",
         direct=lambda a: {"kv_last_page_lens": a["kv_last_page_lens"].long()}, hostile=Use()),
    Rule("indptr-from-1", "the KV indptr begins at 0", SILENT,
         words="seqlens_kv_indptr starts at 0",
         direct=lambda a: {"seqlens_kv_indptr": a["seqlens_kv_indptr"] + 1},
         hostile=Use(before=lambda plan: plan.kv_indptr.fill_(1))),
    Rule("other-batch", "both indptr tensors describe one batch", SILENT,
         words="the two indptr tensors describe the same batch",
         refused="qo_indptr must be a dense int32 tensor of 3 elements (a batch of 2)",
         direct=lambda a: {"seqlens_kv_indptr": a["seqlens_kv_indptr"][:-1]},
         hostile=Use(refresh=lambda a: {"seq_lens": a["seq_lens"][:-1]})),
    Rule("few-page-lengths", "there is a last page for each sequence", SILENT,
         words="a page length for each sequence", refused="a batch of 4 does not fit a plan",
         direct=lambda a: {"kv_last_page_lens": a["kv_last_page_lens"][:-1]},
         hostile=Use(lengths=(70, 3, 200, 5))),
    Rule("full-pages", "a page of one token is full", SILENT,
         words="pages of one token hold one",
         direct=lambda a: {"kv_last_page_lens": a["kv_last_page_lens"] + 15},
         hostile=Use(lengths=(64, 16, 208))),
    Rule("granularity", "cuts are at multiples of a power of two", ABORTS,
         words="kv_granularity is a power of two",
         refused="AITER's planner takes a power of two as kv_granularity, got 24",
         direct=lambda a: {"kv_granularity": 24}, hostile=Use({"kv_granularity": 24})),
    Rule("page-of-3", "pages hold a power of two of tokens", ABORTS,
         words="page_size is a power of two",
         direct=lambda a: {"page_size": 3}, hostile=Use(page=3)),
    Rule("longer-queries", "no query is longer than declared", SILENT,
         words="a query is longer than max_seqlen_qo", direct=lambda a: {"max_seqlen_qo": 0}),
    Rule("uneven-queries", "queries declared even are even", SILENT,
         words="uni_seqlen_qo says that all queries are so long",
         direct=lambda a: {"uni_seqlen_qo": 2}, hostile=Use(rows=(2, 1, 2))),
    Rule("plan-fp16", "queries are bf16 or fp8", ABORTS,
         words="unsupported query type torch.float16",
         refused="no kernel takes a torch.float16 query",
         direct=lambda a: {"dtype_q": torch.float16}, hostile=Use({"q_dtype": torch.float16})),
    Rule("24-heads", "other head counts than 16 are folded to 16", ABORTS,
         words="the planner knows no fp8 of 24 heads",
         direct=lambda a: {"num_heads_per_head_k": 24},
         hostile=Use({"num_heads": 24, "max_query_len": 1})),
    Rule("grid", "the grid is the size of work_indptr", SILENT,
         words="the grid is read from the size of work_indptr",
         refused=REPLACED.format("work_indptr"),
         direct=lambda a: {"work_indptr": twice(a["work_indptr"])},
         hostile=Use(before=replace(work_indptr=twice))),
    Rule("int64-works", "buffers are of the types asked for", SILENT,
         words="work_info_set is reinterpreted as torch.int32",
         refused=REPLACED.format("work_info_set"),
         direct=lambda a: {"work_info_set": a["work_info_set"].long()},
         hostile=Use(before=replace(work_info_set=torch.Tensor.long))),
    Rule("strided-works", "buffers are dense", SILENT,
         words="work_info_set must be dense", refused=REPLACED.format("work_info_set"),
         direct=lambda a: {"work_info_set": twice(a["work_info_set"])[::2]},
         hostile=Use(before=replace(work_info_set=lambda x: twice(x)[::2]))),
    Rule("small-buffer", "buffers hold the batch", SILENT,
         words="reduce_indptr is too small for the batch",
         refused=REPLACED.format("reduce_indptr"),
         direct=lambda a: {"reduce_indptr": a["reduce_indptr"][:2]},
         hostile=Use(before=replace(reduce_indptr=lambda x: x[:2]))),
    Rule("swapped-works", "work_info_set goes before work_indptr", SILENT,
         words="work_indptr is too small for the batch",
         direct=lambda a: {"work_info_set": a["work_indptr"].expand(8, -1).T.contiguous(),
                           "work_indptr": a["work_info_set"][:, 0].contiguous()[:99]},
         hostile=Use()),
    Rule("cap", "buffers are sized for the cap on splits that the plan is made with", SILENT,
         words="reduce_partial_map is too small for the batch",
         direct=lambda a: {"max_split_per_batch": 999},
         hostile=Use({"max_split_per_batch": 999}), since="v0.1.16"),
    Rule("cap-unsized", "there is no cap where buffers cannot be sized for it", SILENT,
         words="buffers cannot be sized for max_split_per_batch",
         refused="this AITER sizes its buffers without max_split_per_batch",
         direct=lambda a: {"max_split_per_batch": 4},
         hostile=Use({"max_split_per_batch": 4}), before="v0.1.16"),
]  # fmt: skip
