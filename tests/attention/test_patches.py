"""Patches of benchmarks/patches/: they apply, compile for Hopper, and compute the same on a CPU."""

import pytest

pytest.importorskip("triton")

from patched import UNPATCHED, Copy, copy_package, variants

from tests.attention.decodes import BF16, FN
from tests.attention.specialized import check, inputs
from tests.kernels import products
from tests.kernels.compiled import LDS, compile_kernel

TYPES = {"bf16": BF16, "fp8": FN}
ALL = [(kind, variant) for kind in TYPES for variant in variants(kind)]
PARTS = [set(variant.split("+")) for _, variant in ALL]
# Heads, query rows, KV tokens, and the plan: items that are pieces and whole sequences, more tiles
# than buffers, rows that see nothing of a piece, and fewer rows than a program has.
CASES = [
    (64, [1, 1, 1], [650, 64, 90], {"workers": 2, "kv_granularity": 16}),
    (16, [4, 3], [200, 1], {"workers": 3}),
    (40, [1], [100], {"workers": 2}),
]


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """Each variant once."""
    made, folder = {}, tmp_path_factory.mktemp("patched")

    def copy(variant):
        if variant not in made:
            made[variant] = Copy(copy_package(variant, folder))
        return made[variant]

    return copy


@pytest.mark.parametrize(("kind", "variant"), ALL)
def test_a_patch_changes_the_kernel_and_no_result(copies, kind, variant):
    kernels = copies(variant).kernels
    assert kernels.decode_kernel.cache_key != copies(UNPATCHED).kernels.decode_kernel.cache_key
    for case in CASES:
        check(TYPES[kind], *case, kernels=kernels)


@pytest.mark.parametrize(
    ("kind", "variant"),
    [
        # Patches of a stack are compiled with it, and stacks with the longer ones they are part of.
        pytest.param(*each, marks=pytest.mark.nightly)
        if any(mine < more for more in PARTS)
        else each
        for each, mine in zip(ALL, PARTS, strict=True)
    ],
)
def test_a_patch_compiles(copies, kind, variant):
    kernels = copies(variant).kernels
    args, options = kernels.arguments(inputs(dtype=TYPES[kind]))
    compiled = compile_kernel("sm_90", kernels.decode_kernel, args, options)
    assert compiled.metadata.shared <= LDS["sm_90"]
    code = products.disassemble(compiled.asm["cubin"])
    assert products.touched_early(code) == []
    if kind == "fp8":
        assert products.given_back_early(code) == []
