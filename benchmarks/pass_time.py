"""Time of all passes against the compile time of the same graph, by number of layers, on a CPU.

    python benchmarks/pass_time.py [--layers 61 122 244] [--out benchmarks/results/pass_time.csv]

Each engine is a real vLLM with a narrow DeepSeek-V3-shaped model, in a process of its own, with
every compile cache off. vLLM says how long the decode-range graph took to compile; the report says
how long the passes took on it, pass 5 and vLLM's own last step included.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def main() -> None:
    """Run one engine per layer count and write a row for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[61, 122, 244])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/pass_time.csv"))
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print("RESULT " + json.dumps(measure(args.one)))
        return
    rows = []
    for layers in args.layers:
        done = subprocess.run(
            [sys.executable, __file__, "--one", str(layers)], capture_output=True, text=True
        )
        found = re.search(r"^RESULT (.*)$", done.stdout, re.M)
        if found is None:
            sys.exit(f"{layers} layers failed:\n{(done.stdout + done.stderr)[-3000:]}")
        row = json.loads(found[1])
        rows.append(row)
        print(
            f"{layers} layers: passes {row['pass_ms']:.0f} ms, compile {row['compile_s']:.1f} s: "
            f"{row['share']:.2%}; {row['ms_per_layer']:.2f} ms a layer"
        )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def measure(layers: int) -> dict[str, Any]:
    """Compile a model of `layers` layers in this process."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_CACHE_ROOT=f"{folder}/vllm",
            TORCHINDUCTOR_CACHE_DIR=f"{folder}/inductor",
            HF_HUB_OFFLINE="1",
        )
        import torch
        import vllm

        import mla_fusion
        from mla_fusion import plugin, report

        mla_fusion.register()
        times: dict[str, float] = {}

        class Listener(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                pattern = r"compile range \((\d+), \d+\) takes ([\d.]+) s"
                found = re.search(pattern, record.getMessage())
                if found:
                    times[found[1]] = float(found[2])

        logging.getLogger("vllm").addHandler(Listener())
        (Path(folder) / "config.json").write_text(json.dumps(model(layers)))
        llm = vllm.LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=256,
            max_num_seqs=4,
            attention_backend="CPU_MLA",
            compilation_config={"pass_config": {"fuse_aiter_qk_rope_kvcache_mla": True}},
            additional_config={"mla_fusion": {"provider": "reference"}},
        )
        made = report.load(plugin.report_path(llm.llm_engine.vllm_config)).ranges[0]
        assert made.fused == made.layers == layers, made
        return {
            "layers": layers,
            "pass_ms": round(made.pass_ms, 1),
            "compile_s": times["1"],
            "share": round(made.pass_ms / 1e3 / times["1"], 5),
            "ms_per_layer": round(made.pass_ms / layers, 3),
            "cpu": platform.processor() or platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "torch": torch.__version__,
            "vllm": vllm.__version__,
        }


def model(layers: int) -> dict[str, Any]:
    """config.json of a narrow DeepSeek-V3 with dense layers only."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 64,
        "num_hidden_layers": layers,
        "first_k_dense_replace": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "q_lora_rank": 32,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "vocab_size": 256,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
    }


if __name__ == "__main__":
    main()
