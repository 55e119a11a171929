"""The fused region: the machine code that a launch on gfx942 and gfx950 would run, executed."""

import itertools
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.amd.compiler import HIPBackend

from mla_fusion.kernels import dispatch
from mla_fusion.kernels.dispatch import Plan, Widths
from tests.amd import region
from tests.amd.execute import Settings
from tests.gpus import described

BACKWARDS = Settings(backwards=True, seed=99)
# tokens, heads, types, RoPE and what else is unusual.
SOME = [
    (1, 16, "fp8", "neox", {}),
    (3, 16, "fp8", "gptj", {"strided": True}),
    (12, 24, "bf16", "neox", {"factor": torch.float32}),
]
MORE = [
    (1, 8, "bf16", "gptj", {}),
    (2, 8, "cache", "none", {}),
    (17, 16, "fp8", "neox", {"factor": torch.bfloat16, "context_parallel": True}),
    (33, 8, "bf16", "gptj", {"strided": True}),
    (65, 32, "cache", "gptj", {}),
    (64, 128, "fp8", "neox", {}),
]
TOKENS, HEADS = (1, 2, 7, 16, 31, 64, 100, 256), (8, 16, 48, 128)
# What else may differ from a layer of DeepSeek's and its default plan.
UNUSUAL = [
    *({"nope": nope, "rope": rope, "latent": latent, "block_size": 16}
      for nope, rope, latent in ((192, 64, 512), (100, 32, 192), (64, 64, 256), (128, 0, 512))),
    {"act": torch.float16}, {"act": torch.float32},
    {"plan": Plan(block_m=64, m_tiles=4)},
    {"plan": Plan(block_m=64, block_n=256, m_tiles=2, num_warps=8, rest_last=True)},
    {"plan": Plan(block_m=32, block_n=128, num_warps=8, rope_rows=64, cache_tokens=8)},
]  # fmt: skip
targets = pytest.mark.parametrize("target", ["gfx942", "gfx950"])


def made(target, tokens, heads, kind, rope, more):
    return region.build(region.case(target, tokens, heads, kind, rope, **more))


def named(value):
    return "-".join(map(str, value[:4])) if isinstance(value, tuple) else None


@targets
@pytest.mark.parametrize(
    "shape", [*SOME, *(pytest.param(each, marks=pytest.mark.nightly) for each in MORE)], ids=named
)
def test_default_plans(target, shape):
    """As usual, then with NaN, infinities and overflow, the waves in reverse order."""
    region.check(target, made(target, *shape))
    region.check(target, region.hostile(made(target, *shape)), BACKWARDS)


@targets
def test_all_default_plans_are_here(target):
    """Every plan that the dispatch chooses for AMD, which has no measured ones, is executed."""

    def chosen(tokens, heads):
        return dispatch.choose(tokens, heads, True, Widths(128, 64, 512), described(target))

    every = {chosen(*shape) for shape in itertools.product(range(1, 257), range(8, 129))}
    assert not [row for row in dispatch.measured() if "gfx" in row.arch]
    shapes = [*itertools.product(TOKENS, HEADS), *(each[:2] for each in SOME + MORE)]
    assert every == {chosen(*shape) for shape in shapes}


@targets
@pytest.mark.parametrize("rounding", [-1, 1])
def test_approximate_instructions_may_be_off(target, rounding):
    region.check(target, made(target, 3, 16, "fp8", "gptj", {}), Settings(rounding=rounding))


@targets
def test_the_prologue_loads_what_is_not_preloaded(target):
    region.check(target, made(target, 3, 16, "fp8", "gptj", {}), Settings(preload=False))


@targets
def test_tensors_beyond_two_gibibytes(target):
    """Their addresses do not fit buffer instructions, and Triton takes global ones."""
    call = made(target, 3, 16, "fp8", "gptj", {})
    (near,) = region.check(target, call)
    with mock.patch.object(HIPBackend, "is_within_2gb", staticmethod(lambda tensor: False)):
        (far,) = region.check(target, call)
    for launch, kind in ((near, "buffer_"), (far, "global_")):
        stores = {i.name for i in launch.kernel.program.instructions if "_store_" in i.name}
        assert stores and all(name.startswith(kind) for name in stores), stores


@pytest.mark.nightly
@targets
@pytest.mark.parametrize("kind", ["fp8", "cache", "bf16"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_every_shape(target, tokens, heads, kind):
    # Each rotation with each number of heads and each type, not with each number of tokens.
    turn = TOKENS.index(tokens) + HEADS.index(heads) + len(kind)
    rope = ("neox", "gptj", "none")[turn % 3]
    region.check(target, region.hostile(made(target, tokens, heads, kind, rope, {})), BACKWARDS)


@pytest.mark.nightly
@targets
@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize("tokens", [5, 100])
@pytest.mark.parametrize("unusual", UNUSUAL, ids=lambda each: str(next(iter(each.items()))))
def test_unusual_widths_types_and_plans(target, unusual, tokens, kind):
    more = dict(unusual)
    plan, rope = more.pop("plan", None), "gptj" if more.get("rope", 64) else "none"
    region.check(target, made(target, tokens, 8, kind, rope, more), BACKWARDS, plan=plan)
