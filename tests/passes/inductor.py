"""Graphs of `graphs.build` through Inductor, which does not run what it is given node by node."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.virtualized import V

from mla_fusion.passes import fix_functionalization
from tests.passes import edits, graphs
from tests.passes.fake_engine import fuse

# vLLM's own pass takes its RoPE kernels out of `auto_functionalized` too; of an op that is left
# there, Inductor copies values that are not stored wrong.
IN_PLACE = fix_functionalization.OWN | {*edits.IN_PLACE.values()}


@dataclass
class Compiled:
    """A graph through Inductor, and what Inductor assumes of the number of tokens."""

    call: Callable[[list[Any]], Any]
    guards: list[Any]

    def holds(self, tokens):
        """True if it may run with that many."""
        return all(guard.subs(dict.fromkeys(guard.free_symbols, tokens)) for guard in self.guards)


def through(module, spec, quantized_query=False, fused=True):
    """(a `Compiled` copy of a graph of `graphs.build_apart`, with the passes where vLLM runs them;
    what became of the layers, without them None)."""
    module, record = graphs.copy(module), None
    values = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]

    def passes(graph):
        nonlocal record
        if fused:
            record = fuse(graph.owning_module, spec, quantized_query=quantized_query)
        with mock.patch.object(fix_functionalization, "OWN", IN_PLACE):
            fix_functionalization.MLAFixFunctionalizationPass()(graph)

    settings = {
        "post_grad_custom_post_pass": passes, "enable_auto_functionalized_v2": False,
        "force_disable_caches": True,
    }  # fmt: skip
    mode = detect_fake_mode(values)
    known = len(mode.shape_env.guards)
    patched, context = torch._inductor.config.patch(settings), TracingContext(mode)
    with patched, V.set_fake_mode(mode), tracing(context):
        compiled = compile_fx_inner(module, values)
    return Compiled(compiled, [guard.expr for guard in mode.shape_env.guards[known:]]), record
