"""Every spelling of RoPE and cache write, in every variant, among the passes of vLLM.

The graphs are traced from vLLM's own code (`tests/passes/graphs.py`), and run before and after the
passes; others were recorded from an engine on a GPU (`tests/passes/recorded.py`).
"""

from dataclasses import dataclass

from tests.coverage import vllm_passes
from tests.passes.graphs import Spec


@dataclass(frozen=True)
class Spelling:
    """The graphs of a row.

    Attributes:
        rope: as in `Spec`.
        styles: `is_neox` of each graph.
        scaled: as in `Spec`.
        by_vllm: whether vLLM's own fusion of RoPE and cache write is on, and must find it.
    """

    rope: str
    styles: tuple[bool, ...] = (False, True)
    scaled: str = ""
    by_vllm: bool = False


SPELLINGS = {
    "native, NeoX": Spelling("native", (True,)),
    "native, GPT-J": Spelling("native", (False,)),
    "native, DeepSeek scaling": Spelling("deepseek"),
    "`_C.rotary_embedding`": Spelling("vllm_c"),
    "`vllm.flashinfer_rotary_embedding`": Spelling("flashinfer"),
    "`vllm.rocm_aiter_triton_rotary_embedding`": Spelling("aiter"),
    "vLLM's fused RoPE and cache write": Spelling("deepseek", by_vllm=True),
    "no RoPE": Spelling("nope", (False,)),
    "native, DeepSeek scaling, then a scaled query": Spelling("deepseek", scaled="in_place"),
    "`vllm.flashinfer_rotary_embedding`, then a scaled query": Spelling(
        "flashinfer", scaled="in_place"
    ),
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

    def __str__(self):
        words = "q_lora" if self.q_lora else "no q_lora", f"name {self.layer_name}"
        return ", ".join((*words, "partition" if self.partition else "whole"))


VARIANTS = [
    Variant(q_lora, name, partition)
    for q_lora in (False, True)
    for name in ("input", "constant")
    for partition in (True, False)
]


def outcome(name, variant):
    """ "fused", or the code of the reason against it."""
    spelling = SPELLINGS[name]
    return " / ".join(sorted({_run(spelling, style, variant) for style in spelling.styles}))


def _run(spelling, is_neox, variant):
    name, q_lora = variant.layer_name, variant.q_lora
    spec = Spec(spelling.rope, is_neox, q_lora=q_lora, layer_name=name, scaled=spelling.scaled)
    made = vllm_passes.compare(spec, variant.partition, spelling.by_vllm)
    if made.fused == made.layers == 1 and not made.declined:
        return "fused"
    return " / ".join(made.declined)
