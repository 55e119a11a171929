#!/usr/bin/env python3
"""Run real vLLM engines with and without the fusion, and compare them.

    python benchmarks/engine.py tokens OUT.csv     same tokens? many configurations, in parallel
    python benchmarks/engine.py complete OUT.csv   whole models, the engines in turns
    python benchmarks/engine.py short OUT.csv      the same for steps with a short prompt
    python benchmarks/engine.py start OUT.csv      cold and warm starts of whole models
    python benchmarks/engine.py sparse OUT.csv     a sparse model with the backend CUSTOM

Every engine runs in a process of its own. `fused` (attention `vllm`) is compared with `default`
(vLLM as it comes) and `cat` (graph partition and vLLM's fuse_rope_kvcache_cat_mla). The exit status
is 1 if a result is wrong. --plant adds an engine whose provider rotates for the next position,
which must be found wrong. engine_complete.py, engine_start.py and engine_sparse.py have the others.

With block-fp8 weights `default` and `cat` are equal in every bit. There `tokens` also has the
unfused arms `stored` (see engine_complete.py) and `native`, in which Inductor compiles norms and
quantizations. The widest is the measure, and the error is always planted.

Some configurations of `tokens` also run `portable`: `fused` with this library's persistent decode.
A profile must show that decode in every layer, and one refresh of its plan in every forward pass.

With --tp N, --dp N or --dcp N, or several of them, an engine of `tokens` and `complete` has N GPUs:
tensor parallelism, data-parallel attention with experts in parallel (N engines, which begin at
different times), and ranks of tensor parallelism that share a cache, with and without a draft.
mla_fusion must be installed. Where ranks share a cache, `tp`, vLLM with a cache for each rank, is
in the place of `cat`, which leaves the tokens of other ranks unrotated. In the place of `fused` is
`auto`, the flag alone. `tokens` plants the error on the last rank of every configuration, and reads
from the report of each rank that it fused every layer. With --multicast vLLM also chooses among
all-reduces that need NVLink multicast, and fusions with them.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import engine_compare
import torch
from engine_compare import layers_of
from engine_complete import complete
from engine_jobs import devices, is_asked, job, run, write
from engine_sparse import sparse
from engine_start import start
from engine_worker import KERNELS

from mla_fusion.measure.records import environment

if TYPE_CHECKING:
    from collections.abc import Iterator

WAYS = ("tp", "dp", "dcp")  # in which several GPUs divide the work of an engine
# Configurations of `tokens` that `portable` runs in.
PORTABLE = (
    "r1-tp8 fp8 custom-rope", "r1-tp8 bf16 FULL_DECODE_ONLY", "r1-tp8 fp8 mtp-1",
    "r1-tp8 fp8 ngram-3", "r1-dp bf16", "r1-dp fp8", "r1-tp8 block-fp8",
    "r1-tp8 block-fp8 ue8m0",
)  # fmt: skip
# What the epilogue of `portable` does there to the output, if anything.
QUANTIZED = {"r1-tp8 block-fp8": "group", "r1-tp8 block-fp8 ue8m0": "group_ue8m0"}
# vLLM's linear kernels for block-fp8 weights whose input is quantized in the graph, DeepGEMM's with
# scales that are powers of two; its first choice, FlashInfer's, quantizes inside an op.
DEEP_GEMM = {"VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0"}
CUTLASS = {**DEEP_GEMM, "VLLM_USE_DEEP_GEMM": "0"}
# Unfused arms beside `default` and `cat` that configurations of `tokens` need as a measure.
UNFUSED = dict.fromkeys((*QUANTIZED, "r1-tp8 block-fp8 flashinfer"), ("stored", "native"))


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=MEASURES)
    parser.add_argument("out")
    parser.add_argument("--jobs", type=int, default=4, help="`tokens`: engines at a time")
    parser.add_argument("--seconds", type=float, default=1e6, help="end engines after this time")
    parser.add_argument("--arms", default="", help="not of `tokens`: separated by commas")
    parser.add_argument("--layers", type=int, default=0, help="`complete`: at most so many layers")
    parser.add_argument("--graphs", default="", help="`complete`: vLLM's cudagraph_mode")
    parser.add_argument("--drafts", type=int, default=0, help="`complete`, `start`: of MTP a step")
    for way in WAYS:
        parser.add_argument(f"--{way}", type=int, default=1, help="GPUs of an engine; see above")
    parser.add_argument("--multicast", action="store_true", help="with all-reduces that need it")
    parser.add_argument("--only", default="", help="parts of configurations' names, with commas")
    parser.add_argument("--plant", nargs="*", default=(), help="`tokens`: configurations for it")
    parser.add_argument("--commit", default="", help="commit, where git does not know it")
    args = parser.parse_args()
    asked = {way: n for way in WAYS if (n := getattr(args, way)) > 1}
    args.gpus = max(asked.values(), default=1)
    args.ways = tuple(f" {way}{n}" for way, n in asked.items()) or ("",)
    if args.gpus > (seen := torch.cuda.device_count()):
        sys.exit(f"{args.gpus} GPUs for an engine: torch sees {seen}")
    if asked and (len({*asked.values()}) > 1 or args.what not in ("tokens", "complete")):
        sys.exit(
            "--tp, --dp and --dcp have one number, of GPUs, and are of `tokens` and `complete`"
        )
    rows, wrong, facts = [], 0, environment(args.commit, "benchmarks/engine.py")
    for found, failed in MEASURES[args.what](args):
        rows, wrong = rows + found, wrong + failed
        write(args.out, rows, facts)
    if not rows:
        sys.exit("nothing was measured: see above, or --only names no configuration")
    sys.exit(bool(wrong))


def run_arms(
    known: dict[str, dict[str, Any]], args: argparse.Namespace
) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """The results by arm of each configuration that `args.only` chooses, once all its arms end."""
    from vllm.utils.import_utils import has_deep_gemm

    wanted = [name for name in known if is_asked(name, args)]
    for name in [n for n in wanted if QUANTIZED.get(n) == "group_ue8m0" and not has_deep_gemm()]:
        # vLLM would take another linear layer, whose scales are not powers of two.
        print(f"   {name}: left out, DeepGEMM is not installed")
        wanted.remove(name)
    began, groups = time.time(), torch.cuda.device_count() // args.gpus

    def measure(name: str, arm: str, index: int) -> dict[str, Any]:
        changes = {"arm": arm, "device": devices(index % groups * args.gpus, args.gpus)}
        changes["multicast"] = args.multicast
        if arm == "tp":
            changes |= {"arm": "default", "dcp": 1}
        left = max(0.0, began + args.seconds - time.time())
        result = run(job(**known[name] | changes), left)
        seconds, problem = time.time() - began, result.get("error", "")
        print(f"   {name}, {arm}: {'FAILED' if problem else 'done'} at {seconds:.0f} s {problem}")
        return result

    with ThreadPoolExecutor(args.jobs) as pool:
        index = itertools.count()
        work = {
            name: {
                arm: pool.submit(measure, name, arm, next(index)) for arm in arms(name, known, args)
            }
            for name in wanted
        }
        for name, made in work.items():
            yield name, {arm: each.result() for arm, each in made.items()}


def arms(name: str, known: dict[str, dict[str, Any]], args: argparse.Namespace) -> list[str]:
    """The arms of a configuration."""
    found = ["default", *unfused(name, known[name]), "auto" if args.gpus > 1 else "fused"]
    if name in PORTABLE:
        found.append("portable")
    return found + ["planted"] * (name in (*args.plant, *UNFUSED) or args.gpus > 1)


def unfused(name: str, changes: dict[str, Any]) -> tuple[str, ...]:
    """The arms whose differences from `default` are the measure of a configuration."""
    return ("tp",) if "dcp" in changes else ("cat", *UNFUSED.get(name, ()))


def portable_launches(asked: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Launches of `engine_worker.KERNELS` in a decode step of `portable` on Hopper, by number of
    sequences."""
    # Each draft of MTP is a forward pass of its own, through a layer of the drafter.
    drafts = asked["drafts"] if asked["drafter"] == "mtp" else 0
    layers, passes = asked["layers"] + drafts, 1 + drafts
    counts: dict[str, float] = dict.fromkeys(KERNELS, layers) | {"mla_plan": passes}
    return dict.fromkeys(("5",) if asked["drafts"] else ("1", "5"), counts)


