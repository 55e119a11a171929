"""Calls of the provider that would break a rule of AITER's fused op; test_fused.py makes them.

`BROKEN`: for each rule what to change in a good call, functions of its arguments, and part of the
ValueError with which the provider refuses before it calls AITER; no words where it calls AITER so
that the result is right.
"""

import torch

from tests.aiter_double.calls import H, L, P, R, T

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


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


# Two heads, which the general kernel serves.
FEW = {"q": lambda a: a["q"][:, :2], "w_uk_t": lambda a: a["w_uk_t"][:2],
       "q_out": lambda a: a["q_out"][:, :2].contiguous()}  # fmt: skip
CACHE = "kv_cache must be torch.bfloat16 or torch.float8"
QUERY = "q_out must be torch.bfloat16, or fp8"
SCALES = "k_scale and q_scale must be fp32 on the device"
KEYS = "kv_c and k_pe must be torch.bfloat16 as q"
ALIGNED = "q, kv_c, k_pe, kv_cache and q_out must be aligned to 4 bytes"
TABLE = "cos_sin_cache"
BROKEN = {
    # The cache and its type.
    "an fp8 cache kept as bytes": (cache(torch.uint8), CACHE),
    "fp8 of the other architecture": ({"kv_cache": other_flavour}, CACHE),
    "an e5m2 cache": (cache(torch.float8_e5m2), CACHE),
    "a wide cache of another type": (cache(torch.float16), CACHE),
    "a narrow entry": (cache(torch.bfloat16, 3, 16, L), "kv_cache must be 576 wide"),
    "strided entries": ({"kv_cache": lambda a: every_second(a["kv_cache"], 2)},
                        "kv_cache must be [blocks, size, L + R]"),
    # The query that is written.
    "an fp8 query without an fp8 cache": (
        {"q_out": lambda a: torch.zeros(T, H, L + R).to(a["fp8"])}, QUERY),
    "a query of another type": ({"q_out": lambda a: a["q_out"].half()}, QUERY),
    "a wider query": ({"q_out": lambda a: torch.zeros(T, H, 640).bfloat16()},
                      "q_out must be [T, H, L + R]"),
    "gaps between heads": ({"q_out": padded_heads}, "q_out must be dense"),
    "few query rows": ({"q_out": lambda a: a["q_out"][: T - 1]}, "q_out must be [T, H, L + R]"),
    "strided values of the query": (
        {"q_out": lambda a: every_second(a["q_out"], 2)}, "q_out must be dense"),
    # Integers.
    **{f"{name} {how}": ({name: lambda a, name=name, make=make: make(a[name])},
                         f"{name} must be dense int64")
       for name in ("slot_mapping", "positions")
       for how, make in (("int32", torch.Tensor.int), ("strided", lambda x: every_second(x, 0)))},
    "few positions": ({"positions": lambda a: a["positions"][: T - 1]},
                      "positions must be 5 long"),
    # Cosines and sines: AITER takes halves of the activation type, and does not clamp positions.
    "a table of halves": ({TABLE: lambda a: a[TABLE].bfloat16()}, ""),
    "an fp32 table": ({TABLE: lambda a: a[TABLE].float()}, ""),
    "a strided table": ({TABLE: lambda a: every_second(a[TABLE], 1)}, ""),
    "no table": ({TABLE: lambda a: None}, ""),
    "a narrow table": ({TABLE: lambda a: a[TABLE][:, ::2].contiguous()},
                       "cos_sin_cache must be 64 wide"),
    # Scales.
    **{f"{name}: {how}": ({name: lambda a, value=value: value}, SCALES)
       for name in ("k_scale", "q_scale")
       for how, value in (("a number", 0.02), ("elsewhere", torch.ones(1, device="meta")),
                          ("fp64", torch.ones(1, dtype=torch.float64)), ("none", torch.ones(0)))},
    # What is read.
    "query heads apart": ({"q": lambda a: by_head(a["q"])}, ""),
    "few query heads apart": (FEW | {"q": lambda a: by_head(a["q"][:, :2])}, ""),
    "strided query heads": ({"q": lambda a: every_second(a["q"], 2)}, "q must be [T, H, P + R], d"),
    "a key of three dimensions": ({"k_pe": lambda a: a["k_pe"].unsqueeze(1)}, "k_pe must be [T, R"),
    **{f"strided {name}": ({name: lambda a, name=name: every_second(a[name], 1)},
                           f"{name} must be [T, ")
       for name in ("kv_c", "k_pe")},
    "a latent of another type": ({"kv_c": lambda a: a["kv_c"].half()}, KEYS),
    "a key of another type": ({"k_pe": lambda a: a["k_pe"].half()}, KEYS),
    "a query of another type than the key": (
        {"q": lambda a: a["q"].half()}, "kv_c and k_pe must be torch.float16 as q"),
    "activations in fp64": (
        {n: lambda a, n=n: a[n].double() for n in ("q", "kv_c", "k_pe", "kv_cache", "q_out")},
        "q must be fp32, fp16 or bf16"),
    "few queries": ({"q": lambda a: a["q"][: T - 1]}, "q must be [T, H, P + R]"),
    **{f"few rows of {name}": ({name: lambda a, name=name: a[name][: T - 1]},
                               "kv_c and k_pe must be 5 rows")
       for name in ("kv_c", "k_pe")},
    "a query of two dimensions": ({"q": lambda a: a["q"][:, 0]}, "q must be [T, H, P + R]"),
    # Kernels that do less than their dispatch lets through.
    "a narrow latent in blocks of one": (
        narrow(64, 32, 1), "kv_cache must be of blocks larger than 1"),
    "an odd latent": (narrow(508, H, 16), "k_pe must be of even width beside a latent of 8 n"),
    "32-bit offsets": (FEW | {"q": huge}, "q must be small enough for 32-bit offsets"),
    "few heads": (FEW, ""),
    "few factors": ({"q_factor": lambda a: torch.ones(T - 1)}, "q_factor must be as long as q"),
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
