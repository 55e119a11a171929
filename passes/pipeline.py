"""The passes in order, as one vLLM pass: gate on the compile range, run, undo errors, report.

1  (vLLM) MLARoPEKVCacheCatFusionPass          runs before, where it exists
2  CanonicalizeMLARoPEPass                     canonicalize.py
3  MLADecodeQPrepLiftPass                      lift.py
4  MLAAiterQkRopeKVCacheFusionPass             fuse.py
6  MLADecodeOutputFusionPass                   output.py
7  MLAProjectionPass                           projections.py
8  MLANormPass                                 norms.py
5  MLAFixFunctionalizationPass                 fix_functionalization.py, after the cleanup"""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo.utils
import torch._inductor.config
from torch import fx
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._logging import trace_structured
from vllm.compilation.passes.inductor_pass import InductorPass, get_pass_context
from vllm.config.utils import Range

from mla_fusion import config, logger, ops, report, runtime
from mla_fusion.config import eligibility, vllm_compat
from mla_fusion.config.identity import graphs_hash, source_hash
from mla_fusion.passes import describe, norms
from mla_fusion.passes.canonicalize import CanonicalizeMLARoPEPass
from mla_fusion.passes.fix_functionalization import OWN, MLAFixFunctionalizationPass
from mla_fusion.passes.fuse import MLAAiterQkRopeKVCacheFusionPass
from mla_fusion.passes.lift import MLADecodeQPrepLiftPass
from mla_fusion.passes.norms import MLANormPass
from mla_fusion.passes.output import MLADecodeOutputFusionPass
from mla_fusion.passes.projections import MLAProjectionPass, described, left_out
from mla_fusion.passes.rewrite import FactsOf, Snapshot, drop_dead
from mla_fusion.patterns.nodes import dtype_of
from mla_fusion.patterns.site import ATTENTION, attention_calls, functionalized_op
from mla_fusion.report.graphs import LayerGraph, PassOps
from mla_fusion.report.reasons import Decline, Declined
from mla_fusion.runtime import layer_state

# The layers of the graph that is compiled now, if their names are inputs of it.
_names: ContextVar[tuple[str, ...]] = ContextVar("_names", default=())


@contextmanager
def piece_of(layer_names: Iterable[str]) -> Iterator[None]:
    """While a graph is compiled whose inputs hold these names, which vLLM's cache key leaves out:
    it would take one graph's code for another's."""
    token = _names.set(tuple(layer_names))
    try:
        yield
    finally:
        _names.reset(token)


