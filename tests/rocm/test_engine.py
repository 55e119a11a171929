"""Whole vLLM engines on its ROCm backend over the double of AITER, with the flag and without.

vLLM's worker, model runner, builder and backend serve several prompts, mixed with decode and with
drafts; with attention=aiter `watch` checks every call they make. Each engine takes a minute, so
they run nightly. No AMD hardware is involved.
"""

import pytest

from tests import child as children
from tests.engine.work import BUCKET

pytestmark = [pytest.mark.engine, pytest.mark.nightly]
FUSED = "fused_qk_rope_concat_and_cache_mla"
LAYERS, MAX_TOKENS = 2, 6
# Every token is in every prompt, and so has a continuation there that is drafted.
VOCABULARY = 48
PROMPTS = [(0, [(step * n) % VOCABULARY for n in range(VOCABULARY)]) for step in (1, 5, 7, 11)]
# architecture, heads, cache, drafts, attention and its cap. On the double vLLM's own decode of an
# fp8 cache takes no query of three tokens, and it decodes batches of several lengths: fp8 has one
# draft at most.
ENGINES = [
    ("gfx950", 16, "auto", 3, "auto", None),
    ("gfx942", 12, "fp8", 0, "auto", None),
    ("gfx950", 8, "auto", 3, "aiter", -1),
    ("gfx942", 12, "fp8", 1, "aiter", -1),
    ("gfx942", 16, "auto", 2, "aiter", -1),
    ("gfx950", 20, "fp8", 0, "aiter", -1),
    ("gfx942", 40, "auto", 3, "aiter", 16),
    ("gfx950", 64, "fp8", 1, "aiter", -1),
    ("gfx942", 128, "auto", 0, "aiter", 1),
]
COMPARED = ENGINES[:4]
# Without the flag an fp8 value is rounded twice, which moved no logprob by more than 0.12 here. A
# query without its rope half in one of the 12 heads moves them by 0.4 and more.
BOUND = 0.2


def serve(folder, engine, **options):
    """What an engine did."""
    architecture, heads, cache, drafts, *_ = engine
    arguments = {"kv_cache_dtype": cache}
    if drafts:
        arguments["speculative_config"] = {
            "method": "ngram", "num_speculative_tokens": drafts,
            "prompt_lookup_min": 1, "prompt_lookup_max": 2,
        }  # fmt: skip
    given = {"architecture": architecture, "heads": heads, "bucket": BUCKET * (1 + drafts)}
    given["vocab_size"] = VOCABULARY
    asked = children.job(
        "tests.rocm.work:serve", folder, engine=arguments, options={**given, **options},
        prompts=PROMPTS, new_tokens=MAX_TOKENS, plugin=bool(options),
    )  # fmt: skip
    return children.run(asked)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: "-".join(map(str, engine)))
def test_an_engine_serves_what_it_serves_without_the_flag(engine, tmp_path):
    architecture, _, cache, _, attention, cap = engine
    chosen = {"provider": "aiter", "attention": attention}
    if attention == "aiter":
        chosen["max_split_per_batch"] = cap
    on = serve(tmp_path / "on", engine, flag=True, **chosen)
    assert on["calls"][FUSED] > 0
    if attention == "aiter":
        assert_planned_once_a_step(on, engine)
    if engine in COMPARED:
        off = serve(tmp_path / "off", engine)
        assert FUSED not in off["calls"] and not off["watched"]["made"]
        if (architecture, cache, attention) == ("gfx950", "auto", "auto"):
            assert (on["tokens"], on["logprobs"]) == (off["tokens"], off["logprobs"])
        assert_alike(on, off)


def assert_planned_once_a_step(on, engine):
    """By one plan that both layers share."""
    _, heads, _, drafts, _, cap = engine
    watched = on["watched"]
    [[planned, _, fold]] = watched["made"]
    assert planned == heads
    assert set(watched["plans"]) == {1}, "a step is planned once"
    assert watched["decodes"] == LAYERS * len(watched["plans"]) > 0
    lengths = {live for _, live in watched["rows"]}
    assert lengths <= set(range(1, 2 + drafts)) and 1 + drafts in lengths
    if cap > 0:
        assert max(watched["busy"]) <= cap * BUCKET * fold
    [steps] = on["steps"]
    assert sum(group["fused"] for group in steps.values()) == len(watched["plans"])


def assert_alike(on, off):
    """The same tokens up to a near tie, and logprobs within `BOUND`."""
    compared = 0
    for ours, theirs, our_logprobs, their_logprobs, margins in zip(
        *(on["tokens"], off["tokens"], on["logprobs"], off["logprobs"], off["margins"]), strict=True
    ):
        # All prompts enter in one mixed batch, which runs as without the flag.
        assert (ours[0], our_logprobs[0]) == (theirs[0], their_logprobs[0])
        for step in range(MAX_TOKENS):
            assert our_logprobs[step] == pytest.approx(their_logprobs[step], abs=BOUND)
            if ours[step] != theirs[step]:  # a near tie; the texts differ from here on
                assert margins[step] < BOUND, (ours, theirs)
                break
            compared += 1
    assert compared >= len(PROMPTS) * MAX_TOKENS / 2
