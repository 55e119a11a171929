"""Decode kernels under the repaired interpreter; test_interpreted.py runs this.

Every result is compared with float64 attention over the dequantized inputs; every slot of a cache
that no sequence addresses holds NaN.
"""

import pytest
import torch

from mla_fusion.attention import persistent_mla_decode
from mla_fusion.attention.sparse import Scope, sparse_mla_decode, sparse_scratch
from mla_fusion.cli.bench.kit import distance
from tests.attention import decodes
from tests.attention.decodes import BF16, FN, FNUZ, FP16, SCALE, lists, same_lse
from tests.kernels import interpreter
from tests.nightly import daily

interpreter.install()
LATENT, ROPE, TOLERANCE = 64, 16, 4e-3


DENSE = {
    # name: heads, query rows, KV tokens, q type, cache type, page size, CTAs
    "one token": (16, [1], [1], BF16, BF16, 16, 2),
    "ragged": (8, [1, 1, 1, 1], [1, 33, 70, 130], BF16, BF16, 16, 5),
    "page of one": (16, [1, 1], [40, 7], FP16, FP16, 1, 3),
    "page as a tile": (16, [1, 1], [100, 65], BF16, BF16, 32, 3),
    "large page": (16, [1, 1], [150, 65], BF16, BF16, 128, 3),
    "drafts": (8, [4, 1, 0, 3], [50, 20, 9, 3], BF16, BF16, 16, 4),
    "eight rows": (16, [8, 2], [9, 70], BF16, BF16, 64, 3),
    "folded heads": (128, [1, 1], [80, 20], BF16, BF16, 32, 5),
    "padded heads": (24, [2], [70], BF16, BF16, 32, 3),
    "full width": (16, [1], [100], BF16, BF16, 64, 2),
    "fp8": (16, [1, 2], [90, 40], FN, FN, 32, 4),
    "fp8 fnuz": (16, [1], [90], FNUZ, FNUZ, 16, 3),
    "fp8 cache": (16, [1, 1], [90, 2], BF16, FN, 64, 3),
    "fp16 query, fp8 cache": (16, [1], [40], FP16, FN, 16, 2),
}


@pytest.mark.parametrize(
    "name",
    daily(DENSE, "ragged", "large page", "drafts", "folded heads", "padded heads", "full width",
          "fp8", "fp8 cache"),
)  # fmt: skip
def test_dense(name):
    heads, rows, lens, q_dtype, kv_dtype, page, ctas = DENSE[name]
    # DeepSeek's own widths, once.
    widths = {"v_head_dim": 512, "rope": 64} if name == "full width" else {}
    given = decodes.arguments(
        rows, lens, page, num_heads=heads, q_dtype=q_dtype, kv_dtype=kv_dtype, ctas=ctas,
        overhead=1, **widths,
    )  # fmt: skip
    want, want_lse = decodes.definition(given, rows, lens)
    out = torch.full(want.shape, torch.nan, dtype=BF16)
    _, lse = persistent_mla_decode(**given, out=out, return_lse=True, provider="triton")
    assert distance(out, want) <= TOLERANCE
    same_lse(lse, want_lse)


WIDTHS = [
    (256, 64, BF16), (320, 64, BF16), (80, 48, FN), (256, 64, FN), (256, 32, FN), (640, 96, BF16)
]  # fmt: skip


@pytest.mark.parametrize("widths", daily(WIDTHS, (80, 48, FN)))
def test_widths(widths):
    """Also those that are no powers of two; sequences are split, so the reduction runs too."""
    latent, rope, dtype = widths
    rows, lens = [2, 1], [70, 33]
    given = decodes.arguments(
        rows, lens, 32, num_heads=16, q_dtype=dtype, kv_dtype=dtype, ctas=3, overhead=1,
        v_head_dim=latent, rope=rope,
    )  # fmt: skip
    assert given["plan"].reduce_indptr[-1] > 0
    want, want_lse = decodes.definition(given, rows, lens)
    # The neighbours of a row and of a partial row are not its columns.
    wide = torch.full((*want.shape[:2], latent + 16), torch.nan, dtype=BF16)
    out = wide[..., :latent]
    _, lse = persistent_mla_decode(**given, out=out, return_lse=True, provider="triton")
    assert distance(out, want) <= TOLERANCE
    assert wide[..., latent:].isnan().all()
    same_lse(lse, want_lse)


