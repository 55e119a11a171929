"""Plans one step of the persistent MLA decode and prints work per CTA, utilisation and splits.
Needs no GPU and no model."""

import argparse
import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from mla_fusion.attention.aiter import selection
from mla_fusion.attention.plan import heads, planner
from mla_fusion.attention.plan.buffers import MOST_TOKENS, OVERHEAD, Rules
from mla_fusion.cli import UserError, option, positive, write

_MOST_CTAS, _MOST_TILES = 2**16, 2**20  # of a plan that is drawn: it is made in Python
ROWS, WIDTH = 32, 64  # of the plot in text
_SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyz"
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")  # Paul Tol's bright


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
    if arguments.lengths is not None and arguments.batch is not None:
        raise UserError("--batch goes with --kv; --lengths names every sequence")
    lengths, fold = arguments.lengths, _head_blocks(arguments)
    batch = len(lengths or ()) or arguments.batch or 1
    for most, what, asked in (
        (_MOST_CTAS, "CTAs", arguments.ctas),
        (_MOST_TILES, "tiles (sequences times head blocks)", batch * fold),
        (MOST_TOKENS, "KV tokens (counted in 32 bits)", sum(lengths or [arguments.kv * batch])),
    ):
        if asked > most:
            raise UserError(f"{asked} {what} are asked for, and plan draws {most} at most")
    rules = Rules(arguments.ctas, fold, 16, OVERHEAD, arguments.max_split_per_batch or -1)
    drawn = make(rules, lengths or (arguments.kv,) * batch, arguments.query_len)
    text = lines(drawn)
    if arguments.svg is not None:
        write(arguments.svg, svg(drawn))
        text += ["", f"{arguments.svg} written"]
    print("\n".join(text))
    return 0


def _head_blocks(arguments: argparse.Namespace) -> int:
    """In how many blocks the kernel takes the heads; a UserError if AITER has none for them."""
    asked, arch = (arguments.heads, arguments.query_len), arguments.aiter
    if arch is None:
        if arguments.kv_cache_dtype is not None:
            raise UserError("--kv-cache-dtype goes with --aiter: other plans depend on no type")
        return heads.layout(*asked).fold
    fp8 = arguments.kv_cache_dtype == "fp8"
    dtype = selection.FP8_OF[arch] if fp8 else torch.bfloat16
    verdict = selection.aiter_verdict(*asked, dtype, dtype, arch)
    if verdict.unsupported:
        raise UserError(f"attention=aiter: {verdict.unsupported}")
    return verdict.layout.fold


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(","))


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One plan, read back from its buffers."""

    rules: Rules
    seq_lens: tuple[int, ...]  # KV tokens of each sequence
    query_len: int  # query rows of each sequence
    # for each CTA its items in order, as (sequence, cost in blocks), the fixed cost included
    shares: list[list[tuple[int, int]]]
    splits: list[int]  # for each sequence, the most that one of its head blocks is in

    @property
    def loads(self) -> list[int]:
        """Cost of the items of each CTA, in blocks."""
        return [sum(cost for _, cost in share) for share in self.shares]

    @property
    def busy(self) -> int:
        """CTAs that have an item."""
        return sum(bool(share) for share in self.shares)

    @property
    def utilisation(self) -> float:
        """Mean load over the largest: the share of the kernel's time that a CTA is busy."""
        return sum(self.loads) / (max(self.loads) * len(self.loads))


