"""A job in a process of its own: what to do goes in as JSON, and what came out comes back.

`demo` and `check` run vLLM engines through `run`; the tests and benchmarks name other work. A job
does not use the user's compile cache, so the passes run. The child runs this file too.

A job ends with its parent, however that ends: the parent holds one end of a pipe and gives its
children the other, and a thread of each waits until it closes. A signal from the kernel
(PR_SET_PDEATHSIG) would leave what the child had started, and its folder."""

import contextlib
import functools
import itertools
import json
import logging
import os
import pkgutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from mla_fusion import config
from mla_fusion.cli import UserError, mend_vllm, short
from mla_fusion.config import models
from mla_fusion.report import Report, counted, load, stored_reports
from mla_fusion.report.reasons import Decline, recognize

LOG = "engine.log"
Prompts = Sequence[tuple[int, list[int]]]  # (step at which it arrives, token ids) of each
# A shell outside the group $0 ends it, and then removes the folder $1, to which nobody writes now.
_END = 'kill -9 "-$0"; sleep 0.5; if [ -n "$1" ]; then rm -rf -- "$1"; fi'
_JOB, _RESULT = "job.json", "result.json"
# What vLLM logs when a stage of its start begins -> what the user reads.
_STAGES = {
    "Resolved architecture": "vLLM is imported",
    "vLLM's torch.compile": "the model is built and traced, its graphs are compiled",
}


@dataclass
class Job:
    """One child process, and what its work reads."""

    workdir: str  # folder of its log and its result
    cache: str  # vLLM cache root; from a warm one no pass runs
    # "module:function". It is called with the job and a stream for its progress, and returns a
    # dictionary for JSON.
    work: str = "mla_fusion.cli.child:generate"
    path: str = ""  # a further folder to import from
    engine: dict[str, Any] = field(default_factory=dict)  # arguments of `build`
    prompts: Prompts = ()
    new_tokens: int = 0  # tokens after each prompt
    plugin: bool = True  # whether vLLM may load this library
    options: dict[str, Any] = field(default_factory=dict)  # further input of `work`
    environment: dict[str, str] = field(default_factory=dict)  # further variables
    temporary: bool = False  # whether its folder goes too if the parent ends before it


@dataclass
class Outcome:
    """The result of `generate`: the tokens of each prompt and their log-probabilities."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    warnings: list[str]  # of this library
    report: Report | None = None  # that the engine stored
    layers: int = 0  # of the model, any kind, without a draft's

    @property
    def declines(self) -> list[Decline]:
        """Why layers stayed unfused, from the report. If none was stored, the reason in the warning
        that switched the flag off."""
        if self.report:
            uncompiled = [Decline("no-graph")] if self.report.uncompiled else []
            return [*counted(self.report.decode().declined, uncompiled)]
        return [found for text in self.warnings if (found := recognize(text))]


class EngineError(UserError):
    """The work of a job failed; `why` is its last error, and `log` the path of its log."""

    def __init__(self, job: Job, why: str) -> None:
        self.why, self.log = why, Path(job.workdir, LOG)
        model = job.engine.get("model")
        remedy = mend_vllm(why) or f"What led to it: {self.log}"
        super().__init__(f"vLLM could not start or run its engine on {model}: {why}. {remedy}")


def run(job: Job, progress: TextIO | None = None) -> Outcome:
    """Run a job whose work is `generate`, its progress on `progress`; errors as `result`."""
    progress = progress or sys.stdout
    progress.flush()
    stdout = None  # the child's own, where there is no file, as under pytest
    with contextlib.suppress(OSError):
        stdout = progress.fileno()
    found = result(job, start(job, stdout=stdout))
    reports = found.pop("reports")
    return Outcome(**found, report=load(Path(reports[0])) if reports else None)


def start(job: Job, **streams: Any) -> subprocess.Popen[str]:
    """Start the process of a job, in a group of its own; `streams` are of subprocess.Popen."""
    workdir, cache = Path(job.workdir), Path(job.cache).resolve()
    workdir.mkdir(parents=True, exist_ok=True)
    share_facts(cache)
    (workdir / _JOB).write_text(json.dumps(asdict(job)))
    (workdir / _RESULT).unlink(missing_ok=True)
    paths = filter(None, (os.environ.get("PYTHONPATH"), job.path))
    environment = {
        **os.environ,
        "VLLM_CACHE_ROOT": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "PYTHONPATH": os.pathsep.join(paths),
        "VLLM_PLUGINS": "mla_fusion" if job.plugin else "",
        # vLLM's own settings for a small engine without a network, inside one process.
        **dict.fromkeys(("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "VLLM_CPU_KVCACHE_SPACE"), "1"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        **job.environment,
    }
    environment.pop("VLLM_DEBUG_DUMP_PATH", None)
    line = _lifeline()
    # -P: the installed package, not one in the current folder.
    command = [sys.executable, "-P", "-m", "mla_fusion.cli.child", job.workdir, str(line)]
    streams |= {"text": True, "start_new_session": True, "pass_fds": [line]}
    return subprocess.Popen(command, env=environment, **streams)


@functools.cache
def _lifeline() -> int:
    """The end of the pipe that children get; the other stays open as long as this process."""
    return os.pipe()[0]


def end(process: subprocess.Popen[str]) -> None:
    """End a child that has a group of its own, with all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def share_facts(cache: Path, root: Path | None = None) -> None:
    """Let the vLLM cache at `cache` share with that at `root`, by default the user's, facts about
    model classes, which cost vLLM ten seconds each, and what `mla-fusion calibrate` measured."""
    if root is None:
        users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "vllm")
        root = Path(os.environ.get("VLLM_CACHE_ROOT") or users).expanduser().resolve()
    for name in ("modelinfos", "mla_fusion/tables") if cache != root else ():
        with contextlib.suppress(OSError):  # shared already, or a folder that takes no file
            (root / name).mkdir(parents=True, exist_ok=True)
            (cache / name).parent.mkdir(parents=True, exist_ok=True)
            (cache / name).symlink_to(root / name)


