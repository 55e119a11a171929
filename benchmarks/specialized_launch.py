"""Plans and launches of the specialized decode kernel for Hopper: for its checks and its times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mla_fusion.attention import PersistentDecodePlan
from mla_fusion.attention import triton as provider
from mla_fusion.attention.buffers import multiprocessors
from mla_fusion.attention.validate import Inputs as Given
from mla_fusion.attention.validate import validate
from mla_fusion.cli.bench.decode_peers import BF16, FP8, Case, Inputs, exact
from mla_fusion.cli.bench.kit import distance

if TYPE_CHECKING:
    from mla_fusion.attention import triton_choice

TYPES = {"bf16": BF16, "fp8": FP8}
LSE_TOLERANCES = {BF16: 1e-5, FP8: 2e-3}  # as in check_attention.py
Result = tuple[torch.Tensor, torch.Tensor]  # output and LSE


def settings_of(case: Case) -> dict[str, Any]:
    """The provider's settings of a plan for bf16: with pairs where items may have them."""
    return {**provider.plan_settings(case.heads, case.queries, BF16, case.width, "cuda")}


def has_pairs(case: Case) -> bool:
    """Whether items may have two row blocks, both at the same time."""
    return settings_of(case)["workers"] < multiprocessors(torch.device("cuda"))


def plan_of(case: Case, pairs: bool, batch: int) -> PersistentDecodePlan:
    """A plan for `batch` sequences; without `pairs` there is a worker for each multiprocessor, and
    an item holds up to 64 heads.
    """
    settings = settings_of(case)
    if not pairs:
        settings |= {"workers": multiprocessors(torch.device("cuda")), "heads_per_work": None}
    return PersistentDecodePlan.allocate(
        max_batch=batch, max_query_len=case.queries, num_heads=case.heads, q_dtype=case.dtype,
        kv_dtype=case.dtype, device="cuda", v_head_dim=case.latent, **settings,
    )  # fmt: skip


def refresh(plan: PersistentDecodePlan, rows: list[int], lens: torch.Tensor) -> None:
    """Plan sequences of `rows` query rows."""
    starts = torch.tensor([0, *rows], dtype=torch.int32, device="cuda").cumsum(0).int()
    plan.refresh(
        qo_indptr=starts, seq_lens=lens, num_tokens=sum(rows), max_query_len=max(rows, default=0)
    )


def launch(
    inputs: Inputs, plan: PersistentDecodePlan, i: int, out: torch.Tensor, lse: torch.Tensor,
    config: triton_choice.Config,
) -> None:  # fmt: skip
    """One decode of cache `i` by the kernel of `config`."""
    given = Given(
        inputs.q[: len(out)], inputs.caches[i], plan, inputs.table, inputs.case.scale, inputs.scale,
        inputs.scale, out, lse,
    )  # fmt: skip
    validate(given)
    provider.launch(given, config=config)


def outputs(case: Case, rows: int) -> Result:
    """Output and LSE of `rows` query rows, NaN."""
    out = torch.full((rows, case.heads, case.latent), torch.nan, device="cuda", dtype=BF16)
    return out, torch.full((rows, case.heads), torch.nan, device="cuda")


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits; also where they are NaN."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def repeat(
    inputs: Inputs, plan: PersistentDecodePlan, rows: list[int], config: triton_choice.Config,
    times: int, apart: bool = False,
) -> list[Result]:  # fmt: skip
    """So many launches on cache 0. apart: none starts before the last has ended."""
    launches = [outputs(inputs.case, sum(rows)) for _ in range(times)]
    for out, lse in launches:
        launch(inputs, plan, 0, out, lse, config)
        if apart:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return launches


def different(launches: list[Result]) -> list[int]:
    """The launches whose results are not those of the first one, bit by bit."""
    return [i for i, each in enumerate(launches) if not all(map(same, each, launches[0]))]


def definition(inputs: Inputs, rows: list[int], lengths: list[int]) -> list[Result]:
    """float64 attention of each sequence, over cache 0."""
    starts = torch.tensor([0, *rows]).cumsum(0).tolist()
    return [exact(inputs, b, length, slice(*starts[b : b + 2])) for b, length in enumerate(lengths)]


def errors(out: torch.Tensor, lse: torch.Tensor, wanted: list[Result]) -> tuple[float, float]:
    """The largest error of a sequence's output, and of an LSE; NaN stays NaN."""
    found, start = [[0.0, 0.0]], 0
    for want, want_lse in wanted:
        at = slice(start, start + len(want))
        start = at.stop
        moved = torch.where(lse[at] == want_lse, 0.0, (lse[at].double() - want_lse).abs())
        found.append([distance(out[at], want), float(moved.amax())])
    # max() may lose a NaN; torch keeps it.
    worst, worst_lse = torch.tensor(found).amax(0).tolist()
    return worst, worst_lse
