"""`benchmarks/ablate.py` with a GPU that is only pretended: copies, rows, and what it judges."""

import argparse
import csv
import difflib
import sys
import time
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import ablate as script
import checks
import patched
import watched
from specialized_times import shape_of

from mla_fusion.attention import PersistentDecodePlan, reference
from mla_fusion.cli import bench_decode_peers as peers
from tests.on_cpu import OnCpu

PATH = "mla_fusion/attention/reference.py"
LINE = "output = weights @ keys[:, :latent]"
# What patches make of a line.
PATCHES = {
    "fp8_same": LINE + "  # the same",
    "fp8_off": LINE + " * 1.1",
    "fp8_raises": "raise RuntimeError('no kernel')",
    "fp8_stale": None,
    "bf16_other": LINE + " # of another type",
    "plan_any": LINE + "  # of both types",
}


@pytest.fixture
def on_cpu(monkeypatch, tmp_path):
    """Copies of the reference decode, on a CPU."""

    class Copy(patched.Copy):
        def __init__(self, target):
            super().__init__(target)
            decode = self.modules["mla_fusion.cli.bench_decode_peers"].decode

            def launch(inputs, plan, i, out, lse, config):
                assert config.specialized
                lse.copy_(decode(inputs, plan, i, out, return_lse=True))

            def allocate(**arguments):
                return PersistentDecodePlan.allocate(**arguments | {"device": "cpu"})

            settings = {"workers": 4, "kv_granularity": 64, "overhead": 4}
            self.launch.provider.plan_settings = lambda *_: dict(settings)
            self.launch.multiprocessors = lambda _: 4
            self.launch.PersistentDecodePlan = SimpleNamespace(allocate=allocate)
            self.launch.launch = launch

    source = (patched.ROOT / PATH).read_text()
    for name, line in PATCHES.items():
        old = source.replace(LINE, "an older line") if line is None else source
        new = source.replace(LINE, line or "a new line")
        lines = (text.splitlines(keepends=True) for text in (old, new))
        diff = difflib.unified_diff(*lines, f"a/{PATH}", f"b/{PATH}")
        (tmp_path / f"{name}.patch").write_text("".join(diff))
    (tmp_path / "stacks.txt").write_text("fp8_same+fp8_off\n")
    monkeypatch.setattr(patched, "PATCHES", tmp_path)
    monkeypatch.setattr(script, "Copy", Copy)
    monkeypatch.setattr(script, "candidates", lambda _: {})
    monkeypatch.setattr(script, "compile_ahead", lambda *_: None)
    monkeypatch.setattr(script, "capture_calls", lambda call, _: SimpleNamespace(call=call))
    monkeypatch.setattr(script, "replays", lambda graph, call, out: graph.call(-1) is None)
    monkeypatch.setattr(script, "interleave", interleave)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(checks, "failures", [])
    monkeypatch.setattr(peers, "ROTATED", 0)
    with OnCpu():
        yield


def interleave(graphs, copies, rounds):
    return {kind: [float(2 + i)] * rounds for i, kind in enumerate(graphs)}


def ablate(tmp_path, **changes):
    """The rows by variant, and how many checks failed."""
    options = {"types": ["fp8"], "variants": [], "shapes": ["2x70x16x1-ragged"], "budget": 9.0}
    options |= {"launches": 3, "rounds": 2, "csv": tmp_path / "rows.csv"}
    facts = dict.fromkeys(script.FACTS, "")
    script.ablate(argparse.Namespace(**options | changes), facts, tmp_path / "copies")
    with (tmp_path / "rows.csv").open(newline="") as file:
        return {row["variant"]: row for row in csv.DictReader(file)}, len(checks.failures)


def test_all_patches_of_a_type_are_rows(on_cpu, tmp_path, capsys):
    before = {name: id(module) for name, module in sys.modules.items() if patched.is_own(name)}
    path = list(sys.path)
    rows, failures = ablate(tmp_path)
    wanted = ["unpatched", "fp8_off", "fp8_raises", "fp8_same", "fp8_stale", "plan_any",
              "fp8_same+fp8_off"]  # fmt: skip
    assert sorted(rows) == sorted(wanted) and failures == 4
    assert [name for name in wanted if rows[name]["ok"] == "1"] == [
        "unpatched", "fp8_same", "plan_any"
    ]  # fmt: skip
    right, off, raises, stale = (rows[f"fp8_{x}"] for x in ("same", "off", "raises", "stale"))
    shape = [right[name] for name in script.SHAPE]
    assert shape == ["2", "70", "1", "16", "1", "fp8"]
    assert float(right["error"]) < 0.004 and right["different"] == "0" and right["p50_us"]
    # What is wrong is timed all the same.
    assert float(off["error"]) == pytest.approx(0.1, rel=0.1) and off["p50_us"]
    assert raises["problem"] == "RuntimeError no kernel" and not raises["p50_us"]
    assert "fp8_stale.patch does not apply" in stale["problem"] and not stale["p50_us"]
    assert "us, +1.00 of unpatched" in capsys.readouterr().out
    # The package itself is the one that was imported.
    after = {name: id(module) for name, module in sys.modules.items() if patched.is_own(name)}
    assert before == {name: after[name] for name in before} and sys.path == path
    assert sys.modules["mla_fusion.attention.reference"] is reference


