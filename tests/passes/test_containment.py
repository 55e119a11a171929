"""Whatever fails, the graph stays as it was: a fault at each call of each function of the passes.

The calls are those of functions of passes/ and patterns/, and of report/ below them, as Python's
trace sees them. By day the first call of each function fails, in `make test-full` every one.
"""

import gc
import sys
from pathlib import Path

import pytest
import torch
from vllm.compilation.passes.inductor_pass import pass_context
from vllm.config.utils import Range
from vllm.forward_context import override_forward_context

from mla_fusion import report
from mla_fusion.passes.fix_functionalization import OWN, MLAFixFunctionalizationPass
from mla_fusion.passes.pipeline import LastStep, MLAFusionPass
from mla_fusion.patterns.site import functionalized_op
from tests.passes import edits, graphs
from tests.passes.fake_engine import DECODE, Engine, fuse, reasons, run
from tests.passes.graphs import Spec, build, printed

ROOMS = ("mla_fusion.passes", "mla_fusion.patterns", "mla_fusion.report")
# What vLLM calls, and what contains all others: a fault there is one of vLLM's call.
GUARD = ("pipeline.MLAFusionPass.__call__", "pipeline.LastStep.__call__", "pipeline.contained")
BUCKET = 4


class Fault(Exception):
    """Raised where a function is called."""


class Calls:
    """Names the functions of `ROOMS` that are called meanwhile, and lets one call fail."""

    def __init__(self, at=None):
        self.at, self.names, self.frames = at, [], set()

    def __call__(self, frame, event, arg):
        if frame.f_globals.get("__name__", "").startswith(ROOMS) and frame not in self.frames:
            self.frames.add(frame)  # a generator's is entered again
            self.names.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname}")
            if len(self.names) - 1 == self.at:
                raise Fault(self.names[-1])  # and Python stops tracing

    def __enter__(self):
        gc.disable()  # what closes a generator of an earlier run enters its frame
        sys.settrace(self)
        return self

    def __exit__(self, *error):
        sys.settrace(None)
        gc.enable()


def declining(spec):
    """A layer whose rotated query something else reads, and one that fuses."""
    module = build(spec)
    edits.read_also(module, edits.attention(module).kwargs["q"])
    return module


def read_later(spec):
    """An old value is read behind the op that writes over it."""
    module = build(spec)
    edits.read_also(module, graphs.find(module, torch.ops.aten.mm.default, 1))
    fuse(module, spec)
    return module


def fused(spec):
    module = build(spec)
    fuse(module, spec)
    return module


QUANTIZED = Spec("flashinfer", dtype=torch.bfloat16, quantized="tensor_native")
# name -> the graph, its spec, and whether its last step is run or the passes before
SUBJECTS = {
    "native": (build, Spec("native"), False),
    "scaled": (build, Spec("deepseek", dtype=torch.bfloat16, scaled="in_place"), False),
    "quantized": (build, QUANTIZED, False),
    "declining": (declining, Spec("native", layers=2), False),
    "unknown": (build, Spec("computed"), False),
    "last step": (fused, Spec("native", layers=2), True),
    "last step, read later": (read_later, Spec("vllm_c"), True),
    "last step of vLLM's own op": (build, Spec("cat_fused"), True),
}


def rewrite(module, spec, last, calls):
    """One step of vLLM's pass manager; the codes in the report and what was found."""
    engine = Engine(spec)
    attention = "portable" if spec.quantized else "auto"
    step = LastStep(None) if last else MLAFusionPass("reference", BUCKET, attention)
    report.forget()
    with (
        override_forward_context(engine.context(DECODE)),
        pass_context(Range(start=1, end=BUCKET)),
        calls,
    ):
        step(module.graph)
    return {d for record in report._records for d in record.declined}


def test_the_log_has_the_traceback(caplog):
    rewrite(build(Spec("native")), Spec("native"), False, Calls(40))
    assert "mla_fusion: a pass failed; this graph stays as it was" in caplog.messages
    assert "tests.passes.test_containment.Fault: " in caplog.text


@pytest.mark.parametrize("ours", [False, True], ids=["raises", "ours raises too"])
@pytest.mark.parametrize("make", [fused, build])
def test_an_error_of_vllms_own_step_is_vllms(make, ours, monkeypatch):
    """It is raised unchanged, and the report does not blame this library. An error of ours does not
    become one of vLLM's, whose step never sees an op of pass 5 that stayed functional."""
    module = make(Spec("native"))
    before, fault, seen = printed(module), Fault(), []

    def rest(graph):
        seen.extend(name for node in graph.nodes if (name := functionalized_op(node)) in OWN)
        raise fault

    if ours:
        monkeypatch.setattr(MLAFixFunctionalizationPass, "__call__", lambda *_: 1 / 0)
    report.forget()
    with pass_context(Range(start=1, end=BUCKET)), pytest.raises(Fault) as raised:
        LastStep(rest)(module.graph)
    assert raised.value is fault and not seen
    [record] = report._records
    assert reasons(record) == ["pass-error"] * ours
    assert printed(module) == before or not ours


@pytest.mark.timeout(7200)
@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize(
    "name, every",
    [
        ("quantized", False),
        ("last step, read later", False),
        *(pytest.param(name, True, marks=pytest.mark.nightly) for name in SUBJECTS),
    ],
)
def test_invariant_4_a_fault_at_any_call_leaves_the_graph_as_it_was(name, every):
    make, spec, last = SUBJECTS[name]
    whole = make(spec)
    before, wanted, calls = printed(whole), run(whole, spec), Calls()
    rewrite(graphs.copy(whole), spec, last, calls)
    points = [(at, name) for at, name in enumerate(calls.names) if name not in GUARD]
    first = {name: at for at, name in reversed(points)}
    for at in [at for at, _ in points] if every else first.values():
        module, faulted = graphs.copy(whole), Calls(at)
        [decline] = rewrite(module, spec, last, faulted)
        # Where a pass walks a set, the order of its calls is that of addresses.
        assert (decline.code, decline.detail) == ("pass-error", f"Fault({faulted.names[-1]!r})")
        assert printed(module) == before
        module.graph.lint()
        if at in first.values():
            assert all(map(torch.equal, wanted.outputs, run(module, spec).outputs))
