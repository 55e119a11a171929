"""What every benchmark does: time candidates, compare results, say on what it ran. Candidates are
CUDA graphs of many calls that take turns, so that clock changes and neighbours meet all alike."""

import csv
import dataclasses
import functools
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from mla_fusion.attention.aiter.selection import FP8_OF
from mla_fusion.attention.plan.device import architecture
from mla_fusion.attention.plan.epilogue import GROUP, Epilogue
from mla_fusion.cli import UserError, version_of

T = TypeVar("T")
C = TypeVar("C")
Row = dict[str, Any]
Call = Callable[[int], object]
FACTS = ["gpu", "driver", "torch", "triton", "vllm", "commit", "command"]
TIMES = ["p20_us", "p50_us", "p80_us"]
# A peer that is not here, or that this vLLM calls otherwise.
UNAVAILABLE = ImportError, RuntimeError, AttributeError, ValueError, TypeError
say_once = functools.cache(functools.partial(print, flush=True))
POISON = 0x5A  # the byte that outputs are filled with before a call


@functools.cache
def fp8_type() -> torch.dtype:
    """The fp8 type that this GPU computes in: e4m3fnuz on gfx942, e4m3fn on all others."""
    return FP8_OF.get(architecture(torch.device("cuda")), torch.float8_e4m3fn)


@dataclasses.dataclass
class Ceilings:
    """What this GPU was measured to do: GB/s of a copy (read plus write) and bf16 TFLOP/s."""

    gbps: float
    tflops: float

    def floor_us(self, moved: int, flops: int) -> float:
        """Nothing that moves so many bytes and computes so much is faster, in microseconds."""
        return max(moved / self.gbps / 1e3, flops / self.tflops / 1e6)


def capture_calls(call: Call, count: int) -> torch.cuda.CUDAGraph:
    """A graph of `count` calls, after a first one that is not captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            call(i)
    return graph


def interleave(
    graphs: dict[T, torch.cuda.CUDAGraph], calls: int, rounds: int
) -> dict[T, dict[str, float]]:
    """`TIMES` of a call of every graph, in microseconds, of one sample per round."""
    samples: dict[T, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # The first replay keeps the GPU busy while the CPU enqueues the second.
            graph.replay()
            begin.record()
            graph.replay()
            end.record()
            samples[name].append((begin, end))
        torch.cuda.synchronize()
    times = {}
    for name, pairs in samples.items():
        us = [begin.elapsed_time(end) * 1e3 / calls for begin, end in pairs]
        times[name] = dict(zip(TIMES, np.quantile(us, (0.2, 0.5, 0.8)).tolist(), strict=True))
    return times


def compare(
    names: Iterable[T], build: Callable[[T], tuple[Call, C]], calls: int, rounds: int
) -> list[tuple[T, C, dict[str, float]]]:
    """Each candidate that is here, what its check found, and its `TIMES`. build: its call, which
    keeps what a graph of `calls` of them reads, and what the check found."""
    graphs, checks, kept = {}, {}, []
    for name in names:
        try:
            call, checks[name] = build(name)
            graphs[name] = capture_calls(call, calls)
            kept.append(call)
        except UNAVAILABLE as problem:
            say_once(f"{name} left out: {type(problem).__name__} {str(problem)[:300]}")
    times = interleave(graphs, calls, rounds)
    return [(name, checks[name], times[name]) for name in graphs]


def rates(moved: int, flops: int, times: dict[str, float]) -> dict[str, float]:
    """The times of a shape, with its GB/s and TFLOP/s for so many bytes and operations."""
    us = times["p50_us"]
    return {**times, "gbps": moved / us / 1e3, "tflops": flops / us / 1e6}


def poisoned(like: torch.Tensor) -> torch.Tensor:
    """A tensor like `like`, filled with `POISON`: what stays so was not written."""
    return torch.full_like(like.view(torch.uint8), POISON).view(like.dtype)


def storage(view: torch.Tensor) -> torch.Tensor:
    """All bytes of what `view` is a view of."""
    return torch.empty(0, dtype=torch.uint8, device=view.device).set_(view.untyped_storage())


def steps(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Distance in representable values (ulp) per element; NaN is at distance 0 from NaN."""

    def ordinal(x: torch.Tensor) -> torch.Tensor:
        bits = 8 * x.element_size()
        raw = x.view({8: torch.uint8, 16: torch.int16, 32: torch.int32}[bits]).long()
        raw = raw & ((1 << bits) - 1)
        sign = 1 << (bits - 1)
        return torch.where(raw >= sign, sign - raw, raw)

    got_nan, want_nan = got.float().isnan(), want.float().isnan()
    distance = (ordinal(got) - ordinal(want)).abs()
    return distance.masked_fill(got_nan & want_nan, 0).masked_fill(got_nan ^ want_nan, 1 << 40)


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative distance of two tensors, in float64; NaN if either holds one."""
    want = want.double()
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-9))


def worst(errors: Sequence[float]) -> float:
    """The largest; NaN if one is, which max() may lose."""
    return float(torch.tensor([0.0, *errors], dtype=torch.double).max())


def agreement(*pairs: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, int]:
    """Share of equal elements, and the largest distance in steps, over pairs of tensors."""
    distances = torch.cat([steps(got, want).flatten() for got, want in pairs])
    if not len(distances):
        return 1.0, 0
    return int((distances == 0).sum()) / len(distances), int(distances.max())


def exact_attention(
    q: torch.Tensor, keys: torch.Tensor, latent: int, sink: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [n, H, latent] and LSE [n, H], without the sink [H], of queries [n, H, L + R] over
    keys [s, L + R], all in float64. Row i of the n sees all but the last n - 1 - i keys."""
    scores = q.shape[2] ** -0.5 * q @ keys.T
    after = torch.arange(len(q) - 1, -1, -1, device=q.device)
    seen = torch.arange(len(keys), device=q.device) < len(keys) - after[:, None]
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    total = lse if sink is None else torch.logaddexp(lse, sink.double())
    # exp(-inf - -inf) is NaN, and a row that sees no key is zero. Any other NaN stays.
    weights = (scores - total[..., None]).exp().masked_fill(~seen.any(1)[:, None, None], 0.0)
    return weights @ keys[:, :latent], lse


