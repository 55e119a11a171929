#!/usr/bin/env python3
"""The Triton provider on this GPU against the reference, on fresh random inputs.

    python benchmarks/check_numerics.py

The reference's product is computed in float64 here, so that no library's summation order is part
of the comparison. `judge` in tests/kernels/cases.py is the criterion: rotated half and cache equal;
absorbed half within one step, or, in an activation type, what an fp32 sum in some order gives (the
number of such elements is printed). Exits with 1 if a check fails.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from pathlib import Path
from unittest import mock

import torch
from checks import expect, finish

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/kernels"))
import cases

from mla_fusion.cli.bench_region import fp8_type
from mla_fusion.cli.compare import POISON, different_bytes, steps
from mla_fusion.kernels import dispatch, get_provider
from mla_fusion.kernels import triton as provider
from mla_fusion.kernels.dispatch import Plan
from mla_fusion.kernels.inputs import Inputs

reference = get_provider("reference")
DEEPSEEK = {"nope": 128, "rope": 64, "latent": 512, "block_size": 64}
# Widths of other models, and what no model has.
OTHER_WIDTHS = {
    "Mistral-Small-4": {"nope": 64, "rope": 64, "latent": 256},
    "MiniCPM3": {"nope": 64, "rope": 32, "latent": 256, "neox": True},
    "192 + 64, 512": {"nope": 192, "rope": 64, "latent": 512},
    "128 + 96, 320": {"nope": 128, "rope": 96, "latent": 320},
    "256 + 128, 1024": {"nope": 256, "rope": 128, "latent": 1024},
}
FP8, BF16, FP16 = fp8_type(), torch.bfloat16, torch.float16


def absorb(q_nope: torch.Tensor, w_uk_t: torch.Tensor) -> torch.Tensor:
    """`reference.absorb` in float64, rounded once."""
    out = torch.einsum("thp,hpl->thl", q_nope.double(), w_uk_t.double())
    return out.to(q_nope.dtype)


def compare(name: str, inputs: Inputs, got: torch.Tensor, want: torch.Tensor) -> None:
    """One query against the reference."""
    result = cases.judge(inputs, got, want)
    detail = (
        f"equal {result.equal:.6f}, worst step {result.worst}, "
        f"needing the bound {result.bounded}, wrong {result.wrong}"
    )
    expect(name, result.wrong == 0, detail)


def check(name: str, case: cases.Case, plan: Plan | None = None) -> None:
    """Query, cache, padded rows and untouched bytes of one case."""
    call = cases.build(case, "cuda")
    got, got_storage = cases.run(provider, call, plan=plan)
    want, want_storage = cases.run(reference, call)
    compare(f"{name} query", call.inputs, got, want)
    different = different_bytes(got_storage, want_storage)
    padded = bool(got.view(torch.uint8)[call.inputs.slot_mapping < 0].any())
    detail = f"{different} bytes differ, padded rows {'written' if padded else 'zero'}"
    expect(f"{name} cache", different == 0 and not padded, detail)


def shapes() -> None:
    """Real shapes with the measured plans, and every option on small ones."""
    real = cases.Case(**DEEPSEEK)
    for seed, (tokens, heads) in enumerate(
        [(1, 8), (1, 16), (1, 128), (3, 16), (16, 32), (17, 16), (33, 64), (64, 128), (100, 16),
         (128, 128), (200, 8), (256, 16), (512, 16), (512, 128), (1000, 16)]
    ):  # fmt: skip
        case = dataclasses.replace(real, tokens=tokens, heads=heads, seed=seed)
        check(f"T={tokens} H={heads} fp8", case)
        scaled = dataclasses.replace(case, factor=torch.float32)
        check(f"T={tokens} H={heads} fp8 scaled", scaled)
        if tokens in (1, 17, 256):
            check(f"T={tokens} H={heads} bf16", dataclasses.replace(case, kv=BF16, query=BF16))
    options = {
        "neox": {"neox": True},
        "no rope": {"angles": None},
        "fp16": {"act": FP16},
        "fp16 all": {"act": FP16, "kv": FP16, "query": FP16},
        "bf16 query": {"query": BF16},
        "bf16 angles": {"angles": BF16},
        "fp32": {"act": torch.float32, "kv": torch.float32, "query": torch.float32},
        "strided": {"strided": True, "neox": True},
        "misaligned": {"strided": True, "gap": 3},
        "odd": {"nope": 24, "rope": 12, "latent": 40, "block_size": 3},
        "padded": {"padded": tuple(range(0, 40, 3))},
        "all padded": {"padded": tuple(range(40))},
        "scaled": {"factor": torch.float32},
        "scaled neox bf16 query": {"factor": BF16, "query": BF16, "neox": True},
        "scaled no rope fp16": {"factor": torch.float32, "act": FP16, "angles": None},
    }
    for (name, fields), tokens in itertools.product(options.items(), (1, 40)):
        case = dataclasses.replace(real, tokens=tokens, heads=16, seed=tokens, **fields)
        check(f"{name} T={tokens}", case)
    for name, plan in {
        "sum": Plan(block_m=1, block_n=64),
        "walk": Plan(block_m=64, block_n=128, m_tiles=2, rest_last=True, cache_tokens=4),
        "dot": Plan(block_m=16, block_n=64),
    }.items():
        case = dataclasses.replace(real, tokens=150, heads=16, padded=(0, 149))
        check(f"plan {name}", case, plan)
        check(f"plan {name} bf16", dataclasses.replace(case, kv=BF16, query=BF16), plan)
        check(f"plan {name} scaled", dataclasses.replace(case, factor=torch.float32), plan)


def widths() -> None:
    """Other widths, with the plans that are chosen for them, and with large tiles."""
    large = Plan(block_m=64, block_n=256, m_tiles=4, rope_rows=256, cache_tokens=16, num_warps=8)
    batches = [(1, 16), (17, 32), (64, 16), (256, 8), (512, 32)]
    targets = ({"kv": kv, "query": kv} for kv in (FP8, BF16))
    for target, (name, fields) in itertools.product(targets, OTHER_WIDTHS.items()):
        for seed, (tokens, heads) in enumerate(batches):
            padded = (0, tokens - 1) if tokens > 1 else ()
            case = cases.Case(
                **DEEPSEEK | fields | target, tokens=tokens, heads=heads, seed=seed, padded=padded
            )
            of = f"{name} T={tokens} H={heads} {str(case.kv)[6:]}"
            check(of, case)
            if tokens == 256:
                check(f"{of}, large tiles", case, large)


def extremes() -> None:
    """Saturation, NaN, no tokens, and a cache of more than 2^31 elements."""
    case = cases.Case(**DEEPSEEK, padded=(), tokens=3)
    call = cases.build(case, "cuda")
    q, kv_c = call.inputs.q, call.inputs.kv_c
    q[0], q[1, 0, 0], q[1, 1, -1] = 1e6, torch.nan, torch.nan
    q[2, 2, -3:], kv_c[1, 5] = torch.inf, -torch.inf
    kv_c[0], kv_c[2, 3] = -1e9, torch.nan
    for tokens_plan in (Plan(block_m=1, block_n=32), Plan(block_m=64, block_n=256), None):
        got, _ = cases.run(provider, call, plan=tokens_plan)
        want, _ = cases.run(reference, call)
        compare("overflow and NaN", call.inputs, got, want)
        nan = got.float().isnan()
        expect("saturation", not bool(nan[0].any()), f"largest {float(got[0].float().abs().max())}")
        expect("NaN out", bool(nan[1, 0, :512].all() and nan[1, 1, -1]), "where NaN went in")
    out, storage = cases.run(provider, cases.build(dataclasses.replace(case, tokens=0), "cuda"))
    expect("T=0", out.shape[0] == 0 and bool((storage == POISON).all()), "nothing written")

    blocks = 2**31 // (64 * 576) + 100
    call = cases.build(dataclasses.replace(case, tokens=40, padded=(1,)), "cuda")
    call.storage = torch.full((blocks * 64 * 576,), POISON, dtype=torch.uint8, device="cuda")
    slots = blocks * 64 - 1 - torch.arange(40, device="cuda") * 70
    slots[1], slots[2] = -1, 0
    cache = call.storage.view(FP8).view(blocks, 64, 576)
    call.inputs = call.inputs._replace(kv_cache=cache, slot_mapping=slots)
    (got, got_storage), (want, want_storage) = (cases.run(m, call) for m in (provider, reference))
    compare("huge cache query", call.inputs, got, want)
    different = different_bytes(got_storage, want_storage)
    expect(
        "huge cache", different == 0, f"{got_storage.numel()} elements, {different} bytes differ"
    )


def graphs() -> None:
    """Capture at both ends of the bucket after a warm-up, replay with changed inputs."""
    shapes = [DEEPSEEK, DEEPSEEK | OTHER_WIDTHS["Mistral-Small-4"]]
    for kv, shape in itertools.product((FP8, BF16), shapes):
        case = cases.Case(**shape, heads=16, padded=(), kv=kv, query=kv)
        ends = [cases.build(dataclasses.replace(case, tokens=n), "cuda") for n in (1, 512)]
        started, lines = time.perf_counter(), []
        provider.warmup(cases.padded(ends[1]), 512, progress=lines.append)
        seconds = time.perf_counter() - started
        print(f"     {lines[0]} ... {len(lines)} lines, {seconds:.1f} s")
        untouched = bool((ends[1].storage == POISON).all())
        expect("warm-up", untouched, f"{len(lines)} configurations, cache untouched {untouched}")
        from mla_fusion.kernels import triton_kernels

        def compiled() -> int:
            caches = triton_kernels.prep_kernel.device_caches.values()
            return sum(len(entry[0]) for entry in caches)

        before = compiled()
        for call in ends:
            a = call.inputs
            out = a.q_out
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                provider.fused_mla_decode_prep(a)
            for _ in range(3):
                a.q.normal_()
                a.kv_c.normal_()
                a.positions.random_(0, 64)
                slots = torch.randperm(a.kv_cache.shape[0] * 64, device="cuda")
                a.slot_mapping.copy_(slots[: len(out)])
                call.storage.fill_(POISON)
                fresh = dataclasses.replace(call, storage=call.storage.clone())
                graph.replay()
                want, want_storage = cases.run(reference, fresh)
                compare(f"graph T={len(out)}", a, out, want)
                different = different_bytes(call.storage, want_storage)
                expect(f"graph T={len(out)} cache", different == 0, f"{different} bytes differ")
        expect("no compilation at capture", compiled() == before, f"{compiled()} variants")


def programmatic_launch() -> None:
    """A producer, the region and a consumer, many times in one graph: nothing is read too early."""
    case = cases.Case(**DEEPSEEK, heads=16, tokens=8, padded=())
    device = torch.device("cuda", 0)
    widths = provider.widths_of(cases.build(case).inputs)
    plans = {dispatch.choose(8, 16, True, widths, dispatch.device_table(device))}
    for plan in plans | {Plan(), Plan(block_m=1, block_n=32, num_warps=2)}:
        layers = [cases.build(dataclasses.replace(case, seed=seed), "cuda") for seed in range(40)]
        shared = torch.empty_like(layers[0].inputs.q)
        outs = [torch.empty(8, 16, 576, dtype=FP8, device="cuda") for _ in layers]
        buffer = torch.empty_like(outs[0])

        def step(plan: Plan = plan, layers: list = layers, shared: torch.Tensor = shared,
                 outs: list = outs, buffer: torch.Tensor = buffer) -> None:  # fmt: skip
            for call, out in zip(layers, outs, strict=True):
                shared.copy_(call.inputs.q)
                inputs = call.inputs._replace(q=shared, q_out=buffer)
                provider.fused_mla_decode_prep(inputs, plan)
                out.view(torch.uint8).copy_(buffer.view(torch.uint8))

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        wrong = 0
        for _ in range(20):
            for out in outs:
                out.view(torch.uint8).zero_()
            graph.replay()
            torch.cuda.synchronize()
            for call, out in zip(layers, outs, strict=True):
                want, _ = cases.run(reference, call)
                wrong += int(steps(out, want).max()) > 1
        expect(f"between other kernels, {plan}", wrong == 0, f"{wrong} of 800 layers wrong")


def main() -> None:
    """Run every check."""
    print(torch.cuda.get_device_name(), torch.__version__)
    with mock.patch.object(reference, "absorb", absorb):
        shapes()
        widths()
        extremes()
        graphs()
        programmatic_launch()
    finish()


if __name__ == "__main__":
    main()
