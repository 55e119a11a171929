"""Random cases of the sparse decode for `check_sparse`, and what they should give in float64.

Entries are made with the keys that they stand for: nothing here reads one. Scores of an fp8 query
are those of Hopper's tensor core, whose sums lose digits (`hopper_fp8`): the kernel has no others.
"""

from __future__ import annotations

import dataclasses
import math
import random

import torch
from hopper_fp8 import products

from mla_fusion.attention.layouts import EXPONENTS, FP8_DS_MLA, FP8_DS_MLA_V4, WIDE, CacheLayout
from mla_fusion.cli.bench.decode_peers import BF16, FP8, PAGE

DEVICE = "cuda"
LATENT, TOKENS = 512, 32
USABLE, ENTRIES = 4096, 4160  # entries that may be listed, and all
NOWHERE = 2**30  # in columns that do not count
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 16, TOKENS)
WIDTHS: dict[int, list[tuple[int, ...]]] = {
    1: [(64,), (70,), (512,), (2048,)],
    2: [(128, 1024), (100, 1024)],
}
Q_SCALE, KV_SCALE = 0.25, 0.125  # of fp8 with one scale


@dataclasses.dataclass(frozen=True)
class Kind:
    """Types of query and cache, and how far log-sum-exps may be off.

    rounded: keys of one scope are rounded to bf16; those of two scopes are in every byte cache.
    """

    q: torch.dtype
    kv: torch.dtype
    lse: float
    layout: CacheLayout | None = None
    rounded: bool = False


