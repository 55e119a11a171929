"""Uses of the adapter `mla_fusion.attention.aiter`: a good one, and those that would break a rule
of AITER's planner or decode, which test_adapter.py runs.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from mla_fusion import attention as persistent
from mla_fusion.attention import PersistentDecodePlan, persistent_mla_decode
from tests import gpus
from tests.aiter_double.versions import DECODE, INFO, PLANNER, number
from tests.attention.decodes import arguments, definition

Change = Callable[[dict[str, Any]], dict[str, Any]]
Spoil = Callable[[PersistentDecodePlan], None]
BF16 = torch.bfloat16


def nothing(_):
    return {}


@dataclass(frozen=True)
class Use:
    """The differences from the good use: 16 heads in fp8, 3 sequences of 2 rows.

    allocate: arguments of the allocation. refresh, decode: get the arguments of these. before,
    after: get the plan, before and after its refresh. page: tokens in a block of the cache.
    lengths: keys of each sequence. rows: query rows of each, if not the most there may be.
    overwrite: the caller reuses the step's tensors before the decode.
    """

    allocate: dict[str, Any] = field(default_factory=dict)
    refresh: Change = nothing
    before: Spoil = nothing
    after: Spoil = nothing
    decode: Change = nothing
    page: int = 16
    lengths: tuple[int, ...] = (70, 3, 200)
    rows: tuple[int, ...] = ()
    return_lse: bool = False
    overwrite: bool = False


def replace(**changes):
    """Put other tensors, made of its own, into the plan."""

    def spoil(plan):
        for name, make in changes.items():
            setattr(plan, name, make(getattr(plan, name)))

    return spoil


def found(double, monkeypatch):
    """The library finds the architecture of the double."""
    # Uncached: a test without AITER must not be given the module of this one.
    monkeypatch.setattr(persistent, "get_provider", persistent.get_provider.__wrapped__)
    gpus.imitate(monkeypatch, double.arch.name, sms=double.arch.compute_units)


def run(use, double):
    """The adapter's output [T, H, 512], and that of the definition."""
    fields = {"max_batch": 3, "max_query_len": 2, "num_heads": 16, "planner": "aiter"}
    fields |= dict.fromkeys(("q_dtype", "kv_dtype"), double.arch.fp8) | use.allocate
    rows = use.rows or (fields["max_query_len"],) * len(use.lengths)
    given = arguments(rows, use.lengths, use.page, 512, 64, **fields)
    plan = given["plan"]
    double.forget(PLANNER)  # the refresh below is the one that is watched
    step = {
        "qo_indptr": torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32),
        "seq_lens": torch.tensor(use.lengths, dtype=torch.int32),
        "num_tokens": sum(rows), "max_query_len": max(rows),
    }  # fmt: skip
    step |= use.refresh(step)
    use.before(plan)
    plan.refresh(**step)
    use.after(plan)
    if use.overwrite:
        step["qo_indptr"].zero_()
        step["seq_lens"].fill_(1)
    given |= use.decode(given)
    out, _ = persistent_mla_decode(**given, return_lse=use.return_lse)
    return out, definition(given, rows, use.lengths)[0]


WIDE = {"q_dtype": BF16, "kv_dtype": BF16}
REPLACED = "or none; {} is another tensor: allocate a new plan"
ONE_BATCH = "qo_indptr must be a dense int32 tensor of 3 elements (a batch of 2)"


@dataclass(frozen=True)
class Rule:
    """One rule, in words, and how to make the library break it.

    refused: part of the ValueError with which the library refuses before the call; empty if it
    calls AITER so that the result is right. before: the first release in which the rule no longer
    holds; since: in which it holds. on: the one architecture that has the rule, if not both have.
    """

    says: str
    hostile: Use
    refused: str = ""
    before: str = "v1"
    since: str = "v0"
    on: str = ""

    def holds(self, at):
        """Whether an architecture and a release have the rule."""
        since, before = number(self.since), number(self.before)
        return self.on in ("", at.arch.name) and since <= number(at.release) < before


def half(x, dim):
    """The values of x in a tensor that is twice as large in `dim`."""
    return torch.cat((x, x), dim).narrow(dim, 0, x.shape[dim])


def strided_out(a):
    return {"out": half(torch.empty_like(a["q"][..., :512], dtype=BF16), 1)}


def wrong_block(a):
    """Entries of the block table behind the end of a sequence, which nothing may read."""
    table = a["block_table"].clone()
    table[1, 1:] = -1
    return {"block_table": table}


def given(name, make):
    """A decode of which an argument is another."""
    return Use(decode=lambda a: {name: make(a[name])})


