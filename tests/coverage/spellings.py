"""Every spelling of RoPE and cache write, in every variant, through the passes.

The graphs are traced from vLLM's own code (`tests/passes/graphs.py`) or recorded from an engine on
a GPU (`tests/passes/recorded.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.compilation.passes.inductor_pass import pass_context
from vllm.config.utils import Range
from vllm.forward_context import override_forward_context

from mla_fusion import ops, report
from mla_fusion.passes.pipeline import MLAFusionPass
from mla_fusion.patterns.site import ATTENTION
from tests.passes import recorded
from tests.passes.fake_engine import DECODE, Engine
from tests.passes.graphs import Spec, build

BUCKET = 4
# spelling -> (rope of a Spec, is_neox of each graph, spelling of a recording)
SPELLINGS: dict[str, tuple[str, tuple[bool, ...], str]] = {
    "native, NeoX": ("native", (True,), ""),
    "native, GPT-J": ("native", (False,), "native"),
    "native, DeepSeek scaling": ("deepseek", (False, True), "deepseek"),
    "`_C.rotary_embedding`": ("vllm_c", (False, True), "vllm_c"),
    "`vllm.flashinfer_rotary_embedding`": ("flashinfer", (False, True), "flashinfer"),
    "`vllm.rocm_aiter_triton_rotary_embedding`": ("aiter", (False, True), ""),
    "vLLM's fused RoPE and cache write": ("cat_fused", (False, True), "cat_fused"),
    "no RoPE": ("nope", (False,), ""),
}


@dataclass(frozen=True)
class Variant:
    """How the graph comes to the passes.

    Attributes:
        layer_name: "input" or "constant", as in `Spec`.
        partition: Inductor splits the graph at the attention, after the passes; else the graph
            is whole because vLLM was told to split nowhere.
    """

    q_lora: bool
    layer_name: str
    partition: bool

    def __str__(self) -> str:
        words = "q_lora" if self.q_lora else "no q_lora", f"name {self.layer_name}"
        return ", ".join((*words, "partition" if self.partition else "whole"))


VARIANTS = [
    Variant(q_lora, name, partition)
    for q_lora in (False, True)
    for name in ("input", "constant")
    for partition in (True, False)
]


def outcome(spelling: str, variant: Variant) -> str:
    """ "fused", or the code of the reason against it."""
    rope, styles, _ = SPELLINGS[spelling]
    said = {_run(rope, style, variant) for style in styles}
    return " / ".join(sorted(said))


def _run(rope: str, is_neox: bool, variant: Variant) -> str:
    spec = Spec(rope, is_neox, q_lora=variant.q_lora, layer_name=variant.layer_name)
    split_at = [ATTENTION, *ops.RUNTIME_OPS] if variant.partition else []
    report.take("reference", BUCKET)  # of whatever ran before
    with (
        torch._inductor.config.patch(custom_should_partition_ops=split_at),
        override_forward_context(Engine(spec).context(DECODE)),
        pass_context(Range(1, BUCKET)),
    ):
        MLAFusionPass("reference", BUCKET)(build(spec).graph)
    made = report.take("reference", BUCKET)
    assert made is not None
    [only] = made.ranges
    if only.fused == only.layers == 1 and not only.declined:
        return "fused"
    return " / ".join(only.declined)


def source(spelling: str) -> str:
    """Where the graph of a spelling comes from."""
    wanted = SPELLINGS[spelling][2]
    files = [path for path in recorded.FOLDER.glob("*.json.gz") if path.name.startswith(wanted)]
    return f"traced; {len(files)} recorded" if wanted and files else "traced"


def table() -> dict[str, dict[str, str]]:
    """Spelling -> {variant: outcome}."""
    return {name: {str(v): outcome(name, v) for v in VARIANTS} for name in SPELLINGS}
