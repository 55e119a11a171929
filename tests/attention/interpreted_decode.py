"""Decode kernels under the repaired interpreter; test_decode.py runs this in its own process.

Every result is compared with float64 attention over the dequantized inputs; every slot of a cache
that no sequence addresses holds NaN.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

assert os.environ.get("TRITON_INTERPRET") == "1", "run this file through test_decode.py"

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
import interpreter  # noqa: E402

from mla_fusion.attention import PersistentDecodePlan, persistent_mla_decode  # noqa: E402
from mla_fusion.attention.sparse import (  # noqa: E402
    Scope,
    SparseScratch,
    sparse_mla_decode,
    sparse_scratch,
)

interpreter.install(bounds=True, races=True)
BF16, FP16, FN, FNUZ = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e4m3fnuz
LATENT, ROPE, SCALE = 64, 16, 0.1
TOLERANCE = 4e-3


def stored(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Random values of `dtype`, larger where a scale shrinks them."""
    spread = 4 if dtype.itemsize == 1 else 1
    return (spread * torch.randn(*shape, generator=generator)).to(dtype)


def exact(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The dequantized values of `x`, float64."""
    return x.double() * (scale.double() if x.dtype.itemsize == 1 else 1)


def attention(
    q: torch.Tensor, keys: torch.Tensor, latent: int, sink: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row of queries [H, D] over keys [N, D], float64: output [H, latent] and LSE [H]."""
    scores = SCALE * q @ keys.T
    lse = scores.logsumexp(-1)
    total = lse if sink is None else torch.logaddexp(lse, sink.double())
    weights = (scores - total[:, None]).exp()
    return weights @ keys[:, :latent], lse


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Relative distance of two tensors within the tolerance; NaN never passes."""
    distance = (got.double() - want).norm() / want.norm().clamp(min=1e-9)
    assert distance <= TOLERANCE, f"relative distance {distance:.2e}"


def same_lse(got: torch.Tensor, want: torch.Tensor) -> None:
    """Log-sum-exps within 1e-3, and -inf where the other is."""
    assert torch.equal(got == -torch.inf, want == -torch.inf)
    finite = want > -torch.inf
    assert (got.double() - want)[finite].abs().max() < 1e-3 if finite.any() else True


DENSE = {
    # name: heads, query rows, KV tokens, q type, cache type, page size, workers
    "one token": (16, [1], [1], BF16, BF16, 16, 2),
    "ragged": (8, [1, 1, 1, 1], [1, 33, 70, 130], BF16, BF16, 16, 5),
    "page of one": (16, [1, 1], [40, 7], FP16, FP16, 1, 3),
    "page as a tile": (16, [1, 1], [100, 65], BF16, BF16, 32, 3),
    "large page": (16, [1, 1], [150, 65], BF16, BF16, 128, 3),
    "drafts": (8, [4, 1, 0, 3], [50, 20, 9, 3], BF16, BF16, 16, 4),
    "eight rows": (16, [8, 2], [9, 70], BF16, BF16, 64, 3),
    "folded heads": (128, [1, 1], [80, 20], BF16, BF16, 32, 5),
    "padded heads": (24, [2], [70], BF16, BF16, 32, 3),
    "fp8": (16, [1, 2], [90, 40], FN, FN, 32, 4),
    "fp8 fnuz": (16, [1], [90], FNUZ, FNUZ, 16, 3),
    "fp8 cache": (16, [1, 1], [90, 2], BF16, FN, 64, 3),
    "fp16 query, fp8 cache": (16, [1], [40], FP16, FN, 16, 2),
}


@pytest.mark.parametrize("name", DENSE)
def test_dense(name: str) -> None:
    heads, rows, lens, q_dtype, kv_dtype, page, workers = DENSE[name]
    generator = torch.Generator().manual_seed(len(name))
    width, batch, tokens = LATENT + ROPE, len(lens), sum(rows)
    blocks = [-(-n // page) for n in lens]
    order = torch.randperm(sum(blocks) + 2, generator=generator).int()
    table = torch.full((batch, max(blocks) + 1), 2**30, dtype=torch.int32)
    cache = torch.full((sum(blocks) + 2, page, width), torch.nan).to(kv_dtype)
    keys = []
    for b, n in enumerate(lens):
        mine, order = order[: blocks[b]], order[blocks[b] :]
        table[b, : blocks[b]] = mine
        keys.append(stored(generator, n, width, dtype=kv_dtype))
        at = torch.arange(n)
        cache[mine[at // page].long(), at % page] = keys[-1]
    q = stored(generator, tokens, heads, width, dtype=q_dtype)
    q_scale, kv_scale = torch.tensor([0.2]), torch.tensor([0.3])
    plan = PersistentDecodePlan.allocate(
        max_batch=batch + 1,
        max_query_len=max(rows),
        num_heads=heads,
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        device="cpu",
        workers=workers,
        overhead=1,
        v_head_dim=LATENT,
    )
    ends = torch.tensor([0, *rows]).cumsum(0)
    plan.refresh(
        qo_indptr=ends.int(),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        num_tokens=tokens,
        max_query_len=max(rows),
    )
    plan.partial_output.fill_(torch.nan)
    plan.partial_lse.fill_(torch.nan)
    out = torch.full((tokens, heads, LATENT), torch.nan, dtype=BF16)
    _, lse = persistent_mla_decode(
        q,
        cache,
        plan,
        block_table=table,
        softmax_scale=SCALE,
        q_scale=q_scale,
        kv_scale=kv_scale,
        out=out,
        return_lse=True,
        provider="triton",
    )
    want, want_lse = torch.zeros(out.shape).double(), torch.zeros(lse.shape).double()
    for b, n in enumerate(lens):
        for i in range(rows[b]):
            seen = exact(keys[b], kv_scale)[: max(0, n - (rows[b] - 1 - i))]
            row = int(ends[b]) + i
            query = exact(q[row], q_scale)
            want[row], want_lse[row] = attention(query, seen, LATENT)
    close(out, want)
    same_lse(lse, want_lse)


def test_full_width() -> None:
    """DeepSeek's own 512 + 64, once."""
    generator = torch.Generator().manual_seed(1)
    q = stored(generator, 1, 16, 576, dtype=BF16)
    cache = stored(generator, 2, 64, 576, dtype=BF16)
    plan = PersistentDecodePlan.allocate(
        max_batch=1,
        max_query_len=1,
        num_heads=16,
        q_dtype=BF16,
        kv_dtype=BF16,
        device="cpu",
        workers=2,
        overhead=1,
    )
    plan.refresh(
        qo_indptr=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([100], dtype=torch.int32),
        num_tokens=1,
        max_query_len=1,
    )
    out, _ = persistent_mla_decode(
        q,
        cache,
        plan,
        block_table=torch.tensor([[1, 0]], dtype=torch.int32),
        softmax_scale=SCALE,
        provider="triton",
    )
    keys = cache.flip(0).reshape(-1, 576)[:100].double()
    close(out[0], attention(q[0].double(), keys, 512)[0])


def lists(kind: str, width: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Index rows of slots 0 ... 39."""
    rows = torch.randint(0, 40, (tokens, width), generator=generator).int()
    if kind == "holes":
        rows[torch.rand(tokens, width, generator=generator) < 0.5] = -1
    if kind == "none":
        rows.fill_(-1)
    if kind == "mixed":
        rows[::2] = -1
    if kind == "same":
        rows.fill_(7)
    return rows


SPARSE = {
    # name: heads, q and cache type, kinds of the scopes' lists, widths, lengths, sink
    "one scope": (16, BF16, ["full"], (50,), [None], False),
    "one column": (8, BF16, ["full"], (1,), [None], True),
    "holes": (16, BF16, ["holes", "holes"], (20, 100), [None, None], True),
    "all -1": (16, BF16, ["none", "none"], (20, 70), [None, None], True),
    "some rows empty": (16, BF16, ["mixed", "mixed"], (20, 70), [None, None], True),
    "first scope empty": (16, BF16, ["none", "full"], (20, 70), [None, None], False),
    "last scope empty": (16, BF16, ["full", "none"], (20, 70), [None, None], True),
    "duplicates": (16, BF16, ["same", "same"], (20, 70), [None, None], True),
    "lengths": (16, BF16, ["full", "full"], (70, 90), [[1, 0, 70], [0, 0, 90]], True),
    "split": (16, BF16, ["holes", "full"], (70, 700), [None, None], True),
    "fp8": (128, FN, ["holes", "full"], (20, 70), [None, [70, 1, 0]], True),
}


def run_sparse(
    scratch: SparseScratch,
    heads: int,
    dtype: torch.dtype,
    kinds: list[str],
    lengths: list[list[int] | None],
    with_sink: bool,
    seed: int,
) -> None:
    """One layer of sparse decode against the direct computation, after a refresh."""
    generator = torch.Generator().manual_seed(seed)
    tokens, width = 3, LATENT + ROPE
    q_scale, kv_scale = torch.tensor([0.2]), torch.tensor([0.3])
    q = stored(generator, tokens, heads, width, dtype=dtype)
    # As large as the sum over hundreds of keys, or it would not show.
    sink = 5 + 2 * torch.randn(heads, generator=generator) if with_sink else None
    scopes, every = [], [torch.zeros(0, width).double() for _ in range(tokens)]
    given = [None if n is None else torch.tensor(n, dtype=torch.int32) for n in lengths]
    for i, (kind, columns) in enumerate(zip(kinds, scratch.widths, strict=True)):
        rows = lists(kind, columns, tokens, generator)
        cache = torch.full((11, 4, width), torch.nan).to(dtype)
        flat = cache.view(-1, width)
        for t in range(tokens):
            count = columns if given[i] is None else int(given[i][t])
            rows[t, count:] = 2**30  # not to be read
            slots = rows[t, :count]
            slots = slots[slots >= 0].long()
            fresh = slots[flat[slots].float().isnan().any(1)].unique()
            flat[fresh] = stored(generator, len(fresh), width, dtype=dtype)
            every[t] = torch.cat((every[t], exact(flat[slots], kv_scale)))
        scopes.append(Scope(cache, rows))
    scratch.refresh(tokens, given)
    scratch.plan.partial_output.fill_(torch.nan)
    out = torch.full((tokens, heads, LATENT), torch.nan, dtype=BF16)
    _, lse = sparse_mla_decode(
        q,
        scopes,
        scratch,
        softmax_scale=SCALE,
        sink=sink,
        q_scale=q_scale,
        kv_scale=kv_scale,
        out=out,
        return_lse=True,
    )
    pairs = [attention(exact(q[t], q_scale), every[t], LATENT, sink) for t in range(tokens)]
    close(out, torch.stack([o for o, _ in pairs]))
    same_lse(lse, torch.stack([each for _, each in pairs]))
    for t in range(tokens):
        if not len(every[t]):
            assert (out[t] == 0).all()


def scratch_of(name: str) -> SparseScratch:
    """The scratch of a case, with few workers so that rows are split."""
    heads, dtype, _, widths, _, _ = SPARSE[name]
    return sparse_scratch(
        max_tokens=4,
        num_heads=heads,
        widths=widths,
        q_dtype=dtype,
        kv_dtype=dtype,
        device="cpu",
        workers=7,
        v_head_dim=LATENT,
    )


@pytest.mark.parametrize("name", SPARSE)
def test_sparse(name: str) -> None:
    heads, dtype, kinds, _, lengths, sink = SPARSE[name]
    run_sparse(scratch_of(name), heads, dtype, kinds, lengths, sink, seed=len(name))


def test_sparse_is_replanned_in_place() -> None:
    """Lengths change from step to step; the buffers stay, and are those of every layer."""
    name = "lengths"
    scratch = scratch_of(name)
    assert scratch_of(name) is scratch
    addresses = [scratch.plan.work_info_set.data_ptr(), scratch.plan.partial_output.data_ptr()]
    for seed, lengths in enumerate(([[70] * 3, [90] * 3], [[0] * 3, [1] * 3], [[3] * 3, [0] * 3])):
        run_sparse(scratch, 16, BF16, ["full", "full"], lengths, True, seed)
    assert addresses == [
        scratch.plan.work_info_set.data_ptr(),
        scratch.plan.partial_output.data_ptr(),
    ]


def test_sparse_refuses_what_does_not_fit() -> None:
    scratch = scratch_of("one scope")
    q = torch.zeros(2, 16, LATENT + ROPE, dtype=BF16)
    scope = Scope(torch.zeros(4, 16, LATENT + ROPE, dtype=BF16), torch.zeros(2, 50).int())
    scratch.refresh(3, [None])
    with pytest.raises(ValueError, match="refresh"):
        sparse_mla_decode(q, [scope], scratch, softmax_scale=1.0)
    scratch.refresh(2, [None])
    with pytest.raises(ValueError, match="1 scopes, got 2"):
        sparse_mla_decode(q, [scope, scope], scratch, softmax_scale=1.0)
    with pytest.raises(ValueError, match="table of scope 0"):
        wrong = Scope(scope.kv_cache, scope.table.long())
        sparse_mla_decode(q, [wrong], scratch, softmax_scale=1.0)
    with pytest.raises(ValueError, match="do not fit a scratch"):
        scratch.refresh(5, [None])
    with pytest.raises(ValueError, match="lengths of scope 0"):
        scratch.refresh(2, [torch.zeros(2).long()])
