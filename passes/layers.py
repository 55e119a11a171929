"""Cuts a model's graph, as Dynamo made it, behind the attention of each layer.

    ... ─► attention ─► view (─► quantization) │ o_proj ─► ... ─► attention ─► view │ o_proj ─► ...
                                               cut                                  cut

Equal pieces are compiled once. A cut lies in front of the first op behind an attention that reads a
weight matrix, or that is neither torch's nor a quantization. So passes 2 to 4 and 6 find in one
piece all that they rewrite, and the product, a collective behind it and the norm of the residual
stream, which passes of vLLM join, stay together too. Safe because a cut moves no op."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from mla_fusion import ops


def mark(graph: fx.Graph, is_attention: Callable[[fx.Node], bool]) -> int:
    """Insert a call of the op `ops.CUT` at each cut; returns the number of cuts. `is_attention`
    tells a call of vLLM's MLA attention op."""
    behind, cuts = False, 0
    for node in list(graph.nodes):
        if is_attention(node):
            behind = True
        elif behind and node.op != "output" and _is_product(node):
            with graph.inserting_before(node):
                graph.call_function(ops.get(ops.CUT))
            behind, cuts = False, cuts + 1
    return cuts


def _is_product(node: fx.Node) -> bool:
    """True if a node may multiply: it reads a matrix, or hides its weights in an op of its own."""
    if any(map(_is_matrix, node.all_input_nodes)):
        return True
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return False
    namespace, name, *_ = str(target).split(".")
    quantizes = any(op.startswith(f"{namespace}.{name}") for op in ops.Quantization)
    return namespace != "aten" and not quantizes


def _is_matrix(node: fx.Node) -> bool:
    """True if a node is an input of the graph with two dimensions, neither the token count."""
    value = node.meta.get("example_value")
    shape = value.shape if node.op == "placeholder" and isinstance(value, torch.Tensor) else ()
    return len(shape) > 1 and all(isinstance(size, int) for size in shape)
