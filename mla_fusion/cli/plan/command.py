"""Plans one step of the persistent MLA decode and prints work per CTA, utilisation and splits.
Needs no GPU and no model.
"""

import argparse
from pathlib import Path

from mla_fusion.cli import UserError, option, positive, write

_MOST_CTAS = 2**16  # of a plan that is drawn, and tiles: it is made in Python
_MOST_TILES = 2**20


def declare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    lengths = parser.add_mutually_exclusive_group(required=True)
    option(lengths, "--lengths", "N,N,...", "KV tokens of each sequence", kind=_lengths)
    option(lengths, "--kv", "N", "KV tokens of every sequence")
    option(parser, "--batch", "B", "sequences, with --kv (default: 1)")
    text = "CTAs, one for each SM or compute unit: 132 on an H200, 304 MI300X, 256 MI355X"
    names = "--ctas", "--workers"
    parser.add_argument(*names, type=positive, required=True, metavar="W", help=text)
    option(parser, "--heads", "H", "query heads of one rank", 16)
    text = "query tokens of each sequence: 1, and more with drafts"
    option(parser, "--query-len", "Q", text, 1)
    text = "a budget of N splits for each sequence, shared by all; without it there is no cap"
    option(parser, "--max-split-per-batch", "N", text)
    text = "heads as AITER's kernels on this GPU take them (attention=aiter), or why none does"
    option(parser, "--aiter", None, text, choices=("gfx942", "gfx950"))
    text = "of query and cache, with --aiter (default: auto, bf16)"
    option(parser, "--kv-cache-dtype", None, text, choices=("auto", "fp8"))
    option(parser, "--svg", "FILE", "also draw a picture", kind=Path)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan, and draw it where asked; always 0."""
    from mla_fusion.attention.plan.buffers import MOST_TOKENS, OVERHEAD, Rules
    from mla_fusion.cli.plan import draw

    if arguments.lengths is not None and arguments.batch is not None:
        raise UserError("--batch goes with --kv; --lengths names every sequence")
    sequences = len(arguments.lengths or ()) or arguments.batch or 1
    fold = _head_blocks(arguments)
    for most, what, asked in (
        (_MOST_CTAS, "CTAs", arguments.ctas),
        (_MOST_TILES, "tiles (sequences times head blocks)", sequences * fold),
    ):
        if asked > most:
            raise UserError(f"{asked} {what} are asked for, and plan draws {most} at most")
    seq_lens = arguments.lengths or (arguments.kv,) * sequences
    if sum(seq_lens) > MOST_TOKENS:
        raise UserError(
            f"the batch has {sum(seq_lens)} KV tokens, and a plan counts them in 32 bits: "
            f"{MOST_TOKENS} at most"
        )
    rules = Rules(arguments.ctas, fold, 16, OVERHEAD, arguments.max_split_per_batch or -1)
    drawn = draw.make(rules, seq_lens, arguments.query_len)
    lines = draw.lines(drawn)
    if arguments.svg is not None:
        write(arguments.svg, draw.svg(drawn))
        lines += ["", f"{arguments.svg} written"]
    print("\n".join(lines))
    return 0


def _head_blocks(arguments: argparse.Namespace) -> int:
    """In how many blocks the kernel takes the heads; a UserError if AITER has none for them."""
    import torch

    from mla_fusion.attention.aiter import selection
    from mla_fusion.attention.plan import heads

    if arguments.aiter is None:
        if arguments.kv_cache_dtype is not None:
            raise UserError("--kv-cache-dtype goes with --aiter: other plans depend on no type")
        return heads.layout(arguments.heads, arguments.query_len).fold
    fp8 = arguments.kv_cache_dtype == "fp8"
    dtype = selection.FP8_OF[arguments.aiter] if fp8 else torch.bfloat16
    asked = arguments.heads, arguments.query_len, dtype, dtype, arguments.aiter
    verdict = selection.aiter_verdict(*asked)
    if verdict.unsupported:
        raise UserError(f"attention=aiter: {verdict.unsupported}")
    return verdict.layout.fold


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(","))
