"""Names the first layer whose fusion changes an answer. Prompts are continued greedily with no
layer fused, with all layers, and with layers 0 to k, where each run halves the candidates for k.
Without --model a model of the demo runs, with 27 layers, and needs no GPU."""

import argparse
import json
import os
import shutil
import time
from bisect import bisect_left
from pathlib import Path
from typing import Any

from mla_fusion.cli import UserError, child, make_folder, option, positive, require
from mla_fusion.cli.demo import tiny_models
from mla_fusion.cli.demo.command import NEW_TOKENS, first_difference, prompts
from mla_fusion.kernels import PROVIDERS

_LAYERS = 27  # of the demo's model, as DeepSeek-V2-Lite has
_NONE = str(10**6)  # the option `layers` that no layer has
_WORK = "mla_fusion.cli.child:generate"


def declare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    option(parser, "--model", None, "a model's folder, or on a GPU its name", kind=str)
    text = "file with a prompt in each line, text or a JSON list of token ids; --model needs it"
    option(parser, "--prompts", "FILE", text, kind=Path)
    option(parser, "--new-tokens", "N", "tokens after each prompt", NEW_TOKENS, positive)
    text = "who computes the fused op (default: the platform's; reference without --model)"
    option(parser, "--provider", None, text, choices=PROVIDERS)
    text = "further arguments of vLLM's EngineArgs, as a JSON object"
    option(parser, "--engine-args", "JSON", text, kind=_object)
    option(parser, "--out", "FOLDER", "folder for logs", Path("build/bisect"), Path)


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return found


def run(arguments: argparse.Namespace) -> int:
    """Run it; 0 if no answer changes, 1 if a layer is named."""
    require("vllm", "mla_fusion.passes")
    if arguments.model and not arguments.prompts:
        raise UserError("--model needs --prompts: the demo's are for its own vocabulary")
    asked = _read(arguments.prompts, arguments.model) if arguments.prompts else prompts()
    make_folder(arguments.out, "--out")
    for name in ("cache", "runs"):
        shutil.rmtree(arguments.out / name, ignore_errors=True)
    return _search(_Engines(arguments, asked))


def _read(file: Path, model: str | None) -> child.Prompts:
    """The prompts in a file, all of which arrive at once."""
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read --prompts {file}: {error}") from None
    if not lines:
        raise UserError(f"--prompts {file} has no prompt")
    found, tokenizer = [], None
    for number, line in enumerate(lines, 1):
        if line.startswith("["):
            try:
                ids = json.loads(line)
            except ValueError:
                ids = None
            if not ids or not all(type(token) is int for token in ids):
                raise UserError(f"--prompts {file}, prompt {number}: no list of token ids")
        elif model is None:
            raise UserError(f"--prompts {file}, prompt {number}: text needs --model's tokenizer")
        else:
            from transformers import AutoTokenizer

            tokenizer = tokenizer or AutoTokenizer.from_pretrained(model)
            ids = tokenizer.encode(line)
        found.append((0, ids))
    return found


class _Engines:
    """Runs the prompts in one engine after the other, each in a process of its own."""

    def __init__(self, arguments: argparse.Namespace, asked: child.Prompts) -> None:
        self.out, self.prompts, self.new_tokens = arguments.out, asked, arguments.new_tokens
        self.provider, self.given, self.count = arguments.provider, arguments.engine_args or {}, 0
        longest = max(len(prompt) for _, prompt in asked) + arguments.new_tokens
        self.engine = {"max_num_seqs": len(asked), "max_model_len": max(256, longest)}
        self.engine |= {"model": arguments.model, "dtype": "auto"}
        if not arguments.model:
            layers = dict.fromkeys(("num_hidden_layers", "first_k_dense_replace"), _LAYERS)
            model = tiny_models.write("deepseek-v2-shaped", self.out / "model", **layers)
            self.engine["model"], self.provider = str(model), self.provider or "reference"

    def answer(self, said: str, layers: str, others: child.Outcome | None = None) -> child.Outcome:
        """The answers with these layers fused, all for an empty string, compared with `others`."""
        options = {"provider": self.provider, "layers": layers}
        flag = child.flag_on(**{name: value for name, value in options.items() if value})
        self.count += 1
        job = child.Job(
            workdir=str(self.out / "runs" / str(self.count)), cache=str(self.out / "cache"),
            work=_WORK, engine=_merged(self.engine | flag, self.given), prompts=self.prompts,
            new_tokens=self.new_tokens,
        )  # fmt: skip
        print(f"run {self.count}: {said} fused", end="", flush=True)
        began = time.perf_counter()
        with open(os.devnull, "w") as progress:
            outcome = child.run(job, progress)
        changed = others and first_difference(others.tokens, outcome.tokens)
        said = f": {'other' if changed else 'the same'} answers" if others else ""
        print(f", {time.perf_counter() - began:.0f} s{said}")
        return outcome


def _merged(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """`a` with what `b` has; dictionaries in both are merged too."""
    both = {k: _merged(a[k], b[k]) for k in a.keys() & b.keys() if isinstance(a[k], dict)}
    return a | b | both


def _search(engines: _Engines) -> int:
    every = engines.answer("all layers", "")
    fused = every.report.decode().fused if every.report else 0
    if not fused:
        why = " ".join(decline.explain() for decline in every.declines)
        raise UserError(f"no layer fused: {why or f'the logs are in {engines.out}'}")
    unfused = engines.answer("no layer", _NONE, every)
    if first_difference(unfused.tokens, every.tokens) is None:
        print(f"no layer changes an answer: {len(unfused.tokens)} prompts, {fused} layers fused")
        return 0
    answers = {unfused.layers: every}

    def changes_up_to(layer: int) -> bool:
        answers[layer] = engines.answer(f"layers 0 to {layer}", f"0-{layer}", unfused)
        return first_difference(unfused.tokens, answers[layer].tokens) is not None

    first = bisect_left(range(unfused.layers), True, key=changes_up_to)
    named = f"layer {first} is the first whose fusion changes an answer"
    others = "a draft layer, or a product behind the last attention, is the first that changes one"
    print(named if first < unfused.layers else others)
    difference = first_difference(unfused.tokens, answers[first].tokens)
    assert difference is not None
    prompt, position = difference
    before, after = (
        f"token {outcome.tokens[prompt][position]} (log-probability "
        f"{outcome.logprobs[prompt][position]:.3f})"
        for outcome in (unfused, answers[first])
    )
    print(f"  prompt {prompt}, new token {position}: {before} becomes {after}")
    return 1
