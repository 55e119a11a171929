"""The processes of `benchmarks/engine.py`: each runs one engine, for one job."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from mla_fusion.cli import child
from mla_fusion.cli.arguments import UserError

Engine = tuple[child.Job, "subprocess.Popen[str]"]

# NVLink multicast, which vLLM takes for granted, is off on some machines.
_NO_MULTICAST = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "NCCL_NVLS_ENABLE": "0"}


def start(options: dict[str, Any]) -> Engine:
    """A process that starts the engine of a job; see `engine_worker.main`."""
    folder = tempfile.mkdtemp()
    # A graph from a cache would not meet the passes.
    environment = {"CUDA_VISIBLE_DEVICES": options["device"], "VLLM_DISABLE_COMPILE_CACHE": "1"}
    environment |= _NO_MULTICAST if options["tp"] > 1 else {}
    work = child.Job(
        workdir=folder,
        cache=f"{folder}/cache",
        work="engine_worker:main",
        path=str(Path(__file__).parent),
        options=options,
        environment=environment,
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return work, child.start(work, **pipes, start_new_session=True)


def finish(
    work: child.Job, process: subprocess.Popen[str], seconds: float | None = None
) -> dict[str, Any]:
    """Let a process measure; without a result, "error" is the end of its log.

    After `seconds` the process is ended, with the processes that compile for it.
    """
    try:
        process.communicate("go\n", timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"error": "ended: no time left (--seconds)"}
    try:
        return child.result(work, process)
    except UserError as error:
        log = Path(work.workdir, child.LOG)
        return {"error": log.read_text()[-6000:] if log.exists() else str(error)}


def devices(first: int, count: int) -> str:
    """`count` GPUs, as CUDA_VISIBLE_DEVICES names them."""
    return ",".join(map(str, range(first, first + count)))


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
        "max_len": 4096,
        "max_tokens": 2048,
        "cache_bytes": 1 << 30,
        "shared_weights": "",
        "tp": 1,
        "tokens": 256,
        # Prompt lengths of requests; a phase begins when the one before has ended.
        "phases": [[1, 2, 3, 5, 17, 64, 130, 257, 600, 31, 4, 88]],
        "pause": 5,
        "device": os.environ.get("CUDA_VISIBLE_DEVICES", "0"),
    }
    return {**base, **changes}