def make_w_uv(heads: int, latent: int, values: int, device: str = "cuda") -> torch.Tensor:
    """A random W_UV [H, L, V], bf16: dense in L, as vLLM has that of plain weights."""
    w_uv = torch.randn(heads, values, latent, device=device, dtype=torch.bfloat16)
    return (w_uv / latent**0.5).transpose(1, 2)


def make_epilogue(w_uv: torch.Tensor, rows: int, quantization: str) -> Epilogue:
    """What follows a decode of so many query rows."""
    columns = w_uv.shape[0] * w_uv.shape[2]
    dtype = w_uv.dtype if quantization == "none" else torch.float8_e4m3fn
    out = w_uv.new_empty((rows, columns), dtype=dtype)
    scale = None
    if quantization == "tensor":
        scale = w_uv.new_full((1,), 0.01, dtype=torch.float32)
    elif quantization != "none":  # as vLLM has them
        scale = w_uv.new_empty((columns // GROUP, rows), dtype=torch.float32).T
    return Epilogue(w_uv, out, scale, quantization == "group_ue8m0")


def measure_ceilings() -> Ceilings:
    """Copy bandwidth and bf16 matrix rate of this GPU, on random data."""
    from triton.testing import do_bench

    source = torch.randint(0, 256, (2**31,), device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = do_bench(lambda: target.copy_(source)) / 1e3
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = do_bench(lambda: a @ b) / 1e3
    return Ceilings(gbps=2 * source.numel() / copy / 1e9, tflops=2 * 8192**3 / product / 1e12)


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.split("\n")[0]
    except OSError:
        return ""


def environment(commit: str = "", program: str = "mla-fusion") -> dict[str, str]:
    """GPU, driver, versions, commit and command; what is not there is an empty string."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "vllm": version_of("vllm"),
        "flashinfer": version_of("flashinfer-python"),
        "commit": commit or _output("git", "rev-parse", "--short", "HEAD"),
        "command": " ".join([program, *sys.argv[1:]]),
    }


def table(
    path: Path,
    facts: Mapping[str, str],
    columns: Sequence[str],
    work: Iterable[T],
    measure: Callable[[T], list[Row]],
) -> list[Row]:
    """All rows; those of each shape go at once into a CSV file, behind `FACTS`, in six digits."""
    rows: list[Row] = []
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*FACTS, *columns], extrasaction="ignore")
        writer.writeheader()
        for shape in work:
            rows += (new := measure(shape))
            for row in new:
                short = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()}
                writer.writerow({**facts, **short})
            file.flush()
            torch.cuda.empty_cache()
    return rows


def medians(rows: Iterable[Row], columns: Sequence[str]) -> dict[tuple[Any, ...], dict[str, float]]:
    """The median of each candidate, by what the rows have in `columns`."""
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        of_shape = found.setdefault(tuple(row[name] for name in columns), {})
        of_shape[row["candidate"]] = row["p50_us"]
    return found


def pick(asked: Collection[str], offered: Collection[str]) -> list[str]:
    """The candidates that --peers names, all if it names none; a UserError if one is not here."""
    if unknown := " or ".join(name for name in asked if name not in offered):
        raise UserError(f"no candidate is called {unknown}: --peers takes {', '.join(offered)}")
    return [*(asked or offered)]
