"""The pair that the fusion pass replaces: the canonical RoPE node and the query preparation.

q, kv_c, k_pe, ... ─► auto_functionalized(rope_mla_kv_cache_update)
                        ├─► [0] dummy
                        ├─► [1] q ─► mla_decode_q_prep
                        └─► [2] k_pe
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from mla_fusion import ops
from mla_fusion.patterns.site import functionalized_op, op_name

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Pair:
    """`rope` is the functionalized canonical node, `prep` the query preparation that reads it."""

    rope: fx.Node
    prep: fx.Node


def pairs(graph: fx.Graph) -> Iterator[Pair]:
    """Every pair of one layer in `graph`."""
    for node in list(graph.nodes):
        if op_name(node.target) != f"{ops.NAMESPACE}::{ops.Q_PREP}":
            continue
        q, layer_name = node.args[0], node.args[1]
        if not (isinstance(q, fx.Node) and q.target is operator.getitem and q.args[1] == 1):
            continue
        rope = q.args[0]
        if (
            isinstance(rope, fx.Node)
            and functionalized_op(rope) == f"{ops.NAMESPACE}::{ops.ROPE_UPDATE}"
            and rope.kwargs["layer_name"] == layer_name
        ):
            yield Pair(rope, node)
