"""Every rule with the op it is of, and a direct call of that op which breaks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tests.aiter_double import calls
from tests.aiter_double.decode_rules import DECODE_RULES
from tests.aiter_double.fused_rules import RULES
from tests.aiter_double.module import FP4_PRODUCT, FP8_PRODUCT, FUSED
from tests.aiter_double.other_rules import (
    FP4_RULES,
    FP8_RULES,
    GLUON_RULES,
    QUANTIZE_RULES,
    REDUCE_RULES,
)
from tests.aiter_double.plan_rules import INFO_RULES, PLAN_RULES

if TYPE_CHECKING:
    from tests.aiter_double import Double
    from tests.aiter_double.rule import Rule

INFO, PLANNER, DECODE = "get_mla_metadata_info_v1", "get_mla_metadata_v1", "mla_decode_fwd"
ADAPTER_RULES = {INFO: INFO_RULES, PLANNER: PLAN_RULES, DECODE: DECODE_RULES}
# Those that vLLM or other ops of AITER call, and packed weights, which are vLLM's.
OTHER_RULES = {
    "mla_reduce_v1": REDUCE_RULES,
    "mla_gluon": GLUON_RULES,
    FP4_PRODUCT: FP4_RULES,
    FP8_PRODUCT: FP8_RULES,
    "dynamic_mxfp4_quant": QUANTIZE_RULES,
}
OTHER_CALLS: dict[str, Callable[[torch.dtype], dict[str, Any]]] = {
    INFO: calls.sizes,
    "mla_reduce_v1": calls.reduce,
    "mla_gluon": calls.gluon,
    FP4_PRODUCT: calls.fp4_product,
    FP8_PRODUCT: calls.fp8_product,
    "dynamic_mxfp4_quant": lambda fp8: {"x": torch.randn(4, 64)},
}
ALL = {FUSED: RULES, **ADAPTER_RULES, **OTHER_RULES}


def good(op: str, double: Double) -> dict[str, Any]:
    """The arguments of a good call of `op`, and what a rule may build others from."""
    aiter, fp8 = double.modules["aiter"], double.arch.fp8
    extra = {"aiter": aiter, "fp8": fp8}
    if op == FUSED:
        given = calls.provider()
        return {**calls.fused(given), **extra, "both": given["cos_sin_cache"], "q": given["q"]}
    if op in (PLANNER, DECODE):
        made = calls.decode(aiter, query=fp8, cache=fp8)
        return {**made["plan" if op == PLANNER else "decode"], **extra}
    return {**OTHER_CALLS[op](fp8), **extra}


def call(rule: Rule, op: str, double: Double) -> Callable[[], Any]:
    """A call of `op` that breaks `rule`."""
    given = good(op, double)
    broken = {**given, **rule.direct(given)}
    names = double.signatures[op].parameters
    return lambda: double.ops[op](**{name: broken[name] for name in names if name in broken})
