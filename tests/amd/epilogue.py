"""The epilogue on the machine, against the formula that the interpreted one is compared with."""

from mla_fusion.attention.triton import epilogue as epilogues
from tests.amd.provider import machine
from tests.attention.epilogue_cases import Case, check_quantized, expected, make
from tests.kernels.compiled import FP8

# Of a step, with splits: none; those of whole rows, in one turn and in two; more, of which the last
# turn has few and many; drafts, of which one is missing; padding, in a sequence's slot and behind.
STEPS = {
    "tokens": {"rows": (1, 1, 1, 1), "splits": (17, 0, 1, 128), "padding": 1},
    "drafts": {
        "rows": (2, 2, 1, 0), "splits": (32, 65, 33, 0), "padding": 2, "outweighed": True,
    },
}  # fmt: skip


def case(shape, step="tokens", **more):
    """A layer of DeepSeek's of which the rank has two heads: their number is not compiled in. That
    of a work item is, and the same for every step.
    """
    given = {"shape": shape, "heads": 2, "values": 128, "latent": 512, "per_work": 16}
    return Case(**{**given, **STEPS[step], **more})


def wrong(inputs, wide, want):
    """How many elements are wrong, by part; empty if none is."""
    counts = int(inputs.plan.epilogue_counts.count_nonzero())
    return want.wrong(wide, inputs) | ({"counts": counts} if counts else {})


def check(target, given, settings=None):
    """Execute an epilogue that does not quantize, compare it, and return its launches."""
    wide, inputs = make(given, lse=True)
    with machine(target, settings) as launches:
        epilogues.launch(inputs, given.shape)
    assert not (found := wrong(inputs, wide, expected(inputs))), found
    return launches


def check_quantization(target, given, quantization, settings=None):
    """One that does not quantize, one that does, and the quantization alone: these two give what
    a quantization of the first one's result does."""
    wide, plain = make(given, lse=True)
    _, fused = make(given, quantization, FP8[target])
    _, separate = make(given, quantization, FP8[target])
    plain.out[-1] = fused.out[-1] = 0  # a group whose maximum is zero
    want = expected(plain)
    with machine(target, settings) as launches:
        epilogues.launch(plain, given.shape)
        epilogues.launch(fused, given.shape)
        product = plain.epilogue.out.contiguous()
        epilogues.quantize(product, separate.epilogue)
    assert not (found := wrong(plain, wide, want)), found
    for got in (fused.epilogue, separate.epilogue):
        check_quantized(product, got, quantization)
    return launches
