"""What follows a decode on the machine, against the formula that the interpreted one is compared
with."""

from mla_fusion.attention import triton as provider
from tests.amd.provider import compared, machine
from tests.attention.epilogue_cases import Case, check_quantized, expected, make
from tests.kernels.compiled import FP8

# Of a step, with splits: none; one turn of the reduction and two; more, of which the last turn has
# few and many; drafts, of which one is missing; padding behind.
STEPS = {
    "tokens": {"rows": (1, 1, 1, 1), "splits": (17, 0, 1, 128), "padding": 1},
    "drafts": {
        "rows": (2, 2, 1, 0), "splits": (32, 65, 33, 0), "padding": 2, "outweighed": True,
    },
}  # fmt: skip


def check(target, step="tokens", quantization="none", settings=None, **more):
    """Execute the reduction, and the quantization of a product; its launches."""
    # A layer of DeepSeek's of which the rank has two heads, whose number is not compiled in.
    layer = {"heads": 2, "values": 128, "latent": 512, "per_work": 16}
    case = Case(**STEPS[step] | layer | more)
    wide, plain = make(case, lse=True)
    want = expected(plain)
    with machine(target, settings) as launches:
        provider.merge(plain)
        provider.multiply(plain)
        if quantization != "none":
            _, quantized = make(case, quantization, FP8[target])
            quantized.out.copy_(plain.out)
            provider.multiply(quantized)
            check_quantized(plain.epilogue.out.contiguous(), quantized.epilogue, quantization)
    compared(want.wrong(wide, plain), wide, plain.lse)
    return launches
