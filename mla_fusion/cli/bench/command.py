"""Times the fused region, many layers in one CUDA graph with distinct weights, against vLLM
unfused, vLLM's fuse_rope_kvcache_cat_mla, torch's product with one kernel, and FlashInfer; or the
portable persistent decode, on distinct caches, against TRITON_MLA, FlashMLA and FlashAttention 3;
or the launch plans of products of few tokens, on distinct weights, against cuBLAS.
Each is checked in the same run, and its rows go into a CSV file. Needs a GPU; a candidate that is
not installed is left out."""

import argparse
from pathlib import Path
from typing import Any

from mla_fusion.cli import UserError, positive, require_gpu
from mla_fusion.cli.bench import decode, projections, region
from mla_fusion.measure import region_cases
from mla_fusion.measure.records import environment
from mla_fusion.measure.timing import measure_ceilings

MODULES = {"region": region, "decode": decode, "projections": projections}
DEFAULTS: dict[str, dict[str, Any]] = {name: each.DEFAULTS for name, each in MODULES.items()}
NUMBERS = {
    "tokens": ("T", ""),
    "batches": ("B", "sequences; 16 to 64 of them also with ragged lengths"),
    "contexts": ("N", "KV tokens of a sequence, at most 2^24 of all"),
    "heads": ("H", ""),
    "queries": ("Q", "query rows of a sequence: one, and its drafts"),
    **{name: (name[0].upper(), field) for name, field in region_cases.FIELDS.items()},
    "page": ("N", "tokens of a page of the cache"),
    "values": ("V", "v_head_dim: time the product with W_UV too; 0: the decode alone"),
    "max_split_per_batch": ("N", "splits of a sequence on average, at most; -1: no cap"),
    "chunks": ("N", "batch-invariant plans with these three chunks, and peers in vLLM's mode"),
    "k": ("K", "columns of the weights"),
    "sizes": ("N", "rows of one weight or of two; none: every shape that has shipped rows"),
    "layers": ("N", "layers in one CUDA graph"),
    "rounds": ("N", "samples of each candidate, taken in turns"),
}
FLAGS = {
    "bf16": "bf16 cache and query, not fp8 (decode has both by default)",
    "fp8": "fp8 cache and query, not bf16",
}
OPTIONS = *NUMBERS, *FLAGS, "peers"


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def declare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments. What differs between region and decode gets its default in `settle`."""
    add = parser.add_argument
    add("what", nargs="?", choices=[*DEFAULTS], default="region", help="default: %(default)s")
    add("--csv", type=Path, help="file for the rows (default: build/bench/ and what is timed)")
    for name, (metavar, text) in NUMBERS.items():
        of = {what: defaults[name] for what, defaults in DEFAULTS.items() if name in defaults}
        several = all(isinstance(default, tuple) for default in of.values())
        said = ", ".join(
            f"{what} {' '.join(map(str, default)) if several else default}"
            for what, default in of.items()
            if default != ()
        )
        text = f"{text} (default: {said})".strip() if said else text
        nargs = "+" if several else None
        add(_option(name), type=positive, nargs=nargs, metavar=metavar, help=text)
    for name, text in FLAGS.items():
        having = ", ".join(what for what, defaults in DEFAULTS.items() if name in defaults)
        add(f"--{name}", action="store_true", default=None, help=f"{having}: {text}")
    add("--peers", nargs="+", metavar="NAME", help="candidates (default: all)")
    add("--commit", default="", help="commit, where git does not know it")


def settle(settings: argparse.Namespace) -> None:
    """Give what was not typed its default; a UserError if what is timed has no such option."""
    defaults = DEFAULTS[settings.what]
    for name in OPTIONS:
        if getattr(settings, name) is None:
            setattr(settings, name, defaults.get(name))
        elif name not in defaults:
            raise UserError(f"bench {settings.what} has no option {_option(name)}: leave it out")
    settings.csv = settings.csv or Path("build/bench", f"{settings.what}.csv")


def run(arguments: argparse.Namespace) -> int:
    """Run it; 0 if the provider's results passed every check, else 1."""
    settle(arguments)
    return 0 if measure(arguments) else 1


def measure(settings: argparse.Namespace) -> bool:
    """Measure, print a line for each shape, write the rows; whether ours passed every check."""
    require_gpu()
    facts, ceilings = environment(settings.commit), measure_ceilings()
    print(*(f"{name} {value}" for name, value in facts.items() if value), sep=", ")
    print(f"ceilings: copy {ceilings.gbps:.0f} GB/s, bf16 product {ceilings.tflops:.0f} TFLOP/s")
    return bool(MODULES[settings.what].run(settings, facts, ceilings))
