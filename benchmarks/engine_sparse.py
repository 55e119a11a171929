"""`sparse` of `benchmarks/engine.py`: models shaped as DeepSeek-V3.2, with the backend CUSTOM.

One rank of tensor parallel 8 or of data parallelism, few layers, not compiled, a decode step one
CUDA graph, and an indexer that chooses by position (`engine_indexer`). A GPU ran it with vLLM 0.26,
and 0.33, where the model has a class of its own for CUDA (tests/sparse/test_engine_model.py).

The arms, side by side, then in turns at each point as in `complete`:

    default     vLLM's choice: FLASHMLA_SPARSE, for bf16 FLASH_ATTN_MLA_SPARSE
    other       FLASHMLA_SPARSE called otherwise, the measure of rounding; with 128 heads, which it
                does not pad, each request alone
    custom      --attention-backend CUSTOM: what it takes, and what it leaves to FLASHMLA_SPARSE
    ours        CUSTOM with every decode step taken
    shifted     CUSTOM reads wrong slots; the comparison must find it

Tokens are judged if `default` and `other` run. Over `fp8_ds_mla` CUSTOM takes every step here, so
`custom` and `ours` are the same: `--arms default,other,custom,shifted`.

By the profiler CUSTOM must decode every layer of the steps that it takes, with one refresh, and no
layer of others.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

import engine_compare
import engine_complete
import engine_model
import torch
from engine_jobs import finish, is_asked, job, ready, start_ranks

from mla_fusion.runtime import sparse_step

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

MODELS, LAYERS, SEQS = ("v3.2-tp8", "v3.2-dp"), 4, 128
CACHES = {"fp8_ds_mla": "fp8_ds_mla", "bf16": "auto"}
ARMS = ("default", "other", "custom", "ours", "shifted")
POINTS = [engine_complete.Point(batch, 3000) for batch in (1, 16, 32, 64, SEQS)]
LENGTHS = [1, 2, 3, 17, 64, 600, 2047, 2048, 2049, 3000, 2500, 88]  # of the prompts
LAUNCHES = "launches a step of"


def sparse(args: argparse.Namespace) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """Measure the models and caches that `args.only` names; yields the rows of each, and how many
    arms went wrong."""
    end = time.time() + args.seconds
    print(f"   on {torch.cuda.get_device_name()}")
    for model, name in itertools.product(MODELS, CACHES):
        title = f"{model} {name}"
        if is_asked(title, args):
            yield measured(title, model, CACHES[name], args, end)


def measured(
    title: str, model: str, cache: str, args: argparse.Namespace, end: float
) -> tuple[list[dict[str, Any]], int]:
    """Rows of a model and cache, of the engines that did not fail; how many arms went wrong."""
    arms = [arm for arm in ARMS if not args.arms or arm in args.arms.split(",")]
    changes = {
        "what": "complete", "model": model, "layers": LAYERS, "cache": cache, "seqs": SEQS,
        "cudagraph_mode": "FULL_DECODE_ONLY", "mode": 0, "capture": [1, 2, 4, 8, 16, 32, 64, SEQS],
        "max_len": 4096, "max_tokens": 8192, "cache_bytes": 4 << 30, "tokens": 64,
        "phases": [LENGTHS],
    }  # fmt: skip
    alone = {"phases": [[length] for length in LENGTHS]} if model == "v3.2-dp" else {}
    each = {arm: changes | (alone if arm == "other" else {}) for arm in arms}
    began, engines = time.time(), {arm: start_ranks(job(arm=arm, **each[arm])) for arm in arms}
    results = ready(engines, end)
    verdicts, wrong = {}, len(arms) - len(results)
    for arm in results:
        verdicts[arm] = verdict(arm, results, model, cache)
        found = verdicts[arm].startswith("WRONG")
        wrong += (not found or LAUNCHES in verdicts[arm]) if arm == "shifted" else found
        kernels = results[arm]["launches"]
        print(f"   {title}, {arm}: {verdicts[arm]}; kernels of a step {kernels}", flush=True)
    print(f"== {title}, ready after {time.time() - began:.0f} s: {verdicts}", flush=True)
    if "shifted" in engines:
        finish(*engines.pop("shifted")[0], seconds=0)
    known = {"model": model, "layers": LAYERS, "cache": cache}
    facts = engine_complete.facts
    told = {arm: {**known, **facts(results[arm]), "verdict": verdicts[arm]} for arm in results}
    rows, none_failed = engine_complete.timed(title, engines, POINTS, told, end)
    return rows, wrong + (not none_failed)


def verdict(arm: str, results: dict[str, dict[str, Any]], model: str, cache: str) -> str:
    """What is wrong with the kernels or the tokens of an arm, or "right"."""
    heads = engine_model.MODELS[model]["num_attention_heads"]
    most = sparse_step.most_tokens(heads, cache)
    for batch, count in results[arm]["launches"].items():
        taken = arm in ("ours", "shifted") or (arm == "custom" and int(batch) <= most)
        decodes = LAYERS if taken else 0
        wanted = {"mla_plan": bool(decodes), "mla_decode": decodes, "mla_reduce": decodes}
        if {name: count[name] for name in wanted} != wanted:
            return f"WRONG: {count} {LAUNCHES} {batch}"
    return engine_compare.judge(arm, ("other",), results)