@dataclass(eq=False)
class MLAFusionPass(InductorPass):
    """Passes 2 to 4 and 6 to 8, on every graph whose token range lies inside the decode bucket.

    The mla_fusion plugin adds it to vLLM's pass manager. Without the plugin it is one object for
    vLLM's hook for custom passes:

        CompilationConfig(inductor_compile_config={
            "post_grad_custom_post_pass": MLAFusionPass(provider="triton", max_tokens=256)})

    Args:
        provider: who computes the fused op: "aiter", "triton" or "reference".
        max_tokens: the decode bucket: graphs for more tokens are left as they are.
        attention: who decodes, as in `config.Options`; without the plugin, which attaches plans, it
            is vLLM's backend.
        query_len: the most query tokens of a sequence in a decode step.
        projections: who computes products of few tokens, as in `config.Options`.
        layers: the layers that fuse, as in `config.Options`."""

    provider: str
    max_tokens: int
    attention: str = "auto"
    query_len: int = 1
    projections: str = "auto"
    layers: str = ""

    def __post_init__(self) -> None:
        runtime.register_ops()

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """Built again in a worker process, so that the ops are registered there too."""
        return type(self), dataclasses.astuple(self)

    def uuid(self) -> str:
        """Changes with the source of this library, its measurements and every argument, and with
        `layers` by which layers of a piece fuse."""
        names = _names.get() if self.layers else ()
        chosen = (config.is_chosen(self.layers, name) for name in names)
        parts = "mla_fusion", graphs_hash(), *dataclasses.astuple(self), *chosen
        return "-".join(map(str, parts))

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite a graph in place."""
        try:
            compile_range = get_pass_context().compile_range
        except AssertionError:
            raise RuntimeError(
                "MLAFusionPass was called outside vLLM's piecewise backend, which knows the token "
                "range of a graph: use compilation mode 3 with backend inductor. On a CPU vLLM "
                "replaces that mode, unless the mla_fusion plugin is loaded and its flag is on"
            ) from None
        contained(graph, compile_range, self._run)

    def _run(self, graph: fx.Graph, record: report.RangeReport) -> None:
        calls = attention_calls(graph)
        record.layers = len(calls)
        if record.range[1] > self.max_tokens:
            return
        _show("before", graph)
        partition_ops = torch._inductor.config.custom_should_partition_ops
        if not calls:  # the last piece of a model begins behind its last attention
            project(graph, self.projections, record, self.provider)
        elif ATTENTION in partition_ops and not {*ops.RUNTIME_OPS} <= {*partition_ops}:
            record.declined = {Decline("splitting-ops"): len(calls)}
        else:
            layers = vllm_compat.mla_layers(vllm_compat.forward_context().no_compile_layers)
            # That of the latents; if none has metadata, pass 2 declines all.
            latents: list[Any] = [call.kwargs["kv_c_normed"] for call in calls]
            activation = next(filter(None, map(dtype_of, latents)), torch.get_default_dtype())
            facts = {name: self._facts(layer, activation) for name, layer in layers.items()}
            fuse(graph, by_argument(facts), self.provider, record, self.projections)
        _show("after", graph)

    def _facts(self, layer: Any, activation: torch.dtype) -> eligibility.LayerFacts:
        given = layer, self.provider, activation, self.attention, self.query_len
        return layer_state.of(layer).facts or eligibility.facts(*given, layers=self.layers)


@dataclass(eq=False)
class LastStep(InductorPass):
    """Pass 5 in vLLM's form; `rest` is vLLM's own last step, or None where it cannot run."""

    rest: InductorPass | None

    def uuid(self) -> str:
        """Changes with the source of this library and with vLLM's own step."""
        return f"mla_fusion-{source_hash()}-{self.rest.uuid() if self.rest else ''}"

    def __call__(self, graph: fx.Graph) -> None:
        """Run pass 5, contained, then vLLM's step, whose error is raised unchanged."""
        contained(graph, get_pass_context().compile_range, _fix)
        if self.rest is None:
            return
        # vLLM's step never meets an op of pass 5 that stayed functional, for instance after an
        # error of pass 5: Inductor copies for it, and vLLM's step could raise on it.
        kept = {n: n.target for n in graph.nodes if functionalized_op(n) in OWN}
        for node in kept:
            node.target = _hidden
        try:
            self.rest(graph)
        finally:
            for node, target in kept.items():
                node.target = target


class NoStep(InductorPass):
    """A step that does nothing, in place of vLLM's last one on a CPU, where that one raises: it
    names ops for GPUs alone."""

    def uuid(self) -> str:
        """The same for every graph."""
        return "mla_fusion-no-step"

    def __call__(self, graph: fx.Graph) -> None:
        """Leave the graph as it is."""


def _fix(graph: fx.Graph, record: report.RangeReport) -> None:
    done = _Steps(graph, record)
    MLAFixFunctionalizationPass()(graph)
    done("5")


def _hidden() -> None:
    """Target of the nodes that vLLM's last step must not recognize."""


def contained(
    graph: fx.Graph, compile_range: Range, work: Callable[[fx.Graph, report.RangeReport], Any]
) -> None:
    """Run `work`, which rewrites `graph` and fills in the record for the report. If it raises,
    restore the graph, record the reason, `pass-error` unless it is a decline, and continue."""
    span = compile_range.start, compile_range.end
    record, snapshot = None, None
    try:
        record, snapshot = report.RangeReport(span), Snapshot(graph)
        began = time.perf_counter()
        work(graph, record)
        record.pass_ms = (time.perf_counter() - began) * 1e3
        report.add(record)
    except Exception as error:
        logger.exception("mla_fusion: a pass failed; this graph stays as it was")
        if snapshot:
            snapshot.restore()
        known = error.decline if isinstance(error, Declined) else None
        decline = known or Decline("pass-error", repr(error))
        layers = record.layers if record else 0
        report.add(report.RangeReport(span, layers, declined={decline: layers or 1}))


