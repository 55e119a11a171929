"""What a pass did, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import fx

    from mla_fusion.report.reasons import Decline


@dataclass
class PassResult:
    """What became of the calls that a pass looked at, by the name each had before it.

    `rewritten` has the node that took a call's place. `dead` are old nodes that a new one replaced:
    they stay in the graph until `drop_dead`.
    """

    rewritten: dict[str, fx.Node] = field(default_factory=dict)
    declined: dict[str, Decline] = field(default_factory=dict)
    dead: list[fx.Node] = field(default_factory=list)
