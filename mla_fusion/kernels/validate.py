"""What every provider requires of its arguments."""

from __future__ import annotations

import torch

from mla_fusion.kernels.arithmetic import FP8_DTYPES
from mla_fusion.kernels.inputs import Inputs


def validate(inputs: Inputs) -> None:
    """Raise ValueError with the offending argument unless shapes and types fit together."""
    q, w_uk_t, q_out = inputs.q, inputs.w_uk_t, inputs.q_out
    kv_cache, angles = inputs.kv_cache, inputs.cos_sin_cache

    def check(name: str, ok: bool, want: str, got: object) -> None:
        if not ok:
            raise ValueError(f"{name} must be {want}, got {got}")

    check("q", q.dim() == 3, "[T, H, P + R]", tuple(q.shape))
    check("w_uk_t", w_uk_t.dim() == 3, "[H, P, L]", tuple(w_uk_t.shape))
    tokens, heads, head_dim = q.shape
    _, nope, latent = w_uk_t.shape
    rope = head_dim - nope
    act = q.dtype
    expected: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]] = {
        "w_uk_t": ((heads, nope, latent), (act,)),
        "kv_c": ((tokens, latent), (act,)),
        "k_pe": ((tokens, rope), (act,)),
        "q_out": ((tokens, heads, latent + rope), (act, *FP8_DTYPES)),
        "slot_mapping": ((tokens,), (torch.int64,)),
        "positions": ((tokens,), (torch.int64,)),
    }
    for name, (shape, dtypes) in expected.items():
        tensor = getattr(inputs, name)
        check(name, tensor.shape == shape, f"of shape {shape}", tuple(tensor.shape))
        check(name, tensor.dtype in dtypes, " or ".join(map(str, dtypes)), tensor.dtype)
    entry = kv_cache.dim() == 3 and kv_cache.shape[2] == latent + rope
    check("kv_cache", entry, f"[blocks, block_size, {latent + rope}]", tuple(kv_cache.shape))
    check("kv_cache", kv_cache.dtype in (act, *FP8_DTYPES), f"{act} or fp8", kv_cache.dtype)
    typed = q_out.dtype == act or q_out.dtype == kv_cache.dtype
    check("q_out", typed, "fp8 only with a cache of the same fp8 type", q_out.dtype)
    check("q_out", q_out.is_contiguous(), "dense", q_out.stride())
    if inputs.q_factor is not None:
        factor = inputs.q_factor
        check("q_factor", factor.shape == (tokens,), f"of shape {(tokens,)}", tuple(factor.shape))
        typed = factor.dtype in (act, torch.float32)
        check("q_factor", typed, f"{act} or torch.float32", factor.dtype)
        check("q_factor", factor.is_contiguous(), "dense", factor.stride())
    if angles is not None:
        wide = angles.dim() == 2 and angles.shape[1] == rope
        check("cos_sin_cache", wide, f"[max_position, {rope}]", tuple(angles.shape))
        typed = angles.dtype in (act, torch.float32)
        check("cos_sin_cache", typed, f"{act} or torch.float32", angles.dtype)
