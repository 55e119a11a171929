"""The building blocks of the passes on graphs of a few nodes."""

import operator

import pytest
import torch
from torch import fx

from mla_fusion.passes import rewrite

aten = torch.ops.aten


def chain(*targets, result=0):
    """x -> targets, one after the other; the graph returns the value after `result` of them."""
    graph = fx.Graph()
    values = [graph.placeholder("x")]
    for target in targets:
        values.append(graph.call_function(target, (values[-1],)))
    graph.output(values[result])
    return graph, values


def test_new_value_keeps_strides_and_type():
    value = torch.zeros(4, 6, dtype=torch.bfloat16).t()
    new = rewrite.fake_like(value)
    assert (new.shape, new.stride(), new.dtype) == (value.shape, value.stride(), value.dtype)


def test_snapshot_goes_back():
    graph, (_, a, b) = chain(aten.neg.default, aten.abs.default, result=2)
    before, arguments = list(graph.nodes), [n.args for n in graph.nodes]
    snapshot = rewrite.Snapshot(graph)
    with graph.inserting_before(b):
        new = graph.call_function(aten.clone.default, (a,))
        newer = graph.call_function(aten.clone.default, (new,))
    b.args = (newer,)
    snapshot.restore()
    assert (list(graph.nodes), [n.args for n in graph.nodes]) == (before, arguments)
    graph.lint()


def aside(graph, target, source):
    """One more call in front of the output, which nothing reads."""
    with graph.inserting_before(graph.output_node()):
        return graph.call_function(target, (source,))


def dropped(graph, *replaced):
    """What goes with `replaced`."""
    before = list(graph.nodes)
    rewrite.drop_dead(graph, replaced)
    graph.lint()
    return [node for node in before if node not in graph.nodes]


@pytest.mark.parametrize("length", [1, 3])
def test_what_nothing_reads_goes_with_what_only_it_read(length):
    graph, values = chain(*[aten.neg.default] * (length + 1), result=1)
    twin = aside(graph, aten.alias.default, values[1])
    assert dropped(graph) == [*values[2:], twin]


def test_what_something_reads_stays():
    graph, (x, a, view, _) = chain(aten.abs.default, aten.alias.default, aten.neg.default, result=3)
    assert not dropped(graph, a, view, x, graph.output_node())


@pytest.mark.parametrize("reader, stays", [(aten.abs.default, False), (operator.neg, True)])
def test_a_reader_that_may_do_more_than_compute_keeps_its_source(reader, stays):
    """A function that is no op of torch, though nothing reads its result, unless it is replaced."""
    for replaced in (False, True):
        graph, (_, a, read) = chain(aten.alias.default, reader)
        kept = stays and not replaced
        assert dropped(graph, *[read] * replaced) == ([] if kept else [a, read])


def test_an_op_that_writes_stays_and_those_around_it_go():
    graph, (x, a) = chain(aten.neg.default)
    writes = aside(graph, aten.abs_.default, x)
    assert dropped(graph, a, writes, x) == [a]
