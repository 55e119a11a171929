"""The processes of `benchmarks/engine.py`: each runs one engine, for one job."""

from __future__ import annotations

import csv
import itertools
import json
import os
import signal
import subprocess
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from mla_fusion import report
from mla_fusion.cli import UserError, child

Engine = tuple[child.Job, "subprocess.Popen[str]"]
ENDS = 10  # seconds in which a process whose output is closed has ended

# Ten for each engine. Linux gives those from 32768 on to connections of other engines.
PORTS = itertools.count(20000 + 1000 * (os.getpid() % 12), 10)
# NVLink multicast, which vLLM takes for granted, is off on some machines.
NO_MULTICAST = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "NCCL_NVLS_ENABLE": "0"}


def start(options: dict[str, Any], variables: dict[str, str] | None = None) -> Engine:
    """A process that starts the engine of a job; see `engine_worker.main`."""
    folder = options["folder"] or tempfile.mkdtemp()
    # A graph from a cache would not meet the passes.
    environment = {"CUDA_VISIBLE_DEVICES": options["device"], "VLLM_DISABLE_COMPILE_CACHE": "1"}
    environment["VLLM_PORT"] = str(next(PORTS))
    if not options["multicast"]:
        environment |= NO_MULTICAST
    environment |= options["variables"] | (variables or {})
    if options["what"] == "complete" and options["tp"] > 1:  # see `engine_worker.running`
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    if options["runner"] == "V1":  # else vLLM chooses
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    work = child.Job(
        workdir=folder, cache=f"{folder}/cache", work="engine_worker:main",
        path=str(Path(__file__).parent), options=options, environment=environment,
    )  # fmt: skip
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return work, child.start(work, **pipes)


def finish(
    work: child.Job, process: subprocess.Popen[str], seconds: float | None = None
) -> dict[str, Any]:
    """Let a process measure; without a result, "error" is the end of its log.

    After `seconds` the process is ended, with the processes that compile for it.
    """
    ended = False
    try:
        process.communicate("go\n", timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        ended = True
    try:
        return child.result(work, process)
    except UserError as error:
        log = Path(work.workdir, child.LOG)
        told = log.read_text()[-6000:] if log.exists() else str(error)
        cause = "ended: no time left (--seconds); its log ends:\n" if ended else ""
        return {"error": cause + told}


def ready(engines: dict[str, list[Engine]], end: float) -> dict[str, dict[str, Any]]:
    """The answers of the arms whose ranks are all ready. An arm with a rank that ends before, or is
    not ready at `end` by the clock, is ended, printed with that rank's log, and leaves `engines`.
    """
    waiting = {rank[1].stdout: (arm, rank) for arm, ranks in engines.items() for rank in ranks}
    lines: dict[Any, dict[str, Any]] = {}
    while waiting:
        streams = wait(list(waiting), timeout=max(0.0, end - time.time()))
        stream = (streams or [*waiting])[0]
        arm, rank = waiting.pop(stream)
        if line := stream.readline() if streams else "":
            lines[stream] = json.loads(line)
            continue
        print(f"== {arm}: FAILED\n{finish(*rank, ENDS if streams else 0)['error']}", flush=True)
        for other in engines.pop(arm):
            if other is not rank:
                waiting.pop(other[1].stdout, None)
                finish(*other, seconds=0)
    return {arm: joined([lines[r[1].stdout] for r in ranks]) for arm, ranks in engines.items()}


def start_ranks(options: dict[str, Any]) -> list[Engine]:
    """Start the engines of a job: one, or one for each rank of data parallelism."""
    ranks = options["dp"]
    if ranks == 1:
        return [start(options)]
    gpus = options["device"].split(",")
    port, engines = next(PORTS), []
    for rank in range(ranks):
        # As vLLM's own example of data parallelism without a server sets them.
        variables = {"VLLM_DP_SIZE": ranks, "VLLM_DP_RANK": rank, "VLLM_DP_RANK_LOCAL": 0,
                     "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": port}  # fmt: skip
        named = {name: str(value) for name, value in variables.items()}
        own: dict[str, Any] = {"device": gpus[rank], "dp_rank": rank}
        if weights := options["shared_weights"]:
            own["shared_weights"] = f"{weights}-{rank}"
        engines.append(start(options | own, named))
    return engines


def run(options: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The result of a job, of all its ranks."""
    results = [finish(*engine, seconds) for engine in start_ranks(options)]
    failed = [result for result in results if "error" in result]
    return failed[0] if failed else joined(results)


def joined(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The first result, with the tokens of the first rank, then those of the next."""
    tokens = {name: [each for r in results for each in r[name]] for name in ("tokens", "top")}
    return results[0] | tokens


def reported(cache: Path, ranks: int) -> dict[str, Any]:
    """What the report says. "ranges": first and last token count, MLA layers, and those fused and
    declined, of each compile range. "quantizations": what attention ops do to their outputs.

    Raises:
        RuntimeError: no report was stored, or it does not hold for so many ranks.
    """
    newest = next(iter(report.stored_reports(cache)), None)
    if newest is None:
        raise RuntimeError(
            "no report was stored, so the workers did not load mla_fusion: vLLM finds a plugin by "
            "the entry point of an installed package"
        )
    made = report.load(newest)
    if made.ranks != ranks or made.differing:
        raise RuntimeError(f"{made.ranks} ranks reported, not {ranks}; {made.differing}")
    counts = [[*r.range, r.layers, r.fused, sum(r.declined.values())] for r in made.ranges]
    return {"ranges": counts, "quantizations": sorted(made.quantizations())}


def write(path: Path | str, rows: list[dict[str, Any]], facts: dict[str, str]) -> None:
    """The rows, with `facts` behind each, as a CSV file."""
    columns = dict.fromkeys(column for row in rows for column in {**row, **facts})
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows({**row, **facts} for row in rows)


def is_asked(name: str, args: Any) -> bool:
    """Whether the command line asks for a configuration: `--only`, and how GPUs divide the work."""
    return name.endswith(args.ways) and any(part in name for part in args.only.split(","))


def devices(first: int, count: int) -> str:
    """`count` of the GPUs that this process sees, as CUDA_VISIBLE_DEVICES of another names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else list(map(str, range(first + count)))
    return ",".join(names[first : first + count])


def job(**changes: Any) -> dict[str, Any]:
    """A job with defaults."""
    base = {
        "what": "tokens", "model": "r1-tp8", "arm": "fused", "layers": 4, "cache": "fp8",
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "mode": 3,  # of compilation: vLLM's default
        "capture": [1, 2, 4, 8, 16], "rope": "native", "drafts": 0, "drafter": "mtp", "runner": "",
        "variables": {},  # of the environment
        "seqs": 16, "max_len": 4096, "max_tokens": 2048, "cache_bytes": 1 << 28,
        "shared_weights": "", "prefix_caching": False, "tokens": 256,
        "tp": 1, "dp": 1, "dp_rank": 0, "dcp": 1, "multicast": False,
        # Prompt lengths of requests; a phase begins when the one before has ended.
        "phases": [[1, 2, 3, 5, 17, 64, 130, 257, 600, 31, 4, 88]],
        "pause": 5,
        "device": os.environ.get("CUDA_VISIBLE_DEVICES", "0"),
        "folder": "",  # of the log and the caches; else a new one
    }  # fmt: skip
    return {**base, **changes}
