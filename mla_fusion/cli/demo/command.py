"""Builds two small models with random weights, DeepSeek-V2- and V3-shaped, runs a vLLM engine for
each with the flag off and on, and compares the tokens. Needs no GPU."""

import argparse
import json
import random
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mla_fusion import report
from mla_fusion.cli import UserError, child, make_folder, option, require
from mla_fusion.cli.demo import tiny_models

MAX_NUM_SEQS = 8  # also the decode bucket, in tokens
NEW_TOKENS = 24
# (step at which the prompt arrives, its tokens). Others decode then, so every kind of batch occurs:
# only prefill, only decode, short prompts that fall into the decode bucket, and prefill mixed with
# decode inside the bucket and above it.
ARRIVALS = [(0, 5), (0, 40), (2, 1), (4, 2), (6, 3), (9, 100), (20, 2)]
_CACHE = "cache"  # of all four engines, whose graphs have different keys; made by each demo


def declare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    text = "folder for models, logs, tokens.json and report.json"
    option(parser, "--out", None, text, Path("build/demo"), Path)


def run(arguments: argparse.Namespace) -> int:
    """Run it; 0 if every layer fused and the tokens are equal, else 1."""
    return 0 if compare(arguments.out) else 1


def compare(out: Path, names: Sequence[str] = tuple(tiny_models.MODELS)) -> bool:
    """Run the models `names` and write `out`/tokens.json. True if all layers fused and no token
    differs. Each model's folder has its report; `out` has the last one too. UserError: an engine
    failed."""
    require("vllm", "safetensors")
    make_folder(out, "--out")
    shutil.rmtree(out / _CACHE, ignore_errors=True)
    results, fused = [], True
    for index, name in enumerate(names, 1):
        print(f"[{index}/{len(names)}] {name}: random weights, greedy, real vLLM engines")
        result, stored = _run_model(name, out / name)
        results.append(result)
        fused &= stored.decode().fused > 0 and not any(r.declined for r in stored.ranges)
        report.store(out / "report.json", stored)
    (out / "tokens.json").write_text(json.dumps({"models": results}, indent=1))
    if not fused:
        print("not every MLA layer of the decode range fused; the reasons are above")
    equal = all(result["tokens_equal"] for result in results)
    print(f"tokens equal: {'yes' if equal else 'no'}")
    say_what_shows(out)
    return equal and fused


def say_what_shows(out: Path) -> None:
    """Print a command that shows the last report, from any folder and without a PATH."""
    own = Path(sys.argv[0]).absolute()
    command = [str(own)] if own.name == "mla-fusion" else [sys.executable, "-m", "mla_fusion"]
    print("what fused in the last engine:", shlex.join([*command, "report", str(out.absolute())]))


def _run_model(name: str, folder: Path) -> tuple[dict[str, Any], report.Report]:
    """(its part of tokens.json, the report of its engine with the flag on)."""
    shutil.rmtree(folder, ignore_errors=True)
    model = tiny_models.write(name, folder / "model")
    off = _run_engine(folder, model, fuse=False)
    on = _run_engine(folder, model, fuse=True)
    stored, lines = on.report, on.report.lines() if on.report else []
    for text in [*(w for w in on.warnings if w not in lines), *lines]:
        print(f"    {text}")
    if not stored:
        raise UserError(f"{name}: no layer fused and there is no report; see {folder}")
    report.store(folder / "report.json", stored)
    if difference := first_difference(off.tokens, on.tokens):
        prompt, position = difference
        unfused, fused = (run.tokens[prompt][position:][:4] for run in (off, on))
        where = f"prompt {prompt} differs from token {position} on"
        print(f"    tokens: {where}: {unfused} off, {fused} on")
    else:
        bits = "bit-equal" if off.logprobs == on.logprobs else "not bit-equal"
        print(f"    tokens: equal; their log-probabilities: {bits}")
    ranges = [
        {"range": r.range, "layers": r.layers, "fused": r.fused,
         "declined": sum(r.declined.values())} for r in stored.ranges
    ]  # fmt: skip
    return {"name": name, "tokens_equal": difference is None, "ranges": ranges}, stored


def _run_engine(folder: Path, model: Path, fuse: bool) -> child.Outcome:
    flag = "on" if fuse else "off"
    print(f"  flag {flag}: {'fused decode' if fuse else 'vLLM as it is'}, starting an engine")
    began = time.perf_counter()
    engine: dict[str, Any] = {
        "model": str(model),
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": 256,
    }
    if fuse:
        engine |= child.flag_on(provider="reference")
        # On a CPU vLLM compiles one graph of all layers: so the flag's values compare to the bit.
        engine["compilation_config"]["use_inductor_graph_partition"] = True
    job = child.Job(
        workdir=str(folder / flag), cache=str(folder.parent / _CACHE), engine=engine,
        prompts=prompts(), new_tokens=NEW_TOKENS, plugin=fuse,  # with the flag off it is stock vLLM
    )  # fmt: skip
    outcome = child.run(job)
    print(f"    done in {time.perf_counter() - began:.0f} s")
    return outcome


def prompts() -> child.Prompts:
    """The prompts of `ARRIVALS`, the same each time."""
    choose = random.Random(1)
    return [(step, [choose.randrange(1024) for _ in range(n)]) for step, n in ARRIVALS]


def first_difference(
    off: Sequence[Sequence[int]], on: Sequence[Sequence[int]]
) -> tuple[int, int] | None:
    """(prompt, position) of the first token that differs; None if none does."""
    for prompt, pair in enumerate(zip(off, on, strict=True)):
        for position, (expected, got) in enumerate(zip(*pair, strict=True)):
            if expected != got:
                return prompt, position
    return None
