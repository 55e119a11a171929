"""The attention op carries vLLM's KV-transfer hook: disaggregated serving breaks without it."""

from types import SimpleNamespace

import pytest
import torch
from vllm.utils.torch_utils import _encode_layer_name

from mla_fusion import ops, runtime
from mla_fusion.config import vllm_compat


class Connector:
    """Records when a layer's cache is waited for and saved."""

    def __init__(self, events):
        self.events = events

    def has_connector_metadata(self):
        return True

    def wait_for_layer_load(self, layer_name):
        self.events.append(("load", layer_name))

    def save_kv_layer(self, layer_name, kv_cache, attn_metadata):
        self.events.append(("save", layer_name, kv_cache.data_ptr()))


@pytest.mark.parametrize("decode_tokens", [3, 1], ids=["decode-only", "mixed"])
def test_hook_runs_around_the_attention(monkeypatch, decode_tokens):
    import vllm.model_executor.layers.attention.attention as attention
    import vllm.model_executor.layers.attention.kv_transfer_utils as kv_transfer_utils

    events = []
    cache = torch.zeros(2, 4, 10)

    def forward_mqa(q, kv_cache, metadata, layer):
        events.append("decode")
        return q[..., :8], None

    def forward_impl(q, kv_c, k_pe, kv_cache, metadata, output):
        events.append("vllm")

    layer = SimpleNamespace(
        impl=SimpleNamespace(forward_mqa=forward_mqa, dcp_world_size=1),
        forward_impl=forward_impl,
        kv_cache_dtype="auto",
        _v_up_proj=lambda attended, out: out.fill_(1),
    )
    metadata = SimpleNamespace(num_actual_tokens=3, num_decode_tokens=decode_tokens)

    def context(name):
        return metadata, layer, cache, torch.arange(3)

    monkeypatch.setattr(vllm_compat, "attention_context", context)
    monkeypatch.setattr(attention, "get_attention_context", context)
    monkeypatch.setattr(kv_transfer_utils, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(kv_transfer_utils, "is_v1_kv_transfer_group", lambda: True)
    monkeypatch.setattr(kv_transfer_utils, "get_kv_transfer_group", lambda: Connector(events))
    runtime.attention.cache_clear()

    runtime.register_ops()
    output = torch.zeros(4, 6)
    ops.get(ops.ATTENTION)(
        torch.zeros(4, 2, 6),
        torch.zeros(4, 2, 10),
        torch.zeros(4, 8),
        torch.zeros(4, 1, 2),
        output,
        _encode_layer_name("model.layers.0.attn"),
    )
    runtime.attention.cache_clear()
    ran = "decode" if decode_tokens == 3 else "vllm"
    name = "model.layers.0.attn"
    assert events == [("load", name), ran, ("save", name, cache.data_ptr())]
    if ran == "decode":
        assert output[:3].eq(1).all() and output[3:].eq(0).all()
