"""The passes without the plugin, through vLLM's hook for custom passes.

VLLM_PLUGINS= python examples/without_plugin.py MODEL

For those who build their CompilationConfig themselves. The plugin's decisions are yours then:
graph partition, the compile range, the splitting ops, and whether the model can fuse at all.
Nothing is logged: the program asks what fused. It needs a GPU; without the plugin vLLM runs no
passes on a CPU.
"""

import argparse
import os

import torch
from vllm import LLM, SamplingParams
from vllm.config import CompilationConfig

from mla_fusion import ops, report
from mla_fusion.passes.pipeline import MLAFusionPass


def compilation_config(provider: str, bucket: int) -> CompilationConfig:
    """A config that fuses the graphs of at most `bucket` tokens; the bucket is max_num_seqs."""
    return CompilationConfig(
        use_inductor_graph_partition=True,
        compile_ranges_endpoints=[bucket],
        splitting_ops=[*CompilationConfig._attention_ops, *ops.RUNTIME_OPS],
        inductor_compile_config={
            "post_grad_custom_post_pass": MLAFusionPass(provider, max_tokens=bucket)
        },
    )


def what_fused(provider: str, bucket: int) -> str:
    """The report of the graphs that were compiled."""
    made = report.take(provider, bucket)
    if made is None:
        return "no pass ran: graphs came from vLLM's cache; set VLLM_DISABLE_COMPILE_CACHE=1"
    return "\n".join(made.lines())


def main() -> None:
    """Load the model, answer one prompt, say what fused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--provider", default="triton")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("without the plugin it needs a GPU that torch.cuda can see")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # what fused is known where it compiled
    llm = LLM(
        options.model,
        max_num_seqs=64,
        compilation_config=compilation_config(options.provider, bucket=64),
    )
    [output] = llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=16))
    print(output.outputs[0].text)
    print(what_fused(options.provider, bucket=64))


if __name__ == "__main__":
    main()
