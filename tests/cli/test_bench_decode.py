"""`mla-fusion bench decode`, with a GPU that is only pretended; what a real one showed is in
benchmarks/results/."""

import csv
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from mla_fusion import cli
from mla_fusion.cli.bench import command as bench
from mla_fusion.cli.bench import decode as bench_decode
from mla_fusion.measure import decode_peers as peers
from mla_fusion.measure import records, timing

SMALL = ["--batches", "1", "16", "--contexts", "70", "--heads", "2", "--latent", "32"]
ARGV = ["bench", "decode", *SMALL, "--rope", "16", "--rounds", "3"]


def right(inputs):
    """A peer that computes what ours does."""
    return peers.ours(inputs)


def wrong(inputs):
    call = peers.ours(inputs)

    def off(i):
        call(i)
        inputs.out.mul_(1.5)

    return off


def not_a_number(inputs):
    return lambda i: None  # leaves the NaN that was there


def no_package(inputs):
    raise ImportError("No module named 'vllm'")


@pytest.fixture
def gpu(monkeypatch, on_cpu):
    """A pretended GPU: ours takes 2 us, a peer 3 us, a read 1.6 us; the candidates, by type, to be
    changed."""
    timing.say_once.cache_clear()
    times = {"ours": 2.0, "read": 1.6}
    offered = {
        peers.BF16: {"ours": peers.ours, "triton_mla": right, "flashmla": right, "fa3": no_package},
        peers.FP8: {"ours": peers.ours, "triton_mla": right, "flashmla": wrong},
    }

    def interleave(graphs, count, rounds):
        return {name: dict.fromkeys(timing.TIMES, times.get(name, 3.0)) for name in graphs}

    for module, name, value in (
        (bench, "require_gpu", lambda: None),
        (torch.cuda, "empty_cache", lambda: None),
        (torch.cuda, "synchronize", lambda: None),
        (bench, "environment", lambda commit: dict.fromkeys(records.FACTS, commit)),
        (bench, "measure_ceilings", lambda: timing.Ceilings(4000.0, 800.0)),
        (peers, "CANDIDATES", offered),
        (timing, "capture_calls", lambda call, count: call),
        (timing, "interleave", interleave),
        (bench_decode, "compile_ours", lambda cases: peers.launch_ours([*cases])),
    ):
        monkeypatch.setattr(module, name, value)
    return SimpleNamespace(offered=offered, times=times)


def measured(path, *words):
    """Exit status and rows of a run."""
    status = cli.main([*ARGV, *words, "--csv", str(path)])
    with path.open(newline="") as file:
        return status, list(csv.DictReader(file))


def test_a_step_has_no_more_tokens_than_a_gpu_holds(capsys):
    words = ["bench", "decode", "--batches", "256", "512", "--contexts", "1024", "65536"]
    settings = cli._parser(["bench"]).parse_args(words)
    bench.settle(settings)
    shapes = {(case.batch, case.context) for case in bench_decode.grid(settings, [peers.FP8])}
    assert shapes == {(256, 1024), (256, 65536), (512, 1024)}
    assert capsys.readouterr().out == "left out, more than 16777216 tokens: 512 x 65536\n"


