"""What `mla-fusion bench decode` times: inputs, exact results, and how each candidate is called."""

import inspect
from types import SimpleNamespace

import pytest
import torch

from mla_fusion.cli import bench_decode_peers as peers
from tests.on_cpu import decodes_on_cpu


@pytest.fixture
def on_cpu(monkeypatch):
    with decodes_on_cpu(monkeypatch):
        yield


@pytest.mark.parametrize("dtype", [peers.BF16, peers.FP8])
@pytest.mark.parametrize("page", [16, 64])
def test_ours_is_what_float64_attention_gives(on_cpu, dtype, page):
    case = peers.Case(3, 100, 2, dtype, ragged=True, page=page, latent=32, rope=16)
    inputs = peers.make(case)
    call, out = peers.ours(inputs)
    call(0)
    lengths = case.lengths()
    assert peers.error(inputs, out, lengths) <= peers.TOLERANCE
    scale = 0.5 if dtype == peers.FP8 else 1.0  # of query and cache
    for b, length in enumerate(lengths):
        at = torch.arange(length)
        keys = inputs.caches[0][inputs.table[b, at // page].long(), at % page].double() * scale
        scores = inputs.q[b].double() * scale @ keys.T / 48**0.5
        want, _ = peers.exact(inputs, b, length, slice(b, b + 1))
        torch.testing.assert_close(want[0], scores.softmax(-1) @ keys[:, :32])
    out[2, 1] *= 1.02
    assert peers.error(inputs, out, lengths) > peers.TOLERANCE
    out[2, 1, 0] = torch.nan
    assert not peers.error(inputs, out, lengths) <= peers.TOLERANCE


def test_a_candidate_is_checked_on_what_its_first_call_wrote(on_cpu, monkeypatch):
    """The call checked is of the cache that the check reads; the graph has one call a cache."""
    monkeypatch.setattr(peers, "ROTATED", 3 * 70 * 48 * 2)
    monkeypatch.setattr(peers, "capture_calls", lambda call, count: count)
    inputs = peers.make(peers.Case(1, 70, 2, peers.BF16, latent=32, rope=16))
    calls = []

    def build(inputs):
        call, out = peers.ours(inputs)

        def only_with_a_sign(i):
            calls.append(i)
            call(i)

        return only_with_a_sign, out

    before = [cache.data_ptr() for cache in inputs.caches]
    graph, apart, kept = peers.prepare(inputs, build)
    assert (graph, calls) == (3, [-1]) and apart <= peers.TOLERANCE and callable(kept[0])
    assert [cache.data_ptr() for cache in inputs.caches] == before


@pytest.mark.parametrize("dtype", [peers.BF16, peers.FP8])
def test_triton_mla_is_called_with_what_vllm_takes(on_cpu, monkeypatch, dtype):
    """With the shape's page size, and dequantized where the cache is fp8."""
    from vllm.v1.attention.backends.mla import triton_mla as backend
    from vllm.v1.attention.ops import triton_decode_attention as module

    signature, given = inspect.signature(module.decode_attention_fwd), []

    def take(*args, **kwargs):
        given.append(signature.bind(*args, **kwargs).arguments)

    monkeypatch.setattr(module, "decode_attention_fwd", take)
    # vLLM leaves Triton out on a CPU, and computes this number by it.
    monkeypatch.setattr(backend, "_compute_num_kv_splits", lambda max_seq_len, sm_count: sm_count)
    processors = SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: processors)
    inputs = peers.make(peers.Case(2, 40, 2, dtype, queries=2, page=16, latent=32, rope=16))
    call, out = peers.triton_mla(inputs)
    call(0)
    [arguments] = given
    scale = 0.5 if dtype == peers.FP8 else 1.0
    assert arguments["page_size"] == 16 and arguments["is_mla"] is True
    assert arguments["q"].dtype == peers.BF16 and arguments["o"] is out
    assert float(arguments["k_scale"]) == float(arguments["v_scale"]) == scale
    assert torch.equal(arguments["q"].float(), inputs.q.float() * scale)
    assert arguments["v_buffer"].shape == (6, 16, 1, 32)
    # A query row is a sequence, which ends with it.
    [table, lens] = list(arguments.values())[5:7]
    assert lens.tolist() == [39, 40, 39, 40] and lens.dtype == torch.int32
    assert torch.equal(table, inputs.table[[0, 0, 1, 1]])
    assert arguments["num_kv_splits"] == 4 and arguments["attn_logits"].shape == (4, 2, 4, 33)


def test_flashmla_in_fp8_is_called_with_what_vllm_takes(on_cpu, monkeypatch):
    from vllm.v1.attention.ops import flashmla as ops

    signature, given = inspect.signature(ops.flash_mla_with_kvcache_fp8), []

    def take(*args, **kwargs):
        given.append(signature.bind(*args, **kwargs).arguments)
        return torch.full((2, 1, 2, 32), float(len(given))), None

    monkeypatch.setattr(ops, "flash_mla_with_kvcache_fp8", take)
    monkeypatch.setattr(ops, "get_mla_metadata_dense_fp8", lambda lens, heads, keys: (lens, lens))
    inputs = peers.make(peers.Case(2, 40, 2, peers.FP8, latent=32, rope=16))
    call, out = peers.flashmla(inputs)
    call(-1)
    call(0)
    # Only the call that is checked keeps its result: a copy would be timed.
    assert float(out.max()) == float(out.min()) == 1.0
    assert given[0]["head_dim_v"] == 32 and given[0]["descale_q"] is inputs.scale
