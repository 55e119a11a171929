"""`benchmarks/sparse.py` on a CPU: our kernels by the reference, a mock in FlashMLA's place."""

import csv
import sys
from types import SimpleNamespace

import pytest
import sparse
import sparse_peers

from mla_fusion.attention import triton as provider
from mla_fusion.attention.plan import buffers
from mla_fusion.kernels import triton as region
from tests.sparse.launched import launch


@pytest.fixture
def on_cpu(monkeypatch):
    """Small inputs; a graph is its calls; ours takes 2 microseconds, a peer 3."""
    for module, name, mock in (
        (sparse_peers, "DEVICE", "cpu"),
        (sparse_peers, "ROTATED", 0),
        (provider, "require", lambda: None),
        (region, "require", lambda: None),
        (buffers, "sm_count", lambda device: 4),
        (provider, "launch", launch),
        (sparse, "capture_calls", lambda call, count: call),
        (sparse, "interleave", lambda graphs, *_: {n: [2.0 + (n != "ours")] * 7 for n in graphs}),
        (sparse, "environment", lambda commit: {"gpu": "none", "commit": commit}),
        (sparse, "measure_ceilings", lambda: SimpleNamespace(gbps=100.0)),
    ):
        monkeypatch.setattr(module, name, mock)


@pytest.mark.parametrize("off", [1.0, 1.05])
@pytest.mark.parametrize("cache", sparse_peers.LAYOUTS)
def test_rows_and_what_is_wrong(on_cpu, monkeypatch, tmp_path, capsys, cache, off):
    def peer(inputs):
        call, out = sparse_peers.ours(inputs)
        return lambda i: (call(i), out.mul_(off)), out

    def absent(inputs):
        raise ImportError("no vLLM")

    name, path = (
        sparse_peers.vllm_default(sparse_peers.Case(2, 8, 64, 64, cache)),
        tmp_path / "rows",
    )
    candidates = {"ours": sparse_peers.ours, name: peer, "another": absent}
    monkeypatch.setitem(sparse.CANDIDATES, cache, candidates)
    words = ["--csv", str(path), "--context", "64", "--cache", cache, "--topk", "64"]
    monkeypatch.setattr(sys, "argv", ["sparse.py", *words, "--tokens", "2", "--heads", "8"])
    sparse.main()
    with path.open(newline="") as file:
        ours, theirs = csv.DictReader(file)
    assert [ours["vllm_default"], theirs["vllm_default"]] == ["0", "1"]
    assert 0 < float(ours["error"]) < 4e-3 and (float(theirs["error"]) > 0.01) == (off > 1)
    printed = capsys.readouterr().out
    assert "another left out: ImportError" in printed and "geometric mean 1.50" in printed
    wrong = printed.split("rows that are wrong: ")[1]
    assert (f"'{name}'" in wrong) == (off > 1) and "'ours'" not in wrong
