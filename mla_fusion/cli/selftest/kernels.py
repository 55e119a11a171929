"""Every kernel of the library by name: why it cannot run on this GPU, or its check, several at
once, in a process each: a kernel that never ends or ends the process takes only that with it."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from multiprocessing.connection import wait
from typing import TextIO

import torch

from mla_fusion import gpu, kernels
from mla_fusion.attention import cards
from mla_fusion.attention.card import Card, Decodes, Shape
from mla_fusion.cli.child import EngineError, Job, end, result, start
from mla_fusion.cli.selftest import decode, norms, planner, projections, ranks, region, sparse
from mla_fusion.kernels.card import Card as RegionCard
from mla_fusion.measure.outcome import CannotRun, Outcome
from mla_fusion.projections.plans import PLANS

MOST_JOBS, MEMORY = 8, 12 * 2**30  # processes at once, and bytes of GPU memory that one may take
REPEATS = 3, 15  # of a decode's cases; the second if thorough
SILENCE = 150.0  # seconds; a case compiles kernels for up to half a minute
_behind = partial(Shape, queries=1, page=64, values=128)
EPILOGUES = [
    _behind(16, batch=1),
    _behind(32, batch=2, quantization="group"),
    _behind(16, batch=4, quantization="tensor"),
    _behind(8, batch=8, quantization="group_ue8m0"),
    _behind(128, batch=8),
]
MERGED = [_behind(16, batch=64), _behind(64, batch=32)]
MORE_EPILOGUES = [_behind(64, batch=1, quantization="group"), _behind(16, queries=2, batch=2)]
Check = Callable[[bool], Iterator[Outcome]]  # by `thorough`; it raises CannotRun on this GPU


def checks() -> dict[str, Check]:
    """Every check by its name, in order."""
    found: dict[str, Check] = {"planner": planner.check_all}
    for kind in ("bf16", "fp8"):
        found |= {f"{x.row} {kind}": partial(_region, x, kind)
                  for x in kernels.PROVIDERS.values() if x.shapes}  # fmt: skip
        found |= decodes(cards.CARDS, kind)
    caches = "bf16", "fp8", "656 bytes", "584 bytes"
    found |= {"epilogue": _epilogue, **{f"sparse {x}": partial(_sparse, x) for x in caches}}
    kinds = dict.fromkeys(plan.kernel for plan in PLANS)
    found |= {f"projection {x}": partial(projections.check_all, x) for x in kinds}
    return found | {"norm": norms.check_all, "all-reduce": ranks.check_all}


def decodes(of: Iterable[Card], kind: str) -> dict[str, Check]:
    """The checks of the kernels of these cards. kind: the type of query and cache."""
    mine = (card for card in of if card.shapes and kind in card.kinds)
    return {f"decode {x.name} {kind}": partial(_decode, x, kind) for x in mine}


def _region(card: RegionCard, kind: str, thorough: bool) -> Iterator[Outcome]:
    calls = region.cases(card, _type_of(kind), thorough)
    if why := kernels.why_unavailable(card.name):
        raise CannotRun(why)
    return region.check(kernels.get_provider(card.name), calls)


def _decode(card: Card, kind: str, thorough: bool) -> Iterator[Outcome]:
    if why := card.why_not_on(gpu.of("cuda")):
        raise CannotRun(why.detail)
    kv, chosen = _type_of(kind), card.shapes + (card.thorough if thorough else ())
    cases = [dataclasses.replace(shape, kv=kv, q=kv) for shape in chosen]
    cases = [x for x in cases if card.plans(Decodes(x.heads, x.queries, kv, x.width))]
    if kind == "fp8" and card.widens:
        cases.append(Shape(16, 1, 64, kv=kv))
    return decode.check(card, cases, repeats=REPEATS[thorough])


def _epilogue(thorough: bool) -> Iterator[Outcome]:
    shapes = EPILOGUES + (MORE_EPILOGUES if thorough else [])
    if gpu.of("cuda").no_fp8():
        shapes = [shape for shape in shapes if shape.quantization == "none"]
    else:
        # On Hopper this product merges splits, behind each dense decode.
        fp8 = gpu.fp8_type()
        shapes = [*shapes, *MERGED, *(dataclasses.replace(x, q=fp8, kv=fp8) for x in MERGED)]
    return decode.check(None, shapes, repeats=REPEATS[thorough])


def _sparse(cache: str, thorough: bool) -> Iterator[Outcome]:
    if why := cards.why_no_sparse(gpu.of("cuda")):
        raise CannotRun(why.detail)
    fp8 = gpu.fp8_type() if cache == "bf16" else _type_of("fp8")
    return sparse.check(sparse.variants(cache, fp8), steps=40 if thorough else 4)


def _type_of(kind: str) -> torch.dtype:
    """bf16, or the fp8 type of this GPU; CannotRun where it has no fp8."""
    if kind == "bf16":
        return torch.bfloat16
    if why := gpu.of("cuda").no_fp8():
        raise CannotRun(why)
    return gpu.fp8_type()


def run(job: Job, progress: TextIO) -> dict[str, str]:
    """The work of a child process: a line of JSON for each outcome of a check; then why the kernel
    cannot run here, "skipped", or why the check could not go on, "wrong"."""
    try:
        for outcome in checks()[job.options["name"]](job.options["thorough"]):
            print(json.dumps(dataclasses.asdict(outcome)), file=progress)
    except CannotRun as why:
        return {"skipped": str(why)}
    except Exception as error:  # noqa: BLE001 - whatever it is, the kernel did not run
        problem = f"{type(error).__name__}: {error}".split("\n")[0][:300]
        return {"wrong": f"the next case: {problem}"}
    return {}


@dataclasses.dataclass
class Row:
    """The verdict on a kernel."""

    kernel: str
    cases: int = 0
    error: float = 0.0
    bound: float = 0.0
    wrong: str = ""  # the first wrong case, or how the process ended
    skipped: str = ""  # why it cannot run here
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        """One of "right", "WRONG" and "cannot run"."""
        return "cannot run" if self.skipped else "WRONG" if self.wrong else "right"

    def add(self, outcome: Outcome) -> None:
        """Count a case: the worst is that nearest to, or farthest beyond, its bound."""
        self.cases += 1
        if not outcome.right and not self.wrong:
            why = outcome.wrong or f"error {outcome.error:.2g}, bound {outcome.bound:.2g}"
            self.wrong = f"{outcome.case}: {why}"
        before = self.error / self.bound if self.bound else self.error
        now = outcome.error / outcome.bound if outcome.bound else outcome.error
        if self.cases == 1 or not now <= before:
            self.error, self.bound = outcome.error, outcome.bound

    def __str__(self) -> str:
        start = f"{self.kernel:36} {self.verdict:10}"
        if self.skipped:
            return f"{start} {self.skipped}"
        worst = f"worst error {self.error:.1e}, bound {self.bound:.1e}, {self.seconds:.0f} s"
        return f"{start} {self.cases:3} cases, {worst}" + (f": {self.wrong}" if self.wrong else "")


def run_checks(names: Sequence[str], thorough: bool = False) -> list[Row]:
    """Run the checks of these kernels; a line for each that ends, and on a terminal a bar below."""
    free = torch.cuda.mem_get_info()[0]
    jobs = max(1, min(MOST_JOBS, os.cpu_count() or 1, free // MEMORY))
    terminal, number = sys.stderr.isatty(), itertools.count(1)
    rows: list[Row] = []

    def case(kernel: str) -> None:
        if terminal:
            bar = "#" * len(rows) + "." * (len(names) - len(rows))
            text = f"\r[{bar}] {next(number)} cases, {kernel}\x1b[K"
            print(text, end="", file=sys.stderr)

    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(watch, name, thorough, case) for name in names]):
            rows.append(done.result())
            if terminal:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            print(rows[-1], flush=True)
    return rows


def watch(name: str, thorough: bool, progress: Callable[[str], None]) -> Row:
    """Run the check of one kernel until it or its process ends, or is silent. progress: called with
    the kernel at each of its cases."""
    row, began = Row(name), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        options = {"name": name, "thorough": thorough}
        job = Job(folder, f"{folder}/cache", f"{__name__}:run", options=options, temporary=True)
        process, silent = start(job, stdout=subprocess.PIPE), False
        assert process.stdout is not None
        while True:
            if not wait([process.stdout.fileno()], SILENCE):
                silent = True
                end(process)
            if not (text := process.stdout.readline()):
                break
            row.add(Outcome(**json.loads(text)))
            progress(name)
        try:
            ended = result(job, process)
        except EngineError as error:
            why = f"killed after {SILENCE:.0f} s of silence behind case {row.cases}: a kernel waits"
            ended = {"wrong": f"{why} for ever" if silent else f"the process ended: {error.why}"}
    row.skipped, row.wrong = ended.get("skipped", ""), row.wrong or ended.get("wrong", "")
    row.seconds = round(time.monotonic() - began, 1)
    return row
