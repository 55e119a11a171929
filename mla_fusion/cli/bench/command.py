"""`mla-fusion bench`: this library's kernels against their peers over a grid of shapes, into a CSV
file.

`region` is the fused region, `decode` the decode attention, and `epilogue` what follows it. Every
candidate is checked in the run that times it. Peers whose package is missing are named and left
out. How time is taken: mla_fusion/cli/bench/kit/timing.py.
"""

from __future__ import annotations

import csv
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mla_fusion.cli.arguments import UserError, pick, positive
from mla_fusion.cli.bench import decode, epilogue, region_cases, report
from mla_fusion.cli.bench.kit import (
    Ceilings,
    environment,
    interleave,
    measure_ceilings,
    quantiles,
)
from mla_fusion.kernels.dispatch import Widths

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator


EQUAL, STEPS = 0.995, 1  # least share of equal elements, and most steps, of a result that counts
DEFAULTS: dict[str, dict[str, Any]] = {
    "region": {
        "tokens": (1, 8, 32, 64, 128, 256, 512),
        "heads": (8, 16, 32, 64, 128),
        **region_cases.DEEPSEEK._asdict(),
        "layers": 61,
        "rounds": 15,
        "bf16": False,
    },
    "decode": decode.DEFAULTS,
    "epilogue": epilogue.DEFAULTS,
}
NUMBERS = {
    "tokens": ("T", ""),
    "batches": ("B", "sequences; 16 to 64 of them also with ragged lengths"),
    "contexts": ("N", "KV tokens of a sequence, at most 2^24 of all"),
    "heads": ("H", ""),
    "queries": ("Q", "query rows of a sequence: one, and its drafts"),
    "pieces": ("S", "pieces of a sequence"),
    **{name: (name[0].upper(), field) for name, field in region_cases.FIELDS.items()},
    "page": ("N", "tokens of a page of the cache"),
    "values": ("V", "v_head_dim: time the product with W_UV too; 0: the decode alone"),
    "max_split_per_batch": ("N", "pieces of a sequence on average, at most; -1: no cap"),
    "layers": ("N", "layers in one CUDA graph"),
    "rounds": ("N", "samples of each candidate, taken in turns"),
}
FLAGS = {
    "bf16": "bf16 cache and query, not fp8 (decode has both by default)",
    "fp8": "fp8 cache and query, not bf16",
}


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def declare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments. What differs between region and decode gets its default in `settle`."""
    parser.description = (
        "Times the fused region, many layers in one CUDA graph with distinct weights, against "
        "vLLM unfused, vLLM's fuse_rope_kvcache_cat_mla, torch's product with one kernel, and "
        "FlashInfer; or the portable persistent decode, on distinct caches, against TRITON_MLA, "
        "FlashMLA and FlashAttention 3; or the epilogue of that decode against reduction, "
        "torch.bmm and quantization. Each is checked in the same run. Needs a GPU; what is not "
        "installed is left out."
    )
    parser.add_argument(
        "what", nargs="?", choices=[*DEFAULTS], default="region", help="default: %(default)s"
    )
    parser.add_argument(
        "--csv", type=Path, help="file for the rows (default: build/bench/ and what is timed)"
    )
    for name, (metavar, text) in NUMBERS.items():
        of = {what: defaults[name] for what, defaults in DEFAULTS.items() if name in defaults}
        several = all(isinstance(default, tuple) for default in of.values())
        said = ", ".join(
            f"{what} {' '.join(map(str, default)) if several else default}"
            for what, default in of.items()
        )
        parser.add_argument(
            _option(name),
            type=positive,
            nargs="+" if several else None,
            metavar=metavar,
            help=f"{text} (default: {said})".strip(),
        )
    for name, text in FLAGS.items():
        having = ", ".join(what for what, defaults in DEFAULTS.items() if name in defaults)
        text = f"{having}: {text}"
        parser.add_argument(f"--{name}", action="store_true", default=None, help=text)
    parser.add_argument(
        "--peers", nargs="+", default=(), metavar="NAME", help="candidates (default: all)"
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="a few shapes of both and what doctor finds, as JSON in FILE, to be sent",
    )
    parser.add_argument("--commit", default="", help="commit, where git does not know it")


def settle(settings: argparse.Namespace) -> None:
    """Give what was not typed the default of what is timed.

    Raises:
        UserError: an option of another was typed.
    """
    defaults = DEFAULTS[settings.what]
    for name in (*NUMBERS, *FLAGS):
        if getattr(settings, name) is None:
            setattr(settings, name, defaults.get(name))
        elif name not in defaults:
            raise UserError(f"bench {settings.what} has no option {_option(name)}: leave it out")
    settings.csv = settings.csv or Path("build/bench", f"{settings.what}.csv")


def run(arguments: argparse.Namespace) -> int:
    """Run it; 0 if the provider's results passed every check, else 1."""
    if arguments.report is not None:
        typed = [name for name in (*NUMBERS, *FLAGS, "csv") if getattr(arguments, name) is not None]
        if typed or arguments.peers:
            wrong = ", ".join(map(_option, typed or ["peers"]))
            raise UserError(f"--report measures shapes of its own: leave out {wrong}")
        require_gpu()
        return 0 if report.write(arguments.report, arguments.commit, DEFAULTS, measure) else 1
    settle(arguments)
    return 0 if measure(arguments) else 1


