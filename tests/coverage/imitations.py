"""Imitations of pieces that vLLM's CPU build lacks, so that its other code runs unchanged.

No pass of this library but the seventh reads what is imitated, and an engine with the flag off has
the same imitations.
"""

import itertools

import torch


def _attend(query, cache, tables, lengths, scale, latent):
    """Attention [T, H, latent] in fp32 of each row to a sequence, and its log-sum-exp [T, H]."""
    query = query.float()
    out = query.new_zeros(*query.shape[:2], latent)
    lse = query.new_full(query.shape[:2], -torch.inf)
    for row, length in enumerate(lengths.tolist()):
        if length:
            blocks = tables[row, : -(-length // cache.shape[1])].long()
            keys = cache[blocks].flatten(0, 1)[:length].float()
            scores = scale * query[row] @ keys.T
            lse[row] = scores.logsumexp(-1)
            out[row] = scores.softmax(-1) @ keys[:, :latent]
    return out, lse


def pangu_draft_attribute():
    """vLLM 0.32's OpenPangu MTP head reads an attribute its decoder layer lacks, on any device."""
    from vllm.model_executor.models.openpangu import OpenPanguDecoderLayer

    OpenPanguDecoderLayer.use_sequence_parallel_moe = False


def faster_products():
    """Linear layers are torch's, as on a GPU, and a plan of this library was measured faster for
    each of their products."""
    from torch.nn.functional import linear
    from vllm.model_executor.layers import utils

    from mla_fusion import projections
    from mla_fusion.projections import reference, triton

    def dispatch(layer, remove_weight):
        layer.cpu_linear = linear

    utils.dispatch_cpu_unquantized_gemm = dispatch
    projections.plan_for = lambda *_: "a plan"
    triton.launch = lambda plan, *given: reference.project(*given)


def latents_of_any_width():
    """A decode kernel for any latent and rotated part, as TRITON_MLA is one; vLLM's kernel for the
    CPU takes 512 + 64.
    """
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    def decode(out, query, kv_cache, scale, block_tables, seq_lens):
        out.copy_(_attend(query, kv_cache, block_tables, seq_lens, scale, out.shape[-1])[0])

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


def parts_of_a_cache():
    """What decode context parallelism needs in plain torch, because vLLM's kernels are for GPUs:
    slots of a rank's part of the cache, a decode that gives its log-sum-exp, a merge of the parts.
    """
    from vllm.distributed.parallel_state import get_dcp_group
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
    from vllm.v1.attention.ops import dcp
    from vllm.v1.worker.block_table import BlockTable

    def slots(self, num_reqs, query_start_loc, positions):
        group, mapping = get_dcp_group(), self.slot_mapping.gpu
        mapping.fill_(-1)
        starts = query_start_loc[: num_reqs + 1].tolist()
        for request, (start, end) in enumerate(itertools.pairwise(starts)):
            # Tokens go round: each rank keeps every group.world_size-th.
            at, rank = positions[start:end] // group.world_size, positions[start:end]
            blocks = self.block_table.gpu[request, at // self.block_size].long()
            own = rank % group.world_size == group.rank_in_group
            found = blocks * self.block_size + at % self.block_size
            mapping[start:end] = torch.where(own, found, -1)

    init = CPUMLAImpl.__init__

    def with_ranks(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.dcp_world_size, self.lse_base_on_e = get_dcp_group().world_size, True

    def forward_mqa(self, q, cache, metadata, layer):
        q = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        tables, lengths = metadata.decode.block_table, metadata.decode.seq_lens
        out, lse = _attend(q, cache, tables, lengths, self.scale, self.kv_lora_rank)
        return out.to(cache.dtype), lse

    def merge(out, lse, group, **_):
        every = group.all_gather(lse.contiguous(), dim=0).view(-1, *lse.shape)
        share = (lse - every.logsumexp(0)).exp()
        return (out * share[..., None]).to(out.dtype), every.logsumexp(0)

    CPUMLAImpl.__init__, CPUMLAImpl.forward_mqa = with_ranks, forward_mqa
    CPUMLAImpl.can_return_lse_for_decode = True
    dcp._cp_lse_common, BlockTable.compute_slot_mapping = merge, slots
