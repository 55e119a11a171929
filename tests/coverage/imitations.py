"""Imitations of pieces that vLLM's CPU build lacks, so that its other code runs unchanged.

No pass of this library reads what is imitated, and an engine with the flag off has the same
imitations.
"""

import torch


def pangu_draft_attribute():
    """vLLM 0.32's OpenPangu MTP head reads an attribute its decoder layer lacks, on any device."""
    from vllm.model_executor.models.openpangu import OpenPanguDecoderLayer

    OpenPanguDecoderLayer.use_sequence_parallel_moe = False


def latents_of_any_width():
    """A decode kernel for any latent and rotated part, as TRITON_MLA is one; vLLM's kernel for the
    CPU takes 512 + 64.
    """
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    def decode(out, query, kv_cache, scale, block_tables, seq_lens):
        page, latent = kv_cache.shape[1], out.shape[-1]
        for row, length in enumerate(seq_lens.tolist()):
            if length:
                blocks = block_tables[row, : -(-length // page)].long()
                keys = kv_cache[blocks].flatten(0, 1)[:length].float()
                weights = (scale * query[row].float() @ keys.T).softmax(-1)
                out[row] = weights @ keys[:, :latent]

    ops.mla_decode_kvcache_cpu = decode
    CPUMLABackend.get_supported_head_sizes = classmethod(lambda cls: [])  # all


def several_tokens_per_decode():
    """A decode kernel that takes several tokens of a request, as most backends for GPUs have.

    vLLM's for the CPU takes one, so drafts could not be verified, nor a prompt continue what is
    in the cache: prefix caching and chunked prefill are switched off there. Each token becomes a
    row of its own, which sees the cache up to itself. Prompts go through it too, as with
    FLASH_ATTN_MLA, whose threshold of 512 tokens is taken.
    """
    from vllm.model_executor.layers.attention.mla_attention import (
        MLACommonMetadataBuilder,
        QueryLenSupport,
    )
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

    class Builder(MLACommonMetadataBuilder):
        query_len_support = QueryLenSupport.VARLEN
        reorder_batch_threshold = 512

    def forward_mqa(self, q, cache, metadata, layer):
        decode, starts = metadata.decode, metadata.query_start_loc[: metadata.num_decodes + 1]
        counts = (starts[1:] - starts[:-1]).long()
        request = torch.repeat_interleave(torch.arange(len(counts)), counts)
        behind = starts[1:].long()[request] - 1 - torch.arange(len(request))
        rows = type("Rows", (), {})()
        rows.block_table = decode.block_table[request]
        rows.seq_lens = decode.seq_lens[request] - behind.to(decode.seq_lens.dtype)
        one_each = type("Metadata", (), {"decode": rows})()
        return one_token(self, q, cache, one_each, layer)

    one_token = CPUMLAImpl.forward_mqa
    CPUMLAImpl.forward_mqa = forward_mqa
    CPUMLABackend.get_builder_cls = staticmethod(lambda: Builder)
    check = CpuPlatform.check_and_update_config

    def keep_scheduling(cls, vllm_config):
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        asked = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        prefixes = cache.enable_prefix_caching
        check(vllm_config)
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = asked
        cache.enable_prefix_caching = prefixes

    CpuPlatform.check_and_update_config = classmethod(keep_scheduling)
