"""`mla-fusion bench`, with a GPU that is only pretended; what a real one showed is in
benchmarks/results/."""

import csv
import itertools
import json
from types import SimpleNamespace

import pytest
import torch

from mla_fusion import cli
from mla_fusion.cli import bench, bench_peers, bench_region
from mla_fusion.kernels import reference
from mla_fusion.kernels.dispatch import Widths

ARGV = ["bench", "--tokens", "1", "8", "--heads", "16", "--layers", "3", "--rounds", "10"]


@pytest.mark.parametrize(
    "argv", [[*ARGV, "--csv"], ["bench", "decode", "--csv"], ["bench", "--report"]]
)
def test_without_a_gpu_it_says_so(monkeypatch, capsys, tmp_path, argv):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main([*argv, str(tmp_path / "file")]) == 2
    assert "torch sees none here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.fixture
def gpu(monkeypatch):
    """A pretended GPU: every candidate takes 2 us, and `agreement` is the given dict's."""

    def no_package(region):
        raise ImportError("No module named 'flashinfer'")

    peers = {name: lambda region, name=name: name for name in bench_peers.PEERS}
    own = {name: lambda region, name=name: f"own {name}" for name in bench_peers.OWN_ROUNDING}
    agreements = dict.fromkeys((*peers, *(f"own {name}" for name in own)), (1.0, 0))
    facts = dict.fromkeys(("gpu", "driver", "torch", "triton", "vllm", "flashinfer"), "")
    for module, pretended in (
        (torch.cuda, {"is_available": lambda: True, "synchronize": lambda: None}),
        (bench, {"environment": lambda commit: {**facts, "commit": commit}}),
        (
            bench_peers,
            {
                "PEERS": {**peers, "flashinfer": no_package},
                "OWN_ROUNDING": own,
                "chosen_plan": lambda case: bench_peers.Plan(),
            },
        ),
        (
            bench_region,
            {
                "measure_ceilings": lambda: bench_region.Ceilings(4000.0, 800.0),
                "make_weights": lambda heads, layers, widths: [None] * layers,
                "make_region": lambda case, weights: case,
                "agreement": lambda region, layer, expected=None: agreements[expected or layer],
                "capture": lambda region, layer: SimpleNamespace(replay=lambda: None),
                "interleave": lambda graphs, _, rounds: dict.fromkeys(graphs, [2.0] * rounds),
            },
        ),
    ):
        for name, value in pretended.items():
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
    assert [(r["tokens"], r["heads"]) for r in rows if r["candidate"] == "triton"] == [
        ("1", "16"),
        ("8", "16"),
    ]
    assert {r["candidate"] for r in rows} == set(bench_peers.PEERS) - {"flashinfer"}
    assert {(r["p50_us"], r["commit"], r["query"]) for r in rows} == {("2.0", "abc", "fp8")}
    assert {r["candidate"] for r in rows if r["equal"] == ""} == set(bench_peers.NOT_A_RESULT)
    assert {(r["nope"], r["rope"], r["latent"]) for r in rows} == {("64", "64", "256")}


@pytest.mark.parametrize(
    ("name", "agreement", "status"),
    [("triton", (0.99, 1), 1), ("triton", (0.999, 2), 1), ("vllm-40392", (0.99, 40), 0)],
)
def test_a_failed_check_is_marked_and_ours_fails_the_run(
    gpu, capsys, tmp_path, name, agreement, status
):
    gpu[name] = agreement
    assert cli.main([*ARGV, "--csv", str(tmp_path / "rows.csv")]) == status
    assert f"{name} 2.00!" in capsys.readouterr().out


@pytest.mark.parametrize(("own", "mark"), [(1.0, ""), (0.9999, "!")])
def test_a_peer_that_rounds_twice_counts_if_its_roundings_explain_it(
    gpu, capsys, tmp_path, own, mark
):
    gpu["vllm-40392"], gpu["own vllm-40392"] = (0.996, 44), (own, 0 if own == 1.0 else 1)
    assert cli.main([*ARGV, "--csv", str(tmp_path / "rows.csv")]) == 0
    assert f"vllm-40392 2.00{mark} |" in capsys.readouterr().out


@pytest.mark.parametrize("widths", [bench_region.DEEPSEEK, Widths(64, 32, 256)])
def test_the_roundings_of_vllm_are_other_functions(widths):
    """On a CPU, small: from the specification and from each other, in the rotated halves alone."""
    torch.manual_seed(0)
    tokens, heads = 4, 2
    weight = torch.randn(heads, widths.nope, widths.latent) / widths.nope**0.5
    case = bench_region.Case(tokens, heads, widths=widths)
    region = bench_region.make_region(case, [weight.bfloat16()])
    layers = {
        "specification": bench_region.provider_layer(region, reference.fused_mla_decode_prep),
        "every operation": bench_peers.rotated_first(region, every_operation=True),
        "the sum": bench_peers.rotated_first(region, every_operation=False),
    }
    written = {}
    for name, layer in layers.items():
        [weight], [cache], [a, *_] = region.weights, region.caches, region.sets
        layer(weight, cache, a)
        rows = torch.cat((a.q_out, cache.flatten(0, 1)[a.slots, None]), dim=1).view(torch.uint8)
        written[name] = rows.clone().split((widths.latent, widths.rope), dim=-1)
    for one, other in itertools.combinations(written.values(), 2):
        (latent, rope), (other_latent, other_rope) = one, other
        assert torch.equal(latent, other_latent)
        query, key = (rope != other_rope).split((heads, 1), dim=1)
        assert query.any() and key.any()
    # `agreement` sees them as what they are: few values, few steps.
    for name in ("every operation", "the sum"):
        equal, worst = bench_region.agreement(region, layers[name])
        assert 0.99 < equal < 1 and worst >= 1, name


def test_a_report_has_what_was_measured_and_what_failed(gpu, monkeypatch, capsys, tmp_path):
    """One file, with the rows of the region, the error of the decode, and the environment."""
    path = tmp_path / "new" / "report.json"

    def decode(settings, facts):
        assert (settings.batches, settings.contexts, settings.fp8) == ((4, 64), (8192,), False)
        # What was found before is in the file.
        assert json.loads(path.read_text())["region"]["right"] is True
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(bench.bench_decode, "run", decode)
    found = SimpleNamespace(to_json=lambda: {"platform": "rocm"})
    monkeypatch.setattr(bench.bench_report.doctor, "examine", lambda: found)
    assert cli.main(["bench", "--report", str(path), "--commit", "abc"]) == 1
    report = json.loads(path.read_text())
    assert report["doctor"] == {"platform": "rocm"}
    rows = report["region"]["rows"]
    assert {(row["tokens"], row["heads"]) for row in rows} == {
        (t, h) for t in ("1", "16", "64", "256") for h in ("16", "128")
    }
    assert {row["commit"] for row in rows} == {"abc"}
    assert "RuntimeError: no such instruction" in report["decode"]["error"]
    assert str(path) in capsys.readouterr().out


def test_a_report_has_shapes_of_its_own(gpu, capsys, tmp_path):
    assert cli.main([*ARGV, "--report", str(tmp_path / "report.json")]) == 2
    assert "leave out --tokens, --heads, --layers, --rounds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arch", "wanted"),
    [("gfx942", torch.float8_e4m3fnuz), ("gfx950", torch.float8_e4m3fn), ("", torch.float8_e4m3fn)],
)
def test_the_fp8_type_of_a_gpu(monkeypatch, arch, wanted):
    monkeypatch.setattr(bench_region, "architecture", lambda device: arch)
    assert bench_region.fp8_type.__wrapped__() == wanted
