"""`fused_qk_rope_concat_and_cache_mla`: its checks, its silent assumptions, its kernels."""

import torch

from mla_fusion.kernels import reference
from tests.aiter_double import numbers
from tests.aiter_double.faults import assume, check, reject

FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
WIDE = (torch.float32, torch.float16, torch.bfloat16)


def kernel(tokens, heads, latent, rope, block):
    """Which kernel the dispatch picks for 2-D kv_c and k_pe."""
    if latent <= 512 and block == 1 and rope == 64 and tokens < 256:
        return "per_head"
    if rope == 64 and latent == 512 and latent * heads >= 2048:
        return "opt"
    return "general"


def run(at, a):
    """The op with its arguments by name; writes kv_cache and q_out."""
    if not a["is_nope_first"] or a.get("compute_all_q_rope"):
        raise NotImplementedError("nobody calls it so")
    for name in ("k_pe", "kv_c"):
        check(at, a[name].dim() == 2, f"{name} is [T, n]")
        check(at, a[name].stride(-1) == 1, f"{name} has a dense last dimension")
    _compute(at, a, _validate(at, a))


def _validate(at, a):
    q_nope, q_pe, kv_c, k_pe = a["q_nope"], a["q_pe"], a["kv_c"], a["k_pe"]
    cache, q_out, slots = a["kv_cache"], a["q_out"], a["slot_mapping"]
    tokens, heads, latent, rope = (slots.shape[0], *q_nope.shape[1:], k_pe.shape[-1])

    check(at, q_pe.dim() == q_nope.dim() == 3, "q_nope and q_pe have equal ranks")
    check(at, q_pe.shape[1] == heads, "q_nope and q_pe have equal heads")
    check(at, kv_c.shape[-1] == latent, "q_nope is absorbed: as wide as kv_c")
    check(at, q_out.shape[2] == latent + rope, "q_out is exactly latent + rope wide")
    _check_types(at, a)

    assume(cache.shape[-1] == latent + rope, "the width of a cache entry is not checked")
    assume(cache.stride(-1) == 1, "the values of a cache entry must be dense")
    for name in ("q_nope", "q_pe", "k_pe"):
        assume(a[name].dtype == kv_c.dtype, f"{name} is reinterpreted as the type of kv_c")
    for name in ("q_nope", "q_pe", "q_out"):
        assume(a[name].stride(-1) == 1, f"{name} must have a dense last dimension")
    for name in ("q_nope", "q_pe", "kv_c", "k_pe", "kv_cache", "q_out"):
        assume(_aligned(a[name]), f"{name} is loaded in vectors of 4 bytes or more")
    for name in ("q_nope", "q_pe", "kv_c", "k_pe", "q_out", "positions"):
        assume(a[name].shape[0] >= tokens, f"{name} is read for each of {tokens} slots")
    for name in ("slot_mapping", "positions"):
        assume(a[name].dtype == torch.int64, f"{name} is reinterpreted as int64")
        assume(a[name].is_contiguous(), f"{name} must be contiguous")
    for name in ("cos_cache", "sin_cache"):
        assume(a[name].dtype == kv_c.dtype, f"{name} is reinterpreted as the type of kv_c")
        assume(a[name].is_contiguous(), f"{name} has no stride argument: rows must be dense")
        assume(a[name].shape[-1] * 2 == rope, f"{name} must be half as wide as k_pe")
    for name in ("k_scale", "q_scale"):
        ok = isinstance(a[name], torch.Tensor)
        check(at, ok, f"{name} must be a tensor, not a number of the host")
        assume(a[name].device == kv_c.device, f"{name} is dereferenced on the device")
        assume(a[name].dtype == torch.float32, f"{name} is reinterpreted as fp32")
        assume(a[name].numel() >= 1, f"{name} has no element")
    assume(q_out.stride(1) <= latent + rope, "stores of high heads fall out of range and are lost")
    outputs = {t.untyped_storage().data_ptr() for t in (cache, q_out)}
    inputs = {t.untyped_storage().data_ptr() for t in (q_nope, q_pe, kv_c, k_pe)}
    assume(not outputs & inputs, "outputs must not alias inputs")

    picked = kernel(tokens, heads, latent, rope, cache.shape[1])
    if picked != "per_head" and not at.has("strided_q_nope"):
        assume(q_nope.stride(1) == latent, f"{picked} ignores the head stride of q_nope")
    if picked == "per_head":
        lanes = latent // (4 if latent <= 128 or kv_c.dtype == torch.float32 else 8)
        assume(lanes >= 32, "per_head rotates with its first 32 threads, and there are fewer")
    if picked == "general":
        step = 4 if kv_c.dtype == torch.float32 else 8
        assume(latent % step == 0, f"general handles {step} values of the latent at a time")
        assume(tokens * q_pe.stride(0) < 2**31, "general computes offsets in 32 bits")
    return picked


