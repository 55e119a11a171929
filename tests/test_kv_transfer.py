"""The attention op carries vLLM's KV-transfer hook: disaggregated serving breaks without it."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from vllm.utils.torch_utils import _encode_layer_name

from mla_fusion import ops, runtime
from mla_fusion.config import vllm_compat
from mla_fusion.runtime.layer_state import LayerState


@pytest.mark.parametrize("decode_tokens", [3, 1], ids=["decode-only", "mixed"])
def test_hook_runs_around_the_attention(monkeypatch, decode_tokens):
    import vllm.model_executor.layers.attention.attention as attention
    import vllm.model_executor.layers.attention.kv_transfer_utils as kv_transfer_utils

    events = Mock()  # records the calls of its attributes in order
    events.decode.side_effect = lambda q, kv_cache, metadata, layer: (q[..., :8], None)
    cache, name = torch.zeros(2, 4, 10), "model.layers.0.attn"
    layer = SimpleNamespace(
        impl=SimpleNamespace(forward_mqa=events.decode, dcp_world_size=1), kv_cache_dtype="auto",
        forward_impl=events.vllm, _v_up_proj=lambda attended, out: out.fill_(1),
        mla_fusion_state=LayerState(),
    )  # fmt: skip
    metadata = SimpleNamespace(num_actual_tokens=3, num_decode_tokens=decode_tokens)

    context = metadata, layer, cache, torch.arange(3)
    for module, asked, answer in (
        (vllm_compat, "attention_context", context),
        (attention, "get_attention_context", context),
        (kv_transfer_utils, "has_kv_transfer_group", True),
        (kv_transfer_utils, "is_v1_kv_transfer_group", True),
        (kv_transfer_utils, "get_kv_transfer_group", events),
    ):
        monkeypatch.setattr(module, asked, lambda *_, answer=answer: answer)
    runtime.attention.cache_clear()

    runtime.register_ops()
    output = torch.zeros(4, 6)
    shapes = (4, 2, 6), (4, 2, 10), (4, 8), (4, 1, 2)
    ops.get(ops.ATTENTION)(*map(torch.zeros, shapes), output, _encode_layer_name(name))
    runtime.attention.cache_clear()
    order = [called for called, _, _ in events.method_calls if called != "has_connector_metadata"]
    ran = "decode" if decode_tokens == 3 else "vllm"
    assert order == ["wait_for_layer_load", ran, "save_kv_layer"]
    events.wait_for_layer_load.assert_called_once_with(name)
    saved = events.save_kv_layer.call_args.args
    assert saved[0] == name and saved[1] is cache
    if ran == "decode":
        assert output[:3].eq(1).all() and output[3:].eq(0).all()
