"""`benchmarks/check_specialized.py` with a GPU that is only pretended: what it judges."""

import csv
import random
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import check_specialized as script
import checks
import specialized_launch
import specialized_times

from mla_fusion.attention import PersistentDecodePlan
from mla_fusion.cli.bench import decode_peers as peers
from tests.on_cpu import OnCpu

CASE = (4, 2, 64, False, "bf16")
FACTS = dict.fromkeys(script.FACTS, "")


@pytest.fixture
def on_cpu(monkeypatch):
    """The reference decodes, on a CPU; few short sequences."""

    def decode(inputs, plan, i, out, lse, config):
        lse.copy_(peers.decode(inputs, plan, i, out, return_lse=True))

    def allocate(**arguments):
        return PersistentDecodePlan.allocate(**arguments | {"device": "cpu"})

    settings = {"workers": 4, "kv_granularity": 64, "overhead": 4}
    monkeypatch.setattr(specialized_launch.provider, "plan_settings", lambda *_: dict(settings))
    monkeypatch.setattr(specialized_launch, "multiprocessors", lambda _: 8)
    fake = SimpleNamespace(allocate=allocate)
    monkeypatch.setattr(specialized_launch, "PersistentDecodePlan", fake)
    monkeypatch.setattr(specialized_launch, "launch", decode)
    monkeypatch.setattr(script, "BATCHES", [("short", 3), ("short", 2)])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(checks, "failures", [])
    monkeypatch.setattr(peers, "ROTATED", 0)
    with OnCpu():
        yield decode


def checked(path):
    """The row of a case, launched five times a batch, and how many failed."""
    script.check([CASE], random.Random(3), 5, FACTS, path)
    with path.open(newline="") as file:
        [row] = csv.DictReader(file)
    return row, len(checks.failures)


def test_a_right_kernel(on_cpu, tmp_path):
    row, failures = checked(tmp_path / "rows.csv")
    assert (row["different"], row["ok"], failures) == ("0", "1", 0)
    assert (row["batches"], row["launches"]) == ("2", "5")
    assert 0 < float(row["error"]) < 0.004 and float(row["lse_error"]) < 1e-5


@pytest.mark.parametrize("what", ["output", "LSE"])
def test_a_launch_that_differs(on_cpu, monkeypatch, tmp_path, capsys, what):
    """By less than the error that is allowed."""
    count = iter(range(100))

    def sometimes(inputs, plan, i, out, lse, config):
        on_cpu(inputs, plan, i, out, lse, config)
        if next(count) == 3:
            (out if what == "output" else lse).mul_(1 + 2**-8 if what == "output" else 1 + 2**-22)

    monkeypatch.setattr(specialized_launch, "launch", sometimes)
    row, failures = checked(tmp_path / "rows.csv")
    assert (row["different"], row["ok"], failures) == ("1", "0", 1)
    [line] = [line for line in capsys.readouterr().out.splitlines() if "launch 3:" in line]
    assert ("; 0 LSEs; heads [0, 1, 2, 3];" if what == "output" else ": 0 values differ") in line


@pytest.mark.parametrize(("change", "column"), [(0, "error"), (1, "lse_error")])
def test_a_wrong_result(on_cpu, monkeypatch, tmp_path, change, column):
    """NaN in the second of both batches, in every launch of it."""

    def off(inputs, plan, i, *results_and_config):
        on_cpu(inputs, plan, i, *results_and_config)
        if inputs.case.batch == 2:
            results_and_config[change][-1] += torch.nan

    monkeypatch.setattr(specialized_launch, "launch", off)
    row, failures = checked(tmp_path / "rows.csv")
    assert (row[column], row["different"], row["ok"], failures) == ("nan", "0", "0", 1)


@pytest.mark.parametrize("dtype", [peers.BF16, peers.FP8])
def test_both_plans(on_cpu, dtype):
    """Pairs are what the provider has for bf16; without them all multiprocessors have a worker."""
    case = peers.Case(3, 64, 128, dtype)
    workers = [specialized_launch.plan_of(case, pairs, 3).rules.workers for pairs in (True, False)]
    assert specialized_launch.has_pairs(case) and workers == [4, 8]


def test_cases_with_pairs_are_checked_without_them_too():
    cases = script.cases_of([(64, 1, 64, False), (16, 8, 64, True)], ["bf16", "fp8"])
    of_type = [(64, 1, 64, False), (16, 8, 64, False), (16, 8, 64, True)]
    assert cases == [(*each, dtype) for dtype in ("bf16", "fp8") for each in of_type]


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_the_kernels_of_a_shape(on_cpu, monkeypatch, dtype):
    """Both plans where there may be pairs; peers are not compiled."""
    launched = []

    def note(inputs, plan, i, out, lse, config):
        launched.append((inputs.case.context, plan.rules.workers, config.specialized))

    monkeypatch.setattr(specialized_launch, "launch", note)
    case = specialized_times.shape_of("3x500x16x8", dtype)
    assert (case.batch, case.context, case.heads, case.queries) == (3, 500, 16, 8)
    assert specialized_times.compile_shape(case) == f"3 x H=16 x 8 rows {dtype}"
    assert launched == [(64, n, kernel) for kernel in (False, True) for n in (8, 4)]
    launched.clear()
    monkeypatch.setattr(specialized_launch, "multiprocessors", lambda _: 4)
    specialized_times.compile_shape(specialized_times.shape_of("3x500", dtype))
    assert launched == [(64, 4, False), (64, 4, True)]


def test_times_are_rows(on_cpu, monkeypatch, tmp_path, capsys):
    """One of each kernel, for shapes that begin in time; FlashMLA's fp8 error is no failure."""
    times = specialized_times
    prepared = {"flashmla": 0.02, "specialized": 0.0017}

    def prepare(inputs, build):
        name = "flashmla" if build is times.flashmla else "specialized"
        return name, prepared[name], (None, None)

    def interleave(graphs, copies, rounds):
        return {kind: [float(2 + i)] * rounds for i, kind in enumerate(graphs)}

    clock = iter((0.0, 1.0, 9.0))
    monkeypatch.setattr(specialized_launch, "multiprocessors", lambda _: 4)
    monkeypatch.setattr(times, "prepare", prepare)
    monkeypatch.setattr(times, "interleave", interleave)
    monkeypatch.setattr(times, "replays", lambda *_: True)
    monkeypatch.setattr(times.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    shapes = [times.shape_of(text, "fp8") for text in ("3x64x16x4", "5x64")]
    times.measure_all(shapes, 3, 5.0, FACTS, tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = [(row["candidate"], row["p50_us"], row["error"]) for row in rows]
    ours = [("step, blocks", "2", "0.0017"), ("specialized, blocks", "3", "0.0017")]
    assert found == [*ours, ("flashmla", "4", "0.02")] and checks.failures == []
    shape = {k: rows[0][k] for k in ("batch", "context", "heads", "queries", "dtype")}
    assert list(shape.values()) == ["3", "64", "16", "4", "fp8"]
    assert "no time for 5 x 64" in capsys.readouterr().out
    prepared["specialized"] = 0.02
    clock = iter((0.0, 1.0))
    times.measure_all(shapes[:1], 3, 5.0, FACTS, tmp_path / "rows.csv")
    assert len(checks.failures) == 1
