"""Pass 5 writes over no memory that is read later, however the reader got hold of it."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from mla_fusion import ops
from mla_fusion.passes.fix_functionalization import MLAFixFunctionalizationPass
from mla_fusion.patterns.site import functionalized_op
from tests.passes import edits, graphs
from tests.passes.fake_engine import BATCHES, assert_same, fuse, run
from tests.passes.graphs import NOPE, Spec, build, find, find_all

aten, prims = torch.ops.aten, torch.ops.prims
FUSED = f"{ops.NAMESPACE}::{ops.FUSED}"


def first(pair):
    """What `_tuple` returns, taken apart by a Python function: nothing is known of it."""
    return pair[0]


def _tuple(x):
    return (x, 1)


def columns(x):
    return x[..., :2]


# name -> calls, one after the other, whose last one shows memory of a tensor [T, n]
ALIASES: dict[str, list[tuple[Any, ...]]] = {
    "view.dtype": [(aten.view.dtype, torch.int32)],
    "as_strided": [(aten.as_strided.default, [2, 2], [1, 1])],
    "detach": [(aten.detach.default,)],
    "alias": [(aten.alias.default,)],
    "view_of": [(prims.view_of.default,)],
    "unfold": [(aten.unfold.default, 1, 2, 2)],
    "diagonal": [(aten.diagonal.default,)],
    "squeeze": [(aten.unsqueeze.default, 0), (aten.squeeze.default,)],
    "unbind": [(aten.unbind.int, 1), (operator.getitem, 1)],
    "split": [(aten.split.Tensor, 4, 1), (operator.getitem, 1)],
    "hsplit": [(aten.hsplit.int, 2), (operator.getitem, 1)],
    "chunk": [(aten.chunk.default, 2, 1), (operator.getitem, 1)],
    "tensor_split": [(aten.tensor_split.sections, 2, 1), (operator.getitem, 1)],
    "narrow": [(aten.narrow.default, 1, 2, 3)],
    "t": [(aten.t.default,)],
    "swapaxes": [(aten.swapaxes.default, 0, 1)],
    "movedim": [(aten.movedim.int, 0, 1)],
    "mT": [(aten.mT.default,)],
    "unflatten": [(aten.unflatten.int, 1, [-1, 2])],
    "flatten": [(aten.flatten.using_ints, 0, 1)],
    "view_as": [(aten.view_as.default, "itself")],
    "expand_as": [(aten.expand_as.default, "itself")],
    "contiguous": [(aten.contiguous.default,)],
    "to": [(aten.to.dtype, torch.float32)],
    "ravel": [(aten.ravel.default,)],
    "select": [(aten.select.int, 1, 1)],
    "slice of unbind": [
        (aten.unbind.int, 1), (operator.getitem, 1), (aten.slice.Tensor, 0, 0, 1)
    ],
    "a Python function": [(columns,)],
    "Python functions": [(_tuple,), (first,)],
    "a view by a Python function of a view": [(aten.unbind.int, 1), (first,), (columns,)],
}  # fmt: skip
_LIBRARY = torch.library.Library("mla_fusion_tests", "FRAGMENT")
_LIBRARY.define("forgets(Tensor x) -> Tensor")
_LIBRARY.impl("forgets", lambda x: x.detach(), "CompositeExplicitAutograd")
FUSED_LAYER, CAT = Spec("native"), Spec("cat_fused")


def columns_of(x):
    """[T, n], without a copy."""
    return [(aten.squeeze.dim, 1)] if x.meta["val"].dim() == 3 else []


def alias(module, source, calls, metadata=True):
    """A node behind `source` that shows its memory."""
    before, node, made = source.next, source, []
    for target, *args in [*columns_of(source), *calls]:
        args = [node if arg == "itself" else arg for arg in args]
        node = edits.add(module, before, target, node, *args)
        made.append(node)
    for each in made if not metadata else ():
        del each.meta["val"]
    return node


def projection(module):
    """Of the query."""
    return find(module, aten.mm.default, 1)


def key(module):
    """[T, R], before its rotation."""
    split = next(n for n in find_all(module, aten.split_with_sizes.default) if n.args[1] == [16, 8])
    return next(user for user in split.users if user.args[1] == 1)


def part(module):
    """[T, R] of an unflattened query."""
    query = edits.add(
        module, projection(module).next, aten.view.default, projection(module), [-1, 2, 20]
    )
    head = edits.add(module, query.next, aten.select.int, query, 1, 1)
    return edits.add(module, head.next, aten.slice.Tensor, head, 1, NOPE, NOPE + 8)


SOURCES: dict[str, Callable[[Any], fx.Node]] = {
    "projection": projection,
    "key": key,
    "part of the query": part,
}


def in_place(module, spec):
    """After all passes, and whether an op of this library writes in place."""
    if spec is FUSED_LAYER:
        assert fuse(module, spec).fused == 1
    MLAFixFunctionalizationPass(None)(module.graph)
    module.graph.lint()
    return not functionalized_op(find(module, FUSED if spec is FUSED_LAYER else edits.CAT_FUSED))


def assert_reads_the_old_value(module, spec):
    before = graphs.copy(module)
    in_place(module, spec)
    for batch in (BATCHES["decode"], BATCHES["mixed"]):
        assert_same(run(before, spec, batch), run(module, spec, batch), batch, tolerance=1e-5)


HOW = [(source, FUSED_LAYER, True) for source in SOURCES]
HOW += [("projection", FUSED_LAYER, False), ("part of the query", CAT, True)]


@pytest.mark.parametrize("source, spec, metadata", HOW)
@pytest.mark.parametrize("name", ALIASES)
def test_an_alias_that_is_read_later(name, source, spec, metadata, plain_kernels):
    module = build(spec)
    read = alias(module, SOURCES[source](module), ALIASES[name], metadata)
    edits.also_return(module, read)
    assert_reads_the_old_value(module, spec)


def test_a_method(plain_kernels):
    module = build(FUSED_LAYER)
    with module.graph.inserting_after(source := projection(module)):
        edits.also_return(module, module.graph.call_method("t", (source,)))
    assert_reads_the_old_value(module, FUSED_LAYER)


def test_a_module_that_returns_its_input(plain_kernels):
    module = build(FUSED_LAYER)
    module.add_module("same", torch.nn.Identity())
    source = projection(module)
    with module.graph.inserting_after(source):
        edits.also_return(module, module.graph.call_module("same", (source,)))
    assert_reads_the_old_value(module, FUSED_LAYER)


def test_an_op_that_says_nothing_but_whose_value_has_the_storage(plain_kernels):
    """Its schema names no alias, as an op of somebody else's may forget to."""
    module = build(FUSED_LAYER)
    read = alias(module, projection(module), [(torch.ops.mla_fusion_tests.forgets.default,)])
    edits.also_return(module, read)
    assert_reads_the_old_value(module, FUSED_LAYER)


@pytest.mark.parametrize("target", [aten.clone.default, aten.neg.default, aten.sum.default])
def test_a_value_of_its_own_costs_no_copy(target):
    module = build(FUSED_LAYER)
    edits.also_return(module, alias(module, projection(module), [(target,)]))
    assert in_place(module, FUSED_LAYER)


def test_an_alias_that_is_read_before_costs_no_copy():
    module = build(FUSED_LAYER)
    read = alias(module, projection(module), ALIASES["unbind"])
    edits.also_return(module, edits.add(module, read.next, aten.neg.default, read))
    assert in_place(module, FUSED_LAYER)


def test_an_op_that_is_given_what_it_writes_to_as_another_argument(plain_kernels):
    """It reads the latents of a row, functionalized, as they were before it rotated the key."""
    module = build(CAT)
    call = find(module, edits.CAT_FUSED)
    whole = find(module, aten.mm.default)
    latents = edits.add(module, call, aten.slice.Tensor, whole, 1, 8, 24)
    edits.set_argument(call, kv_c=latents)
    edits.set_argument(edits.attention(module), kv_c_normed=latents)
    assert_reads_the_old_value(module, CAT)
