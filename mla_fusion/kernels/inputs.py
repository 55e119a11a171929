"""The arguments of a provider, and the checks that all providers share."""

from typing import Any, NamedTuple

import torch

from mla_fusion.kernels.arithmetic import FP8_DTYPES


class Inputs(NamedTuple):
    """The arguments of `mla_fusion.kernels.fused_mla_decode_prep`, which describes them.

    derived: an engine's `mla_fusion.runtime.tables`, where a provider keeps what it makes of the
    cosines and sines, each with a `refresh()`; without it each call makes them.
    kept: an empty list for calls that make the same launch again, if the provider only launches.
    A NamedTuple: each layer of a step makes one, and a frozen dataclass takes 4 times as long."""

    q: torch.Tensor
    w_uk_t: Any  # a tensor; provider `aiter` also takes its PackedWeight
    kv_c: torch.Tensor
    k_pe: torch.Tensor
    kv_cache: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    cos_sin_cache: torch.Tensor | None
    k_scale: torch.Tensor
    q_scale: torch.Tensor
    is_neox: bool
    q_out: torch.Tensor
    q_factor: torch.Tensor | None = None
    context_parallel: bool = False
    derived: dict[Any, Any] | None = None
    kv_norm_weight: torch.Tensor | None = None
    kv_norm_epsilon: float = 0.0
    batch_invariant: bool = False
    kept: list[Any] | None = None


def padded_batch(
    tokens: int, *, w_uk_t: Any, kv_cache: torch.Tensor, cos_sin_cache: torch.Tensor | None,
    k_scale: torch.Tensor, q_scale: torch.Tensor, rope_dim: int, is_neox: bool,
    q_dtype: torch.dtype, factor_dtype: torch.dtype | None = None, context_parallel: bool = False,
    kv_norm_epsilon: float | None = None,
) -> Inputs:  # fmt: skip
    """A batch of `tokens` padded rows for one layer, dense zeros that write nothing into its cache.
    rope_dim: R; q_dtype: of q_out; factor_dtype, kv_norm_epsilon: of q_factor and of the norm of
    kv_c, if the layer has one."""
    heads, nope, latent = w_uk_t.shape
    slots = torch.full((tokens,), -1, device=w_uk_t.device)
    factor = None if factor_dtype is None else slots.new_ones(tokens, dtype=factor_dtype)
    q = slots.new_zeros((tokens, heads, nope + rope_dim), dtype=w_uk_t.dtype)
    kv_c, k_pe = q.new_zeros((tokens, latent)), q.new_zeros((tokens, rope_dim))
    q_out = q.new_empty((tokens, heads, latent + rope_dim), dtype=q_dtype)
    return Inputs(
        q, w_uk_t, kv_c, k_pe, kv_cache, slots, torch.zeros_like(slots), cos_sin_cache, k_scale,
        q_scale, is_neox, q_out, factor, context_parallel,
        kv_norm_weight=None if kv_norm_epsilon is None else kv_c.new_ones(latent),
        kv_norm_epsilon=kv_norm_epsilon or 0.0,
    )  # fmt: skip


def check(name: str, ok: bool, want: str, got: Any) -> None:
    """Raise ValueError unless `ok`, with the type and shape of a tensor, but none of its values."""
    if not ok:
        is_tensor = isinstance(got, torch.Tensor)
        shown = f"{got.dtype} {tuple(got.shape)} on {got.device}" if is_tensor else repr(got)
        raise ValueError(f"{name} must be {want}, got {shown}")


def fits(tensor: Any, *of: Any) -> bool:
    """True for a tensor of this type, shape and device."""
    return isinstance(tensor, torch.Tensor) and (tensor.dtype, tensor.shape, tensor.device) == of


def check_whole(name: str, value: Any) -> None:
    """Raise ValueError unless it is a Python int."""
    check(name, type(value) is int, "a whole number", value)  # True is an int too


