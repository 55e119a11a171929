"""The Triton kernel of the fused region: one source for NVIDIA and AMD.

One launch holds two kinds of programs, which run side by side:

    product   `triton_product.py`, [block_m tokens, one head, block_n latents]: q_nope @ W_UK,
              rounded to the activation type, cast into q_out
    rest      `triton_rows.py`: RoPE of k_pe and the cache rows of a few tokens, or RoPE of q_pe
              for a few rows of the flattened [tokens * heads]

Offsets into q, w_uk_t and q_out fit 32 bits (the provider checks that); offsets into the cache
are 64-bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_fusion.kernels.triton_cast import Given
from mla_fusion.kernels.triton_product import product
from mla_fusion.kernels.triton_rows import cache_rows, query_rows


@triton.jit(do_not_specialize=["tokens", "heads", "q_row", "kv_c_row", "k_pe_row"])
def prep_kernel(
    q_ptr, w_ptr, kv_c_ptr, k_pe_ptr, cache_ptr, slot_ptr, position_ptr, cos_sin_ptr, k_scale_ptr,
    q_scale_ptr, factor_ptr, out_ptr, tokens, heads, q_row, q_head, w_head, w_row, w_col, kv_c_row,
    k_pe_row, cache_block, cache_entry, cos_sin_row, FORM: tl.constexpr, Q_LIMIT: tl.constexpr,
    K_LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See the module. Shapes and types are those of `kernels.fused_mla_decode_prep`; FORM is a
    `triton.Form`, whose `plan` gives BLOCK_M and other sizes their values.

    `factor_ptr` is None for a query without a factor: the machine code then has no trace of it.

    Q_LIMIT and K_LIMIT are the largest finite fp8 values, 0 for a target that is not fp8, and
    negative where conversions saturate by themselves. PDL: the launch has the
    programmatic-dependent-launch attribute.
    """
    # The factor shows Triton the alignment, which decides between 16-byte and 2-byte loads;
    # tl.multiple_of has no effect on an argument.
    q_row = q_row * FORM.ALIGN
    kv_c_row = kv_c_row * FORM.ALIGN
    k_pe_row = k_pe_row * FORM.ALIGN
    if PDL:
        # The next kernel may start loading its weights; it waits for this grid before it reads
        # or writes anything else.
        tl.extra.cuda.gdc_launch_dependents()
    given = Given(
        q_ptr, w_ptr, kv_c_ptr, k_pe_ptr, cache_ptr, slot_ptr, position_ptr, cos_sin_ptr,
        k_scale_ptr, q_scale_ptr, factor_ptr, out_ptr, tokens, heads, q_row, q_head, w_head, w_row,
        w_col, kv_c_row, k_pe_row, cache_block, cache_entry, cos_sin_row,
    )  # fmt: skip
    cache_programs = tl.cdiv(tokens, FORM.plan.cache_tokens)
    rest = cache_programs + tl.cdiv(tokens * heads, FORM.plan.rope_rows)
    work = tl.program_id(0)
    # Of the rest, the programs of cache rows are the first.
    if FORM.plan.rest_last:
        products = tl.num_programs(0) - rest
        is_rest, unit = work >= products, work - products
    else:
        is_rest, unit, work = work < rest, work, work - rest
    if is_rest:
        if PDL:
            tl.extra.cuda.gdc_wait()
        if unit < cache_programs:
            cache_rows(given, unit, FORM, K_LIMIT)
        else:
            query_rows(given, unit - cache_programs, FORM, Q_LIMIT)
    else:
        product(given, work, FORM, Q_LIMIT, PDL)
