"""A whole vLLM engine on its ROCm backend over the double of AITER, with the flag and without.

Prompts of several lengths mixed with decode, and speculative decoding. No AMD hardware is involved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.rocm import child

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.engine
FUSED = "fused_qk_rope_concat_and_cache_mla"
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [7], [9, 10, 11, 12, 9, 10, 11, 12, 9, 10], [5, 6, 5, 6, 5]]
MAX_TOKENS = 6
DRAFTS = 3
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 2}
ENGINES = {
    "gfx950, bf16 cache, 16 heads, speculating": {
        "architecture": "gfx950",
        "heads": 16,
        "bucket": 4 * (1 + DRAFTS),
        "engine": {"seed": 0, "speculative_config": SPECULATIVE},
    },
    "gfx942, fp8 cache, 12 heads": {
        "architecture": "gfx942",
        "heads": 12,
        "engine": {"seed": 0, "kv_cache_dtype": "fp8"},
    },
}

# Without the flag an fp8 value is rounded twice. That moved no logprob by more than 0.12 here; a
# query whose rope half is lost in one of the 12 heads moves them by 0.4 and more.
BOUND = 0.2


def pair(job: dict[str, Any], tmp_path: Path) -> list[tuple[dict[str, Any], dict[str, int]]]:
    """(what the engine did, calls of AITER) with the flag and without, both at once."""
    job = {**job, "prompts": PROMPTS, "max_tokens": MAX_TOKENS}
    started = []
    for name, flag in (("on", {"plugin": True, "flag": True, "provider": "aiter"}), ("off", {})):
        folder = tmp_path / name
        caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "VLLM_CACHE_ROOT": "vllm"}
        places = {key: str(folder / value) for key, value in caches.items()}
        started.append(child.start("engine", {**job, **flag}, **places))
    return [tuple(child.answer(process, "RESULT", "CALLS")) for process in started]


@pytest.mark.parametrize("name", ENGINES)
def test_the_engine_serves_what_it_serves_without_the_flag(name: str, tmp_path: Path) -> None:
    (on, calls), (off, without) = pair(ENGINES[name], tmp_path)
    assert calls[FUSED] > 0
    assert FUSED not in without
    if "bf16" in name:
        assert on["tokens"] == off["tokens"]
        assert on["logprobs"] == off["logprobs"]
        return
    compared = 0
    for ours, theirs, our_logprobs, their_logprobs, margins in zip(
        *(on["tokens"], off["tokens"], on["logprobs"], off["logprobs"], off["margins"]), strict=True
    ):
        # All prompts enter in one mixed batch, which runs as it does without the flag.
        assert (ours[0], our_logprobs[0]) == (theirs[0], their_logprobs[0])
        for step in range(MAX_TOKENS):
            assert our_logprobs[step] == pytest.approx(their_logprobs[step], abs=BOUND)
            if ours[step] != theirs[step]:  # two nearly equal; what follows is another text
                assert margins[step] < BOUND, (ours, theirs)
                break
            compared += 1
    assert compared >= len(PROMPTS) * MAX_TOKENS / 2