def validate(inputs: Inputs) -> None:
    """Raise ValueError with the offending argument unless shapes and types fit together."""
    optional = {"cos_sin_cache", "q_factor", "kv_norm_weight"}
    for name in ("q", "kv_c", "k_pe", "kv_cache", "slot_mapping", "positions", "q_out", *optional):
        value = getattr(inputs, name)
        ok = isinstance(value, torch.Tensor) or (value is None and name in optional)
        check(name, ok, "a tensor", value)
    for name in ("is_neox", "context_parallel", "batch_invariant"):
        value = getattr(inputs, name)
        check(name, isinstance(value, bool), "True or False", value)
    epsilon: Any = inputs.kv_norm_epsilon
    ok = isinstance(epsilon, float) and 0 <= epsilon < 1
    check("kv_norm_epsilon", ok, "a float of 0 to 1", epsilon)
    q, w_uk_t, q_out = inputs.q, inputs.w_uk_t, inputs.q_out
    kv_cache, angles = inputs.kv_cache, inputs.cos_sin_cache
    check("q", q.dim() == 3, "[T, H, P + R]", q)
    check("kv_c", inputs.kv_c.dim() == 2, "[T, L]", inputs.kv_c)
    check("w_uk_t", len(getattr(w_uk_t, "shape", ())) == 3, "a tensor [H, P, L]", w_uk_t)
    tokens, heads, head_dim = q.shape
    _, nope, latent = w_uk_t.shape
    rope, act, width = head_dim - nope, q.dtype, inputs.kv_c.shape[1]
    ok = rope >= 0 and not nope == width != latent
    want = f"[H, P, L], with L = {width} of kv_c last and P at most {head_dim} of q"
    check("w_uk_t", ok, want, tuple(w_uk_t.shape))
    scales: dict[str, Any] = {"k_scale": inputs.k_scale, "q_scale": inputs.q_scale}
    for name, scale in scales.items():
        found = (scale.dtype, scale.numel()) if isinstance(scale, torch.Tensor) else None
        check(name, found == (torch.float32, 1), "a tensor of one fp32 element", scale)
        check(name, scale.device == q.device, f"on {q.device}, as q", scale.device)
    rows = () if angles is None else angles.shape[:1]
    fp8_too, wide_too = (act, *FP8_DTYPES), (act, torch.float32)
    expected: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]] = {
        "w_uk_t": ((heads, nope, latent), (act,)),
        "kv_c": ((tokens, latent), (act,)),
        "k_pe": ((tokens, rope), (act,)),
        "kv_cache": ((*kv_cache.shape[:2], latent + rope), fp8_too),
        "q_out": ((tokens, heads, latent + rope), fp8_too),
        "slot_mapping": ((tokens,), (torch.int64,)),
        "positions": ((tokens,), (torch.int64,)),
        "q_factor": ((tokens,), wide_too),
        "cos_sin_cache": ((*rows, rope), wide_too),
        "kv_norm_weight": ((latent,), (act,)),
    }
    for name, (shape, dtypes) in expected.items():
        if (tensor := getattr(inputs, name)) is None:
            continue
        check(name, tensor.shape == shape, f"of shape {shape}", tuple(tensor.shape))
        check(name, tensor.dtype in dtypes, " or ".join(map(str, dtypes)), tensor.dtype)
        check(name, tensor.device == q.device, f"on {q.device}, as q", tensor.device)
        if name in ("q_out", "q_factor", "kv_norm_weight"):
            check(name, tensor.is_contiguous(), "dense", tensor.stride())
    check("kv_cache", kv_cache.shape[1] > 0, "of blocks of 1 token or more", tuple(kv_cache.shape))
    check("kv_cache", kv_cache.stride(-1) == 1, "dense in its last dimension", kv_cache.stride())
    typed = q_out.dtype in (act, kv_cache.dtype)
    check("q_out", typed, "fp8 only with a cache of the same fp8 type", q_out.dtype)