def test_every_layer_is_compiled_ahead_with_its_batches(monkeypatch, capsys):
    """Where there are several; what fails is said."""
    taken = []

    def launch(cases):
        taken.append([case.batch for case in cases])
        if cases[0].heads == 8:
            raise RuntimeError("no such layout")
        return cases[0].name

    monkeypatch.setattr(bench_decode, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(peers, "launch_ours", launch)
    cases = [peers.Case(b, n, h, peers.BF16) for h in (8, 16) for b in (1, 4) for n in (70, 90)]
    bench_decode.compile_ours(cases)
    bench_decode.compile_ours(cases[:4])
    assert taken == [[1, 4]] * 2
    printed = capsys.readouterr().out
    assert "H=16 bf16 compiled, " in printed
    assert "not compiled ahead: RuntimeError no such layout, " in printed


def test_rows_lines_and_summary(gpu, capsys, tmp_path):
    gpu.times["flashmla"] = 1.0
    status, rows = measured(tmp_path / "out" / "rows.csv", "--commit", "abc")
    printed = capsys.readouterr().out
    assert status == 0
    # Batches of 16 also ragged; bf16 has two peers that are here, and so has fp8.
    assert len(rows) == 2 * 3 * 3
    assert {(r["batch"], r["ragged"]) for r in rows} == {("1", "0"), ("16", "0"), ("16", "1")}
    found = {(r["latent"], r["rope"], r["page"], r["commit"]) for r in rows}
    assert found == {("32", "16", "64", "abc")}
    names = "p20_us", "p50_us", "of_read"
    ours = {tuple(r[name] for name in names) for r in rows if r["candidate"] == "ours"}
    assert (
        ours == {("2", "2", "1.25")} and printed.count("GB/s, 1.25 of a read, ") == len(rows) // 3
    )
    assert all(float(r["error"]) < 4e-3 for r in rows if r["candidate"] == "ours")
    lines = [line for line in printed.splitlines() if " H=2 " in line and "GB/s" in line]
    assert len(lines) == 6 and sum("ragged" in line for line in lines) == 2
    assert printed.count("fa3 left out: ImportError No module named 'vllm'") == 1
    than = "geometric mean {0}x of 3, least {0}x; that one is faster at (batch, context, ragged)"
    assert f"H=2 bf16 against triton_mla: {than.format('1.50')} none\n" in printed
    faster = "{(1, 70, 0): 0.5, (16, 70, 0): 0.5, (16, 70, 1): 0.5}"
    assert f"H=2 fp8 against flashmla: {than.format('0.50')} {faster}\n" in printed
    assert "against fa3" not in printed


@pytest.mark.parametrize("values, cap", [(0, -1), (8, 3)])
def test_what_was_asked_is_timed(gpu, monkeypatch, capsys, tmp_path, values, cap):
    """The decode alone, in chunks, or with the product that follows it; splits are capped."""
    caps, allocate = set(), peers.PersistentDecodePlan.allocate

    def allocating(**settings):
        caps.add(settings["max_split_per_batch"])
        assert settings.get("chunks") == (None if values else (64, 64, 128))
        return allocate(**settings)

    monkeypatch.setattr(peers.PersistentDecodePlan, "allocate", allocating)
    words = ["--values", str(values), "--max-split-per-batch", str(cap)] if values else []
    words += [] if values else ["--chunks", "64", "64", "128"]
    status, rows = measured(tmp_path / "rows.csv", "--bf16", "--peers", "ours", *words)
    found = {(row["candidate"], row["values"], row["chunks"]) for row in rows}
    chunks = "" if values else "64 64 128"
    assert status == 0 and found == {("ours", str(values), chunks)} and caps == {cap}
    timed = "decode and product" if values else "decode"
    assert f"microseconds per {timed}; ! marks" in capsys.readouterr().out


@pytest.mark.parametrize("build", [wrong, not_a_number, right])
@pytest.mark.parametrize("name", ["ours", "triton_mla"])
def test_a_failed_check_is_marked_and_ours_fails_the_run(gpu, capsys, tmp_path, name, build):
    build, mark = (peers.ours, "") if build is right else (build, "!")
    gpu.offered[peers.BF16][name] = build
    status, rows = measured(tmp_path / "rows.csv", "--bf16")
    printed = capsys.readouterr().out
    assert status == (bool(mark) and name == "ours") and len(rows) == 9
    [line] = [line for line in printed.splitlines() if line.startswith("   1 x     70 H=2 bf16:")]
    [shown] = [each for each in line.partition(": ")[2].split(" | ") if each.startswith(name)]
    assert shown.endswith(f"TF){mark}")
    worst = "nan" if build is not_a_number else "0.5"
    said = f"{name} is off by more than 0.004 in 3 shapes, by {worst} at most"
    assert (said in printed) is bool(mark)


def test_ours_left_out_fails_the_run(gpu, capsys, tmp_path):
    gpu.offered[peers.BF16]["ours"] = no_package
    status, rows = measured(tmp_path / "rows.csv", "--bf16")
    assert status == 1 and {r["candidate"] for r in rows} == {"triton_mla", "flashmla"}
    assert measured(tmp_path / "rows.csv", "--bf16", "--peers", "triton_mla")[0] == 0


def test_a_shape_without_memory_is_left_out_and_the_others_are_kept(
    gpu, monkeypatch, capsys, tmp_path
):
    make = peers.make

    def full(case):
        if case.ragged:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make(case)

    monkeypatch.setattr(peers, "make", full)
    status, rows = measured(tmp_path / "rows.csv", "--fp8")
    printed = capsys.readouterr().out
    assert status == 1 and {r["ragged"] for r in rows} == {"0"}
    assert "  16 x     70 ragged H=2 fp8: nothing, OutOfMemoryError CUDA out of memory" in printed
