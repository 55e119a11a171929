"""Layers of vLLM's FLASHMLA_SPARSE on a CPU, by the backend CUSTOM, with their metadata.

Classes and builder are vLLM's own. `imitate` replaces what needs a GPU: kernels, by the reference
or plain torch, and what asks about the GPU.
"""

import contextlib
import dataclasses
import types

import numpy as np
import pytest
import torch

from mla_fusion import gpu
from mla_fusion.attention import reference
from mla_fusion.attention import triton as provider
from mla_fusion.attention.plan.inputs import Scope
from mla_fusion.config import vllm_compat
from mla_fusion.kernels import ProviderUnavailable
from mla_fusion.kernels import triton as region
from mla_fusion.runtime import sparse_step
from tests import gpus
from tests.attention import decodes
from tests.attention.pages import V32, Cache
from tests.step import forward_pass

BF16 = torch.bfloat16
PAGE, TOPK = 64, 128
K_SCALE, Q_SCALE = 0.25, 0.0625
SIZES = {"q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
         "qk_head_dim": 192, "v_head_dim": 128, "kv_b_proj": None}  # fmt: skip


@contextlib.contextmanager
def kept_environment():
    """vLLM sets a variable for good when it makes the config of this class, from 0.29 on."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
        monkeypatch.delenv("VLLM_USE_BREAKABLE_CUDAGRAPH")
        yield


def imitate(monkeypatch):
    """Let layers be made and run here: steps of up to 16 heads and 15 tokens are ours."""
    from vllm import _custom_ops
    from vllm.utils import torch_utils
    from vllm.v1.attention.backends.mla import flashmla_sparse, sparse_utils

    monkeypatch.setattr(vllm_compat, "gpu_arch", lambda: "sm_90")
    monkeypatch.setattr(region, "require", lambda: None)
    monkeypatch.setattr(provider, "require", lambda: None)
    gpus.imitate(monkeypatch, "", sms=4)
    monkeypatch.setattr(provider, "launch", launched)
    monkeypatch.setattr(sparse_utils, "triton_convert_req_index_to_global_index", to_slots)
    monkeypatch.setattr(
        _custom_ops, "concat_mla_q", lambda a, b, out: out.copy_(torch.cat((a, b), -1))
    )
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(torch_utils, "PIN_MEMORY", False, raising=False)
    monkeypatch.setattr(flashmla_sparse, "num_compute_units", lambda index: 4)
    monkeypatch.setattr(flashmla_sparse, "get_mla_metadata", lambda *_, **__: (None, None))
    monkeypatch.setattr(sparse_step, "most_tokens", lambda heads, _: 15 if heads <= 16 else 0)


def launched(given):
    """The kernels, by the reference, in fp32 and without rounding of keys."""
    plan, tokens, sparse = given.plan, len(given.q), given.sparse
    assert plan.step.num_tokens == tokens
    end = plan.kv_indptr[1 : tokens + 1] - plan.kv_indptr[:tokens]
    scopes = [Scope(sparse.extra.kv_cache, sparse.extra.table, given.layout)]
    lengths = [end.long()]
    if sparse.first:
        scopes = [Scope(given.kv_cache, given.block_table, given.layout), *scopes]
        lengths = [sparse.lens[:tokens].long(), end.long() - sparse.first]
    out, lse = reference.sparse_mla_decode(
        given.q, scopes, lengths, latent=512, softmax_scale=given.softmax_scale,
        kv_dtype=plan.settings.kv_dtype, sink=sparse.sink, q_scale=given.q_scale,
        kv_scale=given.kv_scale,
    )  # fmt: skip
    given.out.copy_(out)
    if given.lse is not None:
        given.lse.copy_(lse)


def to_slots(req_id, block_table, token_indices, BLOCK_SIZE, NUM_TOPK_TOKENS, stride=None):
    """vLLM's kernel, as its docstring has it."""
    assert req_id.shape[0] == token_indices.shape[0]
    assert token_indices.shape[1] == NUM_TOPK_TOKENS and NUM_TOPK_TOKENS % 128 == 0
    column = token_indices // BLOCK_SIZE
    inside = (token_indices >= 0) & (column < block_table.shape[1])
    blocks = block_table[req_id.long()[:, None], column.clamp(0, block_table.shape[1] - 1).long()]
    slots = blocks * (stride or BLOCK_SIZE) + token_indices % BLOCK_SIZE
    return torch.where(inside, slots, -1).int()


