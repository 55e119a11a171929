"""Calls of the provider: a good one, and those that would break a rule of AITER's fused op.

`BROKEN`: for each rule what to change in a good call, functions of its arguments, and part of the
ValueError with which the provider refuses before it calls AITER; no words where it calls AITER so
that the result is right. test_fused.py makes them.
"""

import torch

from mla_fusion.kernels.aiter import PackedWeight
from tests.aiter_double import numbers

T, H, P, R, L = 5, 8, 128, 64, 512
ENTRY = L + R
SLOTS = 3, 17, -1, 40, 0
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


def provider(cache=torch.bfloat16, query=torch.bfloat16):
    """The `Inputs` of the provider, less is_neox."""
    g = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=g).bfloat16()

    return {
        "q": random(T, H, P + R),
        "w_uk_t": random(H, P, L) / 11,
        "kv_c": random(T, 2 * L)[:, :L],
        "k_pe": random(T, 2 * R)[:, :R],
        "kv_cache": torch.full((3, 16, L + R), 0.5).to(cache),
        "slot_mapping": torch.tensor(SLOTS),
        "positions": torch.tensor([3, 1, 99, 4, 0]),
        "cos_sin_cache": random(100, R).float(),
        "k_scale": torch.tensor([0.04]),
        "q_scale": torch.tensor([0.05]),
        "q_out": torch.full((T, H, L + R), 7.0).to(query),
    }


def cache(dtype, *shape):
    return {"kv_cache": lambda a: torch.zeros(shape or (3, 16, L + R)).to(dtype)}


def other_flavour(a):
    return torch.zeros(3, 16, L + R).to(FNUZ if a["fp8"] is FN else FN)


def every_second(x, dim):
    """The values of x with a stride of two in `dim`."""
    return torch.stack((x, x), dim=dim + 1).flatten(dim, dim + 1)[
        (slice(None),) * dim + (slice(None, None, 2),)
    ]


def shifted(x):
    """The values of x, dense, at an address that no vector of 4 bytes begins at."""
    one = 2 // x.element_size()
    return torch.cat((x.new_empty(one), x.flatten()))[one:].view(x.shape)


def padded_heads(a):
    out = a["q_out"].new_zeros((T, H, 640))
    out[..., : L + R] = a["q_out"]
    return out[..., : L + R]


