"""What else an engine may have on, and an engine with the fusion off and on for each of them.

Real weights of unit gain (`mla_fusion.tiny_models`), so that tokens would notice a wrong value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mla_fusion import tiny_models

MODEL = "deepseek-v3-shaped"


@dataclass(frozen=True)
class Neighbour:
    """`engine` are arguments of EngineArgs, `imitate` functions of imitations.py.

    `reason` is the code for which it must decline; then no engine is needed, only its config.
    """

    name: str
    engine: dict[str, Any] = field(default_factory=dict)
    imitate: tuple[str, ...] = ()
    reason: str = ""
    refused: str = ""  # what vLLM itself says against it on a CPU
    model: str = ""  # a folder below that of the model all others run

    def jobs(self, folder: str) -> list[dict[str, Any]]:
        """The engine with the flag off, and on, as `engines.py` takes them."""
        common = {
            "folder": str(Path(folder, self.model)),
            "engine": self.engine,
            "imitate": self.imitate,
            "prompts": True,
            "config_only": bool(self.reason),
        }
        return [
            {"name": f"{self.name} ({'on' if flag else 'off'})", "flag": flag, **common}
            for flag in ((True,) if self.reason else (False, True))
        ]


TERSE = "terse"
_SEVERAL = ("several_tokens_per_decode",)


def _drafts(count: int) -> Neighbour:
    method = {"method": "ngram", "num_speculative_tokens": count, "prompt_lookup_max": 3}
    return Neighbour(
        f"speculative decoding, {count} draft token{'s' * (count > 1)}",
        {"speculative_config": {**method, "prompt_lookup_min": 1}},
        imitate=_SEVERAL,
        model=TERSE,
    )


NEIGHBOURS = (
    Neighbour("none"),
    Neighbour("prefix caching", {"enable_prefix_caching": True}, imitate=_SEVERAL),
    Neighbour(
        "chunked prefill",
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 16},
        imitate=_SEVERAL,
    ),
    *(_drafts(count) for count in range(1, 8)),
    Neighbour("LoRA", {"enable_lora": True, "max_lora_rank": 8}),
    Neighbour("tensor parallel 2", {"tensor_parallel_size": 2}),
    Neighbour(
        "KV-transfer connector",
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
    ),
    Neighbour(
        "decode context parallel 2",
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        reason="context-parallel",
    ),
    Neighbour(
        "prefill context parallel 2",
        {"tensor_parallel_size": 2, "prefill_context_parallel_size": 2},
        reason="context-parallel",
        refused="Model Runner V1 does not support: prefill context parallel",
    ),
)


def write_model(folder: Path) -> str:
    """Write the model all of them run, and below it, in `TERSE`, one that says eight tokens alone.

    With that one drafts from the prompt are often right; with the other hardly one is ever made.
    """
    from safetensors.torch import load_file, save_file

    terse = tiny_models.write(MODEL, folder / TERSE) / "model.safetensors"
    tensors = load_file(terse)
    tensors["lm_head.weight"][8:] = 0
    save_file(tensors, terse, metadata={"format": "pt"})
    return str(tiny_models.write(MODEL, folder))