def make(rules: Rules, seq_lens: tuple[int, ...], query_len: int) -> Drawn:
    """Plan sequences of `seq_lens` KV tokens with `query_len` query rows each."""
    batch = len(seq_lens)
    shapes = planner.shapes(rules, batch)
    plan = SimpleNamespace(**{name: np.zeros(s, np.int32) for name, s in shapes.items()})
    qo_indptr = np.arange(batch + 1, dtype=np.int32) * query_len
    planner.fill_arrays(plan, rules, qo_indptr, np.array(seq_lens, np.int32), query_len)
    items = plan.work_info_set[: plan.work_indptr[-1]]
    tiles = items[:, planner.BATCH]
    blocks = -(-(items[:, planner.KV_END] - items[:, planner.KV_START]) // rules.granularity)
    costs = (blocks + rules.overhead).tolist()
    each = [*zip((tiles // rules.fold).tolist(), costs, strict=True)]
    shares = [each[begin:end] for begin, end in itertools.pairwise(plan.work_indptr.tolist())]
    counts = np.bincount(tiles, minlength=batch * rules.fold)
    return Drawn(rules, seq_lens, query_len, shares, counts.reshape(batch, -1).max(1).tolist())


def lines(drawn: Drawn) -> list[str]:
    """The plan in words and as a plot, a row for each CTA or group of CTAs."""
    rules, loads = drawn.rules, drawn.loads
    cap = rules.max_split_per_batch
    splits = f"{_range(drawn.splits)} splits"
    if cut := sum(count > 1 for count in drawn.splits):
        splits += f", {cut} of them split"
    text = [
        f"{_count(len(drawn.seq_lens), 'sequence')} of {_range(drawn.seq_lens)} KV tokens, "
        f"{_count(drawn.query_len, 'query row')} each, {_count(rules.fold, 'head block')}; "
        f"{_count(rules.ctas, 'CTA')}, "
        + (f"at most {cap} splits per sequence on average" if cap > 0 else "no cap on splits"),
        "",
        f"busy CTAs      {drawn.busy} of {rules.ctas}",
        f"work items     {sum(map(len, drawn.shares))}; sequences in {splits}",
        f"largest load   {max(loads)} blocks of {rules.granularity} tokens; an item counts "
        f"{rules.overhead} blocks more than it reads",
        f"utilisation    {drawn.utilisation:.1%} (mean load / largest load)",
    ]
    if cap > 0:
        uncapped = dataclasses.replace(rules, max_split_per_batch=-1)
        free = make(uncapped, drawn.seq_lens, drawn.query_len)
        text.append(
            f"without a cap  {free.busy} of {rules.ctas} busy, largest load {max(free.loads)}: "
            f"{max(loads) / max(free.loads):.1f} times less, utilisation {free.utilisation:.1%}"
        )
    return [*text, "", *_plot(drawn)]


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def _plot(drawn: Drawn) -> list[str]:
    ctas = drawn.rules.ctas
    group = -(-ctas // ROWS)
    top = max(drawn.loads) * group
    label = 2 * len(str(ctas - 1)) + 1
    modulo = f", modulo {len(_SYMBOLS)}" if len(drawn.seq_lens) > len(_SYMBOLS) else ""
    rows = [f"{'CTAs':>{label}}   load; digits and letters are sequences{modulo}"]
    # The planner takes CTAs in order: those without an item are the last.
    for first in range(0, drawn.busy, group):
        last = min(first + group, ctas) - 1
        bar, done = "", 0
        for sequence, cost in itertools.chain(*drawn.shares[first : last + 1]):
            done += cost
            bar += _SYMBOLS[sequence % len(_SYMBOLS)] * (round(done * WIDTH / top) - len(bar))
        name = str(first) if first == last else f"{first}-{last}"
        rows.append(f"{name:>{label}} |{bar:<{WIDTH}}|")
    if (first := -(-drawn.busy // group) * group) < ctas:
        rows.append(f"{f'{first}-{ctas - 1}':>{label}} |{'idle':^{WIDTH}}|")
    return rows


def svg(drawn: Drawn) -> str:
    """The plan as an SVG picture: a bar for each CTA, a colour for each sequence."""
    height, width, left, top, most = 12, 720, 40, 44, max(drawn.loads)
    scale, overhead = (width - left - 10) / most, drawn.rules.overhead
    bottom = top + height * drawn.rules.ctas
    size = f'width="{width}" height="{bottom + 24}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="10">',
        f'<rect {size} fill="white"/>',
        f'<text x="{left}" y="16" font-size="12">{len(drawn.seq_lens)} sequences on '
        f"{drawn.rules.ctas} CTAs: utilisation {drawn.utilisation:.1%}</text>",
        f'<text x="{left}" y="32">a bar is a CTA, a colour a sequence, the dark edge of an item '
        "its fixed cost</text>",
    ]
    for cta, share in enumerate(drawn.shares):
        y, x = top + cta * height, float(left)
        parts.append(f'<text x="{left - 6}" y="{y + 9}" text-anchor="end">{cta}</text>')
        for sequence, cost in share:
            colour, at = _COLOURS[sequence % len(_COLOURS)], f'<rect x="{x:.1f}" y="{y}"'
            parts += [
                f'{at} width="{cost * scale:.1f}" height="{height - 2}" fill="{colour}">'
                f"<title>sequence {sequence}, {cost - overhead} blocks</title></rect>",
                f'{at} width="{overhead * scale:.1f}" height="{height - 2}" fill="black" '
                'fill-opacity="0.35"/>',
            ]
            x += cost * scale
    axis = f"load in blocks of {drawn.rules.granularity} tokens, 0 to {most}"
    parts.append(f'<text x="{left}" y="{bottom + 14}">{axis}</text>')
    return "\n".join([*parts, "</svg>", ""])
