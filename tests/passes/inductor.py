"""Graphs of `graphs.build` through Inductor, which does not run what it is given node by node."""

import torch
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.virtualized import V

from mla_fusion.passes.fix_functionalization import MLAFixFunctionalizationPass
from tests.passes import graphs
from tests.passes.fake_engine import fuse


def through(module, spec, quantized_query=False, fused=True):
    """(what Inductor compiles of a copy of the graph, with the passes where vLLM runs them, or None
    if it holds for one number of tokens alone; what became of the layers, without them None). It
    takes the list of the graph's inputs."""
    module, record = graphs.copy(module), None
    values = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]

    def passes(graph):
        nonlocal record
        if fused:
            record = fuse(graph.owning_module, spec, quantized_query=quantized_query)
            MLAFixFunctionalizationPass(None)(graph)

    settings = {
        "post_grad_custom_post_pass": passes, "enable_auto_functionalized_v2": False,
        "force_disable_caches": True,
    }  # fmt: skip
    mode = detect_fake_mode(values)
    shapes = mode.shape_env
    kept = dict(shapes.replacements)
    patched, context = torch._inductor.config.patch(settings), TracingContext(mode)
    try:
        with patched, V.set_fake_mode(mode), tracing(context):
            compiled = compile_fx_inner(module, values)
        return compiled if shapes.replacements == kept else None, record
    finally:  # other copies of the graph share its symbols
        shapes.replacements.clear()
        shapes.replacements.update(kept)
        shapes._update_version_counter()
