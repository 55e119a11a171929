"""`benchmarks/check_sparse.py` on a CPU: its cases, with the kernels replaced by the reference."""

import dataclasses
import functools
import itertools

import check_sparse
import checks
import hopper_fp8
import pytest
import sparse_cases
import torch

from mla_fusion.attention import buffers
from mla_fusion.attention import triton as provider
from mla_fusion.kernels import triton as region
from tests.sparse.launched import launch


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
    check_sparse.scratch_of.cache_clear()


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


def last_key(given, sparse):
    """(row, column) of the last column of the last scope that counts and lists one, if any does."""
    counts = given.plan.kv_indptr.diff()[: len(given.q)] - sparse.first
    columns = torch.arange(sparse.extra.table.shape[1])
    listed = (sparse.extra.table >= 0) & (columns < counts[:, None])
    return listed, tuple(listed.nonzero()[-1].tolist()) if listed.any() else None


def another_slot(given, sparse):
    """A column names the slot of another one; False if there is none."""
    (listed, at), table = last_key(given, sparse), sparse.extra.table
    others = table[listed & (table != table[at])] if at else []
    if len(others):
        table[at] = others[0]
    return given, len(others) > 0


def lost_key(given, sparse):
    """A key is left out; False if there is none."""
    _, at = last_key(given, sparse)
    if at:
        sparse.extra.table[at] = -1
    return given, at is not None


def scaled(name):
    """A fault: a scale is 2 % off."""
    return lambda given, _: (
        dataclasses.replace(given, **{name: getattr(given, name) * 1.02}),
        None,
    )


@pytest.mark.parametrize(
    "fault", [another_slot, lost_key, scaled("q_scale"), scaled("kv_scale")],
    ids=["another slot", "lost key", "q_scale", "kv_scale"],
)  # fmt: skip
def test_faults_of_fp8_with_one_scale_are_found(fault, monkeypatch):
    faults = []

    def broken(given, sparse):
        own = dataclasses.replace(sparse.extra, table=sparse.extra.table.clone())
        sparse = dataclasses.replace(sparse, extra=own)
        given, made = fault(given, sparse)
        launch(given, sparse)
        # A scale matters where there is a key.
        faults.append(bool(given.lse.isfinite().any()) if made is None else made)

    monkeypatch.setattr(provider, "launch", broken)
    row = check_sparse.check(sparse_cases.Variant("fp8", 8), 12, 1, plant=False)
    assert sum(faults) > 4 and row["wrong"] == sum(faults), (row, faults)


def test_scores_without_the_tensor_cores_losses_are_found(monkeypatch):
    exact = lambda q, keys: (q.double() @ keys.double().mT).float()  # noqa: E731
    monkeypatch.setattr(hopper_fp8, "products", exact)
    row = check_sparse.check(sparse_cases.Variant("fp8", 16), 12, 1, plant=False)
    assert row["wrong"] > 4 and 3e-4 < row["lse_error"] < 1e-2


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
