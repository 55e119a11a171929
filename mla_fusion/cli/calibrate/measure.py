"""Measures what `attention=auto` decides by, behind what `products.py` and `region.py` measure. The
portable decode and the product behind it take turns with vLLM's backends, as in `mla-fusion bench
decode --values`, and every result is checked against float64 before its time counts. The rows go to
the file that `mla_fusion.runtime.measured` reads."""

import argparse
import itertools
import json
import operator
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mla_fusion import gpu
from mla_fusion.attention import cards
from mla_fusion.cli import UserError, make_folder
from mla_fusion.cli.bench import decode
from mla_fusion.cli.calibrate import products, region
from mla_fusion.cli.calibrate.tables import tables
from mla_fusion.cli.check import model_config
from mla_fusion.cli.selftest.kernels import decodes, run_checks
from mla_fusion.config import identity, vllm_compat
from mla_fusion.files import read_bounded
from mla_fusion.measure import decode_peers as peers
from mla_fusion.measure.decode_peers import Case
from mla_fusion.measure.records import environment, text
from mla_fusion.runtime import measured

CONTEXTS = 1024, 8192, 65536
GRID = {"batches": tuple(2**n for n in range(11)), "contexts": CONTEXTS}
ROUNDS = 5
LIMIT = 270  # seconds after which no further number of sequences is begun


def run(arguments: argparse.Namespace) -> int:
    """See `command.run`."""
    kernels = measured.kernels()
    folder = arguments.out or identity.tables_folder()
    make_folder(folder, "--out")
    # As the engine will ask for it.
    facts = {**environment(), "gpu": vllm_compat.gpu_name()}
    if arguments.model and products.calibrate(arguments, facts, folder):
        return 1
    layer = _layer(arguments) if arguments.model else {}
    fp8 = arguments.kv_cache_dtype.startswith("fp8")
    if region.calibrate([region.of_layer(layer, fp8)] if layer else region.every(), facts, folder):
        return 1
    if gpu.of("cuda").vendor == "AMD":
        print("attention=auto takes vLLM's decode on AMD GPUs: no decode is timed")
        return 0
    shapes = [_of_model(arguments, layer, fp8)] if layer else every()
    names = concerned({cases[0].dtype for cases in shapes})
    print(f"selftest of {len(names)} kernels first: a wrong one has no time", flush=True)
    if any(row.verdict == "WRONG" for row in run_checks(names)):
        print("nothing is measured; open an issue with `mla-fusion selftest --json FILE`")
        return 1
    path = folder / measured.file_name(facts["gpu"])
    decode.compile_ours(itertools.chain(*shapes))
    # Each is stored when it is measured: the whole list may be interrupted.
    return max(calibrate(cases, facts, path, kernels) for cases in shapes)


def calibrate(cases: list[Case], facts: dict[str, str], path: Path, kernels: str) -> int:
    """Measure one type, number of heads and of query rows, and store it; the exit status."""
    cases.sort(key=lambda case: case.batch)
    torch.manual_seed(0)
    dtype, timed = cases[0].dtype, []
    names = [*peers.CANDIDATES[dtype]]
    # Else all peers, and one that is missing is left out: `auto` compares with the engine's.
    if default := peers.vllm_default(cases[0]):
        names = [decode.OURS, default]
    for case in paced(cases):
        timed += decode.measure(case, names, ROUNDS)
        torch.cuda.empty_cache()
    wrong = sum(row["candidate"] == decode.OURS and not decode.is_right(row) for row in timed)
    if wrong:
        print(f"WRONG in {wrong} shapes, marked with !: nothing is written for attention=auto")
        return 1
    # vLLM runs its backend whatever its error: FlashMLA's, with P in fp8, is beyond our bound.
    [*found] = tables({**facts, **row} for row in timed).values()
    if not found or not found[0]["shapes"]:
        print("no backend of vLLM could be timed here, so there is nothing to compare")
        return 1
    store(path, found[0], kernels)
    tell(path, found[0]["shapes"])
    return 0


