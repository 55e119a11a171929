"""Readers of memory that an op writes; aliases by ops of aten are in `programs.ALIASES`."""

import pytest
import torch

from mla_fusion.patterns.site import functionalized_op
from tests.passes import declare, edits, graphs, programs
from tests.passes.fake_engine import BATCHES, assert_same, fuse, run
from tests.passes.graphs import Spec, build, find, find_all
from tests.passes.test_fix_functionalization import CAT, FUSED, aten, fix, fix_and_compare

FUSED_LAYER = Spec("native")
declare.op("mla_fusion_tests", "forgets(Tensor x) -> Tensor", torch.detach, torch.detach)
declare.op("mla_fusion_tests", "stores(Tensor x) -> Tensor", torch.clone, torch.empty_like)


def _products(x, a, b):
    return x @ a, x @ b


declare.op(
    "mla_fusion_tests", "products(Tensor x, Tensor a, Tensor b) -> (Tensor, Tensor)",
    _products, _products,
)  # fmt: skip


def projection(module):
    """Of the query."""
    return find(module, aten.mm.default, 1)


def in_place(module):
    """After all passes, whether the fused op writes to no copy."""
    assert fuse(module, FUSED_LAYER).fused == 1
    before = len(find_all(module, aten.clone.default))
    fix(module)
    assert not functionalized_op(find(module, FUSED))
    return len(find_all(module, aten.clone.default)) == before


def assert_reads_the_old_value(module):
    before = graphs.copy(module)
    in_place(module)
    for batch in (BATCHES["decode"], BATCHES["mixed"]):
        wanted, found = (run(each, FUSED_LAYER, batch) for each in (before, module))
        assert_same(wanted, found, batch, tolerance=1e-5)


@pytest.mark.parametrize("kind, name", [("call_method", "t"), ("call_module", "same")])
def test_a_method_or_a_module_that_shows_its_input(kind, name, plain_kernels):
    module = build(FUSED_LAYER)
    module.add_module("same", torch.nn.Identity())
    with module.graph.inserting_after(source := projection(module)):
        edits.also_return(module, getattr(module.graph, kind)(name, (source,)))
    assert_reads_the_old_value(module)


def test_an_op_that_says_nothing_but_whose_value_has_the_storage(plain_kernels):
    """Its schema names no alias, as an op of somebody else's may forget to."""
    module = build(FUSED_LAYER)
    forgets = torch.ops.mla_fusion_tests.forgets.default
    edits.also_return(module, programs.behind(module, projection(module), (forgets,)))
    assert_reads_the_old_value(module)


@pytest.mark.parametrize(
    "calls",
    [
        *([(target,)] for target in (aten.clone.default, aten.neg.default, aten.sum.default)),
        [(aten.unbind.int, 1), (edits.operator.getitem, 1), (aten.neg.default,)],
    ],
)
def test_a_value_of_its_own_or_an_alias_that_is_stored_before_costs_no_copy(calls):
    module = build(FUSED_LAYER)
    stores = (torch.ops.mla_fusion_tests.stores.default,)
    edits.also_return(module, programs.behind(module, projection(module), *calls, stores))
    assert in_place(module)


def test_one_of_two_results_of_an_op_costs_no_copy():
    module = build(FUSED_LAYER)
    made = [find(module, aten.mm.default, index) for index in (0, 1)]
    (x, a), (_, b) = (product.args for product in made)
    before = next(iter(made[0].users))
    both = edits.add(module, before, torch.ops.mla_fusion_tests.products.default, x, a, b)
    for index, product in enumerate(made):
        product.replace_all_uses_with(
            edits.add(module, before, edits.operator.getitem, both, index)
        )
    assert in_place(module)


def test_an_op_that_is_given_what_it_writes_to_as_another_argument(plain_kernels):
    """It reads the latents of a row, functionalized, as they were before it rotated the key."""
    module = build(CAT)
    call = find(module, edits.CAT_FUSED)
    whole = find(module, aten.mm.default)
    latents = edits.add(module, call, aten.slice.Tensor, whole, 1, 8, 24)
    edits.set_argument(call, kv_c=latents)
    edits.set_argument(edits.attention(module), kv_c_normed=latents)
    fix_and_compare(module)