def configurations(gpus: int) -> dict[str, dict[str, Any]]:
    """What `tokens` runs with so many GPUs an engine, by name: changes of a job."""
    if gpus > 1:
        draft = {"drafts": 1, "capture": [2, 4, 8, 16, 32]}
        tp, dp, dcp = {"tp": gpus}, {"dp": gpus}, {"tp": gpus, "dcp": gpus, "model": "k2-tp4"}
        bf16 = {"cache": "auto"}
        return {
            f"v2-lite fp8 tp{gpus}": {"model": "v2-lite", **tp},
            f"r1-tp8 bf16 tp{gpus}": {**bf16, **tp},
            f"r1-tp8 fp8 mtp-1 tp{gpus}": {**draft, **tp},
            f"deepseek-v2-lite fp8 dp{gpus}": {"model": "deepseek-v2-lite", **dp},
            f"r1-ep bf16 mtp-1 dp{gpus}": {"model": "r1-ep", **bf16, **draft, **dp},
            f"k2-tp4 fp8 dcp{gpus}": dcp,
            f"k2-tp4 bf16 mtp-1 dcp{gpus}": {**bf16, **draft, **dcp},
        }
    return {
        "v2-lite fp8": {"model": "v2-lite"},
        "v2-lite bf16 PIECEWISE custom-rope": {
            "model": "v2-lite", "cache": "auto", "cudagraph_mode": "PIECEWISE", "rope": "custom"
        },
        "r1-tp8 fp8 custom-rope": {"rope": "custom"},
        "r1-tp8 bf16 FULL_DECODE_ONLY": {
            "cache": "auto", "cudagraph_mode": "FULL_DECODE_ONLY"
        },
        "large3-tp8 fp8": {"model": "large3-tp8"},
        "k2-tp4 fp8 PIECEWISE": {"model": "k2-tp4", "cudagraph_mode": "PIECEWISE"},
        "r1-tp8 fp8 mtp-1": {"drafts": 1, "capture": [2, 4, 8, 16, 32]},
        "k2-tp4 bf16 mtp-2": {
            "model": "k2-tp4", "cache": "auto", "drafts": 2, "capture": [3, 6, 12, 24, 48]
        },
        "r1-tp8 bf16 mtp-3": {"cache": "auto", "drafts": 3, "capture": [4, 8, 16, 32, 64]},
        "r1-tp8 fp8 ngram-3": {
            "drafts": 3, "drafter": "ngram", "capture": [1, 2, 4, 8, 16, 32, 64]
        },
        "v2-lite fp8 V1": {"model": "v2-lite", "runner": "V1"},
        "r1-dp bf16": {"model": "r1-dp", "cache": "auto"},
        "r1-dp fp8": {"model": "r1-dp"},
        # In four layers `native` moves log-probabilities by 1.50, and the planted error by 2.14.
        "r1-tp8 block-fp8": {"model": "r1-tp8-block", "layers": 2, "variables": CUTLASS},
        "r1-tp8 block-fp8 ue8m0": {
            "model": "r1-tp8-block", "layers": 2, "variables": DEEP_GEMM
        },
        "r1-tp8 block-fp8 flashinfer": {"model": "r1-tp8-block", "layers": 2},
    }  # fmt: skip


