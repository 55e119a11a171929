"""What a pass did, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mla_fusion.report.reasons import Decline


@dataclass
class PassResult:
    """`rewritten` and `declined` name the attention calls as they stood before the pass."""

    rewritten: list[str] = field(default_factory=list)
    declined: dict[str, Decline] = field(default_factory=dict)
