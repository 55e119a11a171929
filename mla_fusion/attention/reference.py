"""Executes a plan literally, item by item, in plain torch: the oracle of every other provider.

It runs on any device, reads the plan back to the host, and is not fast. Arithmetic is fp32 (the
dot products of the definition, no online softmax), rounded once to the output type.
"""

from collections.abc import Sequence
from typing import Any

import torch

from mla_fusion.attention.plan.epilogue import EPSILON, GROUP, Epilogue, largest
from mla_fusion.attention.plan.inputs import Inputs, Scope, covers
from mla_fusion.attention.plan.layouts import read_keys


def require() -> None:
    """It needs nothing but torch."""


def plan_settings(*_: Any) -> dict[str, int]:
    """Any number of CTAs is as fast, since they are one after another."""
    return {"ctas": 8}


def warm_up_batches(*_: Any) -> list[int]:
    """Nothing is compiled."""
    return [1]


def unsupported(*_: Any) -> str:
    """It decodes all."""
    return ""


def persistent_mla_decode(given: Inputs) -> None:
    """See `mla_fusion.attention.persistent_mla_decode`."""
    covers(given)
    plan, kv_cache = given.plan, given.kv_cache
    query, page = dequantize(given.q, given.q_scale), kv_cache.shape[1]
    layout, latent, device = plan.layout, plan.settings.v_head_dim, given.q.device
    qo_indptr, kv_indptr = plan.qo_indptr.tolist(), plan.kv_indptr.tolist()
    rows = int(plan.reduce_indptr[-1]) * plan.settings.max_query_len
    partial_output = torch.zeros((rows, layout.per_work, latent), device=device)
    partial_lse = torch.full((rows, layout.per_work), -torch.inf, device=device)

    items = plan.work_info_set[: int(plan.work_indptr[-1])].tolist()
    for tile, partial, qo_start, qo_end, kv_start, kv_end, kv_offset, _ in items:
        sequence, block = divmod(tile, layout.fold)
        count, first = qo_end - qo_start, block * layout.per_work
        queries = query.new_zeros((count, layout.per_work, query.shape[2]))
        token = qo_indptr[sequence]
        real = query[token : token + count, first : first + layout.per_work]
        queries[:, : real.shape[1]] = real
        positions = torch.arange(kv_start, kv_end, device=device)
        at = positions - kv_indptr[sequence]
        blocks = given.block_table[sequence, at // page].long()
        keys = dequantize(kv_cache[blocks, at % page], given.kv_scale)
        ends = kv_end + kv_offset - torch.arange(count - 1, -1, -1, device=device)
        visible = positions < ends[:, None]
        scores = torch.einsum("nhd,kd->nhk", queries, keys) * given.softmax_scale
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
        logsumexp = scores.logsumexp(-1)
        output = queries.new_zeros((count, layout.per_work, latent))
        # Without the keys that a row does not see: 0 * NaN is NaN.
        for row, seen in enumerate(visible.sum(1).tolist()):
            p = (scores[row, :, :seen] - logsumexp[row, :, None]).exp()
            output[row] = p @ keys[:seen, :latent]
        if partial < 0:
            write(given, tile, output, logsumexp)
        else:
            partial_output[partial : partial + count] = output
            partial_lse[partial : partial + count] = logsumexp
    merge(given, partial_output, partial_lse)
    if given.epilogue is not None:
        finish(given.out, given.epilogue)


def write(given: Inputs, tile: int, output: torch.Tensor, logsumexp: torch.Tensor) -> None:
    """Store the rows of a tile, less its padded heads."""
    sequence, block = divmod(tile, given.plan.layout.fold)
    per_work, token = given.plan.layout.per_work, int(given.plan.qo_indptr[sequence])
    at = slice(token, token + len(output)), slice(block * per_work, (block + 1) * per_work)
    for target, values in (given.out, output), (given.lse, logsumexp):
        if target is not None:
            target[at].copy_(values[:, : target[at].shape[1]])


def merge(given: Inputs, partial_output: torch.Tensor, partial_lse: torch.Tensor) -> None:
    """Merge the splits, partial rows [rows, heads of an item, ..], into rows of the output."""
    plan = given.plan
    indptr, final = plan.reduce_indptr.tolist(), plan.reduce_final_map.tolist()
    starts = plan.reduce_partial_map.tolist()
    for tile in range(len(indptr) - 1):
        splits = range(indptr[tile], indptr[tile + 1])
        if not splits:
            continue
        count = final[tile][1] - final[tile][0]
        rows = [slice(starts[i], starts[i] + count) for i in splits]
        outputs, lses = (torch.stack([x[at] for at in rows]) for x in (partial_output, partial_lse))
        total = lses.logsumexp(0)
        shares = (lses - total).exp().masked_fill(total == -torch.inf, 0.0)  # else a NaN
        write(given, tile, (shares[..., None] * outputs).sum(0), total)


def finish(latents: torch.Tensor, epilogue: Epilogue) -> None:
    """Multiply latents [T, H, L], rounded to the type of w_uv, and quantize: see `Epilogue`."""
    tokens, dtype = latents.shape[0], epilogue.out.dtype
    # 16-bit operands are summed in fp32 and rounded once; vLLM calls this product too.
    product = torch.bmm(latents.transpose(0, 1), epilogue.w_uv).transpose(0, 1)
    values = product.reshape(tokens, -1)
    if epilogue.scale is not None:
        limit = torch.full((), largest(dtype), device=values.device)
        values = values.float()
        if epilogue.quantization == "tensor":
            values = values * (1.0 / epilogue.scale)
        else:
            groups = values.view(tokens, -1, GROUP)
            # By a tensor: torch multiplies by the reciprocal of a number on a GPU.
            scale = groups.abs().amax(-1).clamp(min=EPSILON) / limit
            if epilogue.ue8m0:
                scale = power_of_two(scale)
            epilogue.scale.copy_(scale)
            values = (groups / scale[..., None]).view(tokens, -1)
        values = values.clamp(-limit, limit)
    epilogue.out.copy_(values.to(dtype))


def power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """The least power of two that is neither below `scale` (fp32, not negative) nor `EPSILON`."""
    bits = scale.clamp(min=EPSILON).view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)  # up to an empty mantissa


