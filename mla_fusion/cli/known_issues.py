"""Combinations of versions, hardware and settings with known trouble, and where it is reported.

As of September 2026. `applies` covers what `doctor` can see; the text names the settings that it
cannot see (a model, a flag of vLLM).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from mla_fusion.cli.environment import Environment


@dataclass(frozen=True)
class Issue:
    """One combination: its public threads, the trouble with its remedy, and where it applies."""

    threads: tuple[str, ...]
    text: str
    applies: Callable[[Environment], bool]


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, for comparison: "0.1.19.post1" is (0, 1, 19, 1)."""
    return tuple(int(n) for n in re.findall(r"\d+", version.partition("+")[0]))


def _rocm(environment: Environment) -> bool:
    return environment.platform == "rocm"


def _gpu(environment: Environment) -> bool:
    return environment.platform in ("rocm", "cuda")


def _aiter_before(version: str) -> Callable[[Environment], bool]:
    return lambda e: bool(e.aiter) and numbers(e.aiter) < numbers(version)


ISSUES: tuple[Issue, ...] = (
    Issue(
        ("ROCm/aiter#1380",),
        "AITER before 0.1.8 has no fused_qk_rope_concat_and_cache_mla: the aiter provider is "
        "refused",
        _aiter_before("0.1.8"),
    ),
    Issue(
        ("ROCm/aiter#4342",),
        "AITER before 0.1.19.post1 leaves the query of padded rows unwritten and does not clamp "
        "positions: handled here, the provider zeroes the rows and passes valid positions",
        _aiter_before("0.1.19.post1"),
    ),
    Issue(
        ("ROCm/aiter#3841",),
        "AITER before 0.1.17 ignores the head stride of the query: handled here, it is dense",
        _aiter_before("0.1.17"),
    ),
    Issue(
        ("vllm-project/vllm#25475", "vllm-project/vllm#45562"),
        "gfx942 stores fp8 as e4m3fnuz; reading it as e4m3fn loses accuracy: handled here, the "
        "cache is viewed in the type of vLLM's platform",
        lambda e: e.arch == "gfx942",
    ),
    Issue(
        ("vllm-project/vllm#55609", "ROCm/aiter#5679"),
        "bf16 cache with more than 3 draft tokens on gfx942: AITER's persistent decode aborts and "
        "the other path returns wrong output; use fewer draft tokens or an fp8 cache",
        lambda e: e.arch == "gfx942",
    ),
    Issue(
        ("ROCm/aiter#1455",),
        "Kimi-K2 with DP2 TP4 loses all accuracy with AITER's MLA decode on MI300X",
        lambda e: e.arch == "gfx942",
    ),
    Issue(
        ("ROCm/aiter#4752",),
        "bf16 query, fp8 cache and more than 3 draft tokens at 16 heads a rank: AITER has no "
        "kernel and aborts at graph capture",
        _rocm,
    ),
    Issue(
        ("ROCm/aiter#2656",),
        "DeepSeek-R1-MXFP4 with an fp8 cache: GSM8K falls from 0.95 to 0.03 with one GEMM "
        "configuration of AITER; check accuracy before you serve",
        lambda e: e.arch == "gfx950",
    ),
    Issue(
        ("vllm-project/vllm#45943", "ROCm/aiter#4144"),
        "AITER's persistent decode is slower than the plain one at high concurrency and long "
        "context on MI350X",
        lambda e: e.arch == "gfx950",
    ),
    Issue(
        ("vllm-project/vllm#57134",),
        "a NoPE layer with an fp8 cache: AITER assumes rows of 576 and reads past rows of 512",
        _rocm,
    ),
    Issue(
        ("vllm-project/vllm#45798", "vllm-project/vllm#49142"),
        "vLLM's own fuse_rope_kvcache_cat_mla matches nothing without graph partition: handled "
        "here, the flag switches use_inductor_graph_partition on",
        _gpu,
    ),
    Issue(
        ("vllm-project/vllm#53816", "vllm-project/vllm#56861"),
        "decode context parallelism (-dcp) takes other attention paths: this library declines it",
        _gpu,
    ),
    Issue(
        ("vllm-project/vllm#54933",),
        "a CUDA-graph capture size that is no multiple of 1 + draft tokens is cut silently, and "
        "decode runs without its graph",
        _gpu,
    ),
    Issue(
        ("vllm-project/vllm#58189",),
        "torch 2.13 with E8M0 scales (MXFP4, MXFP8 weights): AssertionError that "
        "auto_functionalized was not removed",
        lambda e: _gpu(e) and numbers(e.torch)[:2] == (2, 13),
    ),
    Issue(
        ("vllm-project/vllm#54338",),
        "--kv-cache-dtype float16 for a bf16 model is reinterpreted without an error: leave it at "
        "auto (this library declines such a layer)",
        lambda e: bool(e.vllm),
    ),
    Issue(
        ("vllm-project/vllm#52190",),
        "Kimi-K3 and other classes without torch.compile run no fusion pass although vLLM logs "
        "them as enabled: mla-fusion check says so before you start",
        lambda e: bool(e.vllm),
    ),
)
