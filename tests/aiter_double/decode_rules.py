"""The rules of AITER's decode. test_rules.py and test_adapter.py run them.

`direct` changes a good call of the decode of 16 heads in fp8 with a plan; it gets the arguments.
`hostile` is a use of the adapter.
"""

import torch

from tests.aiter_double import calls
from tests.aiter_double.decode import PLAN
from tests.aiter_double.plan_rules import REPLACED
from tests.aiter_double.rule import ABORTS, ASSERTS, KEY, SILENT, Rule
from tests.aiter_double.uses import Use, replace

BF16 = torch.bfloat16
BUFFER = {name: name.replace("work_meta_data", "work_metadata_ptrs") for name in PLAN}
UNPLANNED = dict.fromkeys(PLAN)


def shaped(a, heads, qlen, *types):
    """The arguments of a decode of other shapes, with a plan of its own."""
    query, cache = types or (a["fp8"], a["fp8"])
    return calls.decode(a["aiter"], heads, (70, 9, 200), qlen, query, cache)["decode"]


def half(x, dim):
    """The values of x in a tensor that is twice as large in `dim`."""
    return torch.cat((x, x), dim).narrow(dim, 0, x.shape[dim])


def wrong_block(a):
    """Entries of the block table behind the end of a sequence, which nothing may read."""
    table = a["block_table"].clone()
    table[1, 1:] = -1
    return {"block_table": table}


