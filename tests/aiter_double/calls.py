"""Good calls of the double and of the provider, which a rule spoils in one place."""

import torch

from mla_fusion.kernels import reference
from tests.aiter_double.metadata import BUFFERS

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


def decode(
    aiter, heads=16, lengths=(70, 3, 200), qlen=1, query=torch.bfloat16, cache=torch.bfloat16
):
    """The arguments of `mla_decode_fwd`, with a plan for them in the six buffers."""
    g = torch.Generator().manual_seed(1)
    batch = len(lengths)
    sizes = aiter.get_mla_metadata_info_v1(batch, qlen, heads, query, cache, False)
    shapes = dict(zip(BUFFERS, sizes, strict=True))
    buffers = {
        name: torch.empty(shape, dtype=dtype).fill_(99) for name, (shape, dtype) in shapes.items()
    }
    qo = torch.arange(0, (batch + 1) * qlen, qlen, dtype=torch.int32)
    kv = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    pages = torch.ones(batch, dtype=torch.int32)
    plan = {
        "seqlens_qo_indptr": qo, "seqlens_kv_indptr": kv, "kv_last_page_lens": pages,
        "num_heads_per_head_k": heads, "num_heads_k": 1, "is_causal": True, **buffers,
        "max_seqlen_qo": qlen, "uni_seqlen_qo": qlen, "dtype_q": query, "dtype_kv": cache,
    }  # fmt: skip
    aiter.get_mla_metadata_v1(**plan)
    total = int(kv[-1])
    arguments = {
        "q": torch.randn((batch * qlen, heads, L + R), generator=g).to(query),
        "kv_buffer": torch.randn((2 * total, 1, 1, L + R), generator=g).to(cache),
        "o": torch.full((batch * qlen, heads, L), 7.0, dtype=torch.bfloat16),
        "qo_indptr": qo, "kv_indptr": kv,
        "kv_indices": torch.randperm(2 * total, generator=g)[:total].to(torch.int32),
        "kv_last_page_lens": pages, "max_seqlen_q": qlen, "sm_scale": 0.07,
        "q_scale": torch.tensor([0.5]), "kv_scale": torch.tensor([0.25]),
        "work_meta_data": buffers["work_metadata_ptrs"],
        **{name: buffers[name] for name in BUFFERS[1:]},
    }  # fmt: skip
    return {"plan": plan, "decode": arguments}


def sizes(fp8):
    """The arguments of `get_mla_metadata_info_v1`."""
    shape = {"batch_size": 3, "max_seqlen_qo": 1, "num_head_qo": 16}
    return {**shape, "q_dtype": fp8, "kv_dtype": fp8, "is_sparse": False}
