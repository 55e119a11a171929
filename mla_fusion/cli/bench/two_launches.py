"""A peer of the benchmark: cuBLAS's product, and one Triton kernel for the rest of the region, as
AITER divides the work. Its programs are the Triton provider's, and cast the latents to fp8."""

import torch
import triton
import triton.language as tl

from mla_fusion.kernels import triton as provider
from mla_fusion.kernels.dispatch import Plan
from mla_fusion.kernels.inputs import Inputs
from mla_fusion.kernels.triton_rows import Given, cache_rows, cast, rotated_rows


@triton.jit(do_not_specialize=["tokens", "heads"])
def rest_kernel(
    latent_ptr, q_ptr, kv_c_ptr, k_pe_ptr, cache_ptr, slot_ptr, position_ptr, cos_sin_ptr,
    k_scale_ptr, q_scale_ptr, out_ptr,
    tokens, heads, q_row, q_head, kv_c_row, k_pe_row, cache_block, cache_entry, cos_sin_row,
    FORM: tl.constexpr,
):  # fmt: skip
    """Cache rows, rotated rows, and with an fp8 query the casts of `latent_ptr` [T, H, L]."""
    given = Given(
        q_ptr, None, kv_c_ptr, k_pe_ptr, cache_ptr, slot_ptr, position_ptr, cos_sin_ptr,
        k_scale_ptr, q_scale_ptr, None, out_ptr, tokens, heads, q_row, q_head, 0, 0, 0, kv_c_row,
        k_pe_row, cache_block, cache_entry, cos_sin_row, None,
    )  # fmt: skip
    unit = tl.program_id(0)
    cache_programs = tl.cdiv(tokens, FORM.plan.cache_tokens)
    if unit < cache_programs:
        cache_rows(given, unit, FORM)
    else:
        row, inside, slot, inverse = rotated_rows(given, unit - cache_programs, FORM)
        if FORM.Q_LIMIT != 0:
            cols = tl.arange(0, FORM.L_PAD)[None, :]
            stored = inside & (slot >= 0) & (cols < FORM.L)
            y = tl.load(latent_ptr + row * FORM.L + cols, mask=stored, other=0.0).to(tl.float32)
            y = cast(y, inverse, out_ptr.dtype.element_ty, FORM.Q_LIMIT)
            tl.store(out_ptr + row * (FORM.L + FORM.R) + cols, y, mask=stored)


def fused_mla_decode_prep(inputs: Inputs) -> torch.Tensor:
    """The region without padding and without factors, as `region_cases` makes it."""
    assert inputs.cos_sin_cache is not None
    q, q_out, w_uk_t = inputs.q, inputs.q_out, inputs.w_uk_t
    (tokens, heads, _), (_, nope, latent) = q.shape, w_uk_t.shape
    product = q_out[..., :latent]
    if q_out.dtype != q.dtype:  # torch.bmm cannot write fp8
        product = q.new_empty((tokens, heads, latent))
    torch.bmm(q[..., :nope].transpose(0, 1), w_uk_t, out=product.transpose(0, 1))
    plan = Plan(cache_tokens=max(1, min(8, tokens // 64)))
    given = provider.launch_arguments(plan, inputs)
    known = {name: given[name] for name in rest_kernel.arg_names if name in given}
    # There some rows are counted in units of 16 bytes.
    rows = {"q_row": q, "kv_c_row": inputs.kv_c, "k_pe_row": inputs.k_pe}
    known |= {name: tensor.stride(0) for name, tensor in rows.items()}
    rest = -(-tokens // plan.cache_tokens) + -(-tokens * heads // plan.rope_rows)
    rest_kernel[rest,](
        latent_ptr=product, **known, num_warps=plan.num_warps, enable_fp_fusion=False
    )
    return q_out
