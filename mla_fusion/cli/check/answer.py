"""The answer of `mla-fusion check`: whether a model fuses, where, and the command to type."""

import argparse
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mla_fusion import config
from mla_fusion.report import Report
from mla_fusion.report.reasons import Decline

_NAME = {"nvidia": "NVIDIA GPUs", "amd": "AMD GPUs (not yet run there)"}
_ENVIRONMENT = {"nvidia": "", "amd": "VLLM_ROCM_USE_AITER=1 "}  # for any of AITER's kernels
_REQUESTS = 256  # at once, if the user does not say
_SHOWN = 2  # reasons of a text, in two lines each
_WEIGHTS = ("*.safetensors", "*.bin")
_SNAPSHOT = re.compile(r"/models--(.+?)--(.+)/snapshots/[^/]+$")  # in the Hub's cache


class Settings(argparse.Namespace):
    """The engine that the user would start, and how it is cut: the command's arguments."""

    checkpoint = "auto"  # the type of the KV cache that vLLM takes from the checkpoint

    @property
    def cache(self) -> str:
        """The type of the KV cache: --kv-cache-dtype, or without it the checkpoint's."""
        return self.checkpoint if self.kv_cache_dtype == "auto" else str(self.kv_cache_dtype)

    @property
    def requests(self) -> int:
        """Requests at once: --max-num-seqs, or the number that is assumed without it."""
        return int(self.max_num_seqs or _REQUESTS)

    @property
    def bucket(self) -> int:
        """As `config.decode_bucket` without CUDA graphs; draft tokens of any method widen it."""
        return max(self.requests * (1 + self.speculative_tokens), 2)

    def drafts(self, method: str) -> dict[str, Any]:
        """vLLM's speculative_config with `method`."""
        return {"method": method, "num_speculative_tokens": self.speculative_tokens}

    def serve(self, model: Mapping[str, Any], draft: bool) -> list[str]:
        """The arguments of `vllm serve`, the model first, which a draft head is not. model: its
        config. If that brings code, it is trusted; if it has layers that predict tokens, drafts
        come from them, else from the prompt. An option that was not asked for is left to vLLM."""
        name = self._served()
        words = ["MODEL" if draft else name or "MODEL"]
        words += ["--trust-remote-code"] if model.get("auto_map") else []
        for flag, default in (
            ("tensor-parallel-size", 1), ("decode-context-parallel-size", 1),
            ("max-num-seqs", None), ("kv-cache-dtype", "auto"),
        ):  # fmt: skip
            value = getattr(self, flag.replace("-", "_"))
            words += [f"--{flag}", str(value)] if value != default else []
        if self.speculative_tokens:
            predicts = draft or model.get("num_nextn_predict_layers")
            drafts = self.drafts("mtp" if predicts else "ngram")
            drafts |= {"model": name or "DRAFT"} if draft else {}
            words += ["--speculative-config", json.dumps(drafts, separators=(",", ":"))]
        options = {} if self.attention == "auto" else {"attention": self.attention}
        # AITER's op, ROCm's default, is declined by ranks that share a cache.
        options |= {"provider": "triton"} if self.decode_context_parallel_size > 1 else {}
        if options:
            words += ["--additional-config", json.dumps({config.OPTIONS_KEY: options})]
        return words

    def _served(self) -> str:
        """The model's name on the Hub, or its folder if that has weights; else empty."""
        folder = self.model if self.model.is_dir() else self.model.parent
        if hub := _SNAPSHOT.search(str(folder.absolute())):
            return f"{hub[1]}/{hub[2]}"
        return str(folder) if any(any(folder.glob(kind)) for kind in _WEIGHTS) else ""


@dataclass(frozen=True)
class Answer:
    """The answer of `mla-fusion check`, as text or as JSON."""

    model: str  # the architecture
    settings: Settings  # for which it was asked
    checked_by: str  # "engine" or "configuration"
    why: list[Decline]  # each reason against it
    details: list[str]  # lines on how it was found
    report: Report | None = None  # of the engine, if one ran and compiled an MLA layer
    backends: dict[str, list[str]] = field(default_factory=dict)  # with which it fuses, by platform
    arguments: list[str] = field(default_factory=list)  # of `vllm serve`, the model first
    notes: list[str] = field(default_factory=list)  # lines on the decode that was asked for

    @property
    def layers(self) -> tuple[int, int]:
        """(fused, all) MLA layers of the cut model, as often as a decode graph has them."""
        if self.report is None:
            return 0, 0
        decode = self.report.decode()
        return decode.fused, decode.layers + self.report.uncompiled

    @property
    def fuses(self) -> bool:
        """True if every MLA layer does."""
        fused, layers = self.layers
        return 0 < fused == layers

    def commands(self) -> dict[str, str]:
        """The command line for each platform on which it fuses."""
        line = shlex.join(["vllm", "serve", *self.arguments, f"-cc.pass_config.{config.FLAG}=True"])
        return {name: _ENVIRONMENT[name] + line for name in self.backends if self.fuses}

    def lines(self) -> list[str]:
        """The answer, in five lines at most."""
        (fused, layers), asked = self.layers, self.settings
        if self.fuses:
            drafts = asked.speculative_tokens
            each = f" of 1 + {drafts} tokens" if drafts else ""
            batch = f"{asked.requests} requests{each} at once"
            out = [
                f"{self.model}: fuses. Every MLA layer, in graphs for 1 to {asked.bucket} tokens: "
                f"{batch} (--max-num-seqs; vLLM's own may be higher)"
            ]
            for place, (platform, line) in enumerate(self.commands().items()):
                backends = ", ".join(self.backends[platform])
                out.append(f"  {_NAME[platform]}, attention backend {backends}:")
                if place:
                    out[-1] += f" the same after {_ENVIRONMENT[platform].strip()}"
                else:
                    out.append(f"    {line}")
            return out + self.notes
        part = f"{layers - fused} of {layers} MLA layers of the cut model stay unfused"
        out = [f"{self.model}: {part if fused else 'does not fuse'}"]
        if len(self.why) > _SHOWN:
            out[0] += f". {_SHOWN} of its {len(self.why)} reasons, all with --json:"
        said = [text for decline in self.why[:_SHOWN] for text in decline.sentences()]
        return out + [f"  {text}" for text in said or ["no graph with an MLA layer was compiled"]]

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        fused, layers = self.layers
        return {
            "model": self.model,
            "fuses": self.fuses,
            "checked_by": self.checked_by,
            "tokens": [1, self.settings.bucket] if self.fuses else None,
            "platforms": [*self.backends] if self.fuses else [],
            "backends": self.backends if self.fuses else {},
            "commands": self.commands(),
            "reasons": [{"code": d.code, "text": d.explain()} for d in self.why],
            "cut_model": {"fused": fused, "layers": layers},
            "details": self.details,
            "notes": [note.strip() for note in self.notes],
            "report": self.report.lines() if self.report else [],
        }
