"""Models of linear layers, traced as vLLM has them on CUDA, for pass 7."""

import functools

import pytest
import torch
from torch import fx
from torch._inductor.compile_fx import compile_fx
from torch.nn.functional import linear

from mla_fusion.passes import pipeline
from mla_fusion.report import RangeReport
from tests.passes import graphs

BF16 = torch.bfloat16
K, Q, KV, OUT = 24, 40, 18, 32
SHAPES = {"x": (5, K), "w_q": (Q, K), "w_kv": (KV, K), "w_o": (OUT, Q), "w_up": (K, OUT),
          "bias": (OUT,), "turned": (Q, OUT), "wide": (2 * OUT, Q), "gain": (KV,),
          "gain_x": (K,), "gain_rest": (Q - KV,), "residual": (5, K),
          "w_b": (OUT, KV), "w_c": (K, KV), "router": (KV, K),
          "w_wide": (256, K), "w_a": (192, 256), "w_fp8": (192, 256), "scales": (2, 2),
          "row": (1, 2), "narrow": (2, 2)}  # fmt: skip
KINDS = dict.fromkeys(("router", "scales", "row"), torch.float32) | {"w_fp8": torch.float8_e4m3fn}


def values(dtype=BF16, tokens=5, **other):
    """Inputs of a model, by name."""
    generator = torch.Generator().manual_seed(tokens)
    made = {n: torch.randn(shape, generator=generator) for n, shape in SHAPES.items()}
    made = {n: value.to(KINDS.get(n, dtype)) for n, value in made.items()}
    return made | {"x": torch.randn((tokens, K), generator=generator).to(dtype), **other}


def layer(t):
    """Two products of one input, one of another, as q, kv_a and o_proj of a layer."""
    q, kv = linear(t["x"], t["w_q"]), linear(t["x"], t["w_kv"])
    return linear(q.sigmoid(), t["w_o"]), kv


def routed(t):
    """A product with a weight in fp32, as of a router, beside another of its input."""
    return linear(t["x"].float(), t["router"]), linear(t["x"], t["w_kv"])


def in_a_row(t):
    """A product of a product."""
    return linear(linear(t["x"], t["w_q"]), t["w_o"])


def two_of_a_part(t):
    """Two products of a part of each row, as a product that reads what another made."""
    part = linear(t["x"], t["w_q"])[:, :KV]
    return linear(part, t["w_b"]), linear(part, t["w_c"])


def two_layers(t):
    """The same twice."""
    out, first = layer(t)
    again, second = layer({**t, "x": linear(out.tanh(), t["w_up"]).sin()})
    return again, first, second


class _Captured(Exception):
    """Ends a compilation once the graph is known."""


@functools.cache
def _traced(model, dtype, dynamic, turned):
    given, kept = values(dtype), []
    if turned:
        given["w_o"] = given["w_o"].t().contiguous().t()
    if dynamic:
        torch._dynamo.mark_dynamic(given["x"], 0)

    def stop(graph):
        kept.append(graph)
        raise _Captured

    names: list[str] = []

    def backend(module, example_inputs):
        names.extend(graphs._input_names(module, example_inputs))
        settings = {"post_grad_custom_post_pass": stop, "force_disable_caches": True}
        with torch._inductor.config.patch(settings):
            return compile_fx(module, example_inputs)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=None)
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        compiled(given)
    module = fx.GraphModule(torch.nn.Module(), kept[0])
    for node, name in zip(module.graph.find_nodes(op="placeholder"), names, strict=True):
        node.target = node.name = name
    return graphs.copy(module)


def build(model=layer, dtype=BF16, dynamic=True, turned=False):
    """A fresh graph of `model` as vLLM hands it over."""
    return graphs.copy(_traced(model, dtype, dynamic, turned))


def run(module, given):
    inputs = module.graph.find_nodes(op="placeholder")
    flat = [given.get(node.name, len(given["x"])) for node in inputs]
    with torch.no_grad():
        return fx.Interpreter(module).run(*flat)


def rewrite(module, first=1, last=64):
    """What pass 7 did, after its clean-up."""
    record = RangeReport((first, last))
    pipeline.project(module.graph, "auto", record, "triton")
    return record


def names(node):
    return [each.name for each in node.args[1]]
