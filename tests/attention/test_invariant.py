"""What is launched under a batch-invariant plan is one machine code, whatever a step holds."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from mla_fusion.attention import reference
from mla_fusion.attention import triton as provider
from mla_fusion.attention.cdna import decode as cdna
from mla_fusion.attention.hopper import cards, decode, few_rows, product, warp_specialized
from mla_fusion.attention.plan.buffers import Step
from mla_fusion.attention.plan.epilogue import Epilogue
from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.attention.triton import decode_kernel, reduce_kernel
from tests.attention.decodes import BF16, FN
from tests.attention.gluon_warps import Machine
from tests.attention.sequences import Sequence, bits_of, step_of
from tests.attention.test_specialized_run import Copied, InStep
from tests.attention.without_memory import inputs, meta
from tests.gpus import imitated

KERNELS = [
    ("sm_90", decode, 16, BF16), ("sm_90", few_rows, 16, FN), ("sm_90", few_rows, 20, BF16),
    ("sm_90", warp_specialized, 64, BF16), ("sm_90", warp_specialized, 128, FN),
    ("gfx942", cdna, 16, BF16), ("sm_80", decode_kernel, 64, BF16),
    ("sm_90", product, 16, BF16), ("sm_90", reduce_kernel, 16, BF16),
    ("gfx942", reduce_kernel, 128, BF16),
]  # fmt: skip
CHOSEN_BY_BATCH = KERNELS[-3:]  # without the mode


def constants(target, module, heads, dtype, sequences, **options):
    """Compile-time constants and options of the launch for a step of so many sequences."""
    sizes = {"max_batch": 256, "max_kv_len": 9}
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


def executed(sequences, module, heads, dtype, machine, **options):
    """The bits of each sequence after a kernel for Hopper on the CPU, and the merge in torch."""
    sizes = {"latent": 512, "rope": 64, "page": 64, "longest": 200, "chunks": (64, 128, 64)}
    given = step_of(sequences, dtype, heads, **sizes, kv_granularity=64, **options)
    tokens = len(given["q"])
    out, lse = torch.empty(tokens, heads, 512, dtype=BF16), torch.empty(tokens, heads)
    given = Inputs(**given, out=out, lse=lse)
    machine.launch(module.launch_of(given))
    reference.merge(given, given.plan.partial_output, given.plan.partial_lse)
    return bits_of(sequences, out, lse)


@pytest.mark.parametrize(
    ("module", "heads", "machine", "dtype"),
    [
        (warp_specialized, 40, Machine, BF16), (warp_specialized, 40, Machine, FN),
        (decode, 8, InStep, BF16), (decode, 20, InStep, BF16), (decode, 8, InStep, FN),
        (few_rows, 8, Copied, FN), (few_rows, 20, Copied, BF16),
    ],
)  # fmt: skip
def test_kernels_for_hopper_give_a_row_the_same_bits(module, heads, machine, dtype):
    """Alone, and without its last draft, which is a chunk of its own, among others."""
    own, other = Sequence(1, 2, 129), Sequence(2, 1, 180)

    def bits(sequences, ctas, **options):
        step = executed(sequences, module, heads, dtype, machine(seed=ctas), ctas=ctas, **options)
        return step[sequences.index(next(x for x in sequences if x.seed == 1))]

    alone = bits([own], 8)
    assert torch.equal(bits([other, own], 3), alone)
    assert torch.equal(bits([own.fewer(1), other], 2), alone[:1])
    assert not torch.equal(bits([other, own], 3, batch_invariant=False), alone)