def tokens(args: argparse.Namespace) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """Compare the arms of every configuration; yields its rows, and how many are wrong."""
    known = configurations(args.gpus)
    for name, results in run_arms(known, args):
        rows, wrong = [], 0
        for ours in (arm for arm in ("fused", "auto", "portable") if arm in results):
            wanted = ("default", *unfused(name, known[name]), ours, "planted")
            arms = {arm: results[arm] for arm in wanted if arm in results}
            if not all("tokens" in result for result in arms.values()):
                wrong += 1
                continue
            row = judged(name, ours, arms, job(**known[name])) | {"gpus": args.gpus}
            wrong += row["verdict"] != "right" or row["planted"] == "right"
            rows.append(row)
        yield rows, wrong


def judged(
    name: str, ours: str, arms: dict[str, dict[str, Any]], asked: dict[str, Any]
) -> dict[str, Any]:
    """The row of an arm of ours; prints it."""
    default, fused = arms["default"], arms[ours]
    others = tuple(arm for arm in arms if arm not in ("default", ours, "planted"))
    rounding = engine_compare.rounding(others, arms)
    measure = engine_compare.widest(list(rounding.values()))
    pairs = {
        f"fused / {arm}": engine_compare.compare(fused, arms[arm]) for arm in ("default", others[0])
    } | {f"{arm} / default": difference for arm, difference in rounding.items()}
    verdict = engine_compare.verdict(pairs["fused / default"], measure)
    for problem in problems(name, ours, fused, asked):
        verdict = f"WRONG: {problem}; {verdict}"
    title, found = f"{name}, portable" if ours == "portable" else name, ""
    if ours != "portable" and "planted" in arms:
        pairs["planted / default"] = engine_compare.compare(arms["planted"], default)
        found = engine_compare.verdict(pairs["planted / default"], measure)
    layers, inside, outside = layers_of(fused)
    print(f"== {title}: {verdict}; fused {inside} of {layers} layers; steps {fused['steps']}")
    if ours == "portable":
        print(f"   launches a step: {fused['launches']}")
    else:
        print(f"   planted error: {found or 'not tried'}")
    for pair, difference in pairs.items():
        print(f"   {pair}: {difference}")
    return {
        "configuration": title, "runner": fused["runner"], "all_reduce": fused["all_reduce"],
        "bucket_layers": layers, "bucket_fused": inside, "other_fused": outside,
        "verdict": verdict, "planted": found, "steps": fused["steps"],
        **{pair: str(each) for pair, each in pairs.items()},
    }  # fmt: skip


def problems(name: str, ours: str, fused: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    """What an engine did otherwise than it should, whatever its tokens are."""
    layers, inside, outside = layers_of(fused)
    found = []
    # The drafter has an MLA layer of its own.
    expected = asked["layers"] + (asked["drafts"] > 0 and asked["drafter"] == "mtp")
    if not layers == inside == expected or outside:
        found.append(f"fused {inside} of {layers} layers, {outside} outside")
    if ours == "portable":
        if fused["launches"] != portable_launches(asked):
            found.append(f"{fused['launches']} launches a step")
        if fused["quantizations"] != [QUANTIZED.get(name, "none")]:
            found.append(f"outputs quantized {fused['quantizations']}")
    return found


MEASURES = {
    "tokens": tokens, "complete": complete, "short": complete, "sparse": sparse, "start": start
}  # fmt: skip


if __name__ == "__main__":
    main()
