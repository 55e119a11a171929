"""The engine that a user of `mla-fusion check` would start, and how it is cut."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_fusion import config

_WEIGHTS = ("*.safetensors", "*.bin")
# Where the Hub's cache keeps a model.
_SNAPSHOT = re.compile(r"/models--(.+?)--(.+)/snapshots/[^/]+$")


@dataclass(frozen=True)
class Settings:
    """The engine the user would start, and how it is cut: the command's arguments."""

    model: Path
    max_num_seqs: int = 256
    speculative_tokens: int = 0
    tensor_parallel_size: int = 1
    kv_cache_dtype: str = "auto"
    layers: int = 2
    provider: str = "reference"
    dump: Path | None = None
    json: bool = False
    attention: str = "auto"
    decode_context_parallel_size: int = 1

    @property
    def bucket(self) -> int:
        """As `config.decode_bucket` without CUDA graphs; draft tokens of any method widen it."""
        return max(self.max_num_seqs * (1 + self.speculative_tokens), 2)

    def drafts(self, method: str) -> dict[str, Any]:
        """vLLM's speculative_config with `method`."""
        return {"method": method, "num_speculative_tokens": self.speculative_tokens}

    def serve(self, draft: bool, predicts: bool) -> list[str]:
        """The arguments of `vllm serve`, the model first, which a draft head is not.

        --max-num-seqs is always named: the bucket depends on it, and vLLM's default on the GPU.
        Drafts come from the layers with which the model `predicts` them, else from the prompt.
        """
        name, shared = self._served(), self.decode_context_parallel_size
        words = ["MODEL" if draft else name or "MODEL"]
        for flag, value, default in (
            ("--tensor-parallel-size", self.tensor_parallel_size, 1),
            ("--decode-context-parallel-size", shared, 1),
            ("--max-num-seqs", self.max_num_seqs, None),
            ("--kv-cache-dtype", self.kv_cache_dtype, "auto"),
        ):
            words += [flag, str(value)] if value != default else []
        if self.speculative_tokens:
            drafts = self.drafts("mtp" if draft or predicts else "ngram")
            drafts |= {"model": name or "DRAFT"} if draft else {}
            words += ["--speculative-config", json.dumps(drafts, separators=(",", ":"))]
        options = {} if self.attention == "auto" else {"attention": self.attention}
        # AITER's op, ROCm's default, is declined by ranks that share a cache.
        options |= {"provider": "triton"} if shared > 1 else {}
        if options:
            words += ["--additional-config", json.dumps({config.OPTIONS_KEY: options})]
        return words

    def _served(self) -> str:
        """The model's name on the Hub, or its folder if that has weights; else empty."""
        folder = self.model if self.model.is_dir() else self.model.parent
        if hub := _SNAPSHOT.search(str(folder.absolute())):
            return f"{hub[1]}/{hub[2]}"
        return str(folder) if any(any(folder.glob(kind)) for kind in _WEIGHTS) else ""
