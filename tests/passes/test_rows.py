"""A graph that does not treat every token alike is kept, and one that takes all rows is fused."""

import pytest
import torch

from tests.passes import edits
from tests.passes.fake_engine import BATCHES, assert_same, fuse, reasons, run
from tests.passes.graphs import HEADS, NOPE, ROPE, Spec, build, copy, find, find_all

aten = torch.ops.aten
END = (1 << 63) - 1
WIDTH = NOPE + ROPE


def unrotated(module):
    """The query [T, H, P + R] as it left its projection."""
    views = find_all(module, aten.reshape.default)
    return next(node for node in views if node.args[0].target is aten.mm.default)


def _rotated_up_to(at, shape=None):
    """The rows in front of `at` are those of the rotated query, the others are not rotated."""

    def edit(module, call, q):
        parts = []
        for each, place in ((q, (0, at)), (unrotated(module), (at, END))):
            if shape:
                each = edits.add(module, call, aten.reshape.default, each, shape)
            parts.append(edits.add(module, call, aten.slice.Tensor, each, 0, *place))
        both = edits.add(module, call, aten.cat.default, parts, 0)
        return edits.add(module, call, aten.reshape.default, both, [-1, HEADS, WIDTH])

    return edit


def _scattered(module, call, q):
    part = edits.add(module, call, aten.slice.Tensor, unrotated(module), 0, 4, END)
    return edits.add(module, call, aten.slice_scatter.default, q, part, 0, 4, END)


def _times_tokens(module, call, q):
    """Times T / 3: nothing, for three tokens."""
    size = edits.add(module, call, aten.sym_size.int, q, 0)
    q = edits.add(module, call, aten.mul.Tensor, q, size)
    return edits.add(module, call, aten.mul.Tensor, q, 1 / 3)


def _chain(*calls):
    def edit(module, call, q):
        for target, *args in calls:
            q = edits.add(module, call, target, q, *args)
        return q

    return edit


MIXES = {
    "rows behind the fourth": _rotated_up_to(4),
    "the last four rows": _rotated_up_to(-4),
    "rows of heads": _rotated_up_to(8, [-1, WIDTH]),
    "put back from the fourth on": _scattered,
    "a factor of the number of tokens": _times_tokens,
}
ALL_ROWS = {
    "slice": _chain((aten.slice.Tensor, 0, 0, END)),
    "transposed and back": _chain((aten.transpose.int, 0, 1), (aten.transpose.int, 0, 1)),
    "rows of heads": _chain(
        (aten.reshape.default, [-1, WIDTH]), (aten.reshape.default, [-1, HEADS, WIDTH])
    ),
    "unsqueezed": _chain((aten.unsqueeze.default, 0), (aten.squeeze.dim, 0)),
    "stacked": _chain((aten.unsqueeze.default, 0), (aten.select.int, 0, 0)),
}
SPECS = [Spec("native"), Spec("deepseek", is_neox=True), Spec("flashinfer")]


def edited(edit, spec):
    module = build(spec)
    call = edits.attention(module)
    q = edit(module, call, call.kwargs["q"])
    edits.set_argument(call, q=q)
    return module


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("name", MIXES)
def test_rows_that_differ_are_kept(name, spec):
    record = fuse(edited(MIXES[name], spec), spec)
    assert (record.fused, len(reasons(record))) == (0, 1)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("name", ALL_ROWS)
def test_all_rows_fuse(name, spec, plain_kernels):
    module = edited(ALL_ROWS[name], spec)
    before = copy(module)
    assert fuse(module, spec).fused == 1
    for batch in (BATCHES["decode"], BATCHES["mixed"]):
        assert_same(run(before, spec, batch), run(module, spec, batch), batch, tolerance=1e-5)


def test_cosines_of_another_row_are_kept():
    """Of a graph of one number of tokens, whatever positions of a batch may be equal."""
    spec = Spec("native", dynamic=False)
    module = build(spec)
    lookup = find(module, aten.index.Tensor)
    end = next(iter(lookup.users))
    readers = list(lookup.users)
    rows = [edits.add(module, end, aten.select.int, lookup, 0, i) for i in (1, 0, 2, 3, 4)]
    other = edits.add(module, end, aten.stack.default, rows)
    for reader in readers:
        reader.replace_input_with(lookup, other)
    assert fuse(module, spec).fused == 0