def _aligned(x):
    """Whether every row begins at a multiple of 4 bytes."""
    steps = [x.stride(dim) for dim in range(x.dim() - 1) if x.shape[dim] > 1]
    return x.data_ptr() % 4 == 0 and all(step * x.element_size() % 4 == 0 for step in steps)


def _check_types(at, a):
    act, cache, q_out = a["kv_c"].dtype, a["kv_cache"].dtype, a["q_out"].dtype
    check(at, act in WIDE, "kv_c is fp32, fp16 or bf16")
    for dtype in (cache, q_out):
        if dtype in FP8 and dtype != at.arch.fp8:
            if at.has("strict_fp8"):
                raise AssertionError(f"Unsupported dtype: {dtype}")
            assume(False, f"{dtype} is accepted and written as {at.arch.fp8}")
    if cache in WIDE:
        check(at, q_out not in FP8, "an fp8 query needs an fp8 cache")
        assume(cache == act, "the kernel follows kv_c: a cache of another type is corrupted")
    elif cache not in FP8:
        reject(at, f"kv cache data type is not supported: {cache}")
    assume(q_out in (act, at.arch.fp8), "q_out is written as the activation or as fp8")


def _compute(at, a, picked):
    q_nope, q_pe, kv_c, k_pe = a["q_nope"], a["q_pe"], a["kv_c"], a["k_pe"]
    cache, q_out, cos = a["kv_cache"], a["q_out"], a["cos_cache"]
    q_inv, k_inv = 1.0 / a["q_scale"].flatten()[0], 1.0 / a["k_scale"].flatten()[0]
    clamps = at.has("compute_all") and picked != "general"
    block, first = cache.shape[1], torch.zeros(1, dtype=torch.int64)
    for token, slot in enumerate(a["slot_mapping"].tolist()):
        if slot < 0:
            continue  # the whole token returns: its row of q_out keeps what it held
        row = int(a["positions"][token])
        if clamps:
            row = min(max(row, 0), cos.shape[0] - 1)
        assume(0 <= row < cos.shape[0], "a position outside the table reads other memory")
        angles = torch.cat((cos[row], a["sin_cache"][row]))[None], a["is_neox"]
        query = reference.rotate(q_pe[None, token], first, *angles)[0]
        _store(q_out[token], q_nope[token], query, q_inv, False)
        assume(slot < cache.shape[0] * block, "a slot outside the cache writes other memory")
        key = reference.rotate(k_pe[None, token], first, *angles)[0]
        cut = at.arch.truncates_key and picked == "opt"
        _store(cache[slot // block, slot % block], kv_c[token], key, k_inv, cut)


def _store(out, nope, rope, inverse, truncates):
    """One row: the nope half is copied or clamped to fp8, the rope half is rounded once."""
    if out.dtype in FP8:
        halves = [
            numbers.clamped_fp8(nope.float() * inverse, out.dtype),
            numbers.bare_fp8(rope * inverse, out.dtype),
        ]
    else:
        cut = truncates and out.dtype == torch.bfloat16
        halves = [nope, numbers.truncated_bf16(rope) if cut else rope.to(out.dtype)]
    out.copy_(torch.cat([h.to(out.dtype) for h in halves], dim=-1))