DECODE_RULES = [
    *(Rule(f"missing-{name.replace('_', '-')}", f"with a plan there is {name}", SILENT,
           words="all six buffers or none", refused=REPLACED.format(BUFFER[name]),
           direct=lambda a, name=name: {name: None},
           hostile=Use(after=replace(**{BUFFER[name]: lambda x: x[:0]})))
      for name in PLAN),
    *(Rule(f"moved-{name.replace('_', '-')}", f"{name} is where the planner saw it", SILENT,
           words="a buffer moved", refused=REPLACED.format(name),
           direct=lambda a, name=name: {name: a[name].clone()},
           hostile=Use(after=replace(**{name: torch.clone})))
      for name in ("work_indptr", "work_info_set")),
    Rule("stale-lengths", "the plan is of this step's lengths", SILENT,
         words="stale plan: it ends elsewhere",
         direct=lambda a: {"kv_indptr": a["kv_indptr"] + torch.tensor([0, 1, 1, 1]).int(),
                           "kv_indices": a["kv_indices"].repeat(2)},
         hostile=Use(overwrite=True)),
    Rule("stale-start", "the plan is of this step's keys", SILENT,
         words="stale plan: it begins elsewhere",
         direct=lambda a: {"kv_indptr": a["kv_indptr"] + 1,
                           "kv_indices": a["kv_indices"].repeat(2)},
         hostile=Use(overwrite=True)),
    Rule("stale-queries", "the plan is of this step's queries", SILENT,
         words="stale plan: other queries",
         refused="the plan was refreshed for 6 query rows in 3 sequences",
         direct=lambda a: {n: a[n][:-1] for n in ("qo_indptr", "kv_indptr")},
         hostile=Use(decode=lambda a: {"q": a["q"][:-2], "block_table": a["block_table"][:-1]})),
    Rule("strided-query-heads", "the query is packed", SILENT,
         words="the query is read as packed",
         direct=lambda a: {"q": half(a["q"], 1)},
         hostile=Use(decode=lambda a: {"q": half(a["q"], 1)})),
    Rule("strided-output", "the output is packed", SILENT, words="o is packed",
         direct=lambda a: {"o": half(a["o"], 1)},
         hostile=Use(decode=lambda a: {"out": half(torch.empty_like(a["q"][..., :512], dtype=BF16),
                                                   1)})),
    Rule("fp32-output", "the output is bf16", SILENT, words="the kernel writes bf16",
         direct=lambda a: {"o": a["o"].float()},
         hostile=Use(decode=lambda a: {"out": a["q"][..., :512].float()})),
    Rule("strided-cache", "the cache is dense", SILENT, words="pages are read as dense",
         refused="kv_cache is strided",
         direct=lambda a: {"kv_buffer": half(a["kv_buffer"], 3)},
         hostile=Use(decode=lambda a: {"kv_cache": half(a["kv_cache"], 2)})),
    Rule("fp64-scales", "scales are fp32", SILENT, words="q_scale is reinterpreted as fp32",
         refused="q_scale must be one fp32 element",
         direct=lambda a: {"q_scale": a["q_scale"].double()},
         hostile=Use(decode=lambda a: {"q_scale": a["q_scale"].double()})),
    Rule("no-page", "every key has an entry of the cache", SILENT,
         words="an index outside the cache reads other memory",
         direct=lambda a: {"kv_indices": torch.full_like(a["kv_indices"], -1)},
         hostile=Use(decode=wrong_block)),
    Rule("one-batch", "both indptr tensors describe one batch", SILENT,
         words="qo_indptr and kv_indptr describe one batch",
         refused="qo_indptr must be a dense int32 tensor of 3 elements (a batch of 2)",
         direct=lambda a: {"kv_indptr": a["kv_indptr"][:-1]},
         hostile=Use(refresh=lambda a: {"seq_lens": a["seq_lens"][:-1]})),
    Rule("few-rows", "qo_indptr ends within the query", SILENT,
         words="queries behind the last row are read",
         direct=lambda a: {"q": a["q"][:-1], "o": a["o"][:-1]}),
    Rule("few-indices", "kv_indptr ends within the indices", SILENT,
         words="indices behind the last one are read",
         direct=lambda a: {"kv_indices": a["kv_indices"][:-1]}),
    Rule("long-rows", "no query is longer than declared", SILENT,
         words="a query is longer than max_seqlen_q",
         direct=lambda a: shaped(a, 16, 2) | {"max_seqlen_q": 1}),
    Rule("uneven-drafts", "drafts of folded heads are even", SILENT,
         words="drafts of folded heads are even",
         direct=lambda a: shaped(a, 48, 2)
         | {"qo_indptr": torch.tensor([0, 2, 3, 5], dtype=torch.int32)},
         hostile=Use({"num_heads": 48, "q_dtype": BF16, "kv_dtype": BF16}, rows=(2, 1, 2))),
    # Checked by AITER.
    Rule("no-scale", "an fp8 query has a scale", ABORTS, words="an fp8 query needs q_scale",
         refused="q_scale must be one fp32 element",
         direct=lambda a: {"q_scale": None}, hostile=Use(decode=lambda a: {"q_scale": None})),
    Rule("host-scales", "scales are tensors", ABORTS, words="an fp8 query needs kv_scale",
         refused="kv_scale must be one fp32 element",
         direct=lambda a: {"kv_scale": 0.25}, hostile=Use(decode=lambda a: {"kv_scale": 0.25})),
    Rule("fp16-query", "queries are bf16 or fp8", ABORTS,
         words="unsupported query type torch.float16", refused="q must be torch.float8",
         direct=lambda a: {"q": a["q"].half()}, hostile=Use(decode=lambda a: {"q": a["q"].half()})),
    Rule("fp32-cache", "caches are bf16 or fp8", ABORTS,
         words="unsupported cache type torch.float32", refused="kv_cache must be torch.float8",
         direct=lambda a: {"kv_buffer": a["kv_buffer"].float()},
         hostile=Use(decode=lambda a: {"kv_cache": a["kv_cache"].float()})),
    Rule("fp8-query-bf16-cache", "an fp8 query needs an fp8 cache", ABORTS,
         words="an fp8 query needs an fp8 cache", refused="over a torch.bfloat16 cache: queries",
         direct=lambda a: {"kv_buffer": a["kv_buffer"].to(BF16)},
         hostile=Use({"kv_dtype": BF16})),
    Rule("bf16-query-fp8-cache", "a bf16 query over an fp8 cache has 16 heads", ABORTS,
         words="bf16 query, fp8 cache: 16 heads only",
         refused="no persistent bf16 over fp8 kernel for 64 heads",
         direct=lambda a: shaped(a, 64, 1, BF16, a["fp8"]),
         hostile=Use({"num_heads": 64, "q_dtype": BF16})),
    Rule("int64-indices", "page indices are int32", ABORTS,
         words="kv_indices is a dense int32 tensor", refused="block_table must be int32",
         direct=lambda a: {"kv_indices": a["kv_indices"].long()},
         hostile=Use(decode=lambda a: {"block_table": a["block_table"].long()})),
    Rule("two-kv-heads", "there is one KV head", ABORTS, words="kv_buffer is [pages, page, 1, 576]",
         refused="kv_cache must be [blocks, page_size, 576]",
         direct=lambda a: {"nhead_kv": 2},
         hostile=Use(decode=lambda a: {"kv_cache": a["kv_cache"].unsqueeze(2)})),
    Rule("entry-width", "heads and entries are 576 wide", ABORTS,
         words="heads and entries are 576 wide", refused="AITER decodes entries of 576",
         direct=lambda a: {"q": a["q"][..., :512]},
         hostile=Use(decode=lambda a: {n: a[n][..., :544].contiguous()
                                       for n in ("q", "kv_cache")})),
    Rule("logit-cap", "logits are not capped", ABORTS, words="logit_cap is not supported",
         direct=lambda a: {"logit_cap": 30.0}, hostile=Use()),
    # Kernels that do not exist.
    Rule("12-heads", "heads are 8 or a multiple of 16", ASSERTS, words="nhead=12 not supported",
         direct=lambda a: {n: a[n][:, :12].contiguous() for n in ("q", "o")},
         hostile=Use({"num_heads": 12})),
    Rule("3-tokens", "fp8 has no kernel for 3 tokens", ABORTS,
         words="no persistent fp8 kernel for 16 heads, 3 query tokens",
         direct=lambda a: shaped(a, 16, 3), hostile=Use({"max_query_len": 3})),
    Rule("no-lse", "few kernels write the log-sum-exp", ABORTS, words="no LSE from the persistent",
         refused="writes no log-sum-exp", on="gfx942",
         direct=lambda a: {"return_lse": True},
         hostile=Use(return_lse=True)),
    Rule("no-lse-of-many-rows", "one of two bf16 kernels writes the log-sum-exp", ABORTS,
         words="no LSE from the persistent", refused="writes no log-sum-exp", on="gfx950",
         direct=lambda a: shaped(a, 128, 1, BF16, BF16) | {"return_lse": True},
         hostile=Use({"num_heads": 128, "q_dtype": BF16, "kv_dtype": BF16},
                     return_lse=True)),
    Rule("no-lse-yet", "no kernel writes the log-sum-exp (inferred)", ABORTS,
         words="no LSE from the persistent", refused="not all persistent kernels of this AITER",
         on="gfx950", before="v0.1.12",
         direct=lambda a: {"return_lse": True},
         hostile=Use({"max_query_len": 1}, return_lse=True)),
    Rule("non-causal", "few kernels see all of a draft", ABORTS, words="no non-causal persistent",
         direct=lambda a: shaped(a, 16, 2) | {"causal": False}, hostile=Use(), since="v0.1.20"),
    Rule("no-plan", "some kernels need a plan", ABORTS,
         words="no plain fp8 kernel for 64 heads",
         direct=lambda a: shaped(a, 64, 1) | UNPLANNED,
         hostile=Use({"num_heads": 64, "max_query_len": 1})),
    Rule("no-splits", "without a plan few shapes have a number of splits", KEY,
         words="no splits are known for 80 rows",
         direct=lambda a: {"max_seqlen_q": 5, **UNPLANNED}, hostile=Use()),
]  # fmt: skip