def counts(row: dict[str, Any]) -> bool:
    """Whether the correctness check of a row allows its time to count.

    Equal to the specification in nearly all elements, and no element more than a step off. A peer
    that rounds the rotated half twice is many steps off where the sum cancels; it counts if every
    element is what its own roundings give.
    """
    if row["equal"] == "":
        return True
    near = row["worst_step"] <= STEPS or row["own_rounding"] == 1.0
    return bool(row["equal"] >= EQUAL and near)


def require_gpu() -> None:
    """Raise UserError without a GPU."""
    if not torch.cuda.is_available():
        raise UserError(
            "needs a CUDA or ROCm GPU, and torch sees none here; the kernels are tested without "
            "one by the test suite, but only a GPU has times worth reading"
        )


def measure(settings: argparse.Namespace) -> bool:
    """Measure, print a line for each shape, write the rows; whether ours passed every check."""
    require_gpu()
    command = " ".join(["mla-fusion", *sys.argv[1:]])
    facts = {**environment(settings.commit), "command": command}
    ceilings = measure_ceilings()
    print(*(f"{name} {value}" for name, value in facts.items() if value), sep=", ")
    print(f"ceilings: copy {ceilings.gbps:.0f} GB/s, bf16 product {ceilings.tflops:.0f} TFLOP/s")
    if settings.what == "decode":
        return decode.run(settings, facts)
    if settings.what == "epilogue":
        return epilogue.run(settings, facts)
    return _region(settings, facts, ceilings)


def _region(settings: argparse.Namespace, facts: dict[str, str], ceilings: Ceilings) -> bool:
    """Measure the region."""
    from mla_fusion.cli.bench import region_peers

    names = pick(settings.peers, region_peers.PEERS)
    settings.csv.parent.mkdir(parents=True, exist_ok=True)
    right = True
    with settings.csv.open("w", newline="") as file:
        writer = None
        for rows in _shapes(settings, names, facts, ceilings):
            first = rows[0]
            if writer is None:
                writer = csv.DictWriter(file, first)
                writer.writeheader()
            writer.writerows(rows)
            file.flush()
            times = " | ".join(
                f"{r['candidate']} {r['p50_us']:.2f}{'' if counts(r) else '!'}" for r in rows
            )
            print("T={tokens:4d} H={heads:4d} floor {floor_us:6.2f} |".format(**first), times)
            right &= all(counts(r) for r in rows if r["candidate"].endswith("triton"))
    print(f"microseconds per layer; ! marks a failed check. Rows: {settings.csv}")
    return right


def _shapes(
    settings: argparse.Namespace,
    names: list[str],
    facts: dict[str, str],
    ceilings: Ceilings,
) -> Iterator[list[dict[str, Any]]]:
    """The rows of one shape after the other: a candidate, and what it was measured with.

    "query" is the type of query and cache, "equal" the share of elements that equal the reference
    ("" for a part of the work), "own_rounding" the share that equals what the candidate's own
    roundings give, if they are known.
    """
    from mla_fusion.cli.bench import region_peers

    missing: set[str] = set()
    widths = Widths(*(getattr(settings, name) for name in Widths._fields))
    for heads in settings.heads:
        weights = region_cases.make_weights(heads, settings.layers, widths)
        for tokens in settings.tokens:
            case = region_cases.Case(tokens, heads, not settings.bf16, widths)
            region = region_cases.make_region(case, weights)
            # A captured graph does not keep its candidate's workspaces alive: `layers` does.
            layers, graphs, checks, own = {}, {}, {}, {}
            for name in names:
                if name in missing:
                    continue
                try:
                    layer = layers[name] = region_peers.PEERS[name](region)
                    if name not in region_peers.NOT_A_RESULT:
                        checks[name] = region_cases.agreement(region, layer)
                    if name in region_peers.OWN_ROUNDING:
                        expected = region_peers.OWN_ROUNDING[name](region)
                        own[name] = region_cases.agreement(region, layer, expected)[0]
                    graphs[name] = region_cases.capture(region, layer)
                    graphs[name].replay()
                    torch.cuda.synchronize()
                except (ImportError, RuntimeError, AttributeError, ValueError) as error:
                    print(f"{name} left out: {type(error).__name__} {str(error)[:300]}")
                    missing.add(name)
            times = interleave(graphs, settings.layers, settings.rounds)
            plan = dataclasses.asdict(region_peers.chosen_plan(region))
            rows = []
            for name, samples in times.items():
                p20, p50, p80 = (round(x, 3) for x in quantiles(samples))
                equal, worst = checks.get(name, ("", ""))
                row = {
                    **facts,
                    "query": "bf16" if settings.bf16 else "fp8",
                    **widths._asdict(),
                    "tokens": tokens,
                    "heads": heads,
                    "candidate": name,
                    "p20_us": p20,
                    "p50_us": p50,
                    "p80_us": p80,
                    "floor_us": round(ceilings.floor_us(case), 3),
                    "gbps": round(case.bytes() / p50 / 1e3),
                    "equal": equal,
                    "worst_step": worst,
                    "own_rounding": own.get(name, ""),
                    "plan": str(plan) if name == "triton" else "",
                }
                rows.append(row)
            yield rows
            del layers, graphs, region
            torch.cuda.empty_cache()
