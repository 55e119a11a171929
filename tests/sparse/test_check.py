"""`benchmarks/check_sparse.py` on a CPU: its cases, with the kernels replaced by the reference."""

import functools
import itertools

import check_sparse
import checks
import pytest
import sparse_cases
import torch

from mla_fusion.attention import buffers, reference
from mla_fusion.attention import triton as provider
from mla_fusion.attention.sparse import sparse_scratch
from mla_fusion.attention.triton import Scope
from mla_fusion.kernels import triton as region


def launch(given, sparse):
    """The kernels, by the reference, in fp32 and without rounding of keys."""
    plan, tokens = given.plan, len(given.q)
    end = plan.kv_indptr[1 : tokens + 1] - plan.kv_indptr[:tokens]
    scopes = [Scope(sparse.extra.kv_cache, sparse.extra.table, given.layout)]
    lengths = [end.long()]
    if sparse.first:
        scopes = [Scope(given.kv_cache, given.block_table, given.layout), *scopes]
        lengths = [sparse.lens[:tokens].long(), end.long() - sparse.first]
    out, lse = reference.sparse_mla_decode(
        given.q, scopes, lengths, latent=512, softmax_scale=given.softmax_scale,
        kv_dtype=plan.settings.kv_dtype, sink=sparse.sink, q_scale=given.q_scale,
        kv_scale=given.kv_scale,
    )  # fmt: skip
    given.out.copy_(out)
    if given.lse is not None:
        given.lse.copy_(lse)


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    """Small cases on a CPU."""
    for module in (check_sparse, sparse_cases):
        monkeypatch.setattr(module, "DEVICE", "cpu")
        monkeypatch.setattr(module, "TOKENS", 4)
        monkeypatch.setattr(module, "USABLE", 192)
        monkeypatch.setattr(module, "ENTRIES", 256)
    monkeypatch.setattr(sparse_cases, "COUNTS", (1, 3, 4))
    monkeypatch.setattr(sparse_cases, "WIDTHS", {1: [(64,), (70,)], 2: [(100, 70)]})
    monkeypatch.setattr(provider, "require", lambda: None)
    monkeypatch.setattr(region, "require", lambda: None)
    monkeypatch.setattr(buffers, "multiprocessors", lambda device: 4)
    monkeypatch.setattr(provider, "launch", launch)
    yield
    sparse_scratch.cache_clear()


@pytest.mark.parametrize("shape", [(8, 1), (16, 2)], ids=str)
@pytest.mark.parametrize("kind", sparse_cases.KINDS)
def test_cases_agree_with_the_reference_and_plants_are_found(kind, shape):
    variant = sparse_cases.Variant(kind, *shape)
    row = check_sparse.check(variant, 12, 1, plant=False)
    # The reference does not round keys to bf16.
    bytes_of_two = sparse_cases.KINDS[kind].layout is not None and shape[1] == 2
    if not (bytes_of_two or sparse_cases.KINDS[kind].rounded):
        assert row["wrong"] == 0, row
    assert row["error"] < 1e-2 and row["cases"] == 12 and row["without_keys"] > 0
    row = check_sparse.check(variant, 12, 1, plant=True)
    assert row["wrong"] == row["cases"] and not row["first"]


class Graph:
    """In place of a CUDA graph: a replay calls again what was captured, but for some calls."""

    def __init__(self, call, count, without=()):
        self.calls = [lambda i=i: call(i) for i in range(count) if i not in without]
        call(0)

    def replay(self):
        """All calls, in order."""
        for call in self.calls:
            call()


@pytest.fixture
def graph(monkeypatch):
    """graph(**options): replays of three layers; counters that grow by `allocated` each time."""
    monkeypatch.setattr(check_sparse, "LAYERS", 3)
    monkeypatch.setattr(check_sparse, "CHECKED", (0, 2))
    monkeypatch.setattr(checks, "failures", [])

    def run(allocated=0, **options):
        count = itertools.count(0, allocated) if allocated else itertools.repeat(7)
        stats = ("allocation.all.allocated", "segment.all.allocated")
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda: dict.fromkeys(stats, next(count)))
        made = functools.partial(Graph, **options)
        monkeypatch.setattr(check_sparse, "capture_calls", made)
        return check_sparse.replayed("fp8_ds_mla", 3, 5)

    return run


def test_replays_that_are_right(graph):
    row = graph()
    assert row["wrong"] == 0 and row["cases"] == 6 and row["error"] < 4e-3
    assert not checks.failures


def test_a_layer_that_is_not_replayed_is_found(graph):
    assert graph(without=(2,))["wrong"] == 1


def test_a_replay_that_allocates_is_found(graph):
    graph(allocated=1)
    [failure] = checks.failures
    assert "6 allocations" in failure
