"""Every spelling of RoPE and cache write, in every variant, among the passes of vLLM.

The graphs are traced from vLLM's own code (`tests/passes/graphs.py`), and run before and after the
passes; others were recorded from an engine on a GPU (`tests/passes/recorded.py`).
"""

import itertools

from tests.coverage import vllm_passes
from tests.passes.graphs import Spec

BOTH = (False, True)
# name -> what `Spec` has, `is_neox` of each graph, and whether vLLM's own fusion of RoPE and cache
# write is on, and must find it
SPELLINGS = {
    "native, NeoX": ({"rope": "native"}, (True,), False),
    "native, GPT-J": ({"rope": "native"}, (False,), False),
    "native, DeepSeek scaling": ({"rope": "deepseek"}, BOTH, False),
    "`_C.rotary_embedding`": ({"rope": "vllm_c"}, BOTH, False),
    "`vllm.flashinfer_rotary_embedding`": ({"rope": "flashinfer"}, BOTH, False),
    "`vllm.rocm_aiter_triton_rotary_embedding`": ({"rope": "aiter"}, BOTH, False),
    "vLLM's fused RoPE and cache write": ({"rope": "deepseek"}, BOTH, True),
    "no RoPE": ({"rope": "nope"}, (False,), False),
    "native, DeepSeek scaling, then a scaled query": (
        {"rope": "deepseek", "scaled": "in_place"}, BOTH, False
    ),
    "`vllm.flashinfer_rotary_embedding`, then a scaled query": (
        {"rope": "flashinfer", "scaled": "in_place"}, BOTH, False
    ),
}  # fmt: skip
# How the graph comes to the passes: with q_lora; `layer_name` as in `Spec`; and whether Inductor
# splits the graph at the attention, after the passes, or vLLM was told to split nowhere.
VARIANTS = list(itertools.product(BOTH, ("input", "constant"), (True, False)))


def outcome(name, variant):
    """The codes of the reasons against it, if it is not fused."""
    (given, styles, by_vllm), (q_lora, layer_name, partition) = SPELLINGS[name], variant
    declined: set[str] = set()
    for is_neox in styles:
        spec = Spec(is_neox=is_neox, q_lora=q_lora, layer_name=layer_name, **given)
        made = vllm_passes.compare(spec, partition, by_vllm)
        assert made.layers == 1 and made.fused + len(made.declined) == 1
        declined |= {decline.code for decline in made.declined}
    return declined
