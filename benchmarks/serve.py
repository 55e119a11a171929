#!/usr/bin/env python3
"""Serve DeepSeek-V2-Lite as a user would, with the flag off and on: times and throughput.

    python benchmarks/serve.py OUT.csv

A server of vLLM runs for each arm of `benchmarks/engine.py`, side by side on one GPU, or on the two
of `--tp 2`, with an fp8 cache and the weights of engine_model.py. Behind one load that no row has,
each of `vllm bench serve` (random prompts of 1024 tokens, 256 tokens out, an arrival rate) goes to
one server at a time, in alternating order. mla_fusion must be installed. The exit status is 1 if a
layer is not fused.

Rows, which a run that is cut keeps: times per output token and to the first one in milliseconds,
tokens and requests a second.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engine_model
from engine_jobs import NO_MULTICAST, job, reported, write

from mla_fusion.measure import records

# Requests a second and requests, from idle to saturated.
LOADS = {1.0: 10, 8.0: 40, 24.0: 120, float("inf"): 256}
INPUT, OUTPUT, SEQUENCES = 1024, 256, 128
COLUMNS = (
    "median_tpot_ms", "p99_tpot_ms", "median_ttft_ms", "p99_ttft_ms", "output_throughput",
    "request_throughput", "completed",
)  # fmt: skip
START = 400  # seconds a server may take


@dataclass
class Server:
    """A running server; `folder` holds its model, its log and its cache."""

    arm: str
    folder: Path
    url: str
    process: subprocess.Popen[bytes]


def main() -> None:
    """Start the servers, send the loads, write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--arms", default="default,auto", help="separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rates", default="1,8,24,inf", help="requests a second, of these")
    parser.add_argument("--tp", type=int, default=1, help="GPUs of each server")
    parser.add_argument("--commit", default="", help="commit, where git does not know it")
    args = parser.parse_args()
    rows, facts = [], records.environment(args.commit, "benchmarks/serve.py")
    servers = [serve(arm, args.tp) for arm in args.arms.split(",")]
    try:
        for server in servers:
            wait_until_ready(server)
            measure(server, float("inf"), 16)  # what compiles at a first step does it here
        fused = {server.arm: fused_layers(server, args.tp) for server in servers}
        rates = [float(rate) for rate in args.rates.split(",")]
        for number, rate in itertools.product(range(args.rounds), rates):
            for server in servers[:: 1 if number % 2 == 0 else -1]:
                times = measure(server, rate, LOADS[rate])
                known = {"arm": server.arm, "gpus": args.tp, "fused": fused[server.arm]}
                known |= {"rate": rate, "requests": LOADS[rate], "round": number}
                rows.append(known | times)
            write(args.out, rows, facts)
    finally:
        for server in servers:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.killpg(server.process.pid, signal.SIGKILL)
    sys.exit(any(count not in ("", "27 of 27") for count in fused.values()))


def serve(arm: str, tp: int) -> Server:
    """Start a server with an engine of this arm on so many GPUs."""
    folder = Path(tempfile.mkdtemp())
    tokens, capture = SEQUENCES * (INPUT + OUTPUT + 64), [1, 2, 4, 8, 16, 32, 64, 96, 128]
    sizes = {"layers": 27, "seqs": SEQUENCES, "capture": capture, "max_tokens": 8192}
    sizes["tp"], sizes["cache_bytes"] = tp, tokens * 27 * 576
    arguments = engine_model.arguments(job(model="deepseek-v2-lite", arm=arm, **sizes), folder)
    write_tokenizer(folder, engine_model.MODELS["deepseek-v2-lite"]["vocab_size"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = os.environ.get("PYTHONPATH"), str(Path(__file__).parent)
    # A graph from a cache would not meet the passes.
    environment = {"VLLM_CACHE_ROOT": f"{folder}/cache", "HF_HUB_OFFLINE": "1"}
    environment |= {"VLLM_DISABLE_COMPILE_CACHE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment = os.environ | NO_MULTICAST | environment
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags(arguments)]
    with (folder / "log").open("wb") as log:
        # `-m` puts the folder it runs in first: a checkout there hides the installed package.
        process = subprocess.Popen(
            [*command, "--port", str(port)], env=environment, cwd=folder, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    return Server(arm, folder, f"http://127.0.0.1:{port}", process)


def flags(arguments: dict[str, Any]) -> list[str]:
    """Engine arguments as the command line of `vllm serve` spells them."""
    words = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def write_tokenizer(folder: Path, size: int) -> None:
    """A tokenizer of `size` words "t0", "t1", ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def wait_until_ready(server: Server) -> None:
    """Wait until a server answers, or end with the last of its log."""
    end = time.monotonic() + START
    while server.process.poll() is None and time.monotonic() < end:
        try:
            urllib.request.urlopen(f"{server.url}/health", timeout=5)
        except (urllib.error.URLError, TimeoutError):
            time.sleep(1)
        else:
            return
    log = (server.folder / "log").read_text(errors="replace")[-6000:]
    sys.exit(f"the server of {server.arm} ended, or took over {START} s; its log ends:\n{log}")


def fused_layers(server: Server, ranks: int) -> str:
    """How many MLA layers of the decode bucket its report says are fused; "" without the flag."""
    if server.arm not in engine_model.OPTIONS:
        return ""
    (_, _, layers, fused, _), *_ = reported(server.folder / "cache", ranks)["ranges"]
    return f"{fused} of {layers}"


def measure(server: Server, rate: float, requests: int) -> dict[str, Any]:
    """One load on one server: the columns of `COLUMNS`."""
    from vllm.benchmarks import serve as client
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    client.add_cli_args(parser)
    options = {
        "base-url": server.url, "model": server.folder, "dataset-name": "random",
        "random-input-len": INPUT, "random-output-len": OUTPUT, "request-rate": rate,
        "num-prompts": requests, "temperature": 0, "percentile-metrics": "ttft,tpot",
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    found = client.main(parser.parse_args([*words, "--disable-tqdm"]))
    row = {name: round(float(found[name]), 3) for name in COLUMNS}
    print(f"== {server.arm}, {rate} requests a second: {row}", flush=True)
    return row


if __name__ == "__main__":
    main()
