"""The kernels of products and norms compiled (not run) for Hopper: every shipped plan."""

import itertools

import pytest
import torch

pytest.importorskip("triton")

from mla_fusion.ops import Product
from mla_fusion.projections import kernel, measured
from mla_fusion.projections.plans import Plan, tile_of
from mla_fusion.projections.triton import launch_arguments, normalize
from tests.attention.without_memory import meta
from tests.gpus import imitated
from tests.kernels.compiled import compile_report, is_one_variant
from tests.nightly import daily

SHIPPED = [
    (shape, row)
    for shapes in measured.shipped().values()
    for shape, rows in shapes.items()
    for row in rows
]
# One launch of each kernel, one of fp32 weights, and those that need most registers.
KEPT = [
    Product(*each)
    for each in ((2048, (3072, 576)), (5120, (2048,)), (2048, (64,), 32), (7168, (2112,), 8))
]
FEW = [each for each in SHIPPED if each[1].tokens in (1, 16) and each[0] in KEPT]


def arguments(plan, shape, tokens, row=None):
    """A launch on the meta device; `row` is the stride of x."""
    k = shape.k
    dtype = {32: torch.float32, 16: torch.bfloat16, 8: torch.float8_e4m3fn}[shape.bits]
    x, weights = meta(tokens, row or k)[:, :k], [meta(n, k, dtype=dtype) for n in shape.sizes]
    scales = meta(*weights[0].shape, dtype=torch.float32) if shape.bits == 8 else None
    with imitated("sm_90"):
        outputs = [meta(tokens, n, dtype=x.dtype if scales is not None else dtype)
                   for n in shape.sizes]  # fmt: skip
        return launch_arguments(plan, x, weights, outputs, scales)


@pytest.mark.parametrize("case", daily(SHIPPED, *FEW), ids=str)
def test_weights_are_under_way_before_the_wait(case):
    shape, row = case
    given = arguments(row.plan, shape, row.tokens)
    found = compile_report("sm_90", getattr(kernel, row.plan.kernel), (), given)
    wait = found.order.index("ACQBULK")
    # Of 16 bytes, of a thread.
    loads = row.plan.registers(shape.k, row.plan.block_n) // 4 * shape.bits // 16
    ahead = given.get("AHEAD", given["CHUNKS"]) / given["CHUNKS"]
    assert found.order[:wait].count("LDG.128") >= int(ahead * loads), found
    assert not {"STG", "PREEXIT"} & {*found.order[:wait]} and "PREEXIT" in found.order, found
    assert found.matrix == (() if row.plan.kernel == "vector" else ("HMMA",)), found
    # x is, behind it, not in turn with the products: in block fp8 two chunks of four loads each.
    piece = {"vector": kernel.PIECE.value, "matrix": 0, "block": 8}[row.plan.kernel]
    of_x = found.order[wait : found.before_products].count("LDG.128")
    assert of_x >= min(given["CHUNKS"] << 2 * (shape.bits == 8), piece), found
    assert found.spills == 0 or row.tokens == 16, found
    # Of the sum of the warps alone: no operand takes a trip through it.
    assert found.shared <= 4 * row.plan.num_warps * row.plan.block_n * tile_of(row.tokens), found


@pytest.mark.parametrize("tokens", [(2, 7, 8), (9, 15, 16)])
def test_neither_tokens_nor_the_row_of_x_is_a_variant(tokens):
    shape = Product(2048, (1024,))
    given = [arguments(Plan("matrix", 16, 4), shape, n, row)
             for n, row in itertools.product(tokens, (2048, 2112, 3072 + 8))]  # fmt: skip
    assert is_one_variant("sm_90", kernel.matrix, [((), each) for each in given])


@pytest.fixture
def norm(monkeypatch):
    """norm(tokens, widths, residual): the arguments of a launch, whose kernel it returns first."""
    launched, original = [], kernel.rms_norm

    class Launcher:
        def __getitem__(self, grid):
            return lambda *args, **options: launched.append((args, options))

    def arguments(tokens, widths, adds, row=4096):
        monkeypatch.setattr(kernel, "rms_norm", Launcher())
        xs = [meta(tokens, row)[:, :k] for k in widths]
        with imitated("sm_90"):
            weights = [meta(k) for k in widths]
            normalize(xs, weights, [1e-6] * len(xs), xs * adds)
        return original, *launched.pop()

    return arguments


@pytest.mark.parametrize("widths, adds", [((2048,), 1), ((2048,), 2), ((512,), 0), ((768, 512), 0)])
def test_a_norm_writes_and_signals_behind_its_wait(widths, adds, norm):
    code, *given = norm(1, widths, adds)
    found = compile_report("sm_90", code, *given)
    wait = found.order.index("ACQBULK")
    assert {*found.order[:wait]} == {"LDG.128"} and found.order[wait + 1] == "PREEXIT", found
    assert found.order.count("ACQBULK") == found.order.count("PREEXIT") <= len(widths), found
    assert {"LDG.128", "STG.128"} <= {*found.order[wait:]} and found.spills == 0, found


def test_tokens_and_rows_are_no_variant_of_a_norm(norm):
    given = [norm(tokens, (768, 512), 0, row)[1:] for tokens, row in
             itertools.product((1, 2, 16), (2048, 2112))]  # fmt: skip
    assert is_one_variant("sm_90", norm(1, (8,), 0)[0], given)
