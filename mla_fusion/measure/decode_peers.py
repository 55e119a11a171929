"""Shapes of decode attention, their inputs and exact results, and who computes them. A candidate is
a function of `Inputs` that returns a call, which writes `Inputs.out`, or raises one of
`UNAVAILABLE`. It makes its plan or its metadata before: once a step, not once a layer."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch

from mla_fusion import gpu
from mla_fusion.attention import Epilogue, PersistentDecodePlan, persistent_mla_decode
from mla_fusion.attention.triton import plan_settings
from mla_fusion.measure.distances import distance, exact_attention, make_w_uv, worst
from mla_fusion.measure.timing import Call

PAGE = 64
FP8, BF16 = gpu.fp8_type(), torch.bfloat16
# Relative distance of a result from float64. Rounding to bf16 moves it by 1.7e-3, the decode's own
# arithmetic by up to 1.4e-3. A product with a random W_UV keeps the latents' distance, and its own
# rounding adds in squares: 2.8e-3.
TOLERANCE = 4e-3
PLANNED = 1024  # sequences of a plan at least, so that few planners are compiled
WORKSPACE = 128 * 2**20  # bytes of FlashInfer, as in vLLM
ROTATED = 2**28  # bytes of caches that a graph walks over, several times the L2 cache
Candidate = Callable[["Inputs"], Call]


@dataclasses.dataclass(frozen=True)
class Case:
    """A step of decode attention, in one layer."""

    batch: int
    context: int
    heads: int
    dtype: torch.dtype
    ragged: bool = False  # lengths from 16 to twice the context, cubic; else all equal to it
    queries: int = 1  # most query rows of a sequence
    page: int = PAGE  # tokens of a block
    latent: int = 512  # L
    rope: int = 64  # R
    values: int = 0  # columns of W_UV for a head; 0: nothing follows the decode
    max_split_per_batch: int = -1  # of our plan
    # Of our plan: all candidates are batch-invariant, vLLM's as it calls them with
    # VLLM_BATCH_INVARIANT=1. Empty: none is.
    chunks: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        return "fp8" if self.dtype == FP8 else "bf16"

    @property
    def name(self) -> str:
        rows = f" x {self.queries} rows" if self.queries > 1 else ""
        return f"H={self.heads}{rows} {self.kind}"

    @property
    def width(self) -> int:
        """Width of a query and of a cache entry, L + R."""
        return self.latent + self.rope

    @property
    def scale(self) -> float:
        """Scale of the scores."""
        return float(self.width**-0.5)

    def lengths(self) -> list[int]:
        """KV tokens of each sequence."""
        if not self.ragged:
            return [self.context] * self.batch
        draw = random.Random(self.batch * self.context)
        return [16 + int(2 * self.context * draw.random() ** 3) for _ in range(self.batch)]

    def bytes(self) -> int:
        """Fewest bytes: the KV of every sequence once, and W_UV."""
        w_uv = self.heads * self.latent * self.values * BF16.itemsize
        return sum(self.lengths()) * self.width * self.dtype.itemsize + w_uv

    def flops(self) -> int:
        """Operations of both products, and of W_UV's."""
        each = sum(self.lengths()) * (self.width + self.latent)
        each += self.batch * self.latent * self.values
        return 2 * self.queries * self.heads * each


@dataclasses.dataclass
class Inputs:
    """Tensors of one case; `caches` and `w_uv` are distinct, one for each call of a graph."""

    case: Case
    q: torch.Tensor  # [batch * queries, H, L + R]
    caches: list[torch.Tensor]  # [blocks, page, L + R] each
    table: torch.Tensor
    lens: torch.Tensor
    starts: torch.Tensor  # the first query row of each sequence, and their number
    scale: torch.Tensor  # of an fp8 query, and of an fp8 cache
    w_uv: list[torch.Tensor]  # [H, L, V] each, or none
    latents: torch.Tensor  # [batch * queries, H, L]
    out: torch.Tensor  # [batch * queries, H, V], or `latents` without W_UV

    def behind(self, decode: Callable[[int], torch.Tensor]) -> Call:
        """The product behind a decode that is not ours, which returns its latents, as vLLM's
        `_v_up_proj` has it. Without W_UV only what is checked is kept: a copy would be timed."""

        def call(i: int) -> None:
            latents = decode(i)
            if self.w_uv:
                torch.bmm(latents.transpose(0, 1), self.w_uv[i], out=self.out.transpose(0, 1))
            elif i < 0:
                self.out.copy_(latents)

        return call


