"""Every spelling of RoPE and cache write, in every variant, among the passes of vLLM.

The graphs are traced from vLLM's own code (`tests/passes/graphs.py`), and run before and after the
passes; others were recorded from an engine on a GPU (`tests/passes/recorded.py`).
"""

from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from mla_fusion import ops
from mla_fusion.patterns.site import ATTENTION
from tests.coverage import vllm_passes
from tests.passes.cuda_ops import plain_kernels
from tests.passes.fake_engine import BATCHES, assert_same, run
from tests.passes.graphs import Spec, build, copy


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


TOLERANCE = 1e-5  # of fp32: 2**-24 times a few dozen additions
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
    """ "fused", or the code of the reason against it.

    Raises:
        AssertionError: what the graph computes has changed, or vLLM's own fusion did not do before
            what the row says.
    """
    spelling = SPELLINGS[name]
    said = {_run(spelling, style, variant) for style in spelling.styles}
    return " / ".join(sorted(said))


def _run(spelling, is_neox, variant):
    name, q_lora = variant.layer_name, variant.q_lora
    spec = Spec(spelling.rope, is_neox, q_lora=q_lora, layer_name=name, scaled=spelling.scaled)
    split_at = [ATTENTION, *ops.RUNTIME_OPS] if variant.partition else []
    before = build(spec)
    after = copy(before)
    with torch._inductor.config.patch(custom_should_partition_ops=split_at):
        made, by_vllm = vllm_passes.run_all(after, spec, spelling.by_vllm)
    assert by_vllm == spelling.by_vllm
    with pytest.MonkeyPatch.context() as patch, contextmanager(plain_kernels)(patch):
        for batch in (BATCHES["decode"], BATCHES["mixed"]):
            results = run(before, spec, batch), run(after, spec, batch)
            assert_same(*results, batch, tolerance=TOLERANCE)
    if made.fused == made.layers == 1 and not made.declined:
        return "fused"
    return " / ".join(made.declined)
