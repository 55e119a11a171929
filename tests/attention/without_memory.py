"""Decodes without memory, for the compiler, and for what is chosen by shapes alone."""

import dataclasses
import functools

import torch

from mla_fusion.attention.plan.epilogue import GROUP, Epilogue, in_groups
from mla_fusion.attention.plan.inputs import Inputs, Scope, Sparse
from tests.attention.decodes import BF16, FP32, plan_for, refresh
from tests.gpus import imitated
from tests.kernels.compiled import FP8, compile_report

DEEPSEEK = (512, 64)


def meta(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


def inputs(
    heads=64, dtype=BF16, *, tokens=8, page=64, columns=128, sparse=False, widths=DEEPSEEK,
    kv_dtype=None, layout=None, **plan,
):  # fmt: skip
    """What a decode is given, for a latent and a rotated part and a table of `columns` columns."""
    i32, latent, width, kv_dtype = torch.int32, widths[0], sum(widths), kv_dtype or dtype
    stored, byte = (width, kv_dtype) if layout is None else (layout.bytes, torch.uint8)
    scope = Scope(meta(99, page, stored, dtype=byte), meta(8, columns, dtype=i32), layout)
    types = {"num_heads": heads, "q_dtype": dtype, "kv_dtype": kv_dtype, "v_head_dim": latent}
    second = Sparse(scope, 128, meta(8, dtype=i32), meta(heads, dtype=FP32)) if sparse else None
    one = meta(1, dtype=FP32)
    return Inputs(
        meta(tokens, heads, width, dtype=dtype), scope.kv_cache, plan_for(**types | plan),
        scope.table, 0.1, one, one, meta(tokens, heads, latent), meta(tokens, heads, dtype=FP32),
        layout=layout, sparse=second,
    )  # fmt: skip


def behind(target, heads, *, values=128, latent=512, quantization="none", dense="latent"):
    """What follows a decode of 8 tokens."""
    w_uv = meta(heads, latent, values)
    if dense == "latent":
        w_uv = meta(heads, values, latent).transpose(1, 2)
    out, scale = meta(8, heads * values), None
    if quantization != "none":
        out = meta(8, heads * values, dtype=FP8[target])
        scale = meta(1, dtype=FP32)
    if in_groups(quantization):
        scale = meta(heads * values // GROUP, 8, dtype=FP32).T
    given = inputs(heads, widths=(latent, 64), max_batch=8)
    refresh(given.plan, [1] * 8, [9] * 8)
    epilogue = Epilogue(w_uv, out, scale, quantization == "group_ue8m0")
    return dataclasses.replace(given, lse=None, epilogue=epilogue)


def launch_of(target, module, *heads_and_type, **shape):
    with imitated(target):
        return module.launch_of(inputs(*heads_and_type, **shape))


@functools.cache
def report(target, module, *heads_and_type, maxnreg=None, **shape):
    """Report of one decode kernel, compiled and disassembled once for all tests."""
    given = launch_of(target, module, *heads_and_type, **shape)
    limit = {} if maxnreg is None else {"maxnreg": maxnreg}
    return compile_report(target, given.kernel, given.positional, given.options | limit)