def concerned(types: set[torch.dtype]) -> list[str]:
    """The checks of `mla-fusion selftest` for what the portable decode launches here."""
    kinds = [name for name, dtype in decode.TYPES.items() if dtype in types]
    names = itertools.chain(*(decodes(cards.of(gpu.of("cuda")), kind) for kind in kinds))
    return ["planner", *names, "epilogue"]


def every() -> list[list[Case]]:
    """Every shape that a shipped file has."""
    shapes = {
        (each["dtype"], each["heads"], each["queries"], each["values"])
        for file in sorted(measured.FOLDER.glob("*.json"))
        for each in json.loads(file.read_bytes())["shapes"]
    }
    return [_cases(getattr(torch, dtype), *rest) for dtype, *rest in sorted(shapes)]


def _cases(dtype: torch.dtype, heads: int, queries: int, values: int) -> list[Case]:
    """The steps of a shape, as `bench decode` has them."""
    shape = {"heads": [heads], "queries": [queries], "values": values}
    return decode.grid(argparse.Namespace(**{**decode.DEFAULTS, **GRID, **shape}), [dtype])


def _layer(arguments: argparse.Namespace) -> dict[str, Any]:
    """The config of one layer of a rank of the model."""
    model = model_config.read(arguments.model)
    return model_config.cut(model, 1, arguments.tensor_parallel_size).config


def _of_model(arguments: argparse.Namespace, layer: dict[str, Any], fp8: bool) -> list[Case]:
    """The steps of a model's layer; a UserError if `auto` may not decode such a model."""
    widths = layer["kv_lora_rank"], layer["qk_rope_head_dim"]
    if widths != measured.WIDTHS:
        ours, models = ("{} + {}".format(*each) for each in (measured.WIDTHS, widths))
        raise UserError(
            f"attention=auto takes cache entries of {ours} only, and the model's have {models}: "
            "leave the decode to vLLM, or ask for attention=portable"
        )
    dtype = peers.FP8 if fp8 else peers.BF16
    heads, queries = layer["num_attention_heads"], 1 + arguments.speculative_tokens
    return _cases(dtype, heads, queries, layer["v_head_dim"])


def paced(cases: list[Case]) -> Iterator[Case]:
    """Each case, and a line of the time left; after LIMIT none of a further number of sequences, as
    the mean of all its contexts decides."""
    start, batch = time.monotonic(), 0
    for done, case in enumerate(cases):
        spent = time.monotonic() - start
        if case.batch != batch and spent > LIMIT:
            print(f"stopped after {spent:.0f} s: not measured from {case.batch} sequences on")
            return
        batch = case.batch
        if done:
            left = min(spent / done * (len(cases) - done), max(LIMIT - spent, 0))
            print(f"{done} of {len(cases)}, about {left:.0f} s left", file=sys.stderr, flush=True)
        yield case


def store(path: Path, new: dict[str, Any], kernels: str) -> None:
    """Write the shapes, and keep those that the file has of other ones and of the same kernels."""
    name = operator.itemgetter("dtype", "heads", "queries", "backend", "values")
    shapes = new["shapes"]
    if measured.read(path, new["gpu"], kernels):
        names = [*map(name, shapes)]
        old = json.loads(read_bounded(path))["shapes"]
        shapes = [shape for shape in old if name(shape) not in names] + shapes
    # In one step: an engine may be reading it.
    half = path.with_suffix(".part")
    half.write_text(text({"gpu": new["gpu"], "kernels": kernels, "shapes": shapes}))
    half.replace(path)


def tell(path: Path, shapes: list[dict[str, Any]]) -> None:
    """Print what `auto` will do, and how to send the rows."""
    for shape in shapes:
        for tokens in CONTEXTS:
            runs = measured.of_rows(shape["rows"], tokens)
            ours = f"with {measured.words(runs)} sequences" if runs else "for no step"
            print(f"--max-model-len {tokens}: portable {ours}, {shape['backend']} else")
    print(f"Rows: {path}. Open an issue with this file, and it can ship with mla-fusion.")
