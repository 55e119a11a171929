"""A pass of your own, behind those of mla-fusion, through vLLM's hook for custom passes.

    .venv/bin/python examples/custom_pass.py

runs on a CPU in a clone of mla-fusion after `make demo`. The pass joins the two halves that the MLP
of each layer cuts from one product.

    before   x ─┬► slice[:, :256]        after   x ─► split_with_sizes ─┬► [0]
                └► slice[:, 256:]                                       └► [1]

Safe because the parts show the same memory. A slice that begins at 0 and has no such partner is
left as it is, with a reason.
"""

import argparse
import operator
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import fx
from vllm import LLM, SamplingParams
from vllm.compilation.passes.inductor_pass import InductorPass

from mla_fusion.passes.rewrite import call
from mla_fusion.patterns.nodes import arguments
from mla_fusion.plugin import register

aten = torch.ops.aten
OUTCOMES: Counter[str] = Counter()  # of all graphs


class Declined(Exception):
    """A slice stays as it is; the message is the reason."""


class SplitHalvesPass(InductorPass):
    """vLLM's cache key has the hash of this class's source, which is the default of `uuid`."""

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite a graph in place: look at each slice that begins at 0."""
        for node in graph.find_nodes(op="call_function", target=aten.slice.Tensor):
            if node.users and arguments(node)["start"] in (None, 0):
                try:
                    rewrite(graph, node, rest_of(node))
                    OUTCOMES["joined"] += 1
                except Declined as why:
                    OUTCOMES[f"left as it is: {why}"] += 1
        graph.eliminate_dead_code()
        graph.lint()


def rest_of(first: fx.Node) -> fx.Node:
    """The slice of the other part of what `first` is a slice of; Declined if there is none."""
    given = arguments(first)
    if given["step"] != 1:
        raise Declined("it leaves elements out")
    rest = {"start": given["end"], "end": sys.maxsize}
    for user in given["self"].users:
        if user.target is aten.slice.Tensor and arguments(user) == given | rest:
            return user
    raise Declined("no slice begins where it ends")


def rewrite(graph: fx.Graph, first: fx.Node, second: fx.Node) -> None:
    """Let readers of both slices read one split, which is put in front of the first one."""
    source, dim = first.args[0], arguments(first)["dim"]
    values = [node.meta["val"] for node in (first, second)]  # Inductor needs those of new nodes
    sizes = [value.shape[dim] for value in values]
    with graph.inserting_before(min(first, second)):
        split = call(graph, aten.split_with_sizes.default, (source, sizes, dim), values)
        parts = [call(graph, operator.getitem, (split, i), v) for i, v in enumerate(values)]
    for node, part in zip((first, second), parts, strict=True):
        node.replace_all_uses_with(part)


def main() -> None:
    """Load the model with the flag and the pass, answer one prompt, say what the pass did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="build/demo/deepseek-v2-shaped/model")
    options = parser.parse_args()
    if not Path(options.model, "config.json").exists():
        parser.error(f"{options.model} is no model's folder: run make demo in the clone first")
    # Outcomes are counted where a graph is compiled, and a warm cache compiles none.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_DISABLE_COMPILE_CACHE": "1"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    register()
    compilation: Any = {
        "pass_config": {"fuse_aiter_qk_rope_kvcache_mla": True},
        "inductor_compile_config": {"post_grad_custom_post_pass": SplitHalvesPass()},
    }
    llm = LLM(
        options.model, dtype="bfloat16", max_num_seqs=8, max_model_len=128,
        attention_backend=None if torch.cuda.is_available() else "CPU_MLA",
        compilation_config=compilation, additional_config={"mla_fusion": {"provider": "reference"}},
    )  # fmt: skip
    [output] = llm.generate(["w1 w2 w3"], SamplingParams(temperature=0, max_tokens=16))
    print(output.outputs[0].text)
    for outcome, slices in OUTCOMES.items():
        print(f"{slices} slices {outcome}")


if __name__ == "__main__":
    main()
