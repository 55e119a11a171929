"""Generate text with the fusion on, in Python.

python examples/offline_llm.py MODEL
"""

import argparse

from mla_fusion import plugin

# First: vLLM checks the arguments of LLM before it loads plugins.
plugin.register()

from vllm import LLM, SamplingParams  # noqa: E402


def main() -> None:
    """Load the model, answer two prompts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--provider", help="reference on a CPU; a GPU has its own default")
    parser.add_argument("--attention-backend", help="as for vllm serve; CPU_MLA on a CPU")
    options = parser.parse_args()
    chosen = {"provider": options.provider} if options.provider else {}
    llm = LLM(
        options.model,
        max_model_len=128,
        max_num_seqs=8,
        attention_backend=options.attention_backend,
        compilation_config={"pass_config": {"fuse_aiter_qk_rope_kvcache_mla": True}},
        additional_config={"mla_fusion": chosen},
    )
    prompts = ["A fused kernel is", "Prefill and decode differ in"]
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16)):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":  # vLLM starts processes of its own, which import this file
    main()
