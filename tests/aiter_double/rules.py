"""The rules of AITER's fused op, each with a direct call that breaks it and the same as hostile
input of the provider. docs/aiter.md prints this table; test_aiter_rules.py runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tests.aiter_double.calls import H, L, P, R, T

if TYPE_CHECKING:
    from collections.abc import Callable

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
ABORTS, SILENT, TYPE = "aborts", "silently wrong", "refuses the type"
RAISED, AVOIDED = "refused in Python", "avoided"


@dataclass(frozen=True)
class Rule:
    """One rule of the fused op.

    Attributes:
        says: the rule in words.
        fault: what AITER does: `ABORTS` (before v0.1.14 a RuntimeError), `SILENT`, or `TYPE`
            (an AssertionError from v0.1.14, silently wrong before).
        direct: what to change in a good direct call; gets its arguments.
        hostile: what to change in a good call of the provider; gets its arguments.
        library: `RAISED` (ValueError before the call) or `AVOIDED` (called, and right).
        before: the first release in which the rule no longer holds, if there is one.
    """

    name: str
    says: str
    fault: str
    direct: Callable[[dict[str, Any]], dict[str, Any]]
    hostile: Callable[[dict[str, Any]], dict[str, Any]]
    library: str
    before: str = ""


def _same(name: str, make: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """The same change to one argument of both calls."""

    def change(a: dict[str, Any]) -> dict[str, Any]:
        return {name: make(a)}

    return {"direct": change, "hostile": change}


def _cache(dtype: torch.dtype, *shape: int) -> Callable[[dict[str, Any]], torch.Tensor]:
    return lambda a: torch.zeros(shape or (3, 16, L + R)).to(dtype)


def _other_flavour(a: dict[str, Any]) -> torch.Tensor:
    return torch.zeros(3, 16, L + R).to(FNUZ if a["arch_fp8"] is FN else FN)


def _every_second(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The values of x with a stride of two in `dim`."""
    return torch.stack((x, x), dim=dim + 1).flatten(dim, dim + 1)[
        (slice(None),) * dim + (slice(None, None, 2),)
    ]


def _padded_heads(x: torch.Tensor, to: int) -> torch.Tensor:
    out = x.new_zeros((*x.shape[:-1], to))
    out[..., : x.shape[-1]] = x
    return out[..., : x.shape[-1]]


def _huge(a: dict[str, Any], heads: int) -> torch.Tensor:
    """A view of few rows of more than 2^30 elements each; untouched pages cost nothing."""
    wide = torch.empty(T * 2**29 + 2**20, dtype=torch.bfloat16)
    return wide.as_strided((T, heads, P + R), (2**29, P + R, 1))


