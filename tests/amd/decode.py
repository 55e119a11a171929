"""The portable decode and its reduction on the machine, against float64 attention."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import torch

from mla_fusion.attention import triton
from mla_fusion.attention.plan import device
from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.attention.triton import choice
from tests.amd.provider import compared, machine
from tests.attention import decodes
from tests.attention.decodes import BF16
from tests.kernels.compiled import FP8

# heads, query rows, KV tokens, query, cache, page size, CTAs, and what else the plan gets
CASES = {
    "one token": (16, [1], [1], "bf16", "bf16", 64, 2),
    "ragged": (16, [1, 1, 1], [40, 90, 5], "bf16", "bf16", 64, 4),
    "fp8": (16, [1, 1], [70, 33], "fp8", "fp8", 64, 4),
    "fp8 cache": (16, [1, 1], [50, 21], "bf16", "fp8", 64, 4),
    "128 heads": (128, [1], [40], "bf16", "bf16", 64, 6),
    "drafts": (16, [2, 2], [37, 20], "bf16", "bf16", 64, 4),
    "padded heads": (12, [1, 1], [40, 17], "fp8", "fp8", 16, 4),
    "page of one": (16, [1, 1], [30, 18], "bf16", "bf16", 1, 4),
    "one CTA": (12, [1, 1, 1], [40, 17, 33], "fp8", "fp8", 16, 1),
    "two CTAs": (12, [2, 1, 2], [37, 20, 50], "bf16", "bf16", 64, 2),
    "tiles": (16, [1, 2], [200, 130], "fp8", "fp8", 64, 1),
    "tiles of pages": (16, [2, 1], [140, 70], "bf16", "bf16", 16, 1),
    "tiles of slots": (16, [1, 1], [140, 70], "fp8", "fp8", 1, 2),
    "tiles of 8 slots": (16, [1], [140], "bf16", "fp8", 8, 1),
    "pages of three": (12, [1], [140], "fp8", "fp8", 48, 1),
    "large pages": (40, [1, 1], [200, 65], "fp8", "fp8", 128, 3),
    "two row blocks": (32, [2, 1], [140, 70], "fp8", "fp8", 64, 3),
    "bf16 row blocks": (64, [1], [140], "bf16", "fp8", 64, 1),
    "256 latents": (16, [2, 1], [140, 70], "fp8", "fp8", 64, 3, {"v_head_dim": 256}),
    "256 latents in bf16": (32, [1, 1], [140, 7], "bf16", "bf16", 16, 3, {"v_head_dim": 256}),
    "three tiles": (12, [1, 1], [150, 70], "fp8", "fp8", 16, 1),
    "three tiles of drafts": (12, [2, 1], [150, 70], "bf16", "bf16", 64, 1),
    "drafts of 6 heads": (6, [4, 1], [150, 70], "bf16", "bf16", 64, 1),
    "many splits": (12, [2, 1], [150, 20], "bf16", "bf16", 64, 70, {"kv_granularity": 1}),
}
HALF_STEP = 2**-8  # of bf16, relative
FP32 = 2**-16  # sums, exponentials and scales in fp32, relative
LSE_TOLERANCE = 2e-5


class Expected:
    """The inputs of a case, its outputs full of NaN, and what they should become."""

    def __init__(self, target, name):
        heads, rows, lengths, query, cache, page, ctas, *more = CASES[name]
        types = {"bf16": BF16, "fp8": FP8[target]}
        given = decodes.arguments(
            rows, lengths, page, rope=64, num_heads=heads, ctas=ctas, overhead=1,
            q_dtype=types[query], kv_dtype=types[cache],
            **({"v_head_dim": 512} | (more[0] if more else {})),
        )  # fmt: skip
        self.out, self.lse = decodes.definition(given, rows, lengths)
        magnitudes, _ = decodes.definition(given, rows, lengths, of=torch.abs)
        # The weights are rounded to bf16, and the result is.
        self.bound = (HALF_STEP + FP32) * magnitudes + HALF_STEP * self.out.abs()
        out = torch.full(self.out.shape, torch.nan, dtype=BF16)
        lse = torch.full(self.lse.shape, torch.nan)
        self.inputs = Inputs(**given, out=out, lse=lse)

    def wrong(self):
        """How many elements are wrong, by result; empty if none is."""
        near = {
            "output": (self.inputs.out.double() - self.out).abs() <= self.bound,
            "LSE": (self.inputs.lse.double() - self.lse).abs() <= LSE_TOLERANCE,
        }
        return {name: int((~part).sum()) for name, part in near.items() if not part.all()}


def made(target, heads, kind, sequences, length, units, page=64):
    """A decode of random values on a GPU of so many CUs, over a cache of which all pages are the
    same few."""
    types = {"fp8": FP8[target], "bf16": BF16, "cache": FP8[target]}
    query = BF16 if kind == "cache" else types[kind]
    properties = SimpleNamespace(multi_processor_count=units)
    with (
        mock.patch.object(torch.cuda, "get_device_properties", lambda device: properties),
        mock.patch.object(torch.version, "hip", "7.0"),
        mock.patch.object(device, "architecture", lambda device: target),
    ):
        settings = triton.plan_settings(heads, 1, types[kind], 576, "cuda")
    plan = decodes.plan_for(
        max_batch=sequences, num_heads=heads, q_dtype=query, kv_dtype=types[kind], v_head_dim=512,
        **settings,
    )  # fmt: skip
    decodes.refresh(plan, [1] * sequences, [length] * sequences)
    rng, one = torch.Generator().manual_seed(heads), torch.ones(1)
    return Inputs(
        decodes.random(rng, sequences, heads, 576, dtype=query),
        decodes.random(rng, 16, page, 576, dtype=types[kind]),
        plan,
        torch.randint(16, (sequences, -(-length // page)), generator=rng).int(),
        decodes.SCALE,
        one,
        one,
        torch.empty(sequences, heads, 512, dtype=BF16),
        torch.empty(sequences, heads),
    )


def kernel_of(portable):
    """Within it the portable kernel decodes, as on other GPUs, or the one that is chosen."""
    if portable:
        return mock.patch.object(choice, "cdna", lambda _: 0)
    return contextlib.nullcontext()


def check(target, name, settings=None, portable=False):
    """Execute a case, compare it, and return its launches; `portable` as on other GPUs."""
    expected = Expected(target, name)
    with kernel_of(portable), machine(target, settings) as launches:
        triton.launch(expected.inputs)
    compared(expected.wrong(), expected.inputs.out, expected.inputs.lse)
    return launches
