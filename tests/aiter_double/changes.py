"""How a rule of the fused op spoils a good call: functions of its arguments."""

import torch

from tests.aiter_double.calls import L, P, R, T

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


def same(name, make):
    """The same change to one argument of both calls."""

    def change(a):
        return {name: make(a)}

    return {"direct": change, "hostile": change}


def cache(dtype, *shape):
    return lambda a: torch.zeros(shape or (3, 16, L + R)).to(dtype)


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


def padded_heads(x, to):
    out = x.new_zeros((*x.shape[:-1], to))
    out[..., : x.shape[-1]] = x
    return out[..., : x.shape[-1]]


def by_head(x):
    """The same values [T, H, n], head by head in memory, as a batched product leaves them."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def few(a):
    """The provider's arguments for two heads, which the general kernel serves."""
    return {
        "q": a["q"][:, :2],
        "w_uk_t": a["w_uk_t"][:2],
        "q_out": a["q_out"][:, :2].contiguous(),
    }


def few_heads(a):
    """The same of AITER's op."""
    narrow = {name: a[name][:, :2].contiguous() for name in ("q_nope", "q_out")}
    return {**narrow, "q_pe": a["q_pe"][:, :2]}


def huge(a, heads):
    """A view of few rows of more than 2^30 elements each; untouched pages cost nothing."""
    wide = torch.empty(T * 2**29 + 2**20, dtype=torch.bfloat16)
    return wide.as_strided((T, heads, P + R), (2**29, P + R, 1))


def narrow(latent, heads, block):
    """Both calls with another latent width."""

    def hostile(a):
        shapes = {
            "q": (T, heads, P + R),
            "w_uk_t": (heads, P, latent),
            "kv_c": (T, latent),
            "kv_cache": (50, block, latent + R),
            "q_out": (T, heads, latent + R),
        }
        return {name: torch.zeros(shape).bfloat16() for name, shape in shapes.items()}

    def direct(a):
        given = hostile(a)
        return {
            **given,
            "q_nope": given["q_out"][..., :latent].clone(),
            "q_pe": given["q"][..., P:],
        }

    return {"direct": direct, "hostile": hostile}


def direct_table(make):
    return lambda a: {n: make(a[n]) for n in ("cos_cache", "sin_cache")}