def layer(config, heads=16, cache="fp8_ds_mla"):
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    chosen = torch.full((64, TOPK), -1, dtype=torch.int32)
    made = AttentionBackendEnum.CUSTOM.get_class().get_impl_cls()
    with set_current_vllm_config(config):
        impl = made(
            heads, 576, decodes.SCALE, 1, None, None, cache, None, "decoder", None,
            **SIZES, topk_indices_buffer=chosen,
        )  # fmt: skip
    load(config, impl)
    return impl


def load(config, *impls):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    backend = AttentionBackendEnum.CUSTOM.get_class()
    layers = [types.SimpleNamespace(impl=impl, attn_backend=backend) for impl in impls]
    sparse_step.attach(dict(enumerate(layers)), config, True)


@dataclasses.dataclass
class Batch:
    """Requests of so many cached and new tokens; `padding` of a graph: requests without tokens, and
    as many rows that belong to none."""

    requests: tuple
    padding: int = 0

    def common(self, tables):
        """What vLLM's model runner hands to a builder."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        new = [n for _, n in self.requests] + [0] * self.padding
        tokens = sum(new) + self.padding
        lengths = [sum(r) for r in self.requests] + [0] * self.padding
        starts = torch.tensor([0, *np.cumsum(new)], dtype=torch.int32)
        lens = torch.tensor(lengths, dtype=torch.int32)
        made = CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lens,
            seq_lens_cpu_upper_bound=lens, num_reqs=len(new), num_actual_tokens=tokens,
            max_query_len=max(new), max_seq_len=max(lengths), block_table_tensor=tables,
            slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        )  # fmt: skip
        owners = torch.zeros(tokens, dtype=torch.int32)
        owners[: sum(new)] = torch.arange(len(new)).repeat_interleave(torch.tensor(new))
        made._token_to_req_indices_cache = owners  # else a kernel makes it, from vLLM 0.29 on
        return made


class Step:
    """The inputs of a step, and its latents in float64.

    Each token chooses some of the positions before it, in any order; other entries are NaN.
    `dense`: as many as there are columns, or all; they are the first columns, as vLLM's indexer
    leaves them, and -1 behind. An fp8 cache holds value / K_SCALE; of its query fp8 holds
    value / Q_SCALE. `gap`: rows between two blocks of a cache that is not packed.
    """

    def __init__(self, config, impl, batch, seed=0, dense=False, gap=0):
        rng = np.random.default_rng(seed)
        packed = impl.kv_cache_dtype == "fp8_ds_mla"
        stored = fp8_type() if impl.kv_cache_dtype == "fp8" else BF16
        scale = K_SCALE if stored != BF16 else 1.0
        count = len(batch.requests) + batch.padding
        tables = rng.permutation(4 * count).reshape(count, 4)
        written = Cache(V32, 4 * count, PAGE)
        plain = torch.full((4 * count, PAGE + gap, 576), torch.nan).to(stored)[:, :PAGE]
        rows = []
        for owner, (cached, new) in enumerate(batch.requests):
            for position in range(cached, cached + new):
                number = rng.integers(0, min(position + 1, 40) + 1)
                if dense:
                    number = min(position + 1, TOPK)
                rows.append((owner, rng.permutation(position + 1)[:number]))
        rows += [(0, np.zeros(0, dtype=int))] * batch.padding
        generator = torch.Generator().manual_seed(seed)
        self.q = torch.randn(len(rows), impl.num_heads, 576, generator=generator).to(BF16)
        if stored != BF16:
            self.q = ((self.q / Q_SCALE).to(stored).float() * Q_SCALE).to(BF16)
        self.expected = torch.zeros(len(rows), impl.num_heads, 512, dtype=torch.double)
        impl.topk_indices_buffer.fill_(-1)
        for token, (owner, positions) in enumerate(rows):
            # vLLM's indexer leaves what it did not choose behind the rest; here it is anywhere.
            columns = np.arange(TOPK) if dense else rng.permutation(TOPK)
            columns = columns[: len(positions)]
            impl.topk_indices_buffer[token, columns] = torch.tensor(positions).int()
            keys = []
            for position in positions:
                slot = int(tables[owner, position // PAGE] * PAGE + position % PAGE)
                if slot not in written.keys:
                    written.write(slot, rng.normal(size=576), rng)
                    entry = torch.tensor(written.keys[slot]) / scale
                    plain[slot // PAGE, slot % PAGE] = entry.to(stored)
                key = plain[slot // PAGE, slot % PAGE].double() * scale
                keys.append(torch.tensor(written.keys[slot]) if packed else key)
            if keys:
                self.expected[token], _ = decodes.attention(
                    self.q[token].double(), torch.stack(keys), 512
                )
        self.cache = written.tensor() if packed else plain
        self.tables = torch.tensor(tables).int()
        self.builder, self.metadata = build(config, impl, batch, self.tables)

    def parts(self):
        """The query as vLLM's layer hands it over: the first part is a transposed view."""
        latent, rotated = self.q.split([512, 64], -1)
        return latent.transpose(0, 1).contiguous().transpose(0, 1), rotated


