"""The specification of the fused region, in plain torch: the oracle of every other provider.

It runs on any device and is not fast. The formulas are those of DeepSeek-V2 (arXiv:2405.04434,
section 2.1) with the absorbed up-projection of appendix C.
"""

from __future__ import annotations

import torch

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def require() -> None:
    """The reference provider needs nothing but torch."""


def rotate(
    x: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> torch.Tensor:
    """RoPE of `x` [T, ..., R] at `positions` [T], computed and returned in fp32.

    `cos_sin_cache` [max_position, R] holds cosines then sines. Pairs are (i, i + R / 2) for
    NeoX and (2 i, 2 i + 1) for GPT-J; the rotated pair stays in its place.
    """
    cos, sin = cos_sin_cache[positions].float().chunk(2, dim=-1)
    shape = (x.shape[0], *(1,) * (x.dim() - 2), cos.shape[-1])
    cos, sin = cos.view(shape), sin.view(shape)
    x = x.float()
    if is_neox:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def cast(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor) -> torch.Tensor:
    """`x` in `dtype`; for fp8 it is multiplied by 1 / scale and clamped to the finite range."""
    if dtype not in FP8_DTYPES:
        return x.to(dtype)
    limit = torch.finfo(dtype).max
    return (x.float() * scale.float().reciprocal()).clamp(-limit, limit).to(dtype)


def absorb(q_nope: torch.Tensor, w_uk_t: torch.Tensor) -> torch.Tensor:
    """`q_nope` [T, H, P] times `w_uk_t` [H, P, L], as [T, H, L] in the activation type.

    torch.bmm accumulates 16-bit operands in fp32 and rounds once, which is the specification,
    and it is the product vLLM itself computes, so that the two agree bit for bit on a CPU.
    """
    tokens, heads, _ = q_nope.shape
    out = q_nope.new_empty((tokens, heads, w_uk_t.shape[-1]))
    torch.bmm(q_nope.transpose(0, 1), w_uk_t, out=out.transpose(0, 1))
    return out


def absorb_interval(
    q_nope: torch.Tensor, w_uk_t: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and the largest result that `absorb` may have, [T, H, L] each, activation type.

    A sum s of P exact products, accumulated in fp32 in any order, comes out within
    gamma_P * sum |q_i * w_i| of s, gamma_n = n u / (1 - n u), u = 2^-24 (N. Higham, Accuracy and
    Stability of Numerical Algorithms, 2nd edition, sections 3.1 and 4.2); rounding to the
    activation type keeps order. Almost everywhere the two are equal or neighbours. Where the
    products cancel, s is so small that they are many units in its last place apart: there the
    order of summation decides, and "within one unit of the last place" would ask for this
    function's order. s and the bound are computed in float64.

    fp32 products round too, which the same bound covers. Matrix units that truncate have no such
    proof; they are held to the same interval.
    """
    q, w = q_nope.double().transpose(0, 1), w_uk_t.double()
    terms = w_uk_t.shape[1] * 2.0**-24
    exact = torch.bmm(q, w).transpose(0, 1)
    bound = terms / (1 - terms) * torch.bmm(q.abs(), w.abs()).transpose(0, 1)
    return (exact - bound).to(q_nope.dtype), (exact + bound).to(q_nope.dtype)


def fused_mla_decode_prep(
    q: torch.Tensor,
    w_uk_t: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor | None,
    k_scale: torch.Tensor,
    q_scale: torch.Tensor,
    *,
    is_neox: bool,
    q_out: torch.Tensor,
) -> torch.Tensor:
    """See `mla_fusion.kernels.fused_mla_decode_prep`."""
    latent = w_uk_t.shape[-1]
    valid = slot_mapping >= 0
    q_pe, k_rot = q[..., w_uk_t.shape[1] :], k_pe
    if cos_sin_cache is not None:
        safe = torch.where(valid, positions, torch.zeros_like(positions))
        q_pe = rotate(q_pe, safe, cos_sin_cache, is_neox)
        k_rot = rotate(k_pe, safe, cos_sin_cache, is_neox)
    query = torch.cat(
        (
            cast(absorb(q[..., : w_uk_t.shape[1]], w_uk_t), q_out.dtype, q_scale),
            cast(q_pe, q_out.dtype, q_scale),
        ),
        dim=-1,
    )
    # torch has no `where` for fp8: choose between bytes instead.
    raw = query.view(torch.uint8).masked_fill(~valid.view(-1, 1, 1), 0)
    q_out.copy_(raw.view(q_out.dtype))

    slots = slot_mapping[valid]
    block, entry = slots // kv_cache.shape[1], slots % kv_cache.shape[1]
    rows = torch.cat(
        (cast(kv_c, kv_cache.dtype, k_scale), cast(k_rot, kv_cache.dtype, k_scale)), dim=-1
    )
    assert rows.shape[-1] == latent + k_pe.shape[-1]
    kv_cache.view(torch.uint8)[block, entry] = rows.view(torch.uint8)[valid]
    return q_out


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
