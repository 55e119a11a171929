"""`mla-fusion bench decode`, with a GPU that is only pretended; what a real one showed is in
benchmarks/results/."""

import csv
from types import SimpleNamespace

import figures
import pytest
import torch

from mla_fusion import cli
from mla_fusion.cli import bench, bench_compile, bench_decode, bench_region
from mla_fusion.cli import bench_decode_peers as peers
from tests.on_cpu import decodes_on_cpu

SMALL = ["--batches", "1", "16", "--contexts", "70", "--heads", "2", "--latent", "32"]
ARGV = ["bench", "decode", *SMALL, "--rope", "16", "--rounds", "3"]


@pytest.fixture
def on_cpu(monkeypatch):
    with decodes_on_cpu(monkeypatch):
        yield


def right(inputs):
    """A peer that computes what ours does."""
    return peers.ours(inputs)


def wrong(inputs):
    call, out = peers.ours(inputs)

    def off(i):
        call(i)
        out.mul_(1.5)

    return off, out


def not_a_number(inputs):
    _, out = peers.ours(inputs)
    return lambda i: None, out  # leaves the NaN that was there


def no_package(inputs):
    raise ImportError("No module named 'vllm'")


@pytest.fixture
def gpu(monkeypatch, on_cpu):
    """A pretended GPU: ours takes 2 us, a peer 3 us; the candidates, by type, to be changed."""
    facts = dict.fromkeys(("gpu", "driver", "torch", "triton", "vllm", "flashinfer"), "")
    times = {"ours": 2.0}
    offered = {
        peers.BF16: {"ours": peers.ours, "triton_mla": right, "flashmla": right, "fa3": no_package},
        peers.FP8: {"ours": peers.ours, "triton_mla": right, "flashmla": wrong},
    }
    for module, pretended in (
        (
            torch.cuda,
            {
                "is_available": lambda: True,
                "empty_cache": lambda: None,
                "synchronize": lambda: None,
            },
        ),
        (bench, {"environment": lambda commit: {**facts, "commit": commit}}),
        (bench_region, {"measure_ceilings": lambda: bench_region.Ceilings(4000.0, 800.0)}),
        (peers, {"CANDIDATES": offered, "capture_calls": lambda call, count: call}),
        (
            bench_decode,
            {
                "interleave": lambda graphs, count, rounds: {
                    name: [times.get(name, 3.0)] * rounds for name in graphs
                },
                "compile_ahead": lambda launch, cases: [launch(each) for each in cases],
            },
        ),
    ):
        for name, value in pretended.items():
            monkeypatch.setattr(module, name, value)
    return SimpleNamespace(offered=offered, times=times)


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def measured(path, *words):
    """Exit status and rows of a run."""
    status = cli.main([*ARGV, *words, "--csv", str(path)])
    return status, rows_of(path)


# --- the command


def settled(*words):
    settings = cli._parser(["bench"]).parse_args(["bench", *words])
    bench.settle(settings)
    return settings


@pytest.mark.parametrize("words", [(), ("region",)])
def test_without_a_word_it_is_the_region(words):
    settings = settled(*words, "--heads", "4")
    assert settings.what == "region" and str(settings.csv) == "build/bench/region.csv"
    assert (settings.heads, settings.rounds, settings.layers, settings.bf16) == ([4], 15, 61, False)


