"""The model of `benchmarks/engine.py sparse` on a CPU, of vLLM's class for CUDA, with the backend
CUSTOM: vLLM's profile pass, and a decode step.

Replaced are the Triton kernels of the class, by the same in plain torch, events, which a CPU does
not have, and what `layers.imitate` replaces.
"""

import importlib
import types

import engine_indexer
import pytest
import torch

from mla_fusion import plugin
from mla_fusion.kernels import reference
from mla_fusion.runtime import sparse_step
from tests.sparse import layers

plugin.register()

CLASS = "vllm.models.deepseek_v32.nvidia.model"


def norm_rope(
    positions, q_c, q_weight, q_eps, kv_c, kv_weight, kv_eps, k_pe, table, *rest, **named
):
    """`fused_norm_rope` of a layer without indexer and with a bf16 cache, if there is one."""
    assert not named["has_indexer"]
    norm, (latent, rotated) = torch.nn.functional.rms_norm, (named["kv_c_out"], named["k_pe_out"])
    latent.copy_(norm(kv_c, kv_c.shape[1:], kv_weight, kv_eps))
    rotated.copy_(reference.rotate(k_pe, positions, table, is_neox=False))
    if (cache := named["mla_kv_cache"]) is not None:
        slots = named["slot_mapping"]
        cache[slots // cache.shape[1], slots % cache.shape[1]] = torch.cat((latent, rotated), -1)
    return norm(q_c, q_c.shape[1:], q_weight, q_eps)


def q_rope(positions, q_pe, table, *rest, **named):
    """`fused_q` of a layer without indexer and with a bf16 query."""
    assert not named["has_indexer"] and not named["quantize_mqa"]
    rotated = reference.rotate(q_pe, positions, table, is_neox=False)
    return None, None, rotated.to(q_pe.dtype)


@pytest.fixture
def model(config, monkeypatch):
    """The model, its classes as `engine_indexer` leaves them."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.model_executor.models import deepseek_v2
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if not engine_indexer.has_class_for_cuda():
        pytest.skip("vLLM has a class of DeepSeek-V3.2 for CUDA from 0.29 on")
    from vllm.v1.attention.backends.mla import index_group

    attention = importlib.import_module("vllm.models.deepseek_v32.attention")
    classes = importlib.import_module(CLASS)
    layers.imitate(monkeypatch)
    monkeypatch.setattr(deepseek_v2, "Indexer", deepseek_v2.Indexer)
    monkeypatch.setattr(classes, "DeepseekV32Attention", classes.DeepseekV32Attention)
    engine_indexer.install("custom")
    monkeypatch.setattr(attention, "fused_norm_rope", norm_rope)
    monkeypatch.setattr(attention, "fused_q", q_rope)
    event = types.SimpleNamespace(record=lambda stream: None)
    monkeypatch.setattr(index_group, "_create_event", lambda: event)
    chosen = AttentionBackendEnum.CUSTOM.get_class()
    monkeypatch.setattr(mla_attention, "get_attn_backend", lambda *_, **__: chosen)
    monkeypatch.setattr(config.compilation_config, "static_forward_context", {})
    monkeypatch.setattr(config.model_config, "dtype", torch.bfloat16)
    monkeypatch.setattr(config.cache_config, "cache_dtype", "auto")
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        made = classes.DeepseekV32ForCausalLM(vllm_config=config)
        generator = torch.Generator().manual_seed(7)
        for name, weight in made.named_parameters():
            weight.data.normal_(0, 0.06, generator=generator)
            if "norm" in name:
                weight.data.fill_(1)
        process_weights_after_loading(made, config.model_config, torch.device("cpu"))
    made.model.replicated_embed = False  # else another kernel, of embedding and norm
    return made


def test_the_profile_pass(model, config):
    from vllm.forward_context import set_forward_context

    with set_forward_context(None, config, num_tokens=3), torch.no_grad():
        out = model(torch.arange(3), torch.arange(3))
    assert out.shape == (3, config.model_config.get_hidden_size()) and out.isfinite().all()


def test_a_decode_step(model, config, monkeypatch):
    """Every layer is decoded by this library over its own choice, by one plan."""
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention import MLAAttention

    attention = [each for each in model.modules() if isinstance(each, MLAAttention)]
    names = [layer.layer_name for layer in attention]
    sparse_step.attach(dict(zip(names, attention, strict=True)), config, True)
    step = attention[0].impl.mla_fusion_step
    calls, decode = [], sparse_step.Step.decode

    def watched(self, q, cache, chosen, *rest):
        out = decode(self, q, cache, chosen, *rest)
        calls.append((torch.cat(q, -1).double(), cache, chosen.clone(), out.double()))
        return out

    monkeypatch.setattr(sparse_step.Step, "decode", watched)
    batch = layers.Batch(((200, 1), (40, 1)))
    tables = torch.randperm(8, generator=torch.Generator().manual_seed(3)).view(2, 4).int()
    _, metadata = layers.build(config, attention[0].impl, batch, tables)
    positions = torch.tensor([cached for cached, _ in batch.requests])
    slots = tables[[0, 1], positions // layers.PAGE] * layers.PAGE + positions % layers.PAGE
    for layer in attention:
        layer.kv_cache = torch.randn(8, layers.PAGE, 576).to(torch.bfloat16)
    found, written = dict.fromkeys(names, metadata), dict.fromkeys(names, slots.long())
    context = set_forward_context(found, config, num_tokens=2, slot_mapping=written)
    with context, torch.no_grad():
        out = model(torch.tensor([5, 6]), positions)
    assert out.isfinite().all() and len(calls) == len(attention) == 2
    assert step.scratch.plan.refreshes == 1
    for number, (q, cache, chosen, latents) in enumerate(calls):
        expected = torch.zeros_like(chosen)
        engine_indexer.choose(positions, expected, number)
        assert torch.equal(chosen, expected)
        for token in range(2):
            row = chosen[token][chosen[token] >= 0].long()
            keys = cache[tables[token, row // layers.PAGE].long(), row % layers.PAGE].double()
            weights = (q[token] @ keys.T * attention[number].scale).softmax(-1)
            torch.testing.assert_close(
                latents[token], weights @ keys[:, :512], rtol=1e-2, atol=1e-2
            )
    assert not torch.equal(calls[0][2], calls[1][2])
