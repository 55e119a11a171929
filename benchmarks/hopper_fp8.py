#!/usr/bin/env python3
"""Scores of an fp8 query over an fp8 cache as Hopper's tensor core computes them, and their error.

    python benchmarks/hopper_fp8.py

WGMMA adds 32 products and its accumulator at once, in fixed point. An exponent is that of a number,
or the sum of both factors' exponents. With 2^e the largest of the 33, each loses what is below
u = 2^(e - 13), toward zero; of their sum the 13 bits behind the first one are kept, toward zero
too. DeepSeek reports these 14 bits (arXiv:2412.19437, 3.5.2). MMA-Sim (arXiv:2511.10909) has the
rules, which it compared with an H100 bit by bit. Keys of 576 values are 18 such steps in a row.

What that costs a score, before any measurement: a product has no digit below w = 2^(its exponent -
6), so that it loses at most u - w, and nothing if w is the larger. Positive products lose one way,
negative ones the other. The accumulator loses less than u, and the sum less than 2^-13 of itself:

    |error| <= sum over steps of max(sum of u - w over positive products, over negative ones)
               + u + 2^-13 |accumulator|

holds whatever the digits are, with u of the largest accumulator that the bound so far allows.
Random digits lose half of that: the score shrinks by half of the difference of both sums, and the
rest has a variance of (u^2 - w^2) / 12 a product. All grow with the score, because u follows the
accumulator.

This prints the three beside the error itself, for queries of several sizes. It needs no GPU.
"""

from __future__ import annotations

import torch

STEP = 32  # products that are added at once
BITS = 13  # behind the first one, of all addends and of the sum
LEAST = -100  # the exponent of zero
FP8 = torch.float8_e4m3fn


def exponents(x: torch.Tensor, least: int) -> torch.Tensor:
    """Exponents of fp32 values; that of zero is `LEAST`, of other values at least `least`."""
    found = torch.frexp(x).exponent.clamp(min=least + 1) - 1
    return torch.where(x == 0, LEAST, found)


def power(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent in fp32, of normal numbers: exact on every device."""
    return ((exponent.clamp(min=-126) + 127) << 23).to(torch.int32).view(torch.float32)


def aligned(q: torch.Tensor, keys: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(products, their exponents [H, n, 32], u [H, n]) of a step on a sum `total` [H, n].

    q [H, 32] and keys [n, 32] are e4m3 values.
    """
    # Subnormal e4m3 values have the exponent of the smallest normal one.
    added = exponents(q, -6)[:, None] + exponents(keys, -6)[None]
    largest = torch.maximum(added.amax(-1), exponents(total, -126)).clamp(min=LEAST)
    return q[:, None] * keys[None], added, power(largest - BITS)


def products(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """q @ keys.T [H, n] in fp32, of e4m3 values [H, L + R] and [n, L + R] that are fp32 here."""
    total = q.new_zeros(len(q), len(keys))
    for some, others in zip(q.split(STEP, 1), keys.split(STEP, 1), strict=True):
        addends, _, u = aligned(some, others, total)
        addends = (addends / u[:, :, None]).trunc()
        total = (addends.sum(-1) + (total / u).trunc()) * u
        # fp32 has 23 bits behind the first one.
        total = (total.view(torch.int32) & -(1 << (23 - BITS))).view(torch.float32)
    return total


def expected(q: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(bound, shrinking, standard deviation) [H, n] of the error of `products`."""
    exact = q.new_zeros(len(q), len(keys))
    bound, shrinking, variance = exact, exact, exact
    for some, others in zip(q.split(STEP, 1), keys.split(STEP, 1), strict=True):
        addends, added, u = aligned(some, others, exact)
        most = aligned(some, others, exact.abs() + bound)[2]
        exact = exact + addends.sum(-1)
        w = torch.where(addends == 0, torch.inf, power(added - 6))
        lost = (most[:, :, None] - w).clamp(min=0)
        bound = bound + torch.maximum(
            (lost * (addends > 0)).sum(-1), (lost * (addends < 0)).sum(-1)
        )
        bound = (bound + most + exact.abs() * 2.0**-BITS) / (1 - 2.0**-BITS)
        lost = (u[:, :, None] - w).clamp(min=0)
        shrinking = shrinking - (lost * addends.sign()).sum(-1) / 2
        variance = variance + (lost * (u[:, :, None] + w.nan_to_num(posinf=0.0))).sum(-1) / 12
    return bound, shrinking, variance.sqrt()


def main() -> None:
    """Print a table: random queries of several sizes over random keys, as check_sparse has them."""
    torch.manual_seed(0)
    print("amplitude | largest score | its error | expected | bound | largest error | of all, rms")
    for amplitude in (0.25, 1.0, 2.0):
        q = (torch.randn(4, 576) * amplitude / 0.25).to(FP8).float()
        keys = (torch.randn(2048, 576) / 0.125).to(FP8).float()
        factor = 0.25 * 0.125 * 576**-0.5
        scores = q.double() @ keys.double().T * factor
        error = products(q, keys).double() * factor - scores
        at = scores.abs().argmax()
        bound, shrinking, deviation = (part.flatten()[at] * factor for part in expected(q, keys))
        print(
            f"{amplitude} | {scores.flatten()[at]:.2f} | {error.flatten()[at]:.1e} | "
            f"{shrinking:.1e} +- {deviation:.1e} | {bound:.1e} | {error.abs().max():.1e} | "
            f"{error.square().mean().sqrt():.1e}"
        )


if __name__ == "__main__":
    main()
