"""Measurements of the portable decode against vLLM's own. `attention=auto` decides by them.

`gpus/` has a JSON file for each GPU, which `benchmarks/figures.py` writes from the rows of
`mla-fusion bench decode --values`: a decode and the product with W_UV behind it. A file is
{"gpu": its name, "shapes": [...]} (`measured_file.py`); a shape has

    dtype, heads, queries, backend   type of query and cache, heads of a rank, query rows of a
                                     sequence, and vLLM's backend that ours was measured against
    values, vllm, triton, commit, command
    rows                             the nine numbers of a `Row` each

`mla-fusion calibrate` writes such a file under vLLM's cache root, with `kernels()` as "kernels":
another library or Triton has others. Its shapes go before the shipped ones.

Rows decide for all releases of vLLM, and of Triton with which the kernels have run on a GPU: an
engine that brings a newer one should not lose what was measured.
"""

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mla_fusion import logger
from mla_fusion.attention import cards
from mla_fusion.attention.card import Decodes
from mla_fusion.config import Options, eligibility, vllm_compat
from mla_fusion.config.identity import source_hash, tables_folder
from mla_fusion.files import read_bounded
from mla_fusion.gpu import Gpu, triton_version

FOLDER = Path(__file__).parent / "gpus"
WIDTHS = 512, 64  # latent and rotated part of a cache entry
PAGE = 64  # tokens of a page of the cache, or a multiple of it
# Largest slowdown accepted in any measured context, as a fraction, where the mean of all contexts
# gains: the contexts of a step are not known when it is captured.
MAX_LOSS = 0.07

Kernel = tuple[str, int, int]  # type of the query, heads, query rows of a sequence
Shape = tuple[str, int, int, str]  # these, and the backend
Span = tuple[int, int]  # from how many to how many sequences of a step


class Row(NamedTuple):
    """The times of one step: p20, p50 and p80 of both decodes, in microseconds."""

    sequences: int
    context: int  # KV tokens of each sequence, or of the mean where they are ragged
    ragged: int
    ours_p20: float
    ours: float
    ours_p80: float
    theirs_p20: float
    theirs: float
    theirs_p80: float


def file_name(gpu: str) -> str:
    """Name of the file of a GPU."""
    return "".join(c if c.isalnum() or c in "-." else "_" for c in gpu) + ".json"


def has_measurements(gpu: str) -> bool:
    """True if anything was measured on a GPU of this name."""
    return bool(gpu and (_shipped(gpu) or _own(gpu)))


def own_file(gpu: str) -> Path:
    """The file in which `mla-fusion calibrate` writes its measurements of a GPU."""
    return tables_folder() / file_name(gpu)


def files(gpu: str) -> str:
    """For people: by what `attention=auto` goes on a GPU."""
    own = f"{own_file(gpu)}, then " if _own(gpu) else ""
    return own + ("shipped measurements" if _shipped(gpu) else "nothing: vLLM decodes")


@dataclass(frozen=True)
class Measurements:
    """The measurements of an engine that `attention=auto` uses.

    gpu: name of the engine's GPU.
    spans: as `spans` returns them; empty where nothing was measured, or another option decides.
    why_not: the fact of the engine that they do not cover; empty if they cover it.
    """

    gpu: str = ""
    spans: Mapping[Shape, tuple[Span, ...]] = field(default_factory=dict)
    why_not: str = ""

    @classmethod
    def of(cls, vllm_config: Any, options: Options) -> "Measurements":
        """The measurements for an engine with this config of vLLM."""
        gpu, context = vllm_compat.gpu_name(), vllm_config.model_config.max_model_len
        found = spans(gpu, context) if options.attention == "auto" else {}
        if not found:
            return cls()
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            return cls(gpu, found, "ranks share the cache")
        decline = eligibility.why_no_plan(vllm_config, replace(options, attention="portable"))
        return cls(gpu, found, decline.explain() if decline else "")

    def source(self, shape: Shape) -> str:
        """For the report: the file that has a shape, behind a comma; empty if it was shipped."""
        return f", {own_file(self.gpu)}" if shape in _own(self.gpu) else ""

    def why_not_run(self, of: Kernel) -> str:
        """Why a kernel is not known to run here with the installed Triton; empty if it is."""
        dtype, heads, rows = of
        decodes = Decodes(heads, rows, getattr(torch, dtype), sum(WIDTHS))
        newest = cards.planned(Gpu(arch=vllm_compat.gpu_arch()), decodes).newest_triton
        checked = any(shape[:3] == of for shape in _own(self.gpu))
        if newest is None or triton_version() <= newest or checked:
            return ""
        triton = "{}.{}".format(*triton_version())
        return f"the kernel for {heads_and_rows(of)} has not run with Triton {triton}"

    def favour(self, of: Kernel) -> bool:
        """True if ours is to be used against some backend, with the kernel for such a query."""
        faster = any(runs and shape[:3] == of for shape, runs in self.spans.items())
        return faster and not self.why_not and not self.why_not_run(of)