KINDS = {
    "bf16": Kind(BF16, BF16, 1e-4),
    "fp8": Kind(FP8, FP8, 1e-4),
    "bf16 over fp8": Kind(BF16, FP8, 1e-4),
    "fp8_ds_mla": Kind(BF16, FP8, 1e-3, FP8_DS_MLA),
    "fp8_ds_mla of V4": Kind(BF16, FP8, 1e-3, FP8_DS_MLA_V4, rounded=True),
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """What kernels are compiled for."""

    kind: str
    heads: int
    scopes: int = 1
    sink: bool = True


@dataclasses.dataclass
class Bank:
    """Entries of a cache: the bytes of each, in one or two parts, and the key that they are."""

    kind: Kind
    parts: list[torch.Tensor]
    keys: torch.Tensor

    def cache(self, listed: torch.Tensor) -> torch.Tensor:
        """Pages of the entries, with NaN in those that are not `listed`."""
        spoilt = torch.where(listed[:, None], self.parts[0], 0xFF)
        if self.kind.layout is None:
            return spoilt.view(self.kind.kv).view(-1, PAGE, self.keys.shape[1])
        pages = [spoilt, *(torch.where(listed[:, None], part, 0xFF) for part in self.parts[1:])]
        whole = torch.cat([part.view(ENTRIES // PAGE, -1) for part in pages], 1)
        return whole.view(-1, PAGE, self.kind.layout.bytes)


def as_bytes(*parts: torch.Tensor) -> torch.Tensor:
    """Parts [n, ..] of entries, one after the other."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)


def make_bank(kind: Kind) -> Bank:
    """Random entries. In byte caches codes reach the largest, and scales differ by up to 8."""
    if kind.layout is None:
        stored = torch.randn(ENTRIES, LATENT + WIDE, device=DEVICE)
        if kind.kv == FP8:
            stored = stored / KV_SCALE
        stored = stored.to(kind.kv)
        factor = KV_SCALE if kind.kv == FP8 else 1.0
        return Bank(kind, [as_bytes(stored)], stored.double() * factor)
    count, groups = kind.layout.quantized, kind.layout.quantized // kind.layout.group
    codes = (150 * torch.randn(ENTRIES, count, device=DEVICE)).clamp(-448, 448).to(FP8)
    rotated = torch.randn(ENTRIES, WIDE, device=DEVICE).to(BF16)
    exponents = torch.randint(-9, -6, (ENTRIES, groups), device=DEVICE)
    if kind.layout.behind:
        scales = torch.exp2(exponents.double())
        filled = torch.zeros(ENTRIES, EXPONENTS, dtype=torch.uint8, device=DEVICE)
        filled[:, :groups] = (exponents + 127).to(torch.uint8)
        parts = [as_bytes(codes, rotated), filled]
    else:
        scales = torch.exp2(exponents + torch.rand(ENTRIES, groups, device=DEVICE)).float()
        parts = [as_bytes(codes, scales, rotated)]
    values = codes.double().unflatten(1, (groups, -1)) * scales.double()[:, :, None]
    return Bank(kind, parts, torch.cat((values.flatten(1), rotated.double()), 1))


@dataclasses.dataclass
class Case:
    """Query [T, H, L + R], its scale, and for each scope slots [T, n] and lengths [T] or None."""

    q: torch.Tensor
    amplitude: float
    tables: list[torch.Tensor]
    lengths: list[torch.Tensor | None]
    sink: torch.Tensor | None

    def listed(self, scope: int) -> torch.Tensor:
        """Whether a column names an entry, [T, n]."""
        table, length = self.tables[scope], self.lengths[scope]
        column = torch.arange(table.shape[1], device=DEVICE)
        end = table.shape[1] if length is None else length[:, None]
        return (table >= 0) & (column < end)


def make_case(variant: Variant, rng: random.Random) -> Case:
    """Random tokens, lists and lengths."""
    kind = KINDS[variant.kind]
    tokens = rng.choice(COUNTS)
    amplitude = rng.choice((0.25, 1.0, 2.0))
    width = LATENT + WIDE if kind.layout is None else kind.layout.width
    q = torch.randn(tokens, variant.heads, width, device=DEVICE) * amplitude
    q = (q / Q_SCALE).to(FP8) if kind.q == FP8 else q.to(kind.q)
    tables, lengths = [], []
    for columns in rng.choice(WIDTHS[variant.scopes]):
        # Rows are 16 bytes apart, as a compiled kernel expects them.
        wide = torch.randint(0, USABLE, (tokens, -(-columns // 64) * 64), device=DEVICE).int()
        table = wide[:, :columns]
        table[torch.rand(table.shape, device=DEVICE) < rng.choice((0, 0, 0.5, 1))] = -1
        if rng.random() < 0.1:
            table[:] = rng.randrange(USABLE)
        length = torch.randint(0, columns + 1, (tokens,), device=DEVICE).int()
        length[torch.rand(tokens, device=DEVICE) < 0.2] = 0
        length[torch.rand(tokens, device=DEVICE) < 0.2] = columns
        counts = None if rng.random() < 0.3 else length
        if counts is not None:
            table[torch.arange(columns, device=DEVICE) >= counts[:, None]] = NOWHERE
        tables.append(table)
        lengths.append(counts)
    sink = None
    if variant.sink:
        sink = rng.choice((0, 6, 40)) + 2 * torch.randn(variant.heads, device=DEVICE)
    return Case(q, amplitude, tables, lengths, sink)


def exact(
    variant: Variant, case: Case, banks: list[Bank], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in float64, but for the scores of an fp8 query."""
    kind = KINDS[variant.kind]
    rounded = kind.rounded or (kind.layout is not None and variant.scopes == 2)
    keys, masks = [], []
    for scope, bank in enumerate(banks):
        mask = case.listed(scope)
        known = bank.keys.to(BF16).double() if rounded else bank.keys
        keys.append(known[torch.where(mask, case.tables[scope], 0).long()])
        masks.append(mask)
    every, mask = torch.cat(keys, 1), torch.cat(masks, 1)
    if kind.q == FP8:
        stored = (every / KV_SCALE).float()
        sums = [products(q, k) for q, k in zip(case.q.float(), stored, strict=True)]
        scores = torch.stack(sums).double() * (scale * Q_SCALE * KV_SCALE)
    else:
        scores = scale * case.q.double() @ every.mT
    scores = scores.masked_fill(~mask[:, None, :], -math.inf)
    lse = scores.logsumexp(-1)
    total = lse if case.sink is None else torch.logaddexp(lse, case.sink.double())
    weights = (scores - total[:, :, None]).exp().masked_fill(~mask[:, None, :], 0)
    return weights @ every[:, :, :LATENT], lse


def apart(
    out: torch.Tensor, lse: torch.Tensor, want: torch.Tensor, want_lse: torch.Tensor
) -> tuple[float, float]:
    """Largest relative distance of a token's output, and largest of an LSE; NaN stays NaN."""
    least = torch.finfo(torch.double).tiny
    distance = (out.double() - want).flatten(1).norm(dim=1)
    error = (distance / want.flatten(1).norm(dim=1).clamp(min=least)).max()
    # Without keys both are -inf, and minus each other NaN.
    moved = torch.where(lse == want_lse, 0.0, (lse.double() - want_lse).abs())
    return float(error), float(moved.max())
