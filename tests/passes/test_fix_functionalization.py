"""What only pass 5, `MLAFixFunctionalizationPass`, does, and the graphs vLLM's own step fails on.

vLLM's step takes its fused RoPE and cache write out of `auto_functionalized` if the rotated query
goes through copy and slice_scatter, as in its own models, and raises on any other use of it.
"""

import pytest
import torch
from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass

from mla_fusion import ops
from mla_fusion.passes import fix_functionalization
from mla_fusion.passes.fix_functionalization import MLAFixFunctionalizationPass
from mla_fusion.patterns import probe
from mla_fusion.patterns.site import outputs
from tests.passes import edits, graphs
from tests.passes.cuda_ops import define_cuda_ops
from tests.passes.fake_engine import BATCHES, assert_same, run
from tests.passes.graphs import NOPE, Spec, build, find, find_all, printed

aten = torch.ops.aten
FUSED, ATTENTION = (f"{ops.NAMESPACE}::{name}" for name in (ops.FUSED, ops.ATTENTION))
CAT = Spec("cat_fused")


def fix(module):
    result = MLAFixFunctionalizationPass()(module.graph)
    module.graph.lint()
    return list(result.rewritten)


def fix_and_compare(module):
    """Run the pass on a graph of `CAT`: equal results, and nothing left for a second run."""
    before = graphs.copy(module)
    fix(module)
    once = printed(module)
    assert (fix(module), printed(module)) == ([], once)
    for batch in BATCHES.values():
        assert_same(run(before, CAT, batch), run(module, CAT, batch), batch)


@pytest.fixture
def vllm_step():
    """vLLM's own last step, with the CUDA ops that it names and a CPU build lacks."""
    from vllm.config import VllmConfig, set_current_vllm_config

    define_cuda_ops()
    config = VllmConfig()
    with set_current_vllm_config(config):
        yield FixFunctionalizationPass(config)


def _scatter_elsewhere(module, copy):
    """A slice_scatter to another place is no copy back."""
    scatter = find(module, aten.slice_scatter.default)
    scatter.args = (*scatter.args[:3], 0, graphs.ROPE)


def _scatter_into_another_value(module, copy):
    call, scatter = find(module, edits.CAT_FUSED), find(module, aten.slice_scatter.default)
    whole = call.kwargs["q_pe"].args[0]
    scatter.update_arg(0, edits.add(module, call, aten.neg.default, whole))


def _destination(module, copy):
    """copy(rotated, other): of what the op wrote only the type is taken."""
    copy.args = (copy.args[1], edits.add(module, copy, aten.neg.default, copy.args[1]))


def _wider_type(module, copy):
    """The copy rounds what the op wrote to another type, and the scatter takes it back."""
    kept = edits.add(module, copy, aten.to.dtype, copy.args[0], torch.float16)
    copy.args = (kept, copy.args[1])
    copy.meta["val"] = copy.meta["val"].half()


@pytest.mark.parametrize(
    "edit", [_scatter_elsewhere, _scatter_into_another_value, _destination, _wider_type]
)
def test_near_miss_is_no_copy_back(edit, plain_kernels):
    module = build(CAT)
    edit(module, find(module, aten.copy.default))
    fix_and_compare(module)
    assert find_all(module, aten.slice_scatter.default)


def test_missing_metadata_does_not_matter(plain_kernels):
    module = build(CAT)
    for node in module.graph.nodes:
        node.meta.pop("val", None)
    assert len(fix(module)) == 1
    assert_same(run(build(CAT), CAT), run(module, CAT), BATCHES["decode"])


def test_output_read_by_several_getitems(plain_kernels):
    module = build(CAT)
    call = find(module, edits.CAT_FUSED)
    for index in (0, 1, 2):
        twin = edits.add(module, call.next, edits.operator.getitem, call, index)
        edits.read_also(module, twin)
    fix_and_compare(module)