@functools.cache
def spans(gpu: str, max_model_len: int) -> dict[Shape, tuple[Span, ...]]:
    """Spans of the number of sequences in which the portable decode is not slower, for each
    measured shape; () if there is none. Contexts of the engine have up to `max_model_len`
    tokens."""
    measured = _shipped(gpu) | _own(gpu) if gpu else {}
    return {shape: of_rows(rows, max_model_len) for shape, rows in measured.items()}


def of_rows(rows: list[Row], max_model_len: int) -> tuple[Span, ...]:
    """The runs of measured numbers of sequences with which ours is not slower in the mean of the
    contexts, nor by more than MAX_LOSS in one. Contexts up to twice `max_model_len` count, or the
    shortest: rows are a factor of 8 apart."""
    longest = max(2 * max_model_len, min(row.context for row in rows))
    ratios: dict[int, list[float]] = {}
    for row in rows:
        if row.context <= longest:
            ratios.setdefault(row.sequences, []).append(row.theirs / row.ours)
    runs: list[list[int]] = [[]]
    for sequences, here in sorted(ratios.items()):
        if math.prod(here) < 1 or min(here) < 1 - MAX_LOSS:
            runs.append([])
        else:
            runs[-1].append(sequences)
    return tuple((run[0], run[-1]) for run in runs if run)


def words(runs: Iterable[Span]) -> str:
    """For people: the numbers of sequences of some runs."""
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in runs)


def kernels() -> str:
    """Identity of the installed kernels: the hash of this library's source, and Triton's
    version."""
    return "{}, Triton {}.{}".format(source_hash(), *triton_version())


@functools.cache
def _shipped(gpu: str) -> dict[Shape, list[Row]]:
    return read(FOLDER / file_name(gpu), gpu)


@functools.cache
def _own(gpu: str) -> dict[Shape, list[Row]]:
    return read(own_file(gpu), gpu, kernels())


def read(path: Path, gpu: str, kernels: str = "") -> dict[Shape, list[Row]]:
    """The rows of a GPU's file, of these `kernels` if they are given; none, and one warning, from
    a file that is not one."""
    again = "run mla-fusion calibrate again" if kernels else "install mla-fusion again"
    try:
        content = read_bounded(path)
        from mla_fusion.runtime import measured_file  # it takes a while

        held = measured_file.parse(content)
        if held.gpu != gpu:
            raise ValueError(f"it is of another GPU, {held.gpu!r}")
        if kernels and not held.kernels:
            raise ValueError("it does not say of which kernels it is")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as problem:
        logger.warning("attention=auto: %s is damaged (%s) and ignored; %s", path, problem, again)
        return {}
    if kernels and held.kernels != kernels:
        logger.warning("attention=auto: %s is ignored, it is of other kernels; %s", path, again)
        return {}
    if kernels:
        logger.info("attention=auto: goes by %s", path)
    found: dict[Shape, list[Row]] = {}
    for each in held.shapes:  # those of several `values` have one list
        shape = each.dtype, each.heads, each.queries, each.backend
        found.setdefault(shape, []).extend(Row(*row) for row in each.rows)
    return found


def heads_and_rows(of: Kernel) -> str:
    """For people: the heads of a kernel, and its query rows if there are several."""
    return f"{of[1]} heads" + (f" x {of[2]} query rows" if of[2] > 1 else "")