def build(config, impl, batch, tables, builder=None):
    """vLLM's builder, and the metadata of a batch by it."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    config.cache_config.cache_dtype = impl.kv_cache_dtype
    layers = config.compilation_config.static_forward_context
    backend = AttentionBackendEnum.CUSTOM.get_class()
    layers["layer"] = types.SimpleNamespace(prefill_backend=None, impl=impl, attn_backend=backend)
    dtype = torch.uint8 if impl.kv_cache_dtype.startswith("fp8") else BF16
    spec = MLAAttentionSpec(
        block_size=PAGE, num_kv_heads=1, head_size=576, dtype=dtype,
        cache_dtype_str=impl.kv_cache_dtype,
    )  # fmt: skip
    with set_current_vllm_config(config):
        builder = builder or backend.get_builder_cls()(spec, ["layer"], config, torch.device("cpu"))
        return builder, builder.build(0, batch.common(tables))


def unavailable():
    raise ProviderUnavailable("planted: no Triton here")


def plant(monkeypatch, config, impl, changes):
    """Change what a layer, its engine's configs or what asks about the GPU have of these names."""
    configs = config, config.model_config, config.parallel_config, config.attention_config
    for name, value in changes.items():
        owners = (vllm_compat, region, gpu) if callable(value) else configs
        owner = next((each for each in owners if hasattr(each, name)), impl)
        if name == "hisparse_config":
            owner = config.attention_config  # vLLM 0.26 has none
        monkeypatch.setattr(owner, name, value, raising=False)


def assert_declined(said, loaded, layers, code, *parts):
    """Layers that are `loaded` now decode nothing here, and one message says why."""
    said.clear()
    for impl in layers:
        impl.mla_fusion_step = None
    loaded(*layers)
    assert not any(impl.mla_fusion_step for impl in layers)
    [message] = said.messages
    assert all(part in message for part in (f"[{code}]", f"CUSTOM, {len(layers)} layers", *parts))


def run(impl, step, q, layer=None):
    """The decode of a step, in a forward pass of its own."""
    with forward_pass():
        return impl.forward_mqa(q, step.cache, step.metadata, layer)


def fp8_type():
    return vllm_compat.fp8_dtype()