def result(job: Job, process: subprocess.Popen[str]) -> dict[str, Any]:
    """The result of a job, once its process has ended; raises EngineError if it failed."""
    try:
        process.communicate()
    finally:
        end(process)  # an interrupt reaches this process alone
    path, status = Path(job.workdir, _RESULT), process.returncode
    if status != 0 or not path.exists():
        raise EngineError(job, f"{last_error(Path(job.workdir, LOG))} (exit status {status})")
    return dict(json.loads(path.read_text()))


def last_error(log: Path) -> str:
    """The last error in a log, in one line: an error of vLLM may have ten thousand characters."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    said = lines[-1] if lines else "it ended before it wrote anything"
    for line, below in itertools.pairwise([*lines, ""]):
        # "[rank0]: ValueError: why" and "(EngineCore pid=1) ERROR ... ValueError: why"
        if "Error: " in line and "  File " not in line:
            start = line.rfind(" ", 0, line.index("Error: ")) + 1
            # pydantic says what is wrong one line below
            said = below if below and "ValidationError: " in line else line[start:]
    return short(said, 90)


def _child(workdir: Path, line: int) -> None:
    """The child process: progress on the parent's output, everything else into the log."""
    job = Job(**json.loads((workdir / _JOB).read_text()))

    def end_with_parent() -> None:
        os.read(line, 1)
        words = ["sh", "-c", _END, str(os.getpgrp()), str(workdir) if job.temporary else ""]
        subprocess.Popen(words, start_new_session=True)

    threading.Thread(target=end_with_parent, daemon=True).start()
    log = os.open(workdir / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    progress = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(log, 1)
    os.dup2(log, 2)
    outcome = pkgutil.resolve_name(job.work)(job, progress)
    (workdir / _RESULT).write_text(json.dumps(outcome))
    # Nothing is left to save, and taking vLLM down in order takes seconds.
    for stream in (progress, sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def flag_on(bucket: int | None = None, **options: str) -> dict[str, Any]:
    """Arguments of `build` with the flag on; without `bucket` it is derived, as in production."""
    passes = {config.FLAG: True} | ({} if bucket is None else {config.THRESHOLD: bucket})
    compiled = {"compilation_config": {"pass_config": passes}}
    return compiled | {"additional_config": {config.OPTIONS_KEY: options}}


def generate(job: Job, progress: TextIO) -> dict[str, Any]:
    """Build the engine of a job and run its prompts; see `Outcome`. "reports": paths, the newest
    first, of those that the engine stored."""
    older, warnings = stored_reports(Path(job.cache)), kept_messages(logging.WARNING)
    began, stages = time.perf_counter(), dict(_STAGES)

    def pass_on(record: logging.LogRecord) -> bool:
        """A line for each of `_STAGES`, and for each graph that vLLM has compiled."""
        text = record.getMessage()
        # A draft head logs a stage again.
        said = [stages.pop(begin) for begin in [*stages] if begin in text]
        if "ompiling a graph for compile range" in text:
            said.append(f"graph for {text[text.index('compile range') :]}")
        for what in said:
            print(f"    {time.perf_counter() - began:3.0f} s: {what}", file=progress)
        return True

    print("    starting vLLM", file=progress)
    for name in ("config.model", "compilation.backends"):
        logging.getLogger(f"vllm.{name}").addFilter(pass_on)
    engine = build(**job.engine)
    print(f"    engine ready after {time.perf_counter() - began:.0f} s", file=progress)
    outputs, count = complete(engine, job.prompts, job.new_tokens)
    tokens = [list(output.token_ids) for output in outputs]
    if tokens:
        made = sum(map(len, tokens))
        print(f"    {len(tokens)} prompts, {made} tokens, {count} steps", file=progress)
    return {
        "tokens": tokens, "logprobs": [*map(chosen, outputs)], "warnings": warnings,
        "layers": engine.vllm_config.model_config.hf_text_config.num_hidden_layers,
        "reports": [str(path) for path in stored_reports(Path(job.cache)) if path not in older],
    }  # fmt: skip


def kept_messages(level: int) -> list[str]:
    """A list that takes what this library logs from now on, at `level` or above."""
    messages: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        if record.levelno >= level:
            messages.append(record.getMessage())
        return True

    # A filter: vLLM configures logging while it starts, and that drops handlers.
    logging.getLogger("vllm.mla_fusion").addFilter(keep)
    return messages


def build(**arguments: Any) -> Any:
    """A small vLLM engine in this process, with these arguments of EngineArgs."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    if "mla_fusion" in os.environ["VLLM_PLUGINS"]:
        from mla_fusion.plugin import register

        register()
    return LLMEngine.from_engine_args(EngineArgs(**small_engine(arguments)))


def small_engine(arguments: dict[str, Any]) -> dict[str, Any]:
    """`arguments`, of EngineArgs or LLM, and what makes an engine small where they are silent."""
    from vllm.platforms import current_platform

    small: dict[str, Any] = {"skip_tokenizer_init": True, "disable_log_stats": True}
    small |= {"dtype": "bfloat16", "seed": 0, "max_model_len": 256}
    if current_platform.is_cpu():
        # By name: where the CPU has AMX, vLLM would take another, which packs W_UK.
        small["attention_backend"] = "CPU_MLA"
        model = json.loads((Path(arguments["model"]) / "config.json").read_text())
        register_type(model["model_type"])
        small |= _imitate_on_cpu(model["model_type"], type(current_platform))
    return {**small, **arguments}


def register_type(name: str) -> None:
    """Let Transformers read a type whose class comes with the checkpoint, without running that."""
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

    if name not in CONFIG_MAPPING:
        AutoConfig.register(name, type(name, (PretrainedConfig,), {"model_type": name}))


def _imitate_on_cpu(model_type: str, platform: Any) -> dict[str, Any]:
    """Imitate what vLLM lacks on a CPU for a type of model, and return the arguments it needs."""
    known = models.facts(model_type)
    if known.skipped_on_cpu:
        skipped = pkgutil.resolve_name(f"vllm.model_executor.models.{known.skipped_on_cpu}")
        skipped.forward = lambda self, hidden_states: hidden_states
    if known.unaligned_on_cpu:
        platform.update_block_size_for_backend = classmethod(lambda cls, vllm_config: None)
    if known.mla_settings_on_cpu:
        off = ("enable_prefix_caching", "enable_chunked_prefill")
        return {"block_size": 16, **dict.fromkeys(off, False)}
    return {}


def complete(
    engine: Any, prompts: Prompts, new_tokens: int, logprobs: int = 0
) -> tuple[list[Any], int]:
    """(vLLM's completion of each prompt, steps); `logprobs`: further candidates of each token."""
    made = [*steps(engine, prompts, new_tokens, logprobs=logprobs)]
    finished = {int(o.request_id): o.outputs[0] for outputs in made for o in outputs if o.finished}
    return [finished[index] for index in range(len(prompts))], len(made)


def chosen(completion: Any) -> list[float]:
    """The log-probability of each token of a completion."""
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return [candidates[token].logprob for token, candidates in pairs]


def steps(engine: Any, prompts: Prompts, new_tokens: int, **sampling: Any) -> Iterator[list[Any]]:
    """The outputs of each step, until all prompts are continued greedily; ids are their indices."""
    from vllm import SamplingParams

    greedy = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    params = SamplingParams(max_tokens=new_tokens, **greedy, **sampling)
    waiting, step = dict(enumerate(prompts)), 0
    # The engine first: data-parallel engines ask each other, and all must take part.
    while (busy := engine.has_unfinished_requests()) or waiting:
        if not busy:  # a step without a request may wait for ever
            step = max(step, min(arrival for arrival, _ in waiting.values()))
        for index in [index for index, (arrival, _) in waiting.items() if arrival <= step]:
            _, prompt = waiting.pop(index)
            engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        yield engine.step()
        step += 1


if __name__ == "__main__":
    _child(Path(sys.argv[1]), int(sys.argv[2]))
