"""`benchmarks/sparse.py` on a CPU: kernels by the reference, FlashMLA by a mock that reads bytes.

The mock takes what FlashMLA's interface allows of sparse decode (`third_party/flashmla` of vLLM
0.26 to 0.33), and nothing else.
"""

import __future__

import ast
import csv
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sparse
import sparse_peers
import torch

from mla_fusion.attention import buffers
from mla_fusion.attention import triton as provider
from mla_fusion.attention.layouts import FP8_DS_MLA_V4
from mla_fusion.kernels import triton as region
from tests.attention.pages import VALUES
from tests.sparse.launched import launch

BF16 = torch.bfloat16


def stored_key(cache, slot):
    """The key in a slot of a cache [blocks, page, 1, bytes], of its raw bytes."""
    page, size = cache.shape[1], cache.shape[3]
    raw = cache.as_strided((len(cache), cache.stride(0)), (cache.stride(0), 1)).numpy()
    block, entry = raw[slot // page], slot % page
    if size == 656:
        row = block[656 * entry : 656 * (entry + 1)]
        scales = np.repeat(row[512:528].view(np.float32), 128)
        codes, wide = row[:512], row[528:]
    else:
        row, tail = block[576 * entry : 576 * (entry + 1)], block[576 * page + 8 * entry :]
        scales = np.repeat(2.0 ** (tail[:7].astype(float) - 127), 64)
        codes, wide = row[:448], row[448:]
    rotated = (wide.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.concatenate((VALUES[False][codes] * scales, rotated))


class FlashMLA:
    """Functions for `vllm.v1.attention.ops.flashmla`; `calls` are the keywords of each call."""

    def __init__(self):
        self.calls = []
        self.sinks = True

    def get_mla_metadata(self):
        return SimpleNamespace(made_for=None), None

    def take(self, q, cache, indices, lengths):
        """A scope of sparse decode."""
        width, size, step = (512, 584, 576) if q.shape[3] == 512 else (576, 656, 656)
        assert q.shape[3] == width and cache.dtype == torch.uint8
        assert cache.shape[2:] == (1, size) and cache.stride(0) % step == 0
        assert cache.stride(1) == size and cache.stride(3) == 1
        assert indices.dtype == torch.int32 and indices.shape[:2] == q.shape[:2]
        assert indices.shape[2] % 64 == 0 and indices.is_contiguous()
        if lengths is not None:
            assert lengths.dtype == torch.int32 and lengths.shape == q.shape[:1]

    def flash_mla_with_kvcache(
        self, q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata,
        num_splits=None, softmax_scale=None, causal=False, is_fp8_kvcache=False, indices=None,
        attn_sink=None, extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None,
        extra_topk_length=None, out=None,
    ):  # fmt: skip
        given = {name: value for name, value in locals().items() if name != "self"}
        self.calls.append(given)
        assert q.dtype == BF16 and q.dim() == 4 and q.shape[2] in (64, 128)
        assert head_dim_v == 512 and is_fp8_kvcache and not causal and num_splits is None
        shape = (*q.shape, indices.shape[2], extra_k_cache is None)
        assert tile_scheduler_metadata.made_for in (None, shape)
        tile_scheduler_metadata.made_for = shape
        scopes = [(k_cache, indices, topk_length)]
        if extra_k_cache is not None:
            scopes.append((extra_k_cache, extra_indices_in_kvcache, extra_topk_length))
        else:
            assert extra_indices_in_kvcache is None and extra_topk_length is None
        if q.shape[3] == 576:
            assert len(scopes) == 1 and topk_length is None
        for scope in scopes:
            self.take(q, *scope)
        if attn_sink is not None:
            assert attn_sink.dtype == torch.float32 and attn_sink.shape == q.shape[2:3]
        if out is None:
            out = q.new_empty(*q.shape[:3], 512)
        assert out.shape == (*q.shape[:3], 512) and out.dtype == BF16 and out.is_contiguous()
        for sequence in range(q.shape[0]):
            for row in range(q.shape[1]):
                keys = torch.tensor(np.array([
                    stored_key(cache, slot)
                    for cache, slots, lengths in scopes
                    for slot in slots[sequence, row, : None if lengths is None
                                      else lengths[sequence]].tolist()
                ]))  # fmt: skip
                scores = q[sequence, row].double() @ keys.T * softmax_scale
                total = scores.logsumexp(-1)
                if attn_sink is not None and self.sinks:
                    total = torch.logaddexp(total, attn_sink.double())
                out[sequence, row] = ((scores - total[:, None]).exp() @ keys[:, :512]).to(BF16)
        return out, None


@pytest.fixture
def flashmla(monkeypatch):
    """The mock, and small inputs on a CPU; a graph is its calls, and takes as many microseconds."""
    from vllm.v1.attention.ops import flashmla as ops

    mock = FlashMLA()
    for name in ("flash_mla_with_kvcache", "get_mla_metadata"):
        monkeypatch.setattr(ops, name, getattr(mock, name))
    monkeypatch.setattr(sparse_peers, "DEVICE", "cpu")
    monkeypatch.setattr(sparse_peers, "ROTATED", 0)
    monkeypatch.setattr(provider, "require", lambda: None)
    monkeypatch.setattr(region, "require", lambda: None)
    monkeypatch.setattr(buffers, "multiprocessors", lambda device: 4)
    monkeypatch.setattr(provider, "launch", launch)
    monkeypatch.setattr(sparse, "capture_calls", lambda call, count: (call, count))
    monkeypatch.setattr(
        sparse, "interleave",
        lambda graphs, layers, rounds: {
            name: [2.0 + (name != "ours")] * rounds for name in graphs
        },
    )  # fmt: skip
    monkeypatch.setattr(sparse, "environment", lambda commit: {"gpu": "none", "commit": commit})
    monkeypatch.setattr(sparse, "measure_ceilings", lambda: SimpleNamespace(gbps=100.0))
    return mock


def run(monkeypatch, tmp_path, *options):
    """Rows of a run, whose numbers are numbers."""
    file = tmp_path / "out.csv"
    argv = ["sparse.py", "--csv", str(file), "--context", "64", *options]
    monkeypatch.setattr(sys, "argv", argv)
    sparse.main()
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


@pytest.mark.parametrize("heads", ["8", "65"])
def test_v4_rows(flashmla, monkeypatch, tmp_path, capsys, heads):
    options = ["--cache", "fp8_ds_mla_v4", "--topk", "64", "--tokens", "2", "--heads", heads]
    ours, theirs = run(monkeypatch, tmp_path, *options)
    assert [ours["candidate"], theirs["candidate"]] == ["ours", "flashmla"]
    assert [ours["vllm_default"], theirs["vllm_default"]] == ["0", "1"]
    for row in (ours, theirs):
        assert (row["cache"], row["heads"], row["topk"]) == ("fp8_ds_mla_v4", heads, "64")
        assert 0 < float(row["error"]) < 4e-3
        # 192 entries and slots of two tokens, and rows of 512 values in and out.
        size = 2 * 192 * (584 + 4) + 2 * int(heads) * 1024 * 2
        assert float(row["gbps"]) == pytest.approx(size / float(row["p50_us"]) / 1e3, rel=1e-3)
        assert float(row["share"]) == pytest.approx(float(row["gbps"]) / 100, rel=1e-3)
    printed = capsys.readouterr().out
    assert "geometric mean 1.50" in printed and "rows that are wrong: []" in printed


def test_v3_rows(flashmla, monkeypatch, tmp_path, capsys):
    options = ["--cache", "fp8_ds_mla", "bf16", "--topk", "64", "--tokens", "2", "--heads", "64"]
    rows = run(monkeypatch, tmp_path, *options)
    assert [row["candidate"] for row in rows] == ["ours", "flashmla", "flashmla, by token", "ours"]
    assert [row["vllm_default"] for row in rows] == ["0", "0", "1", "0"]
    assert all(0 < float(row["error"]) < 4e-3 for row in rows)
    assert "fa3 left out" in capsys.readouterr().out


def test_a_wrong_result_is_named(flashmla, monkeypatch, tmp_path, capsys):
    flashmla.sinks = False
    options = ["--cache", "fp8_ds_mla_v4", "--topk", "64", "--tokens", "1", "--heads", "8"]
    ours, theirs = run(monkeypatch, tmp_path, *options)
    assert float(ours["error"]) < 4e-3 < sparse.TOLERANCE < float(theirs["error"])
    wrong = capsys.readouterr().out.split("rows that are wrong: ")[1]
    assert "'flashmla'" in wrong and "'ours'" not in wrong


def test_slots_of_v4_are_a_window_in_a_row_and_distinct_entries(flashmla):
    case = sparse_peers.Case(3, 8, 64, 128, "fp8_ds_mla_v4")
    inputs = sparse_peers.make(case)
    for window, chosen in inputs.scopes:
        assert window.table.shape == (3, 128) and (window.table.diff() == 1).all()
        for scope, own in ((window, 256), (chosen, 128)):
            rows = [set(row) for row in scope.table.tolist()]
            assert [len(row) for row in rows] == [scope.table.shape[1]] * 3
            assert all(slot // own == token for token, row in enumerate(rows) for slot in row)
            assert scope.layout is FP8_DS_MLA_V4 and scope.kv_cache.stride(0) == 65 * 576
    assert inputs.scopes[0][0].kv_cache.data_ptr() != inputs.scopes[1][0].kv_cache.data_ptr()
    defaults = [sparse_peers.TOPK[name] for name in ("fp8_ds_mla", "fp8_ds_mla_v4")]
    assert defaults == [(2048,), (512, 1024)]


@pytest.mark.parametrize("name", ["fp8_ds_mla", "fp8_ds_mla_v4"])
def test_entries_hold_what_was_drawn(flashmla, name, monkeypatch):
    drawn, draw = [], torch.randn

    def randn(*size, **options):
        drawn.append(draw(*size, **options).flatten(1))
        return drawn[-1].view(size)

    monkeypatch.setattr(torch, "randn", randn)
    monkeypatch.setattr(sparse_peers, "CHUNK", 128)
    cache = sparse_peers.make_cache(sparse_peers.Case(1, 8, 64, 64, name), 320).unsqueeze(-2)
    assert len(cache) == 5 and len(drawn) == 6
    values, rotated = torch.cat(drawn[::2]), torch.cat(drawn[1::2])
    for slot in (0, 63, 64, 127, 128, 319):
        want = torch.cat((values[slot], rotated[slot])).numpy()
        # e4m3 keeps 3 bits, and near zero steps of 2^-9 times the scale, at most 2 * 5 / 448.
        np.testing.assert_allclose(
            stored_key(cache, slot), want, rtol=2**-4, atol=2**-10 * 10 / 448
        )


def layer_of_vllm(**names):
    """Functions of vLLM's layer, which sees `names`: its module imports half of vLLM."""
    vllm = Path(importlib.util.find_spec("vllm").origin).parent
    tree = ast.parse((vllm / "models/deepseek_v4/nvidia/flashmla.py").read_text())
    [layer] = [node for node in tree.body if getattr(node, "name", "").endswith("Attention")]
    tree.body = [node for node in layer.body if isinstance(node, ast.FunctionDef)]
    for function in tree.body:
        function.decorator_list = []
    flags = __future__.annotations.compiler_flag
    exec(compile(tree, "layer of DeepSeek-V4", "exec", flags), names)
    return SimpleNamespace(**names)


def test_v4_is_called_as_vllm_calls_it(flashmla):
    """vLLM's own layer and the benchmark, with the same tensors, reach FlashMLA alike."""
    layer = layer_of_vllm(torch=torch, flash_mla_with_kvcache=flashmla.flash_mla_with_kvcache)
    case = sparse_peers.Case(2, 20, 64, 64, "fp8_ds_mla_v4")
    inputs = sparse_peers.make(case)
    call, out = sparse_peers.flashmla_v4(inputs)
    call(-1)
    tokens = torch.full((2,), 1, dtype=torch.int32)
    for heads in (1, 8, 16, 64, 65, 128):
        shape = sparse_peers.Case(1, heads, 64, 64, "fp8_ds_mla_v4")
        assert layer.get_padded_num_q_heads(None, heads) == sparse_peers.padded_heads(shape)
    mine = flashmla.calls[0]
    padded = mine["q"].squeeze(1)
    assert (padded[:, :20] == inputs.q).all() and (padded[:, 20:] == 0).all()
    assert (mine["attn_sink"][20:] == -torch.inf).all()
    window, chosen = inputs.scopes[-1]
    own = SimpleNamespace(
        compress_ratio=128, scale=case.scale, attn_sink=mine["attn_sink"],
        swa_cache_layer=SimpleNamespace(kv_cache=window.kv_cache),
    )  # fmt: skip
    swa = SimpleNamespace(
        num_decodes=2, num_decode_tokens=2, is_valid_token=tokens.bool(),
        decode_swa_indices=window.table.unsqueeze(1), decode_swa_lens=128 * tokens,
        tile_sched_c128a=flashmla.get_mla_metadata()[0],
    )  # fmt: skip
    sparse_metadata = SimpleNamespace(
        block_size=256, c128a_global_decode_topk_indices=chosen.table.unsqueeze(1),
        c128a_decode_topk_lens=64 * tokens,
    )  # fmt: skip
    theirs_out = torch.empty_like(padded)
    layer._forward_decode(
        own, padded, chosen.kv_cache, swa, sparse_metadata, swa_only=False, output=theirs_out
    )
    theirs = flashmla.calls[1]
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert (value.dtype, value.shape, value.stride()) == (
                mine[name].dtype, mine[name].shape, mine[name].stride()
            ), name  # fmt: skip
            assert torch.equal(value, mine[name]), name
        elif name != "tile_scheduler_metadata":
            assert value == mine[name], name
    assert torch.equal(theirs_out[:, :20], out)
