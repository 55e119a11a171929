"""What is launched under a batch-invariant plan is one machine code, whatever a step holds."""

import dataclasses

import pytest

pytest.importorskip("triton")

from mla_fusion.attention import triton as provider
from mla_fusion.attention.cdna import decode as cdna
from mla_fusion.attention.hopper import cards, decode, product, warp_specialized
from mla_fusion.attention.plan.buffers import Step
from mla_fusion.attention.plan.epilogue import Epilogue
from mla_fusion.attention.triton import decode_kernel, reduce_kernel
from tests.attention.decodes import BF16, FN
from tests.attention.without_memory import inputs, meta
from tests.gpus import imitated

KERNELS = [
    ("sm_90", decode, 16, BF16), ("sm_90", decode, 16, FN), ("sm_90", decode, 20, FN),
    ("sm_90", warp_specialized, 64, BF16), ("sm_90", warp_specialized, 128, FN),
    ("gfx942", cdna, 16, BF16), ("sm_80", decode_kernel, 64, BF16),
    ("sm_90", product, 16, BF16), ("sm_90", reduce_kernel, 16, BF16),
    ("gfx942", reduce_kernel, 128, BF16),
]  # fmt: skip
CHOSEN_BY_BATCH = KERNELS[1:2] + KERNELS[-3:]  # without the mode


def constants(target, module, heads, dtype, sequences, **options):
    """Compile-time constants and options of the launch for a step of so many sequences."""
    sizes = {"max_batch": 256, "max_kv_len": 9, "half_below": 5}
    given = inputs(heads, dtype, tokens=sequences, **sizes | options)
    given.plan.step = Step(sequences, sequences, 1)
    epilogue = Epilogue(meta(heads, 512, 128), meta(sequences, heads * 128))
    with imitated(target):
        launch = module.launch_of(dataclasses.replace(given, epilogue=epilogue))
    named = {name: value for name, value in launch.arguments.items() if name.isupper()}
    return named | launch.options


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_kernel_for_every_batch(kernel):
    for mode in (True, False):
        found = [constants(*kernel, n, batch_invariant=mode) for n in (1, 4, 64, 256)]
        is_one = all(each == found[0] for each in found)
        assert is_one == (mode or kernel not in CHOSEN_BY_BATCH), found


def test_an_epilogue_without_such_a_kernel_is_refused():
    """Before the decode is launched; Hopper's kernel takes steps that it leaves to torch else."""
    given = inputs(128, tokens=256, batch_invariant=True, max_kv_len=9)
    epilogue = Epilogue(meta(128, 512, 128), meta(256, 128 * 128))
    given = dataclasses.replace(given, epilogue=epilogue)
    assert cards.product(given) is None
    with imitated("sm_80"), pytest.raises(ValueError, match="leave out the epilogue"):
        provider.persistent_mla_decode(given)