def _narrow(latent: int, heads: int, block: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The provider's arguments for another latent width."""

    def change(a: dict[str, Any]) -> dict[str, Any]:
        act = torch.bfloat16
        return {
            "q": torch.zeros(T, heads, P + R, dtype=act),
            "w_uk_t": torch.zeros(heads, P, latent, dtype=act),
            "kv_c": torch.zeros(T, latent, dtype=act),
            "kv_cache": torch.zeros(50, block, latent + R, dtype=act),
            "q_out": torch.zeros(T, heads, latent + R, dtype=act),
        }

    return change


def _narrow_direct(
    latent: int, heads: int, block: int
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(a: dict[str, Any]) -> dict[str, Any]:
        b = _narrow(latent, heads, block)(a)
        q, _ = b.pop("q"), b.pop("w_uk_t")
        return {**b, "q_nope": torch.zeros(T, heads, latent).bfloat16(), "q_pe": q[..., P:]}

    return change


def _direct_table(make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return lambda a: {n: make(a[n]) for n in ("cos_cache", "sin_cache")}


RULES = [
    # The cache and its type.
    Rule("uint8-cache", "an fp8 cache kept as bytes must be viewed as fp8", ABORTS,
         library=RAISED, **_same("kv_cache", _cache(torch.uint8))),
    Rule("other-fp8", "fp8 is the architecture's: e4m3fnuz on gfx942, e4m3fn on gfx950", TYPE,
         library=RAISED, **_same("kv_cache", _other_flavour)),
    Rule("e5m2", "an e5m2 cache is not written as e5m2", TYPE,
         library=RAISED, **_same("kv_cache", _cache(torch.float8_e5m2))),
    Rule("cache-type", "a cache that is not fp8 has the activation type", SILENT,
         library=RAISED, **_same("kv_cache", _cache(torch.float16))),
    Rule("cache-width", "a cache entry is latent + rope wide", SILENT,
         library=RAISED, **_same("kv_cache", _cache(torch.bfloat16, 3, 16, L))),
    Rule("cache-inner-stride", "the values of a cache entry are dense", SILENT,
         library=RAISED, **_same("kv_cache", lambda a: _every_second(a["kv_cache"], 2))),
    # The query that is written.
    Rule("fp8-query-wide-cache", "an fp8 query needs an fp8 cache", ABORTS,
         library=RAISED, **_same("q_out", lambda a: torch.zeros(T, H, L + R).to(a["arch_fp8"]))),
    Rule("query-type", "the query is of the activation type or fp8", SILENT,
         library=RAISED, **_same("q_out", lambda a: a["q_out"].half())),
    Rule("query-width", "a query head is exactly latent + rope wide", ABORTS,
         library=RAISED, **_same("q_out", lambda a: torch.zeros(T, H, 640).bfloat16())),
    Rule("query-head-stride", "the heads of the query are dense", SILENT,
         library=RAISED, **_same("q_out", lambda a: _padded_heads(a["q_out"], 640))),
    Rule("query-rows", "the query has a row for each slot", SILENT,
         library=RAISED, **_same("q_out", lambda a: a["q_out"][: T - 1])),
    # Integers.
    Rule("int32-slots", "slots are int64", SILENT,
         library=RAISED, **_same("slot_mapping", lambda a: a["slot_mapping"].int())),
    Rule("int32-positions", "positions are int64", SILENT,
         library=RAISED, **_same("positions", lambda a: a["positions"].int())),
    Rule("strided-slots", "slots are dense", SILENT,
         library=RAISED, **_same("slot_mapping", lambda a: _every_second(a["slot_mapping"], 0))),
    Rule("strided-positions", "positions are dense", SILENT,
         library=RAISED, **_same("positions", lambda a: _every_second(a["positions"], 0))),
    Rule("few-positions", "there is a position for each slot", SILENT,
         library=RAISED, **_same("positions", lambda a: a["positions"][: T - 1])),
    # Cosines and sines.
    Rule("strided-table", "cosines and sines are dense, not halves of vLLM's table", SILENT,
         direct=lambda a: {"cos_cache": a["both"].bfloat16()[:, : R // 2],
                           "sin_cache": a["both"].bfloat16()[:, R // 2 :]},
         hostile=lambda a: {"cos_sin_cache": a["cos_sin_cache"].bfloat16()}, library=AVOIDED),
    Rule("fp32-table", "cosines and sines have the activation type", SILENT,
         direct=_direct_table(torch.Tensor.float),
         hostile=lambda a: {"cos_sin_cache": a["cos_sin_cache"].float()}, library=AVOIDED),
    Rule("table-width", "cosines and sines are half as wide as k_pe", SILENT,
         direct=_direct_table(lambda t: t[:, ::2].contiguous()),
         hostile=lambda a: {"cos_sin_cache": a["cos_sin_cache"][:, ::2].contiguous()},
         library=RAISED),
    Rule("one-row-table", "positions are not clamped to the table", SILENT,
         direct=_direct_table(lambda t: t[:1]),
         hostile=lambda a: {"cos_sin_cache": None}, library=AVOIDED, before="v0.1.19.post1"),
    # Scales.
    Rule("host-scale", "scales are tensors", ABORTS,
         library=RAISED, **_same("k_scale", lambda a: 0.02)),
    Rule("scale-device", "scales are on the device of the query", SILENT,
         library=RAISED, **_same("q_scale", lambda a: torch.ones(1, device="meta"))),
    Rule("fp64-scale", "scales are fp32", SILENT,
         library=RAISED, **_same("k_scale", lambda a: torch.ones(1, dtype=torch.float64))),
    Rule("empty-scale", "scales have an element", SILENT,
         library=RAISED, **_same("q_scale", lambda a: torch.ones(0))),
    # What is read.
    Rule("unabsorbed-query", "the query is absorbed: as wide as the latent", ABORTS,
         direct=lambda a: {"q_nope": a["q"][..., :P]}, hostile=lambda a: {}, library=AVOIDED),
    Rule("strided-query", "before v0.1.17 the heads of the absorbed query are dense", SILENT,
         direct=lambda a: {"q_nope": a["q_nope"].transpose(0, 1).contiguous().transpose(0, 1)},
         hostile=lambda a: {"q": a["q"].transpose(0, 1).contiguous().transpose(0, 1)},
         library=AVOIDED, before="v0.1.17"),
    Rule("query-inner-stride", "the values of a query head are dense", SILENT,
         direct=lambda a: {"q_pe": _every_second(a["q_pe"], 2)},
         hostile=lambda a: {"q": _every_second(a["q"], 2)}, library=RAISED),
    Rule("3d-key", "a key with a head dimension has stride(1) equal to its width", ABORTS,
         direct=lambda a: {"kv_c": a["kv_c"].unsqueeze(1),
                           "k_pe": torch.zeros(T, 1, 2 * R).bfloat16()[..., :R]},
         hostile=lambda a: {"k_pe": a["k_pe"].unsqueeze(1)}, library=RAISED),
    Rule("key-rank", "latent and key have equal ranks", ABORTS,
         library=RAISED, **_same("k_pe", lambda a: a["k_pe"].unsqueeze(1))),
    Rule("latent-inner-stride", "the values of the latent are dense", ABORTS,
         library=RAISED, **_same("kv_c", lambda a: _every_second(a["kv_c"], 1))),
    Rule("key-type", "the key has the type of the latent", SILENT,
         library=RAISED, **_same("k_pe", lambda a: a["k_pe"].half())),
    Rule("query-input-type", "the query has the type of the latent", SILENT,
         direct=lambda a: {"q_pe": a["q_pe"].half()},
         hostile=lambda a: {"q": a["q"].half()}, library=RAISED),
    Rule("latent-type", "activations are fp32, fp16 or bf16", ABORTS,
         library=RAISED, **_same("kv_c", lambda a: a["kv_c"].double())),
    Rule("few-keys", "there is a latent and a key for each slot", SILENT,
         library=RAISED, **_same("k_pe", lambda a: a["k_pe"][: T - 1])),
    # Kernels that do less than their dispatch lets through.
    Rule("narrow-latent", "with blocks of one token a latent of 64 is not rotated in full", SILENT,
         direct=_narrow_direct(64, 32, 1), hostile=_narrow(64, 32, 1), library=RAISED),
    Rule("odd-latent", "the general kernel takes 8 values of the latent at a time", SILENT,
         direct=_narrow_direct(508, H, 16), hostile=_narrow(508, H, 16), library=RAISED),
    Rule("32-bit-offsets", "the general kernel computes offsets in 32 bits", SILENT,
         direct=lambda a: {"q_pe": _huge(a, 2)[..., P:], "q_nope": a["q_nope"][:, :2],
                           "q_out": a["q_out"][:, :2].contiguous()},
         hostile=lambda a: {"q": _huge(a, 2), "w_uk_t": a["w_uk_t"][:2],
                            "q_out": a["q_out"][:, :2].contiguous()}, library=RAISED),
    Rule("compute-all", "compute_all_q_rope is refused by the general kernel", ABORTS,
         direct=lambda a: {"compute_all_q_rope": True, "q_nope": a["q_nope"][:, :2].contiguous(),
                           "q_pe": a["q_pe"][:, :2], "q_out": a["q_out"][:, :2].contiguous()},
         hostile=lambda a: {"q": a["q"][:, :2], "w_uk_t": a["w_uk_t"][:2],
                            "q_out": a["q_out"][:, :2].contiguous()}, library=AVOIDED),
]  # fmt: skip
