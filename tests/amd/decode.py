"""The portable decode and its reduction on the machine, against float64 attention."""

import random
from unittest import mock

from mla_fusion.attention import cards
from mla_fusion.attention.card import Shape
from mla_fusion.cli.selftest.decode import Bench
from tests.amd.provider import judged
from tests.attention import decodes
from tests.attention.decodes import BF16
from tests.kernels.compiled import FP8

# heads, query rows, page size, query, cache, sequences, and latents. Lengths are around a page and
# a tile, and `LONGEST`.
CASES = {
    "ragged": (16, 1, 64, "bf16", "bf16", 3),
    "fp8": (16, 1, 64, "fp8", "fp8", 3),
    "fp8 cache": (16, 1, 64, "bf16", "fp8", 2),
    "128 heads": (128, 1, 64, "bf16", "bf16", 1),
    "drafts": (16, 2, 64, "bf16", "bf16", 3),
    "fp8 drafts": (16, 2, 64, "fp8", "fp8", 2),
    "padded heads": (12, 1, 16, "fp8", "fp8", 3),
    "page of one": (16, 1, 1, "bf16", "bf16", 3),
    "fp8 slots": (16, 1, 1, "fp8", "fp8", 3),
    "pages of 8": (16, 1, 8, "bf16", "fp8", 2),
    "pages of 16": (16, 2, 16, "bf16", "bf16", 2),
    "pages of three": (12, 1, 48, "fp8", "fp8", 2),
    "large pages": (40, 1, 128, "fp8", "fp8", 2),
    "two row blocks": (32, 2, 64, "fp8", "fp8", 2),
    "bf16 row blocks": (64, 1, 64, "bf16", "fp8", 1),
    "256 latents": (16, 2, 64, "fp8", "fp8", 2, 256),
    "256 latents in bf16": (32, 1, 16, "bf16", "bf16", 2, 256),
    "drafts of 6 heads": (6, 4, 64, "bf16", "bf16", 2),
    "many splits": (12, 2, 64, "bf16", "bf16", 2),
}
LONGEST = 150


def kernel_of(portable):
    """Within it the portable kernel decodes, as on other GPUs, or the one that is chosen."""
    every = (cards.PORTABLE,) if portable else cards.CARDS
    return mock.patch.object(cards, "CARDS", every)


def check(target, name, settings=None, portable=False):
    """Execute a case, compare it, and return its launches; `portable` as on other GPUs."""
    heads, rows, page, query, cache, sequences, *latent = CASES[name]
    types = {"bf16": BF16, "fp8": FP8[target]}
    layer = {"q": types[query], "kv": types[cache], "latent": latent[0] if latent else 512}
    bench = Bench(None, Shape(heads, rows, page, batch=sequences, **layer), LONGEST, "cpu")
    if name == "many splits":
        more = {"ctas": 70, "kv_granularity": 1, "overhead": 1}
        bench.plan = decodes.plan_for(
            max_batch=sequences, max_query_len=rows, num_heads=heads, v_head_dim=512, **more
        )
    bench.fill(random.Random(0), ragged=True)
    with kernel_of(portable):
        return judged(bench, target, settings)