RULES = {
    INFO: [
        Rule("heads are a multiple of 8, before v0.1.12 of 16", Use({"num_heads": 12})),
    ],
    PLANNER: [
        Rule("the indptr tensors are int32",
             Use(refresh=lambda a: {"qo_indptr": a["qo_indptr"].long()}),
             "qo_indptr must be a dense int32 tensor"),
        Rule("the KV indptr begins at 0", Use(before=lambda plan: plan.kv_indptr.fill_(1))),
        Rule("both indptr tensors describe one batch",
             Use(refresh=lambda a: {"seq_lens": a["seq_lens"][:-1]}), ONE_BATCH),
        Rule("there is a last page for each sequence", Use(lengths=(70, 3, 200, 5)),
             "the batch must be 1 to 3 sequences"),
        Rule("a page of one token is full", Use(lengths=(64, 16, 208))),
        Rule("cuts are at multiples of a power of two", Use({"kv_granularity": 24}),
             "AITER's planner takes a power of two as kv_granularity, got 24"),
        Rule("pages hold a power of two of tokens", Use(page=3)),
        Rule("queries declared even are even", Use(rows=(2, 1, 2))),
        Rule("queries are bf16 or fp8", Use({"q_dtype": torch.float16}),
             "no kernel takes a torch.float16 query"),
        Rule("other head counts than 16 are folded to 16",
             Use({"num_heads": 24, "max_query_len": 1})),
        *(Rule(f"{name} is as asked for", Use(before=replace(**{name: make})),
               REPLACED.format(name))
          for name, make in (("work_indptr", lambda x: torch.cat((x, x))),
                             ("work_info_set", torch.clone), ("reduce_indptr", lambda x: x[:2]))),
        Rule("buffers are sized for the cap on splits that the plan is made with",
             Use({"max_split_per_batch": 999}), since="v0.1.16"),
        Rule("there is no cap where buffers cannot be sized for it",
             Use({"max_split_per_batch": 4}),
             "this AITER sizes its buffers without max_split_per_batch", before="v0.1.16"),
    ],
    DECODE: [
        *(Rule(f"with a plan there is {name}", Use(after=replace(**{name: lambda x: x[:0]})),
               REPLACED.format(name))
          for name in ("work_metadata_ptrs", "work_indptr", "work_info_set", "reduce_indptr",
                       "reduce_final_map", "reduce_partial_map")),
        *(Rule(f"{name} is where the planner saw it", Use(after=replace(**{name: torch.clone})),
               REPLACED.format(name))
          for name in ("work_indptr", "work_info_set")),
        Rule("the plan is of this step's lengths and keys", Use(overwrite=True)),
        Rule("the plan is of this step's queries",
             Use(decode=lambda a: {"q": a["q"][:-2], "block_table": a["block_table"][:-1]}),
             "the plan was refreshed for 6 query rows in 3 sequences"),
        Rule("the query is packed", given("q", lambda x: half(x, 1))),
        Rule("the output is packed", Use(decode=strided_out)),
        Rule("the output is bf16", Use(decode=lambda a: {"out": a["q"][..., :512].float()})),
        Rule("the cache is dense", given("kv_cache", lambda x: half(x, 2)), "kv_cache is strided"),
        *(Rule("an fp8 query has scales of fp32", given(name, make),
               f"{name} must be a tensor of one fp32 element")
          for name, make in (("q_scale", torch.Tensor.double), ("q_scale", lambda x: None),
                             ("kv_scale", lambda x: 0.25))),
        Rule("every key has an entry of the cache", Use(decode=wrong_block)),
        Rule("drafts of folded heads are even", Use({"num_heads": 48, **WIDE}, rows=(2, 1, 2))),
        Rule("queries are bf16 or fp8", given("q", torch.Tensor.half), "q must be torch.float8"),
        Rule("caches are bf16 or fp8", given("kv_cache", torch.Tensor.float),
             "kv_cache must be torch.float8"),
        Rule("an fp8 query needs an fp8 cache", Use({"kv_dtype": BF16}),
             "over a torch.bfloat16 cache: queries"),
        Rule("a bf16 query over an fp8 cache has 16 heads", Use({"num_heads": 64, "q_dtype": BF16}),
             "no persistent bf16 over fp8 kernel for 64 heads"),
        Rule("page indices are int32", given("block_table", torch.Tensor.long),
             "block_table must be int32"),
        Rule("there is one KV head", given("kv_cache", lambda x: x.unsqueeze(2)),
             "kv_cache must be [blocks, page_size, 576]"),
        Rule("heads and entries are 576 wide",
             Use(decode=lambda a: {n: a[n][..., :544].contiguous() for n in ("q", "kv_cache")}),
             "AITER decodes entries of 576"),
        # Kernels that do not exist.
        Rule("fp8 has no kernel for 3 tokens", Use({"max_query_len": 3})),
        Rule("few kernels write the log-sum-exp", Use(return_lse=True),
             "writes no log-sum-exp", on="gfx942"),
        Rule("one of two bf16 kernels writes the log-sum-exp",
             Use({"num_heads": 128, **WIDE}, return_lse=True),
             "writes no log-sum-exp", on="gfx950"),
        Rule("no kernel writes the log-sum-exp (inferred)",
             Use({"max_query_len": 1}, return_lse=True),
             "not all persistent kernels of this AITER", on="gfx950", before="v0.1.12"),
        Rule("some kernels need a plan", Use({"num_heads": 64, "max_query_len": 1})),
    ],
}  # fmt: skip
