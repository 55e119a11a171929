"""The passes without the plugin, through vLLM's hook for custom passes.

VLLM_PLUGINS= python examples/custom_pass.py MODEL

For those who build their CompilationConfig themselves. The plugin's decisions are yours then:
graph partition, the compile range, the splitting ops, and whether the model can fuse at all.
`mla_fusion.report.take(...)` in the process that compiled is the report; nothing is logged.
"""

import argparse

from vllm import LLM, SamplingParams
from vllm.config import CompilationConfig

from mla_fusion import ops
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


def main() -> None:
    """Load the model, answer one prompt."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--provider", default="triton")
    options = parser.parse_args()
    llm = LLM(
        options.model,
        max_num_seqs=64,
        compilation_config=compilation_config(options.provider, bucket=64),
    )
    [output] = llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=16))
    print(output.outputs[0].text)


if __name__ == "__main__":
    main()
