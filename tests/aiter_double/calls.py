"""Good calls of the provider and of AITER's fused op, which a rule spoils in one place."""

import torch

from mla_fusion.kernels import reference

T, H, P, R, L = 5, 8, 128, 64, 512
ENTRY = L + R
MAX_POSITION = 100
SLOTS, POSITIONS = (3, 17, -1, 40, 0), (3, 1, 99, 4, 0)


def provider(cache=torch.bfloat16, query=torch.bfloat16, seed=0):
    """The `Inputs` of the provider, less is_neox."""
    g = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=g).bfloat16()

    return {
        "q": random(T, H, P + R),
        "w_uk_t": random(H, P, L) / 11,
        "kv_c": random(T, 2 * L)[:, :L],
        "k_pe": random(T, 2 * R)[:, :R],
        "kv_cache": torch.full((3, 16, L + R), 0.5).to(cache),
        "slot_mapping": torch.tensor(SLOTS),
        "positions": torch.tensor(POSITIONS),
        "cos_sin_cache": random(MAX_POSITION, R).float(),
        "k_scale": torch.tensor([0.04]),
        "q_scale": torch.tensor([0.05]),
        "q_out": torch.full((T, H, L + R), 7.0).to(query),
    }


def fused(given):
    """The arguments of AITER's op, by name, for the arguments of the provider."""
    cos, sin = (h.contiguous() for h in given["cos_sin_cache"].bfloat16().chunk(2, dim=-1))
    same = ("kv_c", "k_pe", "kv_cache", "q_out", "slot_mapping", "k_scale", "q_scale", "positions")
    return {
        "q_nope": reference.absorb(given["q"][..., :P], given["w_uk_t"]).contiguous(),
        "q_pe": given["q"][..., P:],
        **{name: given[name] for name in same},
        "cos_cache": cos,
        "sin_cache": sin,
        "is_neox": False,
        "is_nope_first": True,
    }
