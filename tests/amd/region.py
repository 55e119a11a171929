"""The fused region on the machine against its reference, element by element."""

import torch

from mla_fusion.kernels import reference, triton
from tests.amd.provider import machine
from tests.kernels import cases
from tests.kernels.compiled import FP8

# A layer of DeepSeek's.
WIDTHS = {"nope": 128, "rope": 64, "latent": 512, "block_size": 64, "gap": 1536}


def case(target, tokens, heads, kind="fp8", rotation="neox", **more):
    """kind: "fp8" for query and cache, "cache" for an fp8 cache alone, or "bf16", which stands for
    any type of the activations."""
    fp8, act = FP8[target], more.get("act", torch.bfloat16)
    given = {
        "kv": act if kind == "bf16" else fp8,
        "query": fp8 if kind == "fp8" else act,
        "neox": rotation == "neox",
        "padded": tuple(range(1, tokens, 3)),
    }
    if rotation == "none":
        given["angles"] = None
    return cases.Case(tokens=tokens, heads=heads, **{**WIDTHS, **given, **more})


def build(wanted):
    """The call of a case; one of its rows goes to slot 0.

    The angles at the position of a padded row lie outside memory, but not beyond what the 32 bits
    of an offset reach: whoever reads them is seen.
    """
    call = cases.build(wanted)
    slots = call.slot_mapping
    if not wanted.context_parallel:
        call.positions[slots < 0] = 3_000_000
    live = (slots >= 0).nonzero().flatten()
    if len(live) and not (slots == 0).any():
        slots[live[0]] = 0
    return call


SPECIAL = (float("nan"), float("inf"), float("-inf"), 3e38, -3e38, 1e30, -0.0, 1e-40, 1e-45)


def hostile(inputs):
    """Put NaN, infinities, values that overflow, and subnormals between the others, in place."""
    generator = torch.Generator().manual_seed(1)
    nope = inputs.w_uk_t.shape[1]
    # One NaN makes a whole row of the product NaN.
    tensors = inputs.q[..., :nope], inputs.q[..., nope:], inputs.kv_c, inputs.k_pe
    for tensor, share in zip(tensors, (1 / nope, 0.2, 0.2, 0.2), strict=True):
        values = torch.tensor(SPECIAL).to(tensor.dtype)
        chosen = torch.rand(tensor.shape, generator=generator) < share
        which = torch.randint(len(SPECIAL), tensor.shape, generator=generator)
        tensor.copy_(torch.where(chosen, values[which], tensor))
    # Rows that overflow fp8 when they are scaled.
    inputs.q[::2] *= 300
    inputs.kv_c[::2] *= 300
    return inputs


def _different(got, want):
    """Where bytes differ; one NaN is as good as another."""
    same = (got.view(torch.uint8) == want.view(torch.uint8)).view(*got.shape, -1).all(-1)
    return ~same & ~(got.float().isnan() & want.float().isnan())


def wrong(inputs, query, storage):
    """How many elements differ from the reference's, by part; empty if none does.

    A product may be any that an order of summation gives; all else is equal to the byte, in the
    cache and all around it.
    """
    kind = inputs.kv_cache.dtype
    wanted, wanted_storage = cases.run(reference, inputs)
    q, (_, nope, latent) = inputs.q, inputs.w_uk_t.shape
    if inputs.q_factor is not None:
        q = reference.scale(q, inputs.q_factor, q.dtype)
    low, high = (
        reference.cast(x, query.dtype, inputs.q_scale).float()
        for x in cases.absorb_interval(q[..., :nope], inputs.w_uk_t)
    )
    different = _different(query, wanted)
    value = query[..., :latent].float()
    parts = {
        "cache": _different(storage.view(kind), wanted_storage.view(kind)),
        "rotated query": different[..., latent:],
        "absorbed query": different[..., :latent] & ~((low <= value) & (value <= high)),
    }
    return {name: int(part.sum()) for name, part in parts.items() if part.any()}


def check(target, call, settings=None, plan=None):
    """Execute the region of `call`, compare it, and return its launches."""
    with machine(target, settings) as launches:
        query, storage = cases.run(triton, call, plan=plan)
    assert not (found := wrong(call, query, storage)), found
    return launches
