"""The rules of the ops that vLLM or AITER itself calls; test_rules.py runs them.

`direct` changes a good call. Of these ops the library calls only the products, with vLLM's weights.
"""

import torch

from tests.aiter_double.calls import H, L, P
from tests.aiter_double.rule import ABORTS, ASSERTS, SILENT, Rule

REDUCE = [
    Rule("reduce-heads", "the head count and the width have a kernel", ABORTS,
         words="no reduction of 12 heads of 512",
         direct=lambda a: {"final_output": torch.zeros((2, 12, L), dtype=torch.bfloat16)}),
    Rule("reduce-type", "the result is bf16 or fp16", ABORTS, words="the result is bf16 or fp16",
         direct=lambda a: {"final_output": a["final_output"].float()}),
    Rule("reduce-strided", "the result is packed", SILENT, words="final_output is packed",
         direct=lambda a: {"final_output": torch.cat([a["final_output"]] * 2, 1)[:, :16]}),
    Rule("reduce-partials", "pieces and sums are fp32", SILENT,
         words="partial_lse is read as fp32",
         direct=lambda a: {"partial_lse": a["partial_lse"].bfloat16()}),
    Rule("reduce-maps", "the maps are dense int32", SILENT,
         words="reduce_partial_map is read as dense int32",
         direct=lambda a: {"reduce_partial_map": a["reduce_partial_map"].long()}),
    Rule("reduce-piece", "pieces are among the partial rows", SILENT,
         words="a piece outside the partial rows",
         direct=lambda a: {"reduce_partial_map": a["reduce_partial_map"] + 1}),
    Rule("reduce-tile", "tiles are among the rows of the result", SILENT,
         words="a tile outside the result",
         direct=lambda a: {"reduce_final_map": a["reduce_final_map"] + 2}),
]  # fmt: skip

GLUON = [
    Rule("gluon-arch", "few heads have a Gluon kernel on gfx950", ASSERTS,
         words="mla_gluon requires gfx950", on="gfx942", direct=lambda a: {}),
    Rule("gluon-type", "its query and cache are bf16", ABORTS, words="bf16 query and cache",
         on="gfx950", direct=lambda a: {"kv_c": a["kv_c"].half()}),
    Rule("gluon-page", "every key has an entry of the cache", SILENT, on="gfx950",
         words="an index outside the cache reads other memory",
         direct=lambda a: {"page_table": a["page_table"] - 40}),
]  # fmt: skip

FP4 = [
    Rule("fp4-arch", "fp4 needs gfx950", ASSERTS, words="fp4 needs gfx950", on="gfx942",
         direct=lambda a: {}),
    Rule("fp4-bytes", "fp4 weights are bytes", SILENT, words="weights are packed bytes",
         on="gfx950", direct=lambda a: {"w": a["w"].bfloat16()}),
    Rule("fp4-shape", "two fp4 weights share a byte", SILENT, words="w is [B, N, K / 2]",
         on="gfx950", direct=lambda a: {"w": torch.zeros(H, L, P, dtype=torch.uint8)}),
    Rule("fp4-scales", "32 fp4 weights share a scale", SILENT, words="scales are [B, N, K / 32]",
         on="gfx950", direct=lambda a: {"w_scales": a["w_scales"][..., :1]}),
    Rule("fp4-prequant", "the query is quantized by the product", SILENT,
         words="the kernel without prequant was never documented", on="gfx950",
         direct=lambda a: {"prequant": False}),
]  # fmt: skip

FP8 = [
    Rule("fp8-weights", "fp8 weights are of the architecture's type", SILENT,
         words="weights are read as torch.float8",
         direct=lambda a: {"WQ": a["WQ"].view(torch.uint8)}),
    Rule("fp8-scale", "fp8 weights share one fp32 scale", SILENT,
         words="one fp32 scale for all weights", direct=lambda a: {"w_scale": torch.ones(8)}),
    Rule("fp8-shape", "fp8 weights are as deep as the query", SILENT, words="WQ is [B, N, K]",
         direct=lambda a: {"WQ": a["WQ"][..., :64]}),
    Rule("fp8-groups", "a query is made of whole groups", SILENT,
         words="K is made of whole groups", direct=lambda a: {"group_size": 96}),
]  # fmt: skip

QUANTIZE = [
    Rule("quantize", "the quantized values are a matrix", SILENT, words="the values are a matrix",
         direct=lambda a: {"x": a["x"][None]}),
]  # fmt: skip
