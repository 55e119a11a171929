"""Runs one real vLLM engine on a CPU in a process of its own and prints what it did as JSON.

    python harness.py '{"plugin": true, "flag": true, ...}'

The engine always runs vLLM's piecewise backend with graph partition and a compile range for the
decode bucket, the prerequisites of the flag, so that runs with and without the flag compare.
Keys of the job: model (folder); plugin (register mla_fusion); flag; custom_pass (the pass object
in vLLM's hook, without the plugin); attention and provider (the options of those names); processes
("spawn" or "fork": how the engine core and the worker start, in processes of their own, as vLLM
serves; no graphs are recorded then); engines (how many to start, one after the other, the first
ones still alive); fault (the provider raises in its third step); load_format; prompts; max_tokens;
bucket (the decode bucket, if not 4); engine (further arguments of vllm.LLM).
"""

import json
import multiprocessing
import os
import sys
from typing import Any

BUCKET = 4


def keep_vllm_compile():
    """What the plugin does for the flag on a CPU, for engines that run without it."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check(cls, vllm_config):
        compilation = vllm_config.compilation_config
        asked = compilation.mode, compilation.backend, compilation.ir_enable_torch_wrap
        original(cls, vllm_config)
        compilation.mode, compilation.backend, compilation.ir_enable_torch_wrap = asked

    CpuPlatform.check_and_update_config = classmethod(check)


def start_processes_by(method):
    """Let vLLM start its processes by `method`: on a CPU it spawns them, whatever is asked."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check(cls, vllm_config):
        original(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = method

    CpuPlatform.check_and_update_config = classmethod(check)


def record_graphs(graphs):
    """Keep the printed code of every graph after all passes, by its token range."""
    from vllm.compilation.passes import pass_manager
    from vllm.compilation.passes.inductor_pass import InductorPass, get_pass_context

    class Nothing(InductorPass):
        def __init__(self, *args):
            pass

        def __call__(self, graph):
            pass

    # vLLM's own last step names CUDA-only ops and raises on a CPU build. Where the flag stays on,
    # the plugin puts pass 5 in its place.
    pass_manager.FixFunctionalizationPass = Nothing
    original = pass_manager.PostGradPassManager.__call__

    def call(self, graph):
        original(self, graph)
        r = get_pass_context().compile_range
        graphs[f"{r.start}-{r.end}"] = graph.python_code("self").src

    pass_manager.PostGradPassManager.__call__ = call


def count_refreshes(seen):
    """Note (query rows, sequences) of every refresh of a portable plan."""
    from mla_fusion.attention import PersistentDecodePlan

    original = PersistentDecodePlan.refresh

    def refresh(self, **arguments):
        original(self, **arguments)
        seen.append((self.step.num_tokens, self.step.batch))

    PersistentDecodePlan.refresh = refresh


def exported_steps():
    """What vLLM's /metrics endpoint says of this library's counter."""
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    return {
        sample.labels["path"]: sample.value
        for metric in get_prometheus_registry().collect()
        for sample in metric.samples
        if sample.name == "mla_fusion_steps_total"
    }


def break_provider():
    """Let the reference provider raise when it is called for the third time from now."""
    from mla_fusion.kernels import reference

    original, calls = reference.fused_mla_decode_prep, []

    def raise_at_last(*args, **kwargs):
        calls.append(None)
        if len(calls) == 3:
            raise RuntimeError("planted: an illegal memory access was encountered")
        return original(*args, **kwargs)

    reference.fused_mla_decode_prep = raise_at_last


def main(job):
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.update(HF_HUB_OFFLINE="1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if job.get("processes") else "0"
    if not job.get("plugin"):
        os.environ["VLLM_PLUGINS"] = ""
    import vllm

    if job.get("processes"):
        start_processes_by(job["processes"])
    else:
        keep_vllm_compile()
    if job.get("plugin"):
        import mla_fusion

        mla_fusion.register()
    graphs: dict[str, str] = {}
    record_graphs(graphs)
    compilation: dict[str, Any] = {
        "mode": 3,
        "backend": "inductor",
        "use_inductor_graph_partition": True,
        "compile_sizes": [],
        "compile_ranges_endpoints": [job.get("bucket", BUCKET)],
        "pass_config": {"fuse_rope_kvcache_cat_mla": False},
    }
    extra: dict[str, Any] = {}
    refreshes: list[tuple[int, int]] = []
    if job.get("flag"):
        compilation["pass_config"]["fuse_aiter_qk_rope_kvcache_mla"] = True
        options = {
            "provider": job.get("provider", "reference"),
            "attention": job.get("attention", "auto"),
        }
        extra["additional_config"] = {"mla_fusion": options}
        count_refreshes(refreshes)
    if job.get("custom_pass"):
        from vllm.config import CompilationConfig

        from mla_fusion import ops
        from mla_fusion.passes.pipeline import MLAFusionPass

        compilation["inductor_compile_config"] = {
            "post_grad_custom_post_pass": MLAFusionPass("reference", BUCKET)
        }
        compilation["splitting_ops"] = [*CompilationConfig._attention_ops, *ops.RUNTIME_OPS]
    arguments = dict(
        model=job["model"],
        load_format=job.get("load_format", "dummy"),
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=BUCKET,
        attention_backend="CPU_MLA",
        compilation_config=compilation,
        **extra,
        **job.get("engine", {}),
    )
    engines = [vllm.LLM(**arguments) for _ in range(job.get("engines", 1))]
    if job.get("fault"):
        break_provider()
    sampling = vllm.SamplingParams(
        max_tokens=job.get("max_tokens", 8),
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        logprobs=2,
    )
    prompts = job.get("prompts", [[1, 2, 3], [7], list(range(9, 60)), [5, 6]])
    for llm in engines:  # a line for each
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling)
        completions = [output.outputs[0] for output in outputs]
        chosen = [
            [seen[token].logprob for seen, token in zip(c.logprobs, c.token_ids, strict=True)]
            for c in completions
        ]
        # How far the second candidate of each step lies behind the first.
        ranked = [
            [sorted((x.logprob for x in seen.values()), reverse=True) for seen in c.logprobs]
            for c in completions
        ]
        margins = [[best - second for best, second, *_ in steps] for steps in ranked]
        result = {
            "margins": margins,
            "graphs": graphs,
            "tokens": [list(c.token_ids) for c in completions],
            "logprobs": chosen,
            "refreshes": refreshes,
            "children": [type(child).__name__ for child in multiprocessing.active_children()],
        }
        if job.get("flag"):
            result["steps"] = llm.collective_rpc("mla_fusion_steps")
            result["exported"] = exported_steps()
        print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
