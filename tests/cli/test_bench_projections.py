"""`mla-fusion bench projections` with a pretended GPU, and its file as `plan_for` reads it."""

import csv

import pytest
import torch

from mla_fusion import cli, projections
from mla_fusion.cli.bench import command
from mla_fusion.cli.bench import projections as bench
from mla_fusion.measure import records, timing
from mla_fusion.ops import Product
from mla_fusion.projections import measured, reference
from tests.gpus import imitate

ARGV = ["bench", "projections", "--k", "64", "--sizes", "48", "16", "--tokens", "1", "9"]
SLOW, FAST = "vector 8 8", "matrix 16 4"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """run(wrong): the status of a run on a GPU on which `FAST` is fastest, and the plans of `wrong`
    give wrong results."""
    wrong = []

    def launch(plan, *given):
        results = reference.project(*given)
        return [r * (1.01 if bench.name_of(plan) in wrong else 1) for r in results]

    def interleave(graphs, *_):
        us = {FAST: 3.5, "torch": 4.5, "front": 1.5}
        return {n: dict(zip(timing.TIMES, (1.0, us.get(n, 4.0), 9.0), strict=True)) for n in graphs}

    random = lambda *size: torch.randn(size, dtype=torch.bfloat16)  # noqa: E731
    facts = {**dict.fromkeys(records.FACTS, "7"), "gpu": "Imagined"}
    for module, name, value in (
        (command, "require_gpu", lambda: None),
        (command, "environment", lambda commit: facts),
        (command, "measure_ceilings", lambda: timing.Ceilings(4000.0, 800.0)),
        (bench, "_random", random),
        (bench, "DISTINCT", 1),
        (bench, "launch", launch),
        (bench, "_peer", reference.project),
        (bench, "_has_peer", lambda: True),
        (timing, "compile_all", lambda _: None),
        (timing, "capture_calls", lambda call, count: [call(i) for i in range(count)]),
        (timing, "interleave", interleave),
        (measured, "FOLDER", tmp_path),
    ):
        monkeypatch.setattr(module, name, value)
    imitate(monkeypatch, "sm_90", name="Imagined")
    [cache.cache_clear() for cache in (measured.shipped, measured.chosen)]

    def run(*bugs, argv=ARGV):
        wrong[:] = bugs
        status = cli.main([*argv, "--csv", str(tmp_path / "rows.csv")])
        measured.shipped.cache_clear()
        return status

    yield run
    [cache.cache_clear() for cache in (measured.shipped, measured.chosen)]


def chosen(tokens, of=Product(64, (48, 16))):  # noqa: B008  it is frozen
    plan = projections.plan_for(torch.device("cuda"), of, tokens)
    return plan and bench.name_of(plan)


def test_the_fastest_plan_is_in_the_file(run, tmp_path, capsys):
    assert run() == 0 and "!" not in capsys.readouterr().out.split("\n")[2]
    assert [chosen(n) for n in (1, 2, 9, 10)] == [FAST, FAST, FAST, None]
    [(_, [row, _])] = measured.shapes("Imagined").items()
    assert (row.ours, row.cublas) == (2.0, 3.0)
    with (tmp_path / "rows.csv").open() as file:
        rows = [*csv.DictReader(file)]
    names = {row["candidate"] for row in rows if row["tokens"] == "1"}
    fit = [plan for plan in bench.PLANS if plan.kernel != "block"]
    assert names == {*map(bench.name_of, fit), "torch"}
    assert SLOW not in {row["candidate"] for row in rows if row["tokens"] == "9"}


def test_a_wrong_plan_is_marked_and_never_chosen(run, capsys):
    assert run(FAST) == 1
    assert f"{FAST} 2.00!" in capsys.readouterr().out
    assert chosen(1) not in (FAST, None)


def test_block_fp8_needs_the_op_of_vllm(capsys):
    bench._has_peer.cache_clear()
    shapes = [Product(256, (130,), bits) for bits in (32, 16, 8)]
    assert bench.measurable(shapes) == shapes[:2] and "left out" in capsys.readouterr().out


def test_block_fp8_has_rows_of_its_own(run, monkeypatch):
    eight = Product(256, (130,), 8)
    monkeypatch.setattr(bench, "measurable", lambda _: [eight])
    argv = [*ARGV[:2], "--tokens", "1", "8", "9"]
    assert run(argv=argv) == 0
    assert chosen(8, eight) == chosen(1, Product(256, (200,), 8)) == "block 16 4"
    assert chosen(9, eight) is chosen(8, Product(256, (130,))) is None
    assert run("block 16 4", argv=argv) == 1


def test_more_tokens_than_a_kernel_takes(run, capsys):
    assert cli.main([*ARGV, "17"]) == 2 and "--tokens up to 16" in capsys.readouterr().err
