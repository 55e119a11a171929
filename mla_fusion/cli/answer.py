"""The answer of `mla-fusion check`: whether a model fuses, where, and the command to type."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mla_fusion import config
from mla_fusion.cli.model_classes import PLATFORMS

if TYPE_CHECKING:
    from mla_fusion.report import Report
    from mla_fusion.report.reasons import Decline

_NOTE = {"nvidia": "provider triton", "amd": "provider aiter; not yet run on AMD"}
_NAME = {"nvidia": "NVIDIA GPUs", "amd": "AMD GPUs"}


@dataclass(frozen=True)
class Answer:
    """What `mla-fusion check` prints, as text or as JSON.

    model: the architecture. platforms: where vLLM compiles it.
    bucket: the largest token count of a graph that fuses.
    checked_by: "engine" or "configuration".
    arguments: those of `vllm serve`, the model first.
    why: each reason against it.
    report: that of the engine that ran the cut model, if one ran and compiled an MLA layer.
    details: lines on how it was found.
    """

    model: str
    platforms: frozenset[str]
    bucket: int
    checked_by: str
    arguments: list[str]
    why: list[Decline]
    report: Report | None
    details: list[str]

    @property
    def layers(self) -> tuple[int, int]:
        """(fused, all) MLA layers of the cut model's decode graphs."""
        decode = self.report.decode_ranges() if self.report else []
        return sum(r.fused for r in decode), sum(r.layers for r in decode)

    @property
    def fuses(self) -> bool:
        """Whether every MLA layer does."""
        fused, layers = self.layers
        return 0 < fused == layers

    def commands(self) -> dict[str, str]:
        """The command line for each platform on which it fuses."""
        if not self.fuses:
            return {}
        line = shlex.join(["vllm", "serve", *self.arguments, f"-cc.pass_config.{config.FLAG}=True"])
        return {p: line for p in PLATFORMS if p in self.platforms}

    def lines(self) -> list[str]:
        """The answer, and the detail below it."""
        return [*self._verdict(), *(["", *self.details] if self.details else [])]

    def _verdict(self) -> list[str]:
        fused, layers = self.layers
        if self.fuses:
            where = [f"{_NAME[p]} ({_NOTE[p]})" for p in PLATFORMS if p in self.platforms]
            out = [
                f"{self.model}: fuses. Every MLA layer, in graphs for 1 to {self.bucket} tokens",
                f"  on: {', '.join(where)}",
                "  start it with",
            ]
            return out + [f"    {line}" for line in {*self.commands().values()}]
        part = f"{layers - fused} of {layers} MLA layers of the cut model stay unfused"
        out = [f"{self.model}: {part if fused else 'does not fuse'}"]
        out += [f"  {decline.explain()}" for decline in self.why]
        if not self.why:
            out.append("  no graph with an MLA layer was compiled")
        return out

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        fused, layers = self.layers
        return {
            "model": self.model,
            "fuses": self.fuses,
            "checked_by": self.checked_by,
            "tokens": [1, self.bucket] if self.fuses else None,
            "platforms": [p for p in PLATFORMS if p in self.platforms] if self.fuses else [],
            "commands": self.commands(),
            "reasons": [{"code": d.code, "text": d.explain()} for d in self.why],
            "cut_model": {"fused": fused, "layers": layers},
            "details": self.details,
        }
