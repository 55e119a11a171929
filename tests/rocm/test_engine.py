"""A whole vLLM engine on its ROCm backend over the double of AITER, with the flag and without.

Prompts of several lengths mixed with decode, and speculative decoding. No AMD hardware is involved.
"""

import pytest

from mla_fusion.cli import child
from tests import child as children
from tests.engine.work import BUCKET

pytestmark = [pytest.mark.engine, pytest.mark.nightly]
FUSED = "fused_qk_rope_concat_and_cache_mla"
PROMPTS = [
    (0, [1, 2, 3, 1, 2, 3, 1, 2]),
    (0, [7]),
    (0, [9, 10, 11, 12, 9, 10, 11, 12, 9, 10]),
    (0, [5, 6, 5, 6, 5]),
]
MAX_TOKENS = 6
DRAFTS = 3
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 2}
# (options, arguments of the engine)
ENGINES = {
    "gfx950, bf16 cache, 16 heads, speculating": (
        {"architecture": "gfx950", "heads": 16, "bucket": BUCKET * (1 + DRAFTS)},
        {"speculative_config": SPECULATIVE},
    ),
    "gfx942, fp8 cache, 12 heads": (
        {"architecture": "gfx942", "heads": 12},
        {"kv_cache_dtype": "fp8"},
    ),
}

# Without the flag an fp8 value is rounded twice, which moved no logprob by more than 0.12 here. A
# query without its rope half in one of the 12 heads moves them by 0.4 and more.
BOUND = 0.2


def pair(name, folder):
    """What the engine did with the flag and without, both at once."""
    options, engine = ENGINES[name]
    started = []
    for flag in ({"flag": True, "provider": "aiter"}, {}):
        job = children.job(
            "tests.rocm.engine:serve",
            folder / ("on" if flag else "off"),
            engine=engine,
            options={**options, **flag},
            prompts=PROMPTS,
            new_tokens=MAX_TOKENS,
            plugin=bool(flag),
        )
        started.append((job, child.start(job)))
    return [child.result(*each) for each in started]


@pytest.mark.parametrize("name", ENGINES)
def test_the_engine_serves_what_it_serves_without_the_flag(name, tmp_path):
    on, off = pair(name, tmp_path)
    assert on["calls"][FUSED] > 0
    assert FUSED not in off["calls"]
    if "bf16" in name:
        assert on["tokens"] == off["tokens"]
        assert on["logprobs"] == off["logprobs"]
        return
    assert_alike(on, off)


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
