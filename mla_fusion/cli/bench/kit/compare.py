"""How far results are apart, and an output that shows what a call wrote."""

from __future__ import annotations

import torch

POISON = 0x5A
"""The byte that outputs are filled with before a call."""


def poisoned(like: torch.Tensor) -> torch.Tensor:
    """A tensor like `like`, filled with `POISON`: what stays so was not written."""
    return torch.full_like(like.view(torch.uint8), POISON).view(like.dtype)


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


def agreement(*pairs: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, int]:
    """Share of equal elements, and the largest distance in steps, over pairs of tensors."""
    distances = [steps(got, want).flatten() for got, want in pairs]
    equal = sum(int((distance == 0).sum()) for distance in distances)
    total = sum(map(torch.numel, distances))
    worst = max((int(distance.max()) for distance in distances if distance.numel()), default=0)
    return equal / total if total else 1.0, worst


def exact_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    latent: int,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [n, H, latent] and LSE [n, H], without the sink [H], of queries [n, H, L + R] over
    keys [s, L + R], all in float64. Row i of the n sees all but the last n - 1 - i keys.
    """
    scores = scale * q @ keys.T
    after = torch.arange(len(q) - 1, -1, -1, device=q.device)
    seen = torch.arange(len(keys), device=q.device) < len(keys) - after[:, None]
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    total = lse if sink is None else torch.logaddexp(lse, sink.double())
    # exp(-inf - -inf) is NaN where a row sees nothing: such rows are zero.
    weights = (scores - total[..., None]).exp().nan_to_num(nan=0.0)
    return weights @ keys[:, :latent], lse