def fuse(
    graph: fx.Graph, facts_of: FactsOf, provider: str, record: report.RangeReport,
    projections: str = "vllm",
) -> None:  # fmt: skip
    """Run passes 2 to 4 and 6 to 8 on `graph`; fill in `record`. A layer that cannot be fused stays
    as it was. One that a pass rewrote and the next did not is an error for `contained`."""
    # vLLM's own passes leave nodes before what they read; its cleanup after this one sorts too.
    stable_topological_sort(graph)
    calls, kept = attention_calls(graph), left_out(graph, facts_of)
    layers = {call.name: describe.layer_of(call, calls) for call in calls}
    _trace("before", graph)
    done = _Steps(graph, record)
    canonical = CanonicalizeMLARoPEPass(facts_of)(graph)
    done("2", canonical.dead)
    lifted = MLADecodeQPrepLiftPass(facts_of)(graph)
    done("3", canonical.dead)
    fused = MLAAiterQkRopeKVCacheFusionPass(provider)(graph)
    done("4", canonical.dead)
    if not len(canonical.rewritten) == len(lifted.rewritten) == len(fused.rewritten):
        names = ", ".join(canonical.rewritten)
        raise Declined("unfused-pair", f"{names}: {len(fused.rewritten)} fused")
    finished = MLADecodeOutputFusionPass(facts_of)(graph)
    graph.lint()
    attention = [finished.rewritten.get(n.name, n) for n in lifted.rewritten.values()]
    if replaced := [*canonical.dead, *finished.dead]:
        drop_dead(graph, replaced)
    done("6")
    record.declined = report.counted(canonical.declined)
    record.fused = len(fused.rewritten)
    quantized: list[Any] = [node.kwargs.get("quantization") for node in attention]
    record.outputs = Counter(ops.Quantization(q).kind if q else "none" for q in quantized)
    record.plain_outputs = report.counted(finished.declined)
    project(graph, projections, record, provider, kept)
    record.variants = [*dict.fromkeys(map(describe.variant, fused.rewritten.values()))]
    if fused.rewritten:
        # The last one that fused.
        name, node = [*canonical.rewritten][-1], [*fused.rewritten.values()][-1]
        after = describe.layer_of(attention[-1], {*attention_calls(graph), *attention})
        record.layer = describe.named(LayerGraph(layers[name], after), node)


def project(
    graph: fx.Graph, projections: str, record: report.RangeReport, provider: str,
    kept: Set[fx.Node] = frozenset(),
) -> None:  # fmt: skip
    """Run passes 7 and 8 on `graph`, but for the nodes `kept`, unless `projections` is "vllm"; fill
    in `record`."""
    if projections == "vllm":
        return
    stable_topological_sort(graph)
    done = _Steps(graph, record)
    made = MLAProjectionPass(record.range, kept)(graph)
    record.products = Counter(map(described, dict.fromkeys(made.rewritten.values())))
    record.plain_products = report.counted(made.declined)
    if made.rewritten:
        drop_dead(graph, made.dead)
        graph.lint()
    done("7")
    normed = MLANormPass(provider, kept)(graph)
    found = map(norms.described, dict.fromkeys(normed.rewritten.values()))
    record.norms = Counter(filter(None, found))
    if normed.rewritten:
        stable_topological_sort(graph)  # the second norm's input may come behind the first norm
        drop_dead(graph, normed.dead)
        graph.lint()
    done("8")


def by_argument(facts: Mapping[str, eligibility.LayerFacts]) -> FactsOf:
    """`facts` by the argument of an op; of a name without a value, if all agree."""
    known: dict[Any, eligibility.LayerFacts] = {**facts}
    # Who decodes, and with which weights, matters to a pass by the output alone.
    if len({(f.decline, f.query, f.cache, f.plain_output) for f in facts.values()}) == 1:
        known[None] = next(iter(facts.values()))

    def facts_of(layer_name: Any) -> eligibility.LayerFacts:
        if found := known.get(vllm_compat.traced_layer_name(layer_name)):
            return found
        raise Declined("unknown-layer", str(layer_name))

    return facts_of


def _show(stage: str, graph: fx.Graph) -> None:
    """Hand the graph to depyf, which writes it as Python if vLLM's debug_dump_path is set."""
    # By attribute: depyf replaces the function while it records.
    torch._dynamo.utils.lazy_format_graph_code(f"mla_fusion.{stage}", graph.owning_module)  # type: ignore[arg-type]


class _Steps:
    """Records the ops of a graph before and behind each pass, and leaves it in torch's trace."""

    def __init__(self, graph: fx.Graph, record: report.RangeReport) -> None:
        self.graph, self.record, self.ops = graph, record, describe.counts(graph)

    def __call__(self, number: str, replaced: Iterable[fx.Node] = ()) -> None:
        before, self.ops = self.ops, describe.counts(self.graph, replaced)
        self.record.passes[number] = PassOps(before, self.ops)
        _trace(f"pass_{number}", self.graph)


def _trace(stage: str, graph: fx.Graph) -> None:
    """Leave a graph among torch's structured traces, which TORCH_TRACE and tlparse show."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"mla_fusion_{stage}", "encoding": "string"},
        payload_fn=lambda: graph.python_code("self").src,
    )