@pytest.mark.parametrize("spec", [CAT, Spec("cat_fused", True, 2, q_lora=True)], ids=str)
def test_regular_chain_as_vllm_does(spec, vllm_step, plain_kernels):
    """On the graph that vLLM's step was written for, both write the same code."""
    theirs, ours = build(spec), build(spec)
    values = find(ours, edits.CAT_FUSED).meta["val"]
    vllm_step(theirs.graph)
    fix(ours)
    assert printed(ours) == printed(theirs)
    assert find(ours, edits.CAT_FUSED).meta["val"] is values[0]
    assert_same(run(build(spec), spec), run(ours, spec), BATCHES["decode"])


def _query_without_users(module):
    """Nothing reads the rotated query: it has no getitem 1."""
    edits.set_argument(edits.attention(module), q=find(module, aten.slice_scatter.default).args[0])
    module.graph.eliminate_dead_code()


def _query_used_directly(module):
    """The rotated query is joined to the rest without copy and slice_scatter."""
    read, scatter = (find(module, edits.CAT_FUSED), 1), find(module, aten.slice_scatter.default)
    rest = edits.add(module, scatter, aten.slice.Tensor, scatter.args[0], 2, 0, NOPE)
    whole = edits.add(module, scatter, aten.cat.default, [rest, *outputs(*read)], -1)
    edits.set_argument(edits.attention(module), q=whole)
    module.graph.eliminate_dead_code()


def _without_copy(module):
    copy = find(module, aten.copy.default)
    copy.replace_all_uses_with(copy.args[1])
    module.graph.erase_node(copy)


def _key_without_users(module):
    call, given = edits.attention(module), find(module, edits.CAT_FUSED).kwargs["k_pe"]
    edits.set_argument(call, k_pe=edits.add(module, call, aten.unsqueeze.default, given, 1))
    module.graph.eliminate_dead_code()


CRASHES = {
    "query without users": (_query_without_users, KeyError, "1"),
    "query used directly": (_query_used_directly, UnboundLocalError, "copy_temp"),
    "slice_scatter without copy": (_without_copy, UnboundLocalError, "copy_temp"),
    "key without users": (_key_without_users, KeyError, "2"),
}


@pytest.mark.parametrize("name", CRASHES)
def test_vllm_raises_and_this_pass_survives(name, vllm_step, plain_kernels):
    edit, error, message = CRASHES[name]
    module = build(CAT)
    edit(module)
    module.graph.lint()
    with pytest.raises(error, match=message):
        vllm_step(graphs.copy(module).graph)
    fix_and_compare(module)
    assert not find_all(module, aten.slice_scatter.default)
    # The attention reads an old value, or may.
    assert len(find_all(module, aten.clone.default)) == (name != "slice_scatter without copy")


@pytest.mark.filterwarnings("error:erase_node")
@pytest.mark.parametrize("read", [True, False])
def test_two_scatters_of_one_slice_are_taken_out_once_each(read):
    module = build(CAT)
    scatter = find(module, aten.slice_scatter.default)
    with module.graph.inserting_after(scatter):
        twin = module.graph.node_copy(scatter)
    if not read:
        scatter.replace_all_uses_with(twin)
    assert len(fix(module)) == 1
    assert not find_all(module, aten.slice_scatter.default)


@pytest.mark.parametrize("place", [[], [2], [2, None], [2, 3], [2, 3, 5], [2, 3, 5, 2]], ids=str)
def test_place_of_a_slice(place):
    graph, normal = torch.fx.Graph(), [*place, *[0, 0, None, 1][len(place) :]]
    x, wanted = graph.placeholder("x"), (normal[0], normal[1] or 0, *normal[2:])
    names = dict(zip(("dim", "start", "end", "step"), place, strict=False))
    for args, kwargs in (((*place,), {}), ((), names)):
        cut = graph.call_function(aten.slice.Tensor, (x, *args), kwargs)
        scatter = graph.call_function(aten.slice_scatter.default, (x, x, *args), kwargs)
        assert {fix_functionalization._place(node) for node in (cut, scatter)} == {wanted}


