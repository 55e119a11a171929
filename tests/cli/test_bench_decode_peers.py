"""What `mla-fusion bench decode` times: inputs, exact results, and how TRITON_MLA is called."""

import dataclasses
import inspect
import sys
from types import SimpleNamespace

import pytest
import torch

from mla_fusion.measure import decode_peers as peers
from tests.gpus import imitate


@pytest.mark.parametrize("dtype", [peers.BF16, peers.FP8])
@pytest.mark.parametrize("page", [16, 64])
def test_ours_is_what_float64_attention_gives(on_cpu, dtype, page):
    case = peers.Case(3, 100, 2, dtype, ragged=True, page=page, latent=32, rope=16)
    inputs = peers.make(case)
    peers.ours(inputs)(0)
    assert peers.error(inputs) <= peers.TOLERANCE
    scale = 0.5 if dtype == peers.FP8 else 1.0  # of query and cache
    for b, length in enumerate(case.lengths()):
        at = torch.arange(length)
        keys = inputs.caches[0][inputs.table[b, at // page].long(), at % page].double() * scale
        scores = inputs.q[b].double() * scale @ keys.T / 48**0.5
        want, _ = peers.exact(inputs, b)
        torch.testing.assert_close(want[0], scores.softmax(-1) @ keys[:, :32])
    inputs.out[2, 1] *= 1.02
    assert peers.error(inputs) > peers.TOLERANCE
    inputs.out[2, 1, 0] = torch.nan
    assert not peers.error(inputs) <= peers.TOLERANCE


@pytest.mark.parametrize("dtype", [peers.BF16, peers.FP8])
def test_behind_w_uv_the_product_is_checked(on_cpu, monkeypatch, dtype):
    """Each call has a W_UV of its own, laid out as vLLM's; that of another call is found."""
    case = peers.Case(3, 100, 2, dtype, queries=2, latent=32, rope=16, values=24)
    monkeypatch.setattr(peers, "ROTATED", 2 * case.bytes())
    inputs = peers.make(case)
    assert [w.shape for w in inputs.w_uv] == [(2, 32, 24)] * 2 == [(2, 32, 24)] * len(inputs.caches)
    assert inputs.w_uv[0].stride() == (24 * 32, 1, 32)
    for candidate in (peers.ours, vllms):
        call, apart = peers.build(inputs, candidate)
        assert apart <= peers.TOLERANCE and inputs.out.shape == (6, 2, 24)
        call(-1)
        assert peers.error(inputs) == apart
        call(0)
        assert peers.error(inputs) > peers.TOLERANCE
        call(-1)
        inputs.w_uv.reverse()
        assert peers.error(inputs) > peers.TOLERANCE
        inputs.w_uv.reverse()


def vllms(inputs):
    """A peer: float64 attention, then what follows a decode of vLLM's."""

    def decode(i):
        of_call = dataclasses.replace(inputs, caches=[inputs.caches[i]], w_uv=[])
        found = [peers.exact(of_call, b)[0] for b in range(inputs.case.batch)]
        return torch.cat(found).to(peers.BF16)

    return inputs.behind(decode)


def test_the_fewest_bytes_and_operations_count_w_uv():
    alone = peers.Case(3, 100, 2, peers.FP8, queries=2, latent=32, rope=16)
    behind = dataclasses.replace(alone, values=24)
    assert behind.bytes() - alone.bytes() == 2 * (2 * 32 * 24)
    assert behind.flops() - alone.flops() == 2 * (6 * 2 * 32 * 24)


@pytest.mark.parametrize("chunks", [(), (32, 32, 32)])
@pytest.mark.parametrize("dtype", [peers.BF16, peers.FP8])
def test_triton_mla_is_called_with_what_vllm_takes(on_cpu, monkeypatch, dtype, chunks):
    """With the shape's page size, and dequantized where the cache is fp8. FlashMLA is refused if
    batches may not differ, and a sequence is not split."""
    from vllm.v1.attention.backends.mla import triton_mla as backend
    from vllm.v1.attention.ops import triton_decode_attention as module

    signature, given = inspect.signature(module.decode_attention_fwd), []

    def take(*args, **kwargs):
        given.append(signature.bind(*args, **kwargs).arguments)
        given[-1]["o"].fill_(2.0)

    monkeypatch.setattr(module, "decode_attention_fwd", take)
    # vLLM leaves Triton out on a CPU, and computes this number by it.
    monkeypatch.setattr(backend, "_compute_num_kv_splits", lambda max_seq_len, sm_count: sm_count)
    imitate(monkeypatch, "sm_90", sms=4)
    shape = {"queries": 2, "page": 16, "latent": 32, "rope": 16, "chunks": chunks}
    inputs = peers.make(peers.Case(2, 40, 2, dtype, **shape))
    peers.triton_mla(inputs)(-1)
    [arguments] = given[:1]
    scale = 0.5 if dtype == peers.FP8 else 1.0
    assert arguments["page_size"] == 16 and arguments["is_mla"] is True
    assert arguments["q"].dtype == peers.BF16 and inputs.out.eq(2).all()
    assert float(arguments["k_scale"]) == float(arguments["v_scale"]) == scale
    assert torch.equal(arguments["q"].float(), inputs.q.float() * scale)
    assert arguments["v_buffer"].shape == (6, 16, 1, 32)
    # A query row is a sequence, which ends with it.
    [table, lens] = list(arguments.values())[5:7]
    assert lens.tolist() == [39, 40, 39, 40] and lens.dtype == torch.int32
    assert torch.equal(table, inputs.table[[0, 0, 1, 1]])
    splits, like_deepseek = 1 if chunks else 4, {"latent": 512, "rope": 64}
    assert arguments["num_kv_splits"] == splits
    assert arguments["attn_logits"].shape == (4, 2, splits, 33)
    default = "fa3" if dtype == peers.BF16 else "triton_mla" if chunks else "flashmla"
    assert peers.vllm_default(dataclasses.replace(inputs.case, **like_deepseek)) == default


@pytest.mark.parametrize("dtype", [peers.BF16, peers.FP8])
def test_flashinfer_is_called_as_vllm_calls_it(on_cpu, monkeypatch, dtype):
    """On a GPU of another architecture it is left out."""
    given, sizes = [], []

    def take(**arguments):
        given.append(arguments)
        return torch.full((*arguments["query"].shape[:3], 32), 2.0, dtype=peers.BF16)

    def size(*shape):
        sizes.append(shape)
        return 8

    utils = SimpleNamespace(
        get_trtllm_gen_multi_ctas_kv_counter_bytes=size, get_device_sm_count=lambda _: 4
    )
    decode = SimpleNamespace(trtllm_batch_decode_with_kv_cache_mla=take)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(utils=utils))
    monkeypatch.setitem(sys.modules, "flashinfer.decode", decode)
    inputs = peers.make(peers.Case(2, 40, 2, dtype, queries=2, latent=32, rope=16))
    imitate(monkeypatch, "sm_90")
    with pytest.raises(RuntimeError, match="sm_100"):
        peers.flashinfer_mla(inputs)
    imitate(monkeypatch, "sm_103")
    peers.flashinfer_mla(inputs)(-1)
    [arguments], scale = given, 0.5 if dtype == peers.FP8 else 1.0
    assert inputs.out.eq(2).all() and arguments["query"].shape == (2, 2, 2, 48)
    assert torch.equal(arguments["kv_cache"][:, 0].float(), inputs.caches[-1].float())
    assert arguments["bmm1_scale"] == pytest.approx(scale**2 / 48**0.5)
    assert arguments["bmm2_scale"] == scale
    assert sizes == [(2, 2, 4)] and len(arguments["multi_ctas_kv_counter_buffer"]) == 8