def dequantize(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """`x` in fp32, times its scale if it is fp8."""
    return x.float() * scale if x.dtype.itemsize == 1 and scale is not None else x.float()


def sparse_mla_decode(
    q: torch.Tensor, scopes: Sequence[Scope], lengths: Sequence[torch.Tensor | None], *,
    latent: int, softmax_scale: float, kv_dtype: torch.dtype, sink: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None, kv_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out, lse) in fp32 as `sparse.sparse_mla_decode`, without a plan, keys not rounded.
    lengths: as `SparseScratch.refresh` takes them. latent, kv_dtype: of the scratch."""
    out = q.new_zeros((*q.shape[:2], latent), dtype=torch.float32)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    query = dequantize(q, q_scale)
    for token in range(q.shape[0]):
        rows = []
        for scope, length in zip(scopes, lengths, strict=True):
            slots = scope.table[token] if length is None else scope.table[token, : length[token]]
            slots = slots[slots >= 0].long()
            if scope.layout is not None:
                rows.append(read_keys(scope.kv_cache, slots, scope.layout, kv_dtype))
            else:
                page = scope.kv_cache.shape[1]
                rows.append(dequantize(scope.kv_cache[slots // page, slots % page], kv_scale))
        keys = torch.cat(rows)
        if not len(keys):
            continue
        scores = query[token] @ keys.T * softmax_scale
        lse[token] = scores.logsumexp(-1)
        total = lse[token] if sink is None else torch.logaddexp(lse[token], sink)
        out[token] = (scores - total[:, None]).exp() @ keys[:, :latent]
    return out, lse
