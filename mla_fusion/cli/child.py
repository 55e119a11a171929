"""One vLLM engine in a process of its own: what to run goes in as JSON, what came out comes back.

`demo` and `check` start engines through `run`: a fresh process for each, and not the user's vLLM
cache, so that the passes run. This file is also the child: python -m mla_fusion.cli.child.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from mla_fusion import config
from mla_fusion.cli.arguments import UserError
from mla_fusion.report import stored_reports

LOG = "engine.log"
_JOB, _RESULT = "job.json", "result.json"
_LONGCAT = "longcat_flash"
# vLLM's own settings for a small engine without a network, inside one process.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass
class Job:
    """What one engine does. `workdir` takes its log and result, `cache` is its vLLM cache root."""

    model: str
    workdir: str
    cache: str
    fuse: bool
    provider: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    load_format: str = "auto"
    kv_cache_dtype: str = "auto"
    bucket: int | None = None  # None: the decode bucket is derived, as in production
    dump: str | None = None  # vLLM's debug_dump_path
    # (step at which it arrives, token ids); a CPU that cannot run the cache type runs none.
    prompts: list[tuple[int, list[int]]] = field(default_factory=list)
    new_tokens: int = 0


@dataclass
class Outcome:
    """What one engine did: per prompt the tokens and their log-probabilities."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    warnings: list[str]  # of this library
    seconds: float
    reports: list[Path] = field(default_factory=list)


def run(job: Job, progress: TextIO | None = None) -> Outcome:
    """Run `job` in a process of its own; it tells `progress` (sys.stdout) how far it is.

    Raises:
        UserError: the engine failed; the message holds vLLM's last word and where its log is.
    """
    workdir = Path(job.workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / _JOB).write_text(json.dumps(asdict(job)))
    (workdir / _RESULT).unlink(missing_ok=True)
    cache = Path(job.cache).resolve()
    older = stored_reports(cache)
    environment = {**os.environ, **_ENVIRONMENT, "VLLM_CACHE_ROOT": str(cache)}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "inductor")
    environment.pop("VLLM_DEBUG_DUMP_PATH", None)
    # With the flag off it is stock vLLM: not even the plugin is loaded.
    environment["VLLM_PLUGINS"] = "mla_fusion" if job.fuse else ""
    progress = progress or sys.stdout
    progress.flush()
    # -P: the installed package, whatever lies in the current folder.
    command = [sys.executable, "-P", "-m", "mla_fusion.cli.child", job.workdir]
    done = subprocess.run(command, env=environment, stdout=_stream(progress))
    if done.returncode != 0 or not (workdir / _RESULT).exists():
        raise UserError(
            f"vLLM could not start or run its engine on {job.model}: {last_error(workdir / LOG)} "
            f"(exit status {done.returncode}). What led to it: {workdir / LOG}"
        )
    outcome = Outcome(**json.loads((workdir / _RESULT).read_text()))
    outcome.reports = [path for path in stored_reports(cache) if path not in older]
    return outcome


def _stream(progress: TextIO) -> int | None:
    """The file behind `progress`; the child's own where there is none, as under pytest."""
    try:
        return progress.fileno()
    except OSError:
        return None