@pytest.mark.parametrize("kind", ["placeholder", "get_attr"])
def test_memory_of_the_caller_is_not_written(kind):
    module = build(CAT)
    _query_without_users(module)
    q_pe = find(module, edits.CAT_FUSED).kwargs["q_pe"]
    module.register_buffer("given", torch.zeros(1))
    with module.graph.inserting_before(next(iter(module.graph.nodes))):
        target = getattr(module.graph, kind)("given")
    target.meta["val"] = q_pe.meta["val"]
    edits.set_argument(find(module, edits.CAT_FUSED), q_pe=target)
    fix(module)
    assert [copy.args[0] for copy in find_all(module, aten.clone.default)] == [target]


def _base(module):
    """The projection whose memory the op writes into."""
    return probe.strip(find(module, edits.CAT_FUSED).kwargs["q_pe"], probe.VIEWS)


def _shape(node):
    return str(node.meta["val"].shape)


def test_old_value_without_metadata_is_copied_too():
    module = build(CAT)
    edits.also_return(module, _base(module))
    call = find(module, edits.CAT_FUSED)
    del call.kwargs["q_pe"].meta["val"]  # type: ignore[union-attr]
    fix(module)
    [copy] = find_all(module, aten.clone.default)
    assert "val" not in copy.meta


def test_copies_are_made_right_before_their_op():
    """A later op asks whether they read its memory before it."""
    module = build(CAT)
    edits.also_return(module, _base(module))
    fix(module)
    assert find_all(module, aten.clone.default) == [find(module, edits.CAT_FUSED).prev]


@pytest.mark.parametrize("with_vllm", [False, True])
def test_old_value_that_leaves_the_graph_is_the_old_one(with_vllm, vllm_step, plain_kernels):
    """vLLM's step, which follows, makes any call of its op in-place, read later or not."""
    module = build(CAT)
    edits.also_return(module, _base(module))
    before = graphs.copy(module)
    fix(module)
    if with_vllm:
        vllm_step(module.graph)
    module.graph.lint()
    [copy] = find_all(module, aten.clone.default)
    assert _shape(copy) == _shape(copy.args[0])
    for batch in BATCHES.values():
        assert_same(run(before, CAT, batch), run(module, CAT, batch), batch)


def test_a_reader_that_nothing_reads_does_not_count():
    module = build(CAT)
    edits.add(module, module.graph.output_node(), aten.neg.default, _base(module))
    assert len(fix(module)) == 1


def test_an_op_whose_results_nothing_reads_reads_the_old_value(plain_kernels):
    """It writes the cache too, and with the key that it was given."""
    module = build(CAT)
    first = find(module, edits.CAT_FUSED)
    with module.graph.inserting_after(first):
        module.graph.node_copy(first)
    fix_and_compare(module)


def test_an_op_stays_if_its_results_go_with_a_scatter(plain_kernels):
    """It writes the cache, though what reads its query is dead: a scatter of the same base."""
    module = build(CAT)
    first, scatter = find(module, edits.CAT_FUSED), find(module, aten.slice_scatter.default)
    own = {}
    for name in ("q_pe", "k_pe"):
        own[name] = edits.add(module, first, aten.clone.default, first.kwargs[name])
    with module.graph.inserting_after(first):
        second = module.graph.node_copy(first)
    edits.set_argument(second, **own)
    query = edits.add(module, scatter, edits.operator.getitem, second, 1)
    edits.add(module, scatter, scatter.target, scatter.args[0], query, *scatter.args[2:])
    fix_and_compare(module)
    assert len(find_all(module, edits.CAT_FUSED)) == 2


def test_memory_that_two_ops_write_one_after_the_other(plain_kernels):
    """The second op rotates what the first one rotated."""
    module = build(CAT)
    first = find(module, edits.CAT_FUSED)
    reads = [read for index in range(3) for read in outputs(first, index)]
    users = [list(read.users) for read in reads]
    with module.graph.inserting_after(max(reads)):
        second = module.graph.node_copy(first)
    edits.set_argument(second, q_pe=reads[1], k_pe=reads[2])
    for index in (2, 1, 0):
        read = edits.add(module, second.next, edits.operator.getitem, second, index)
        for reader in users[index]:
            reader.replace_input_with(reads[index], read)
    module.graph.lint()
    fix_and_compare(module)
