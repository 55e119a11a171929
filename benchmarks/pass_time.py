"""Time of all passes against the compile time of the same graph, by number of layers, on a CPU.

    python benchmarks/pass_time.py [--layers 61 122 244] [--out benchmarks/results/pass_time.csv]

Each engine is a real vLLM with a narrow DeepSeek-V3-shaped model, in a process of its own, with
no warm compile cache. vLLM says how long the decode-range graph took to compile; the report says
how long the passes took on it, pass 5 and vLLM's own last step included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import engine_jobs

from mla_fusion.cli import child
from mla_fusion.cli.demo import tiny_models


def main() -> None:
    """Run one engine per layer count and write a row for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[61, 122, 244])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/pass_time.csv"))
    args = parser.parse_args()
    rows = []
    for layers in args.layers:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(layers, Path(folder)))
        print(rows[-1], flush=True)
    engine_jobs.write(args.out, rows, {})


def measure(layers: int, folder: Path) -> dict[str, Any]:
    """Compile a model of `layers` layers in a process of its own; the row of its times."""
    (folder / "config.json").write_text(json.dumps(model(layers)))
    engine = child.flag_on(provider="reference") | {
        "model": str(folder), "load_format": "dummy", "max_num_seqs": 4
    }  # fmt: skip
    job = child.Job(workdir=str(folder), cache=str(folder / "cache"), engine=engine)
    made = child.run(job).report
    assert made is not None
    decode = made.ranges[0]
    assert decode.fused == decode.layers == layers, decode
    log = (folder / child.LOG).read_text()
    compiled = re.search(r"compile range \(1, \d+\) takes ([\d.]+) s", log)
    if compiled is None:
        sys.exit(f"{layers} layers: vLLM logged no compile time; did a cache answer?")
    return {
        "layers": layers,
        "pass_ms": round(decode.pass_ms, 1),
        "ms_per_layer": round(decode.pass_ms / layers, 3),
        "cpu": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": made.versions["torch"],
        "vllm": made.versions["vLLM"],
        "compile_s": float(compiled[1]),
        "share": round(decode.pass_ms / 1e3 / float(compiled[1]), 5),
    }


def model(layers: int) -> dict[str, Any]:
    """config.json of a narrow DeepSeek-V3 with dense layers and RoPE without scaling."""
    narrow = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 64)
    narrow |= dict.fromkeys(("num_hidden_layers", "first_k_dense_replace"), layers)
    narrow |= {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 32}
    others = {"vocab_size": 256, "max_position_embeddings": 4096, "rope_scaling": None}
    return {**tiny_models.MODELS["deepseek-v3-shaped"], **narrow, **others}


if __name__ == "__main__":
    main()
