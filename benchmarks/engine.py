"""Runs real vLLM engines on one GPU, with and without the fusion, and compares what they do.

    python benchmarks/engine.py tokens OUT.json     same tokens? many configurations, in parallel
    python benchmarks/engine.py decode OUT.csv      GPU time of a decode step, one engine at a time

Every engine runs in a process of its own with random weights of a scale at which attention
matters (vLLM's dummy weights are so small that tokens hardly depend on it). Opponents of `fused`
(the Triton provider) are `default` (vLLM as it comes) and `cat` (graph partition and
fuse_rope_kvcache_cat_mla, the prerequisites of the fusion).
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

COMMON = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "intermediate_size": 2304,
    "moe_intermediate_size": 256,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
MODELS: dict[str, dict[str, Any]] = {
    # DeepSeek-V2-Lite, whole
    "v2-lite": {
        **COMMON,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "topk_method": "greedy",
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "q_lora_rank": None,
        "max_position_embeddings": 16384,
        "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    # DeepSeek-R1, one rank of tensor parallel 8
    "r1-tp8": {
        **COMMON,
        "hidden_size": 7168,
        "num_attention_heads": 16,
        "q_lora_rank": 1536,
        "max_position_embeddings": 16384,
        "rope_scaling": YARN,
    },
    # Kimi-K2, one rank of tensor parallel 4
    "k2-tp4": {
        **COMMON,
        "hidden_size": 7168,
        "num_attention_heads": 16,
        "q_lora_rank": 1536,
        "max_position_embeddings": 16384,
        "rope_theta": 50000.0,
        "rope_scaling": {**YARN, "factor": 32},
    },
}
ARMS = ("default", "cat", "fused")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("tokens", "decode", "one"))
    parser.add_argument("out")
    parser.add_argument("--jobs", type=int, default=4, help="engines at a time for `tokens`")
    parser.add_argument("--only", default="", help="run configurations whose name contains this")
    args = parser.parse_args()
    if args.what == "one":
        one(json.loads(args.out))
    elif args.what == "tokens":
        tokens(Path(args.out), args.jobs, args.only)
    else:
        decode(Path(args.out), args.only)


def engine(job: dict[str, Any]) -> Any:
    """The vLLM engine of a job, in this process."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_DISABLE_COMPILE_CACHE="1",
        VLLM_CACHE_ROOT=tempfile.mkdtemp(),
        HF_HUB_OFFLINE="1",
    )
    import mla_fusion

    mla_fusion.register()
    import vllm
    import vllm.model_executor.model_loader.dummy_loader as dummy_loader

    uniform = dummy_loader.initialize_dummy_weights

    def initialize(model: Any, *args: Any, **kwargs: Any) -> None:
        uniform(model, *args, low=-job["scale"], high=job["scale"])
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.data.fill_(1)

    dummy_loader.initialize_dummy_weights = initialize
    compilation: dict[str, Any] = {
        "cudagraph_mode": job["cudagraph_mode"],
        "cudagraph_capture_sizes": job["capture"],
        "pass_config": {},
    }
    if job["rope"] == "custom":
        compilation["custom_ops"] = ["+rotary_embedding"]
    extra: dict[str, Any] = {}
    if job["arm"] == "cat":
        compilation["use_inductor_graph_partition"] = True
        compilation["pass_config"]["fuse_rope_kvcache_cat_mla"] = True
    if job["arm"] == "fused":
        compilation["pass_config"]["fuse_aiter_qk_rope_kvcache_mla"] = True
        extra["additional_config"] = {"mla_fusion": {"provider": "triton"}}
    if job["drafts"]:
        extra["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": job["drafts"],
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    with tempfile.TemporaryDirectory() as folder:
        model = {**MODELS[job["model"]], "num_hidden_layers": job["layers"]}
        model["first_k_dense_replace"] = job["layers"]
        model["num_key_value_heads"] = model["num_attention_heads"]
        (Path(folder) / "config.json").write_text(json.dumps(model))
        return vllm.LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=4096,
            max_num_seqs=job["seqs"],
            max_num_batched_tokens=2048,
            kv_cache_dtype=job["cache"],
            gpu_memory_utilization=job["memory"],
            # Set, so that vLLM does not measure memory that other engines of this run take.
            kv_cache_memory_bytes=4 << 30,
            enable_prefix_caching=False,
            seed=0,
            compilation_config=compilation,
            **extra,
        )


