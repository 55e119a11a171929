"""What every provider requires of its arguments."""

from __future__ import annotations

import torch

from mla_fusion.kernels.arithmetic import FP8_DTYPES


def validate(
    q: torch.Tensor,
    w_uk_t: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor | None,
    q_out: torch.Tensor,
) -> None:
    """Raise ValueError with the offending argument unless shapes and types fit together."""

    def check(name: str, ok: bool, want: str, got: object) -> None:
        if not ok:
            raise ValueError(f"{name} must be {want}, got {got}")

    check("q", q.dim() == 3, "[T, H, P + R]", tuple(q.shape))
    check("w_uk_t", w_uk_t.dim() == 3, "[H, P, L]", tuple(w_uk_t.shape))
    tokens, heads, head_dim = q.shape
    _, nope, latent = w_uk_t.shape
    rope = head_dim - nope
    act = q.dtype
    expected = {
        "w_uk_t": (w_uk_t, (heads, nope, latent), (act,)),
        "kv_c": (kv_c, (tokens, latent), (act,)),
        "k_pe": (k_pe, (tokens, rope), (act,)),
        "q_out": (q_out, (tokens, heads, latent + rope), (act, *FP8_DTYPES)),
        "slot_mapping": (slot_mapping, (tokens,), (torch.int64,)),
        "positions": (positions, (tokens,), (torch.int64,)),
    }
    for name, (tensor, shape, dtypes) in expected.items():
        check(name, tensor.shape == shape, f"of shape {shape}", tuple(tensor.shape))
        check(name, tensor.dtype in dtypes, " or ".join(map(str, dtypes)), tensor.dtype)
    check(
        "kv_cache",
        kv_cache.dim() == 3 and kv_cache.shape[2] == latent + rope,
        f"[blocks, block_size, {latent + rope}]",
        tuple(kv_cache.shape),
    )
    check("kv_cache", kv_cache.dtype in (act, *FP8_DTYPES), f"{act} or fp8", kv_cache.dtype)
    check(
        "q_out",
        q_out.dtype == act or q_out.dtype == kv_cache.dtype,
        "fp8 only with a cache of the same fp8 type",
        q_out.dtype,
    )
    check("q_out", q_out.is_contiguous(), "dense", q_out.stride())
    if cos_sin_cache is not None:
        check(
            "cos_sin_cache",
            cos_sin_cache.dim() == 2 and cos_sin_cache.shape[1] == rope,
            f"[max_position, {rope}]",
            tuple(cos_sin_cache.shape),
        )
        check(
            "cos_sin_cache",
            cos_sin_cache.dtype in (act, torch.float32),
            f"{act} or torch.float32",
            cos_sin_cache.dtype,
        )