def last_error(log: Path) -> str:
    """What the last error in a log says, in one line."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    # "[rank0]: ValueError: why" and "(EngineCore pid=1) ERROR ... ValueError: why"
    found = [i for i, line in enumerate(lines) if "Error: " in line and "  File " not in line]
    if not found:
        return lines[-1] if lines else "it ended before it wrote anything"
    text = lines[found[-1]]
    if "ValidationError: " in text and found[-1] + 1 < len(lines):
        return lines[found[-1] + 1].strip()  # pydantic says what is wrong one line below
    return text[text.rfind(" ", 0, text.index("Error: ")) + 1 :]


def _child(workdir: Path) -> None:
    """The child process: progress on the parent's output, everything else into the log."""
    job = Job(**json.loads((workdir / _JOB).read_text()))
    log = os.open(workdir / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    progress = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(log, 1)
    os.dup2(log, 2)
    outcome = _generate(job, progress)
    (workdir / _RESULT).write_text(json.dumps(outcome))
    # Nothing is left to save, and taking vLLM down in order takes seconds.
    progress.flush()
    os._exit(0)


def _generate(job: Job, progress: Any) -> dict[str, Any]:
    import logging
    import time

    warnings: list[str] = []
    if job.fuse:
        from mla_fusion.plugin import register

        register()

        def keep(record: logging.LogRecord) -> bool:
            if record.levelno >= logging.WARNING:
                warnings.append(record.getMessage())
            return True

        # A filter: vLLM configures logging while it starts, and that drops handlers.
        logging.getLogger("vllm.mla_fusion").addFilter(keep)

    began = time.perf_counter()

    def tell(record: logging.LogRecord) -> bool:
        """vLLM's own lines, one for each graph."""
        text = record.getMessage()
        if "ompiling a graph for compile range" in text:
            where = text[text.index("compile range") :]
            print(f"    {time.perf_counter() - began:3.0f} s: graph for {where}", file=progress)
        return True

    print("    starting vLLM", file=progress)
    logging.getLogger("vllm.compilation.backends").addFilter(tell)
    engine = _build(job)
    print(f"    engine ready after {time.perf_counter() - began:.0f} s", file=progress)
    if job.prompts:
        tokens, logprobs, steps = _step(engine, job)
        count = sum(map(len, tokens))
        print(f"    {len(tokens)} prompts, {count} tokens, {steps} steps", file=progress)
    else:
        tokens, logprobs = [], []
    seconds = time.perf_counter() - began
    return {"tokens": tokens, "logprobs": logprobs, "warnings": warnings, "seconds": seconds}


def skip_experts_of_longcat() -> None:
    """Its "zero experts" have no routing kernel on a CPU; the attention does not read them."""
    from vllm.model_executor.models import longcat_flash

    longcat_flash.LongcatMoe.forward = lambda self, hidden_states: hidden_states


def _build(job: Job) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    compilation: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    if job.fuse:
        compilation["pass_config"] = {config.FLAG: True}
        if job.bucket is not None:
            compilation["pass_config"][config.THRESHOLD] = job.bucket
        arguments["additional_config"] = {config.OPTIONS_KEY: {"provider": job.provider}}
    if job.dump:
        compilation["debug_dump_path"] = job.dump
    if current_platform.is_cpu():
        # By name: where the CPU has AMX, vLLM would take another, which packs W_UK.
        arguments["attention_backend"] = "CPU_MLA"
        if json.loads((Path(job.model) / "config.json").read_text())["model_type"] == _LONGCAT:
            skip_experts_of_longcat()
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=job.model,
            load_format=job.load_format,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            seed=0,
            kv_cache_dtype=job.kv_cache_dtype,
            max_model_len=job.max_model_len,
            max_num_seqs=job.max_num_seqs,
            max_num_batched_tokens=job.max_num_batched_tokens,
            disable_log_stats=True,
            compilation_config=compilation,
            **arguments,
        )
    )


def _step(engine: Any, job: Job) -> tuple[list[list[int]], list[list[float]], int]:
    """(tokens, their log-probabilities, steps): each prompt enters at its step, then greedily."""
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=job.new_tokens, temperature=0, ignore_eos=True, detokenize=False, logprobs=0
    )
    finished: dict[int, Any] = {}
    waiting = dict(enumerate(job.prompts))
    step = 0
    while waiting or engine.has_unfinished_requests():
        for index in [index for index, (arrival, _) in waiting.items() if arrival <= step]:
            _, prompt = waiting.pop(index)
            engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        for output in engine.step():
            if output.finished:
                finished[int(output.request_id)] = output.outputs[0]
        step += 1
    outputs = [finished[index] for index in range(len(job.prompts))]
    tokens = [list(output.token_ids) for output in outputs]
    logprobs = [
        [
            entry[token].logprob
            for token, entry in zip(output.token_ids, output.logprobs, strict=True)
        ]
        for output in outputs
    ]
    return tokens, logprobs, step


if __name__ == "__main__":
    _child(Path(sys.argv[1]))