def one(job: dict[str, Any]) -> None:
    """Run one engine and print its result; called in a process of its own."""
    began = time.time()
    llm = engine(job)
    result: dict[str, Any] = {"start_s": round(time.time() - began, 1)}
    if job["arm"] == "fused":
        from mla_fusion import config, plugin, report

        vllm_config = llm.llm_engine.vllm_config
        result["on"] = config.is_on(vllm_config)
        newest = max(plugin.report_path(vllm_config).parent.glob("*.json"), key=os.path.getmtime)
        ranges = report.load(newest).ranges
        result["ranges"] = [[*r.range, r.layers, r.fused, r.declined] for r in ranges]
    if job["what"] == "tokens":
        result.update(generate(llm, job))
    else:
        result.update(time_steps(llm, job))
    print("RESULT " + json.dumps(result), flush=True)


def generate(llm: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens of prompts that arrive one after another, so that batches mix."""
    import random

    import vllm

    rng = random.Random(7)
    lengths = [1, 2, 3, 5, 17, 64, 130, 257, 600, 31, 4, 88]
    params = vllm.SamplingParams(
        max_tokens=job["tokens"], temperature=0, ignore_eos=True, detokenize=False, logprobs=2
    )
    waiting = [[rng.randrange(10, 4000) for _ in range(n)] for n in lengths]
    done: dict[str, Any] = {}
    step = 0
    core = llm.llm_engine
    while waiting or core.has_unfinished_requests():
        if waiting and step % 5 == 0:
            name = str(len(lengths) - len(waiting))
            core.add_request(name, {"prompt_token_ids": waiting.pop(0)}, params)
        for output in core.step():
            if output.finished:
                done[output.request_id] = output.outputs[0]
        step += 1
    names = sorted(done, key=lambda n: int(n.split("-")[0]))
    return {
        "tokens": [list(done[n].token_ids) for n in names],
        "top2": [
            [sorted((lp.logprob for lp in d.values()), reverse=True)[:2] for d in done[n].logprobs]
            for n in names
        ],
    }


def time_steps(llm: Any, job: dict[str, Any]) -> dict[str, Any]:
    """GPU time of a decode step at each batch size, by the profiler and by the clock."""
    import torch
    import vllm

    core, rows = llm.llm_engine, {}
    for batch in job["batches"]:
        params = vllm.SamplingParams(
            max_tokens=400, temperature=0, ignore_eos=True, detokenize=False
        )
        for i in range(batch):
            prompt = [(7 * i + j) % 4000 + 10 for j in range(job["context"])]
            core.add_request(f"{batch}-{i}", {"prompt_token_ids": prompt}, params)
        produced = 0
        while produced < batch:  # prefill until every request decodes
            produced = sum(bool(o.outputs[0].token_ids) for o in core.step())
        for _ in range(20):
            core.step()
        rounds, kernels = [], []
        for _ in range(5):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(20):
                core.step()
            torch.cuda.synchronize()
            rounds.append((time.perf_counter() - began) / 20 * 1e6)
        for _ in range(3):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
                for _ in range(10):
                    core.step()
                torch.cuda.synchronize()
            kernels.append(sum(e.self_device_time_total for e in prof.key_averages()) / 10)
        rows[batch] = {"wall_us": sorted(rounds), "gpu_us": sorted(kernels)}
        rows[batch]["top"] = [
            [e.key[:90], round(e.self_device_time_total / 10, 2), e.count / 10]
            for e in sorted(prof.key_averages(), key=lambda e: -e.self_device_time_total)[:14]
        ]
        core.abort_request([f"{batch}-{i}" for i in range(batch)])
        while core.has_unfinished_requests():
            core.step()
    return {"steps": rows}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """`one` in a process of its own; the log's tail stands in for a result that is missing."""
    done = subprocess.run(
        [sys.executable, __file__, "one", json.dumps(job)], capture_output=True, text=True
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return dict(json.loads(line.removeprefix("RESULT ")))
    return {"error": (done.stdout + done.stderr)[-3000:]}


def job(**changes: Any) -> dict[str, Any]:
    """A job with defaults."""
    base = {
        "what": "tokens",
        "model": "r1-tp8",
        "arm": "fused",
        "layers": 4,
        "cache": "fp8",
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "capture": [1, 2, 4, 8, 16],
        "rope": "native",
        "drafts": 0,
        "seqs": 16,
        "memory": 0.1,
        "scale": 0.06,
        "tokens": 256,
    }
    return {**base, **changes}


def tokens(out: Path, parallel: int, only: str) -> None:
    """Compare the arms of every configuration; write results as JSON."""
    configurations = {
        "v2-lite fp8": {"model": "v2-lite"},
        "v2-lite auto custom-rope": {"model": "v2-lite", "cache": "auto", "rope": "custom"},
        "r1-tp8 fp8": {},
        "r1-tp8 auto": {"cache": "auto"},
        "r1-tp8 fp8 custom-rope": {"rope": "custom"},
        "r1-tp8 fp8 PIECEWISE": {"cudagraph_mode": "PIECEWISE"},
        "r1-tp8 fp8 FULL_DECODE_ONLY": {"cudagraph_mode": "FULL_DECODE_ONLY"},
        "r1-tp8 fp8 drafts": {"drafts": 3, "capture": [4, 8, 16, 32, 64]},
        "k2-tp4 fp8": {"model": "k2-tp4"},
    }
    chosen = {n: c for n, c in configurations.items() if any(o in n for o in only.split(","))}
    work = [(n, arm) for n in chosen for arm in ARMS]
    with ThreadPoolExecutor(parallel) as pool:
        outcomes = list(pool.map(lambda w: run(job(**chosen[w[0]], arm=w[1])), work))
    results = {f"{n} | {arm}": r for (n, arm), r in zip(work, outcomes, strict=True)}
    for name in chosen:
        arms = {arm: results[f"{name} | {arm}"] for arm in ARMS}
        print(f"== {name}")
        for arm, r in arms.items():
            if "error" in r:
                print(f"   {arm}: FAILED\n{r['error'][-1500:]}")
        fused = arms["fused"]
        print("   fused:", fused.get("on"), fused.get("ranges"), "start", fused.get("start_s"))
        for a, b in (("fused", "cat"), ("fused", "default"), ("cat", "default")):
            if "tokens" in arms[a] and "tokens" in arms[b]:
                print(f"   {a} / {b}: {compare(arms[a], arms[b])}")
    for r in results.values():
        r.pop("top2", None)
    out.write_text(json.dumps(results))


def compare(a: dict[str, Any], b: dict[str, Any]) -> str:
    """How many sequences are equal, and the gap of the candidates where one first differs."""
    gaps, equal = [], 0
    for x, y, top in zip(a["tokens"], b["tokens"], a["top2"], strict=True):
        if any(value != value for pair in top for value in pair):
            return "NaN"
        if x == y:
            equal += 1
            continue
        at = next(i for i in range(len(x)) if x[i] != y[i])
        gaps.append((round(top[at][0] - top[at][1], 5), at))
    text = f"{equal} of {len(a['tokens'])} sequences equal"
    if gaps:
        text += (
            f"; gap at first difference: largest {max(gaps)[0]}, positions {[g[1] for g in gaps]}"
        )
    return text


def decode(out: Path, only: str) -> None:
    """GPU time of a decode step of DeepSeek-R1's TP8 shape, 30 layers, for each arm."""
    rows: list[list[Any]] = []
    for arm in (a for a in ARMS if only in a):
        result = run(
            job(
                what="decode",
                arm=arm,
                layers=30,
                seqs=128,
                capture=[1, 32, 128],
                batches=[1, 32, 128],
                context=1000,
                memory=0.8,
                scale=0.02,
            )
        )
        if "error" in result:
            print(f"== {arm}: FAILED\n{result['error']}")
            continue
        print(f"== {arm}: start {result['start_s']} s, {result.get('ranges')}")
        for batch, r in result["steps"].items():
            gpu, wall = r["gpu_us"], r["wall_us"]
            print(f"   batch {batch}: GPU {gpu} us, wall {[round(w) for w in wall]} us")
            for key, time_us, count in r["top"]:
                print(f"      {time_us:10.1f} us {count:7.1f} x  {key}")
            rows.append([arm, batch, gpu[1], gpu[0], gpu[-1], wall[2], wall[0], wall[-1]])
    with out.open("w") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["arm", "batch", "gpu_us", "gpu_min", "gpu_max", "wall_us", "wall_min", "wall_max"]
        )
        writer.writerows(rows)


if __name__ == "__main__":
    main()