def test_variants_that_are_asked_for(on_cpu, tmp_path, monkeypatch):
    named = ["fp8_same", "plan_any", "bf16_other"]
    rows, failures = ablate(tmp_path, variants=named, shapes=["1x64x16x1", "2x64x16x1"])
    assert sorted(rows) == ["fp8_same", "plan_any", "unpatched"] and failures == 0
    rows, _ = ablate(tmp_path / "late", variants=["fp8_same"], budget=-1.0)
    assert rows == {}


@pytest.mark.parametrize("what", ["output", "LSE"])
def test_a_launch_that_differs(on_cpu, tmp_path, monkeypatch, what):
    """By less than the error that is allowed."""
    count = iter(range(100))

    class Racing(script.Copy):
        def __init__(self, target):
            super().__init__(target)
            launch = self.launch.launch

            def sometimes(inputs, plan, i, out, lse, config):
                launch(inputs, plan, i, out, lse, config)
                if target.name == "fp8_same" and next(count) == 2:
                    (out if what == "output" else lse).mul_(
                        1 + 2**-8 if what == "output" else 1 + 2**-20
                    )

            self.launch.launch = sometimes

    monkeypatch.setattr(script, "Copy", Racing)
    rows, failures = ablate(tmp_path, variants=["fp8_same"])
    assert rows["fp8_same"]["different"] == "1" and rows["fp8_same"]["ok"] == "0"
    assert rows["unpatched"]["ok"] == "1" and failures == 1


def test_compiled_ahead(on_cpu, tmp_path):
    """In another process: the kernels of all shapes, for short sequences."""
    folder = patched.copy_package("fp8_raises", tmp_path)
    cases = [shape_of(text, "fp8") for text in ("1x8192x64x1", "2x64x64x1")]
    with pytest.raises(RuntimeError, match="no kernel"):
        script.compile_variant(("fp8_raises", folder, cases))
    folder = patched.copy_package("fp8_same", tmp_path)
    assert script.compile_variant(("fp8_same", folder, cases)) == "fp8_same H=64"


def test_patches_apply_inside_of_a_repository_too(tmp_path, monkeypatch):
    """Git would look for the paths below the repository's root, and skip the patch."""
    (tmp_path / ".git").mkdir()
    for name in ("HEAD", "config"):
        (tmp_path / ".git" / name).write_text("ref: refs/heads/main\n" if name == "HEAD" else "")
    for name in ("objects", "refs"):
        (tmp_path / ".git" / name).mkdir()
    for name in patched.variants("fp8")[:1]:
        copied = patched.copy_package(name, tmp_path / "copies")
        monkeypatch.setattr(patched.shutil, "which", lambda _: None)
        again = patched.copy_package(name, tmp_path / "without git")
        same = [file.read_bytes() for file in sorted(copied.rglob("*.py"))]
        assert same == [file.read_bytes() for file in sorted(again.rglob("*.py"))]
        whole = patched.copy_package(patched.UNPATCHED, tmp_path / "copies")
        assert same != [file.read_bytes() for file in sorted(whole.rglob("*.py"))]


def test_shapes():
    ragged = shape_of("2x64x16x4-ragged", "fp8")
    assert (ragged.batch, ragged.context, ragged.heads, ragged.queries) == (2, 64, 16, 4)
    assert ragged.ragged and not shape_of("2x64").ragged
    with pytest.raises(ValueError, match="raged"):
        shape_of("2x64-raged")


def test_a_silent_child_is_killed(capsys):
    start = time.monotonic()
    code = "import time; print('a kernel', flush=True); time.sleep(60)"
    assert watched.watch([sys.executable, "-c", code], 2.0) == 1
    assert time.monotonic() - start < 30
    assert capsys.readouterr().out.startswith("a kernel\nFAIL nothing printed for 2 s")
    assert watched.watch([sys.executable, "-c", "raise SystemExit(3)"], 30.0) == 3
