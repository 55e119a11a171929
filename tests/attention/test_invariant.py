"""What is launched under a batch-invariant plan is one machine code, whatever a step holds."""

import pytest

pytest.importorskip("triton")

from mla_fusion.attention.cdna import decode as cdna
from mla_fusion.attention.hopper import decode, warp_specialized
from mla_fusion.attention.plan.buffers import Step
from mla_fusion.attention.triton import decode_kernel, reduce_kernel
from tests.attention.decodes import BF16, FN
from tests.attention.without_memory import inputs
from tests.gpus import imitated

KERNELS = [
    ("sm_90", decode, 16, BF16), ("sm_90", decode, 16, FN), ("sm_90", decode, 20, FN),
    ("sm_90", warp_specialized, 64, BF16), ("sm_90", warp_specialized, 128, FN),
    ("gfx942", cdna, 16, BF16), ("sm_80", decode_kernel, 64, BF16),
    ("sm_90", reduce_kernel, 16, BF16), ("gfx942", reduce_kernel, 128, BF16),
]  # fmt: skip
CHOSEN_BY_BATCH = KERNELS[1:2] + KERNELS[-2:]  # without the mode


def constants(target, module, heads, dtype, sequences, **options):
    """Compile-time constants and options of the launch for a step of so many sequences."""
    sizes = {"max_batch": 256, "max_kv_len": 9, "half_below": 5}
    given = inputs(heads, dtype, tokens=sequences, **sizes | options)
    given.plan.step = Step(sequences, sequences, 1)
    with imitated(target):
        launch = module.launch_of(given)
    named = {name: value for name, value in launch.arguments.items() if name.isupper()}
    return named | launch.options


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_kernel_for_every_batch(kernel):
    for mode in (True, False):
        found = [constants(*kernel, n, batch_invariant=mode) for n in (1, 4, 64, 256)]
        is_one = all(each == found[0] for each in found)
        assert is_one == (mode or kernel not in CHOSEN_BY_BATCH), found
