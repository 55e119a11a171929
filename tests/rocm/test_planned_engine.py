"""Whole vLLM engines with attention=aiter over the double: `watch` checks every call they make.

vLLM's worker, model runner, builder and backend serve several prompts, with drafts; each engine
takes a minute, so they run nightly. No AMD hardware is involved.
"""

import pytest

from tests import child as children
from tests.engine.work import BUCKET
from tests.rocm.test_engine import MAX_TOKENS, assert_alike

pytestmark = [pytest.mark.engine, pytest.mark.nightly]
LAYERS = 2  # of the model
# Every token is in every prompt, and so has a continuation there that is drafted.
VOCABULARY = 48
PROMPTS = [(0, [(step * n) % VOCABULARY for n in range(VOCABULARY)]) for step in (1, 5, 7, 11)]
# architecture, heads, cache, drafts, cap. On the double vLLM's own decode of an fp8 cache takes no
# query of three tokens, and it decodes batches of several lengths: fp8 has one draft at most.
ENGINES = [
    ("gfx950", 8, "auto", 3, -1),
    ("gfx942", 12, "fp8", 1, -1),
    ("gfx942", 16, "auto", 2, -1),
    ("gfx950", 20, "fp8", 0, -1),
    ("gfx942", 40, "auto", 3, 16),
    ("gfx950", 64, "fp8", 1, -1),
    ("gfx942", 128, "auto", 0, 1),
]
COMPARED = ENGINES[:2]


def job(folder, engine, **options):
    """An engine's job."""
    architecture, heads, cache, drafts, _ = engine
    arguments = {"kv_cache_dtype": cache}
    if drafts:
        arguments["speculative_config"] = {
            "method": "ngram", "num_speculative_tokens": drafts,
            "prompt_lookup_min": 1, "prompt_lookup_max": 2,
        }  # fmt: skip
    given = {"architecture": architecture, "heads": heads, "bucket": BUCKET * (1 + drafts)}
    given["vocab_size"] = VOCABULARY
    return children.job(
        "tests.rocm.engine:serve",
        folder,
        engine=arguments,
        options={**given, **options},
        prompts=PROMPTS,
        new_tokens=MAX_TOKENS,
        plugin=bool(options),
    )


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: "-".join(map(str, engine)))
def test_an_engine_plans_once_a_step_and_decodes_right(engine, tmp_path):
    _, heads, _, drafts, cap = engine
    chosen = {"provider": "aiter", "attention": "aiter", "max_split_per_batch": cap}
    on = children.run(job(tmp_path / "on", engine, flag=True, **chosen))
    watched = on["watched"]
    assert watched["made"] == [[heads, watched["made"][0][1], watched["made"][0][2]]]
    assert set(watched["plans"]) == {1}, "a step is planned once"
    assert watched["decodes"] == LAYERS * len(watched["plans"]) > 0, "both layers share the plan"
    lengths = {live for _, live in watched["rows"]}
    assert lengths <= set(range(1, 2 + drafts)) and 1 + drafts in lengths
    fold = watched["made"][0][2]
    if cap > 0:
        assert max(watched["busy"]) <= cap * BUCKET * fold
    [steps] = on["steps"]
    assert sum(group["fused"] for group in steps.values()) == len(watched["plans"])
    if engine in COMPARED:
        off = children.run(job(tmp_path / "off", engine))
        assert not off["watched"]["made"]
        assert_alike(on, off)
