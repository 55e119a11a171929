"""`start` of `benchmarks/engine.py`: seconds until an engine is ready, part by part.

Each arm starts three times in a folder of its own: cold, with all caches empty, then, once all arms
have, with the caches of the starts before. The second start of vLLM 0.26 stores compiled code once
more. As many engines start side by side as there are GPUs, and capture vLLM's own list of sizes.

Rows: seconds from the begin of the process until the engine is ready, and until the first token; of
them the model's load, and what vLLM calls init: Dynamo, each compile range and all of
`torch.compile`, the kernels of this library, the capture of CUDA graphs, and the rest. `cores` are
those that the engine may run on (`taskset`).
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from engine_complete import ARMS, MODELS
from engine_jobs import devices, finish, is_asked, job
from engine_jobs import start as begin

from mla_fusion.cli import child

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

STATES = ("cold", "second", "warm")
# Column -> the log's line that has its seconds.
LOGGED = {
    "load_s": r"Model loading took .* and ([\d.]+) seconds",
    "dynamo_s": r"Dynamo bytecode transform time: ([\d.]+) s",
    "ranges_s": r"compile range (\(\d+, \d+\)) takes ([\d.]+) s",
    "init_s": r"init engine .* took ([\d.]+) s",
    "kernels_s": r"mla-fusion: kernels ready in ([\d.]+) s",
    "capture_s": r"Graph capturing finished in ([\d.]+) secs",
}


def start(args: argparse.Namespace) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """Start the arms of the models that `args.only` names; yields the rows of each of `STATES`, and
    how many starts failed."""
    arms = (args.arms or ARMS).split(",")
    wanted = [name for name in MODELS if is_asked(name, args)]
    folders = {(name, arm): tempfile.mkdtemp() for name in wanted for arm in arms}
    end, gpus = time.time() + args.seconds, torch.cuda.device_count()
    with ThreadPoolExecutor(gpus) as pool:
        for state in STATES:  # of all arms: a cold start beside a warm one would look shorter
            made = [
                pool.submit(once, *work, state, folder, devices(i % gpus, 1), args, end)
                for i, (work, folder) in enumerate(folders.items())
            ]
            rows = [row for each in made if (row := each.result())]
            yield rows, len(wanted) * len(arms) - len(rows)
            folders = {(r["model"], r["arm"]): folders[r["model"], r["arm"]] for r in rows}


def once(
    name: str, arm: str, state: str, folder: str, device: str, args: argparse.Namespace, end: float
) -> dict[str, Any] | None:
    """The row of one start of an arm; None if it failed."""
    options = {
        "what": "start", "model": name, "arm": arm, "layers": MODELS[name].cut(args.layers).layers,
        "drafts": args.drafts, "device": device, "folder": folder, "seqs": 128, "capture": [],
        "max_len": 20480, "max_tokens": 8192, "prefix_caching": True,
        "variables": {"VLLM_DISABLE_COMPILE_CACHE": "0", "TRITON_HOME": folder},
    }  # fmt: skip
    began = time.time()
    result = finish(*begin(job(**options)), max(0.0, end - began))
    if "error" in result:
        print(f"== {name}, {arm}, {state}: FAILED\n{result['error']}", flush=True)
        return None
    row = {
        "model": name, "layers": options["layers"], "arm": arm, "start": state,
        **({"drafts": args.drafts} if args.drafts else {}),
        "cores": len(os.sched_getaffinity(0)),
        "ready_s": round(result["ready"] - began, 1), "token_s": round(result["token"] - began, 1),
        "compile_s": round(result["compile"], 1), **logged(Path(folder, child.LOG)),
    }  # fmt: skip
    print(f"   {row}", flush=True)
    return row


def logged(log: Path) -> dict[str, str]:
    """The columns of `LOGGED`."""
    text = log.read_text(errors="replace")
    found = {name: re.findall(pattern, text) for name, pattern in LOGGED.items()}
    ranges = found.pop("ranges_s")
    parts = {n: f"{sum(map(float, each)):.1f}" if each else "" for n, each in found.items()}
    return parts | {"ranges_s": "; ".join(map(" ".join, ranges))}
