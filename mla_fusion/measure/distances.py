"""Compares results: exact ones in float64, and distances between tensors."""

from collections.abc import Sequence

import torch

from mla_fusion.attention.plan.epilogue import GROUP, Epilogue

POISON = 0x5A  # the byte that outputs are filled with before a call


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
    """An epilogue behind a decode of `rows` query rows."""
    columns = w_uv.shape[0] * w_uv.shape[2]
    dtype = w_uv.dtype if quantization == "none" else torch.float8_e4m3fn
    out = w_uv.new_empty((rows, columns), dtype=dtype)
    scale = None
    if quantization == "tensor":
        scale = w_uv.new_full((1,), 0.01, dtype=torch.float32)
    elif quantization != "none":  # as vLLM has them
        scale = w_uv.new_empty((columns // GROUP, rows), dtype=torch.float32).T
    return Epilogue(w_uv, out, scale, quantization == "group_ue8m0")