def by_head(x):
    """The same values [T, H, n], head by head in memory, as a batched product leaves them."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def huge(a):
    """A view of few rows of more than 2^30 elements each; untouched pages cost nothing."""
    wide = torch.empty(T * 2**29 + 2**20, dtype=torch.bfloat16)
    return wide.as_strided((T, 2, P + R), (2**29, P + R, 1))


def narrow(latent, heads, block):
    """Another latent width."""
    shapes = {"q": (T, heads, P + R), "w_uk_t": (heads, P, latent), "kv_c": (T, latent),
              "kv_cache": (50, block, latent + R), "q_out": (T, heads, latent + R)}  # fmt: skip
    return {n: lambda a, s=shape: torch.zeros(s).bfloat16() for n, shape in shapes.items()}


def packed(kind, w_uk_t, fp8):
    """W_UK [H, P, L] packed as vLLM packs it, and what the packed weight says, [H, P, L] fp32."""
    w = w_uk_t.transpose(1, 2)  # [H, L, P]
    if kind == "fp8":
        # One scale for all heads, without a dimension.
        limit = torch.finfo(fp8).max
        scale = w.float().abs().max() / limit
        codes = (w.float() / scale).clamp(-limit, limit).to(fp8)
        return PackedWeight(kind, codes, scale), (codes.float() * scale).transpose(1, 2)
    # vLLM quantizes [L, H, P] and keeps a transposed view.
    codes, scale = (x.transpose(0, 1) for x in numbers.to_mxfp4(w.transpose(0, 1)))
    return PackedWeight(kind, codes, scale), numbers.from_mxfp4(codes, scale).transpose(1, 2)


# Two heads, which the general kernel serves.
FEW = {"q": lambda a: a["q"][:, :2], "w_uk_t": lambda a: a["w_uk_t"][:2],
       "q_out": lambda a: a["q_out"][:, :2].contiguous()}  # fmt: skip
CACHE = "kv_cache must be torch.bfloat16 or torch.float8"
SCALES = "{} must be on cpu, as q"
ONE = "{} must be a tensor of one fp32 element"
ALIGNED = "q, kv_c, k_pe, kv_cache and q_out must be aligned to 4 bytes"
TABLE = "cos_sin_cache"
BROKEN = {
    # The cache and its type.
    "an fp8 cache kept as bytes": (cache(torch.uint8), CACHE),
    "fp8 of the other architecture": ({"kv_cache": other_flavour}, CACHE),
    "an e5m2 cache": (cache(torch.float8_e5m2), CACHE),
    "a wide cache of another type": (cache(torch.float16), CACHE),
    "a narrow entry": (cache(torch.bfloat16, 3, 16, L), "kv_cache must be of shape (3, 16, 576)"),
    # The query that is written.
    "an fp8 query without an fp8 cache": (
        {"q_out": lambda a: torch.zeros(T, H, L + R).to(a["fp8"])}, "q_out must be fp8 only with"),
    "a query of another type": ({"q_out": lambda a: a["q_out"].half()},
                                "q_out must be torch.bfloat16 or"),
    "a wider query": ({"q_out": lambda a: torch.zeros(T, H, 640).bfloat16()},
                      "q_out must be of shape (5, 8, 576)"),
    "gaps between heads": ({"q_out": padded_heads}, "q_out must be dense"),
    "few query rows": ({"q_out": lambda a: a["q_out"][: T - 1]},
                       "q_out must be of shape (5, 8, 576)"),
    # Integers.
    **{f"int32 {n}": ({n: lambda a, n=n: a[n].int()}, f"{n} must be torch.int64")
       for n in ("slot_mapping", "positions")},
    "few positions": ({"positions": lambda a: a["positions"][: T - 1]},
                      "positions must be of shape (5,)"),
    # Cosines and sines: AITER takes halves of the activation type, and does not clamp positions.
    "a table of halves": ({TABLE: lambda a: a[TABLE].bfloat16()}, ""),
    "an fp32 table": ({TABLE: lambda a: a[TABLE].float()}, ""),
    "a strided table": ({TABLE: lambda a: every_second(a[TABLE], 1)}, ""),
    "no table": ({TABLE: lambda a: None}, ""),
    "a narrow table": ({TABLE: lambda a: a[TABLE][:, ::2].contiguous()},
                       "cos_sin_cache must be of shape (100, 64)"),
    # Scales.
    **{f"{name}: {how}": ({name: lambda a, value=value: value}, wanted.format(name))
       for name in ("k_scale", "q_scale")
       for how, value, wanted in (("a number", 0.02, ONE), ("none", torch.ones(0), ONE),
                                  ("fp64", torch.ones(1, dtype=torch.float64), ONE),
                                  ("elsewhere", torch.ones(1, device="meta"), SCALES))},
    # What is read.
    "one row, whose stride says nothing": (
        {"k_pe": lambda a: a["k_pe"][:1].contiguous().as_strided((1, R), (1, 1)),
         **{n: lambda a, n=n: a[n][:1].contiguous()
            for n in ("q", "kv_c", "slot_mapping", "positions", "q_out")}}, ""),
    "query heads apart": ({"q": lambda a: by_head(a["q"])}, ""),
    "few query heads apart": (FEW | {"q": lambda a: by_head(a["q"][:, :2])}, ""),
    **{f"strided {name}": ({name: lambda a, name=name: every_second(a[name], a[name].dim() - 1)},
                           f"{name} must be dense in its last dimension")
       for name in ("q", "kv_c", "k_pe", "kv_cache", "slot_mapping", "positions")},
    "a key of three dimensions": ({"k_pe": lambda a: a["k_pe"].unsqueeze(1)},
                                  "k_pe must be of shape (5, 64)"),
    **{f"{name} of another type": ({name: lambda a, name=name: a[name].half()},
                                   f"{name} must be torch.bfloat16")
       for name in ("kv_c", "k_pe")},
    "a query of another type than W_UK": (
        {"q": lambda a: a["q"].half()}, "w_uk_t must be torch.float16"),
    "activations in fp64": (
        {n: lambda a, n=n: a[n].double() for n in (
            "q", "w_uk_t", "kv_c", "k_pe", "kv_cache", "q_out", "cos_sin_cache")},
        "q must be fp32, fp16 or bf16"),
    **{f"{kind} weights of another type": (
        {"w_uk_t": lambda a, kind=kind: packed(kind, a["w_uk_t"], a["fp8"])[0],
         **{n: lambda a, n=n: a[n].half() for n in ("q", "kv_c", "k_pe", "kv_cache", "q_out")}},
        f"{kind} product is one of bf16: q is torch.float16") for kind in ("fp4", "fp8")},
    "few queries": ({"q": lambda a: a["q"][: T - 1]}, "kv_c must be of shape (4, 512)"),
    **{f"few rows of {name}": ({name: lambda a, name=name: a[name][: T - 1]},
                               f"{name} must be of shape (5, ")
       for name in ("kv_c", "k_pe")},
    # Kernels that do less than their dispatch lets through.
    "a narrow latent in blocks of one": (
        narrow(64, 32, 1), "kv_cache must be of blocks larger than 1"),
    "an odd latent": (narrow(508, H, 16), "a kv_lora_rank that is a multiple of 8, not 64 and 508"),
    "32-bit offsets": (FEW | {"q": huge}, "q must be small enough for 32-bit offsets"),
    "few heads": (FEW, ""),
    "few factors": ({"q_factor": lambda a: torch.ones(T - 1)}, "q_factor must be of shape (5,)"),
    # A token of another rank has the slot -1, and needs its query here.
    "other ranks": ({"context_parallel": lambda a: True}, "slot is -1: use the triton provider"),
    **{f"{name} not aligned": ({name: lambda a, name=name: shifted(a[name])}, ALIGNED)
       for name in ("q", "kv_c", "k_pe", "kv_cache", "q_out")},
    "rotated parts not aligned": (
        {"q": lambda a: a["q"].new_zeros(T, H, P + R + 2)[..., : P + R + 1],
         "w_uk_t": lambda a: a["w_uk_t"].new_zeros(H, P + 1, L)}, ALIGNED),
    "rows not aligned": (
        {"k_pe": lambda a: a["k_pe"].new_zeros(T, 2 * R + 1)[:, :R]}, ALIGNED),
}  # fmt: skip