def make(case: Case) -> Inputs:
    """Random inputs; blocks in random order."""
    lengths = case.lengths()
    blocks = [-(-n // case.page) for n in lengths]
    order = torch.randperm(sum(blocks), device="cuda").int()
    table = torch.nn.utils.rnn.pad_sequence([*order.split(blocks)], batch_first=True)
    caches = []
    for _ in range(max(1, min(128, ROTATED // case.bytes()))):
        cache = torch.empty(sum(blocks), case.page, case.width, device="cuda", dtype=case.dtype)
        for part in cache.split(4096):
            part.copy_(torch.randn(part.shape, device="cuda", dtype=BF16))
        caches.append(cache)
    shape = case.heads, case.latent, case.values
    w_uv = [make_w_uv(*shape) for _ in (caches if case.values else ())]
    rows = case.batch * case.queries
    q = torch.randn(rows, case.heads, case.width, device="cuda", dtype=BF16).to(case.dtype)
    lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    starts = torch.arange(0, rows + 1, case.queries, dtype=torch.int32, device="cuda")
    latents = q.new_empty(rows, case.heads, case.latent, dtype=BF16)
    out = latents.new_empty(rows, case.heads, case.values) if w_uv else latents
    scale = torch.full((1,), 0.5, device="cuda")
    return Inputs(case, q, caches, table, lens, starts, scale, w_uv, latents, out)


def exact(inputs: Inputs, b: int) -> tuple[torch.Tensor, slice]:
    """float64 attention of sequence `b` over the last cache, behind the last W_UV if there is one,
    [n, H, L or V], and its query rows. Row i of the n sees all but the last n - 1 - i tokens."""
    case, length = inputs.case, inputs.case.lengths()[b]
    rows = slice(b * case.queries, (b + 1) * case.queries)
    scale = 0.5 if case.dtype == FP8 else 1.0
    keys = inputs.caches[-1][inputs.table[b, : -(-length // case.page)].long()]
    keys = keys.view(-1, case.width)[:length].double() * scale
    want, _ = exact_attention(inputs.q[rows].double() * scale, keys, case.latent)
    if inputs.w_uv:
        want = torch.einsum("thl,hlv->thv", want, inputs.w_uv[-1].double())
    return want, rows


def error(inputs: Inputs) -> float:
    """Largest relative distance of a few sequences' outputs; NaN stays NaN."""
    batch = inputs.case.batch
    wanted = [exact(inputs, b) for b in {0, batch // 2, batch - 1}]
    return worst([distance(inputs.out[rows], want) for want, rows in wanted])


def build(inputs: Inputs, candidate: Candidate) -> tuple[Call, float]:
    """A candidate's call by its cache, and the error of that on the last one."""
    call = candidate(inputs)
    inputs.out.fill_(torch.nan)
    call(-1)  # the last cache, and the sign for `Inputs.behind` to keep the result
    return call, error(inputs)


def ours(inputs: Inputs) -> Call:
    """This library."""
    case, most, mode = inputs.case, max(inputs.case.batch, PLANNED), dict[str, Any]()
    if case.chunks:  # room for the chunks of PLANNED sequences would fill a GPU
        most, longest = case.batch, max(case.lengths())
        mode = {"batch_invariant": True, "chunks": case.chunks, "max_kv_len": longest}
    plan = PersistentDecodePlan.allocate(
        max_batch=most, max_query_len=case.queries, num_heads=case.heads,
        q_dtype=case.dtype, kv_dtype=case.dtype, device="cuda", v_head_dim=case.latent,
        max_split_per_batch=case.max_split_per_batch,
        **plan_settings(case.heads, case.queries, case.dtype, case.width, "cuda"), **mode,
    )  # fmt: skip
    plan.refresh(
        qo_indptr=inputs.starts, seq_lens=inputs.lens, num_tokens=len(inputs.q),
        max_query_len=case.queries,
    )  # fmt: skip

    def call(i: int) -> None:
        persistent_mla_decode(
            inputs.q, inputs.caches[i], plan, block_table=inputs.table, softmax_scale=case.scale,
            q_scale=inputs.scale, kv_scale=inputs.scale, out=inputs.latents,
            epilogue=Epilogue(inputs.w_uv[i], inputs.out.flatten(1)) if inputs.w_uv else None,
        )  # fmt: skip

    return call


def launch_ours(cases: list[Case]) -> str:
    """Let Triton's cache have what `cases`, which differ in the batch alone, need; their name."""
    for case in cases:
        ours(make(dataclasses.replace(case, context=case.page, ragged=False)))(0)
    torch.cuda.synchronize()
    return cases[0].name


def triton_mla(inputs: Inputs) -> Call:
    """vLLM's Triton split-KV decode, with a bf16 query, as its backend calls it: each query row is
    a sequence of its own."""
    from vllm.v1.attention.backends.mla.triton_mla import _compute_num_kv_splits
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    fp8, latent = inputs.case.dtype == FP8, inputs.case.latent
    q = inputs.q.float().mul(0.5).to(BF16) if fp8 else inputs.q
    processors = gpu.of("cuda").sms
    splits = _compute_num_kv_splits(max(inputs.case.lengths()), processors)
    splits = 1 if inputs.case.chunks else splits
    rows = inputs.case.queries
    after = torch.arange(rows - 1, -1, -1, dtype=torch.int32, device="cuda")
    lens = (inputs.lens[:, None] - after).flatten()
    table = inputs.table.repeat_interleave(rows, 0)
    latents = inputs.latents
    lse = torch.empty(q.shape[:2], device="cuda", dtype=BF16)
    logits = torch.empty(*q.shape[:2], splits, latent + 1, device="cuda")
    one = inputs.scale if fp8 else torch.ones(1, device="cuda")

    def call(i: int) -> torch.Tensor:
        cache = inputs.caches[i].unsqueeze(2)
        decode_attention_fwd(
            q, cache, cache[..., :latent], latents, lse, table, lens, logits, splits,
            inputs.case.scale, inputs.case.page, k_scale=one, v_scale=one, is_mla=True,
        )  # fmt: skip
        return latents

    return inputs.behind(call)


def flashmla(inputs: Inputs) -> Call:
    """FlashMLA, dense, as vLLM's backend calls it; its metadata is made before."""
    if inputs.case.chunks:
        raise RuntimeError("vLLM refuses its backend with VLLM_BATCH_INVARIANT=1")
    from vllm.v1.attention.ops import flashmla as ops

    case, function = inputs.case, ops.flash_mla_with_kvcache
    shared: dict[str, Any] = {
        "q": inputs.q.unflatten(0, (case.batch, case.queries)), "head_dim_v": case.latent,
        "softmax_scale": case.scale, "causal": True, "block_table": inputs.table,
        "cache_seqlens": inputs.lens,
    }  # fmt: skip
    if case.dtype == FP8:
        function, rows = ops.flash_mla_with_kvcache_fp8, case.queries * case.heads
        schedule, shared["num_splits"] = ops.get_mla_metadata_dense_fp8(inputs.lens, rows, 1)
        shared |= {"descale_q": inputs.scale, "descale_k": inputs.scale}
    else:
        schedule = ops.get_mla_metadata()[0]
    shared["tile_scheduler_metadata"] = schedule

    def call(i: int) -> torch.Tensor:
        out, _ = function(k_cache=inputs.caches[i].unsqueeze(-2), **shared)
        return out.flatten(0, 1)

    return inputs.behind(call)


def fa3(inputs: Inputs) -> Call:
    """FlashAttention 3, bf16 only, as vLLM's FLASH_ATTN_MLA calls it under full CUDA graphs: the
    latent half of the query apart, at most 32 splits, the schedule made before."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    case = inputs.case
    shared: dict[str, Any] = {
        "max_seqlen_q": case.queries, "max_seqlen_k": max(case.lengths()), "causal": True,
        "cu_seqlens_q": inputs.starts, "num_splits": 1 if case.chunks else 32,
    }  # fmt: skip
    schedule = get_scheduler_metadata(
        batch_size=case.batch, num_heads_q=case.heads, num_heads_kv=1, headdim=case.rope,
        headdim_v=case.latent, cache_seqlens=inputs.lens, qkv_dtype=BF16, page_size=case.page,
        **shared,
    )  # fmt: skip
    latent, rope = inputs.q.split([case.latent, case.rope], dim=-1)

    def call(i: int) -> torch.Tensor:
        cache = inputs.caches[i].unsqueeze(-2)
        return flash_attn_varlen_func(
            q=rope, q_v=latent, k=cache[..., case.latent :], v=cache[..., : case.latent],
            seqused_k=inputs.lens, block_table=inputs.table, softmax_scale=case.scale,
            scheduler_metadata=schedule, fa_version=3, **shared,
        )  # fmt: skip

    return inputs.behind(call)


def flashinfer_mla(inputs: Inputs) -> Call:
    """FlashInfer's decode, as vLLM's FLASHINFER_MLA calls it on sm_100 and sm_103. From 0.32 on
    vLLM keeps the counters that the kernel would clear at every call."""
    if gpu.of("cuda").capability[0] != 10:
        raise RuntimeError("vLLM runs it on sm_100 and sm_103 alone")
    from flashinfer import utils
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache_mla

    case, device = inputs.case, inputs.q.device
    scale = float(inputs.scale) if case.dtype.itemsize == 1 else 1.0
    shared: dict[str, Any] = {
        "query": inputs.q.unflatten(0, (case.batch, case.queries)), "block_tables": inputs.table,
        "seq_lens": inputs.lens, "max_seq_len": max(case.lengths()), "qk_nope_head_dim": 128,
        "kv_lora_rank": case.latent, "qk_rope_head_dim": case.rope, "bmm2_scale": scale,
        "bmm1_scale": case.scale * scale * scale,
        "workspace_buffer": torch.zeros(WORKSPACE, dtype=torch.int8, device=device),
    }  # fmt: skip
    if size := getattr(utils, "get_trtllm_gen_multi_ctas_kv_counter_bytes", None):
        count = size(case.batch, case.heads, utils.get_device_sm_count(device))
        counters = torch.zeros(count, dtype=torch.uint8, device=device)
        shared["multi_ctas_kv_counter_buffer"] = counters

    def call(i: int) -> torch.Tensor:
        cache = inputs.caches[i].unsqueeze(1)
        return trtllm_batch_decode_with_kv_cache_mla(kv_cache=cache, **shared).flatten(0, 1)

    return inputs.behind(call)


# vLLM's choice by architecture, type of query and cache, and widths, with pages of 64.
VLLM_DEFAULT = {("sm_90", BF16, 512, 64): "fa3", ("sm_90", FP8, 512, 64): "flashmla"}
FOR_ALL: dict[str, Candidate] = {"ours": ours, "triton_mla": triton_mla, "flashmla": flashmla}
CANDIDATES: dict[torch.dtype, dict[str, Candidate]] = {
    BF16: {**FOR_ALL, "fa3": fa3, "flashinfer_mla": flashinfer_mla},
    FP8: {**FOR_ALL, "flashinfer_mla": flashinfer_mla},
}


def vllm_default(case: Case) -> str:
    """The candidate that vLLM chooses on this GPU; empty where that is not known."""
    found = VLLM_DEFAULT.get((gpu.of("cuda").arch, case.dtype, case.latent, case.rope), "")
    return "triton_mla" if case.chunks and found == "flashmla" else found