def test_decode_has_defaults_of_its_own():
    settings = settled("decode", "--page", "16")
    assert str(settings.csv) == "build/bench/decode.csv"
    assert (settings.heads, settings.rounds, settings.page) == ((16, 128), 7, 16)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--batches", "4"], "batches"),
        (["--page", "64"], "page"),
        (["region", "--fp8"], "fp8"),
        (["decode", "--tokens", "8"], "tokens"),
        (["decode", "--layers", "61"], "layers"),
    ],
)
def test_an_option_of_the_other_is_refused(words, name, capsys):
    """Also with its default: it would say nothing."""
    assert cli.main(["bench", *words]) == 2
    what = "decode" if "decode" in words else "region"
    assert f"bench {what} has no option --{name}: leave it out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["decode", "--peers", "ours", "fa4"], "ours, triton_mla, flashmla, fa3"),
        # FlashAttention 3 takes no fp8 cache.
        (["decode", "--fp8", "--peers", "fa3"], "ours, triton_mla, flashmla"),
        (["region", "--peers", "fa3"], "triton, bmm+1"),
    ],
)
def test_an_unknown_candidate_is_refused_before_anything_is_written(
    gpu, words, offered, capsys, tmp_path
):
    path = tmp_path / "out" / "rows.csv"
    small = SMALL if "decode" in words else ["--layers", "1", "--tokens", "1"]
    assert cli.main(["bench", *words, *small, "--csv", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"no candidate is called {words[-1]}: --peers takes {offered}" in said
    assert not path.parent.exists()


# --- rows, lines and exit status


def test_rows_lines_and_summary(gpu, capsys, tmp_path):
    gpu.times["flashmla"] = 1.0
    status, rows = measured(tmp_path / "out" / "rows.csv", "--commit", "abc")
    printed = capsys.readouterr().out
    assert status == 0
    # Batches of 16 also ragged; bf16 has two peers that are here, and so has fp8.
    assert len(rows) == 2 * 3 * 3
    assert {(r["batch"], r["ragged"]) for r in rows} == {("1", "0"), ("16", "0"), ("16", "1")}
    assert {(r["latent"], r["rope"], r["page"], r["commit"]) for r in rows} == {
        ("32", "16", "64", "abc")
    }
    assert {(r["p20_us"], r["p50_us"]) for r in rows if r["candidate"] == "ours"} == {("2", "2")}
    assert all(float(r["error"]) < 4e-3 for r in rows if r["candidate"] == "ours")
    lines = [line for line in printed.splitlines() if " H=2 " in line and "GB/s" in line]
    assert len(lines) == 6 and sum("ragged" in line for line in lines) == 2
    assert printed.count("fa3 left out: ImportError No module named 'vllm'") == 1
    than = "geometric mean {0}x of 3, least {0}x; that one is faster at (batch, context, ragged)"
    assert f"H=2 bf16 against triton_mla: {than.format('1.50')} none\n" in printed
    faster = "{(1, 70, 0): 0.5, (16, 70, 0): 0.5, (16, 70, 1): 0.5}"
    assert f"H=2 fp8 against flashmla: {than.format('0.50')} {faster}\n" in printed
    assert "against fa3" not in printed


def test_a_mean_is_of_one_type_and_one_number_of_heads_and_rows(capsys):
    """The geometric one: twice and half as fast are 1."""
    us = {
        (1, 16, 1, "bf16"): {"ours": 2.0, "fa3": 4.0},
        (4, 16, 1, "bf16"): {"ours": 2.0, "fa3": 1.0},
        (4, 16, 4, "bf16"): {"ours": 2.0, "fa3": 7.0},
        (1, 16, 1, "fp8"): {"ours": 2.0, "fa3": 6.0},
        (1, 128, 1, "bf16"): {"ours": 2.0, "fa3": 8.0},
        (4, 128, 1, "bf16"): {"ours": 2.0},
    }
    shape = {"context": 70, "ragged": 0, "latent": 512, "rope": 64, "page": 64, "error": 0.0}
    rows = [
        {**shape, "batch": batch, "heads": heads, "queries": queries, "dtype": dtype,
         "candidate": name, "p50_us": time}
        for (batch, heads, queries, dtype), times in us.items()
        for name, time in times.items()
    ]  # fmt: skip
    bench_decode.summary(rows)
    than = "{} against fa3: geometric mean {}; that one is faster at (batch, context, ragged) {}"
    assert capsys.readouterr().out.splitlines() == [
        than.format("H=16 bf16", "1.00x of 2, least 0.50x", "{(4, 70, 0): 0.5}"),
        than.format("H=16 x 4 rows bf16", "3.50x of 1, least 3.50x", "none"),
        than.format("H=16 fp8", "3.00x of 1, least 3.00x", "none"),
        than.format("H=128 bf16", "4.00x of 1, least 4.00x", "none"),
    ]


def test_query_rows(gpu, monkeypatch, capsys, tmp_path):
    """Right with several, in the rows and lines, and compiled ahead for each batch once."""
    compiled = []
    monkeypatch.setattr(bench_decode, "compile_ahead", lambda launch, cases: compiled.extend(cases))
    status, rows = measured(tmp_path / "rows.csv", "--bf16", "--queries", "1", "3")
    assert status == 0 and {r["queries"] for r in rows} == {"1", "3"}
    assert "  16 x     70 ragged H=2 x 3 rows bf16: ours 2.0" in capsys.readouterr().out
    batches = [[(case.queries, case.batch) for case in cases] for cases in compiled]
    assert batches == [[(1, 1), (1, 16)], [(3, 1), (3, 16)]]


def test_the_columns_are_those_of_the_stored_rows(gpu, tmp_path):
    gpu.times["triton_mla"] = 3.14159
    _, rows = measured(tmp_path / "rows.csv", "--fp8")
    assert {r["p50_us"] for r in rows if r["candidate"] == "triton_mla"} == {"3.142"}
    assert set().union(*(figures.read(path)[0] for path in figures.ATTENTION)) <= set(rows[0])
    assert figures.attention_means(rows)[2:] == [
        "| 2, fp8 | TRITON_MLA | 1.57x | 1.57x | 1.57x | 0 of 3 |",
        "| 2, fp8 | FlashMLA | 1.50x | 1.50x | 1.50x | 0 of 3 |",
    ]
    drafts = [{**row, "queries": "4"} for row in rows]
    assert figures.attention_means(rows + drafts)[4:] == [
        "| 2 x 4, fp8 | TRITON_MLA | 1.57x | 1.57x | 1.57x | 0 of 3 |",
        "| 2 x 4, fp8 | FlashMLA | 1.50x | 1.50x | 1.50x | 0 of 3 |",
    ]


@pytest.mark.parametrize(
    ("words", "types"), [(["--bf16"], {"bf16"}), (["--fp8"], {"fp8"}), ([], {"bf16", "fp8"})]
)
def test_types_and_candidates_are_those_asked_for(gpu, tmp_path, words, types):
    status, rows = measured(tmp_path / "rows.csv", *words, "--peers", "ours", "triton_mla")
    assert status == 0 and {r["dtype"] for r in rows} == types
    assert {r["candidate"] for r in rows} == {"ours", "triton_mla"}


@pytest.mark.parametrize(
    ("name", "build", "status", "mark"),
    [
        ("ours", wrong, 1, "!"),
        ("ours", not_a_number, 1, "!"),
        ("triton_mla", not_a_number, 0, "!"),
        ("triton_mla", wrong, 0, "!"),
        ("triton_mla", right, 0, ""),
    ],
)
def test_a_failed_check_is_marked_and_ours_fails_the_run(
    gpu, capsys, tmp_path, name, build, status, mark
):
    gpu.offered[peers.BF16][name] = build
    ended, rows = measured(tmp_path / "rows.csv", "--bf16")
    printed = capsys.readouterr().out
    assert ended == status and len(rows) == 9
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
    assert "16 x 70 left out: OutOfMemoryError CUDA out of memory" in printed
    assert "  16 x     70 ragged H=2 fp8: nothing" in printed


@pytest.mark.parametrize(
    ("dtype", "widths", "marked"),
    [
        (peers.BF16, (512, 64), {"fa3"}),
        (peers.FP8, (512, 64), {"flashmla"}),
        (peers.FP8, (256, 64), set()),
    ],
)
def test_the_default_of_vllm_is_marked(gpu, dtype, widths, marked):
    latent, rope = widths
    case = peers.Case(1, 16, 1, dtype, latent=latent, rope=rope)
    rows = bench_decode.measure(case, dict.fromkeys(("ours", "flashmla", "fa3"), right), 3, set())
    assert {r["candidate"] for r in rows if r["vllm_default"]} == marked


def test_kernels_are_compiled_ahead_in_processes(capsys):
    """One that fails is named, and the others are done."""
    bench_compile.compile_ahead(str.upper, ["a", 3, "b"])
    lines = sorted(line.rpartition(", ")[0] for line in capsys.readouterr().out.splitlines())
    assert lines[:2] == ["A compiled", "B compiled"]
    assert lines[2].startswith("not compiled ahead: TypeError ") and len(lines) == 3
    bench_compile.compile_ahead(str.upper, ["alone"])
    assert not capsys.readouterr().out
