"""`mla-fusion bench`, with a GPU that is only pretended; what a real one showed is in
benchmarks/results/."""

import csv

import pytest

from mla_fusion import cli
from mla_fusion.cli.bench import command as bench
from mla_fusion.cli.bench import region
from mla_fusion.measure import records, region_cases, timing

ARGV = ["bench", "--tokens", "1", "8", "--heads", "16", "--layers", "3", "--rounds", "10"]


@pytest.fixture
def gpu(monkeypatch):
    """A pretended GPU: every candidate takes 2 us, and `agreement` is the given dict's."""

    def no_package(region):
        raise ImportError("No module named 'flashinfer'")

    timing.say_once.cache_clear()
    peers = {name: lambda region, name=name: name for name in region.PEERS}
    own = {name: lambda region, name=name: f"own {name}" for name in region.OWN_ROUNDING}
    agreements = dict.fromkeys((*peers, *(f"own {name}" for name in own)), (1.0, 0))
    times = dict(zip(timing.TIMES, (1.23456789, 2.0, 3.0), strict=True))
    for module, name, value in (
        (bench, "require_gpu", lambda: None),
        (bench, "environment", lambda commit: dict.fromkeys(records.FACTS, commit)),
        (bench, "measure_ceilings", lambda: timing.Ceilings(4000.0, 800.0)),
        (region, "PEERS", {**peers, "flashinfer": no_package}),
        (region, "OWN_ROUNDING", own),
        (region, "chosen_plan", lambda case: region.Plan()),
        (region_cases, "make_weights", lambda heads, layers, widths: [None] * layers),
        (region_cases, "make_region", lambda case, calls: region_cases.Region(case, calls, None)),
        (region_cases, "agreement", lambda _, layer, expected=None: agreements[expected or layer]),
        (timing, "capture_calls", lambda call, count: call),
        (timing, "interleave", lambda graphs, *_: dict.fromkeys(graphs, times)),
    ):
        monkeypatch.setattr(module, name, value)
    return agreements


def test_rows_and_what_is_missing(gpu, capsys, tmp_path):
    path = tmp_path / "out" / "rows.csv"
    small = ["--nope", "64", "--latent", "256"]
    assert cli.main([*ARGV, *small, "--csv", str(path), "--commit", "abc"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("flashinfer left out: ImportError No module named 'flashinfer'") == 1
    with path.open() as file:
        rows = list(csv.DictReader(file))
    ours = [(r["tokens"], r["heads"]) for r in rows if r["candidate"] == "triton"]
    assert ours == [("1", "16"), ("8", "16")]
    assert {r["candidate"] for r in rows} == set(region.PEERS) - {"flashinfer"}
    found = {(r["p20_us"], r["p50_us"], r["commit"], r["query"]) for r in rows}
    assert found == {("1.23457", "2", "abc", "fp8")}
    assert {r["candidate"] for r in rows if r["equal"] == ""} == {*region.NOT_A_RESULT}
    assert {(r["nope"], r["rope"], r["latent"]) for r in rows} == {("64", "64", "256")}
    # 607,872 bytes in 2 us, on a GPU that copies 4000 GB/s.
    speeds = {(r["gbps"], r["floor_us"]) for r in rows if r["tokens"] == "8"}
    assert speeds == {("303.936", "0.151968")}


@pytest.mark.parametrize(
    "found, name, mark, status",
    [
        ({"triton": (0.99, 1)}, "triton", "!", 1),
        ({"triton": (0.999, 2)}, "triton", "!", 1),
        ({"vllm-40392": (0.99, 40)}, "vllm-40392", "!", 0),
        # A peer that rounds twice may be explained by it.
        ({"vllm-40392": (0.996, 44), "own vllm-40392": (1.0, 0)}, "vllm-40392", "", 0),
        ({"vllm-40392": (0.996, 44), "own vllm-40392": (0.9999, 1)}, "vllm-40392", "!", 0),
    ],
)
def test_a_failed_check_is_marked_and_ours_fails_the_run(
    gpu, capsys, tmp_path, found, name, mark, status
):
    gpu.update(found)
    assert cli.main([*ARGV, "--csv", str(tmp_path / "rows.csv")]) == status
    assert f"{name} 2.00{mark} |" in capsys.readouterr().out