@pytest.mark.nightly
@pytest.mark.parametrize("latent, rope", [(512, 128), (1024, 128)])
def test_wide_latents(latent, rope):
    given = decodes.arguments([1], [40], 16, num_heads=16, ctas=2, v_head_dim=latent, rope=rope)
    want, _ = decodes.definition(given, [1], [40])
    out = torch.full(want.shape, torch.nan, dtype=BF16)
    persistent_mla_decode(**given, out=out, provider="triton")
    assert distance(out, want) <= TOLERANCE


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


def run_sparse(scratch, heads, dtype, kinds, lengths, with_sink, seed):
    """One layer of sparse decode against the direct computation, after a refresh."""
    generator = torch.Generator().manual_seed(seed)
    tokens, width = 3, LATENT + ROPE
    q_scale, kv_scale = torch.tensor([0.2]), torch.tensor([0.3])
    q = decodes.random(generator, tokens, heads, width, dtype=dtype)
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
            flat[fresh] = decodes.random(generator, len(fresh), width, dtype=dtype)
            every[t] = torch.cat((every[t], decodes.exact(flat[slots], kv_scale)))
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
    pairs = [
        decodes.attention(decodes.exact(q[t], q_scale), every[t], LATENT, sink)
        for t in range(tokens)
    ]
    assert distance(out, torch.stack([o for o, _ in pairs])) <= TOLERANCE
    same_lse(lse, torch.stack([each for _, each in pairs]))
    for t in range(tokens):
        if not len(every[t]):
            assert (out[t] == 0).all()


def scratch_of(name):
    """The scratch of a case, with few CTAs so that rows are split."""
    heads, dtype, _, widths, _, _ = SPARSE[name]
    return sparse_scratch(
        max_tokens=4,
        num_heads=heads,
        widths=widths,
        q_dtype=dtype,
        kv_dtype=dtype,
        device="cpu",
        ctas=7,
        v_head_dim=LATENT,
    )


@pytest.mark.parametrize(
    "name", daily(SPARSE, "holes", "all -1", "some rows empty", "lengths", "split", "fp8")
)
def test_sparse(name):
    heads, dtype, kinds, _, lengths, sink = SPARSE[name]
    run_sparse(scratch_of(name), heads, dtype, kinds, lengths, sink, seed=len(name))


def test_sparse_is_replanned_in_place():
    """Lengths change from step to step; the buffers stay, and are those of every layer."""
    name = "lengths"
    scratch = scratch_of(name)
    before = decodes.addresses(scratch.plan)
    for seed, lengths in enumerate(([[70] * 3, [90] * 3], [[0] * 3, [1] * 3], [[3] * 3, [0] * 3])):
        run_sparse(scratch, 16, BF16, ["full", "full"], lengths, True, seed)
    assert decodes.addresses(scratch.plan) == before


def test_sparse_refuses_what_does_not_fit():
    scratch = scratch_of("one scope")
    q, table = torch.zeros(2, 16, LATENT + ROPE, dtype=BF16), torch.zeros(2, 50).int()
    cache = torch.zeros(4, 16, LATENT + ROPE, dtype=BF16)

    def refused(message, *tables, **options):
        with pytest.raises(ValueError, match=message):
            scopes = [Scope(cache, table) for table in tables]
            sparse_mla_decode(q, scopes, scratch, softmax_scale=1.0, **options)

    scratch.refresh(3, [None])
    refused("refresh", table)
    scratch.refresh(2, [None])
    refused("1 scopes, got 2", table, table)
    refused("scope 0: block_table must be int32", table.long())
    refused("scope 0: the table must have 50 columns, got 49", table[:, 1:])
    refused(r"sink must be dense fp32 \[16\] on cpu", table, sink=torch.zeros(8))
    with pytest.raises(ValueError, match="do not fit a scratch"):
        scratch.refresh(5, [None])
    with pytest.raises(ValueError, match="lengths of scope 0"):
        scratch.refresh(2, [torch.zeros(2).long()])
