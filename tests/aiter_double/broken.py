"""Every rule with the op it is of, and a direct call of that op which breaks it."""

from tests.aiter_double import calls, versions
from tests.aiter_double.decode_rules import DECODE_RULES
from tests.aiter_double.fused_rules import RULES
from tests.aiter_double.plan_rules import INFO_RULES, PLAN_RULES

ADAPTER_RULES = {
    versions.INFO: INFO_RULES,
    versions.PLANNER: PLAN_RULES,
    versions.DECODE: DECODE_RULES,
}
ALL = {versions.FUSED: RULES, **ADAPTER_RULES}


def good(op, double):
    """The arguments of a good call of `op`, and what a rule may build others from."""
    aiter, fp8 = double.modules["aiter"], double.arch.fp8
    extra = {"aiter": aiter, "fp8": fp8}
    if op == versions.FUSED:
        given = calls.provider()
        return {**calls.fused(given), **extra, "both": given["cos_sin_cache"], "q": given["q"]}
    if op in (versions.PLANNER, versions.DECODE):
        made = calls.decode(aiter, query=fp8, cache=fp8)
        return {**made["plan" if op == versions.PLANNER else "decode"], **extra}
    return {**calls.sizes(fp8), **extra}


def call(op, double, rule=None):
    """Call `op` directly: a good call, or one that breaks `rule`."""
    given = good(op, double)
    if rule:
        given |= rule.direct(given)
    names = double.signatures[op].parameters
    double.ops[op](**{name: given[name] for name in names if name in given})
