"""What the engines of these tests do, in a process of `mla_fusion.cli.child`.

Each runs vLLM's piecewise backend, so that runs with the flag and without compare.
"""

import importlib
import multiprocessing
import os
import re
import signal
import traceback
import types

import torch

from mla_fusion import config
from mla_fusion.cli import child
from mla_fusion.config import vllm_compat
from tests.coverage.imitations import faster_products

BUCKET = 4
# Options of this library.
NAMED = ("provider", "attention", "projections", "max_split_per_batch", "layers")
PROMPTS = [(0, prompt) for prompt in ([1, 2, 3], [7], [*range(9, 60)], [5, 6])]


def serve(job, progress):
    """Build the engines of a job, then run its prompts in one after the other.

    Options: flag; one_graph (vLLM compiles all in one graph, with a range for the bucket);
    custom_pass (the same, and the pass object in vLLM's hook); those of `NAMED`; bucket; gpu
    (whose measurements this library asks for; Inductor gets what it does for a GPU); fp8_ops
    (imitate the quantizations that a CPU build lacks); products (linear layers as on CUDA, and a
    plan for each product, which torch computes); norms (pass 8 takes them as on an H200, and they
    are what Inductor makes of the formula); invariant (as with VLLM_BATCH_INVARIANT=1, for
    which vLLM has no backend on a CPU); engines
    (how many); flags (in place of flag:
    one for each engine, which serves at once, and again after all others); processes ("spawn" or
    "fork": how the engine core starts in a process of its own, in which no graph is recorded);
    fault (once all is served, the provider raises in the third step of the first engine; the
    traceback comes back); killed (the same, if its last worker is killed behind that step).
    """
    options = job.options
    if gpu := options.get("gpu"):
        vllm_compat.gpu_name, vllm_compat.is_gpu = lambda: gpu, lambda: True
    _configure_cpu(options.get("processes"), by_plugin=bool(options.get("flag")))
    if options.get("invariant"):
        vllm_compat.is_batch_invariant = lambda: True
    if options.get("fp8_ops"):
        importlib.import_module("tests.passes.linears")
    if options.get("products"):
        faster_products()
    if options.get("norms"):
        _take_norms()
    kernels = _record_kernels()
    graphs, refreshes = _record_graphs(), _count_refreshes() if options.get("flag") else []
    engines, served = [], []
    for flag in options.get("flags", [options.get("flag")] * options.get("engines", 1)):
        engines.append(_build({**_arguments(options | {"flag": flag}), **job.engine}, options))
        if "flags" in options:
            served.append(_serve_one(engines[-1], job))
    served += [_serve_one(engine, job) for engine in engines]
    children = [type(process).__name__ for process in multiprocessing.active_children()]
    faults = {"fault": _fault, "killed": _killed}
    fault = "".join(make(engines[0], job) for name, make in faults.items() if options.get(name))
    for engine in engines:
        engine.engine_core.shutdown()
    found = {"engines": served, "graphs": graphs, "refreshes": refreshes, "children": children}
    return found | {"fault": fault, "kernels": kernels}


def _build(arguments, options):
    """Without the flag as a user of vLLM does, who knows nothing of this library: some configs are
    made before vLLM loads plugins."""
    if options.keys() & {"flag", "flags", "custom_pass"}:
        return child.build(**arguments)
    from vllm import LLM

    return LLM(**child.small_engine(arguments)).llm_engine


def _serve_one(engine, job):
    completions, _ = child.complete(engine, job.prompts, job.new_tokens, logprobs=2)
    ranked = [
        [sorted((x.logprob for x in seen.values()), reverse=True) for seen in c.logprobs]
        for c in completions
    ]
    result = {
        "tokens": [list(c.token_ids) for c in completions],
        "logprobs": [child.chosen(c) for c in completions],
        # How far the second candidate of each step lies below the first, which tests/rocm asks.
        "margins": [[best - second for best, second, *_ in steps] for steps in ranked],
        "key": engine.vllm_config.compute_hash(),
    }
    if job.options.get("flag"):
        result["steps"] = engine.collective_rpc("mla_fusion_steps")
        result["exported"] = _exported_steps()
    return result


def _arguments(options):
    """Arguments of `child.build`."""
    compilation = {
        "mode": 3,
        "backend": "inductor",
        "compile_sizes": [],
        "pass_config": {"fuse_rope_kvcache_cat_mla": False},
    }
    arguments = {"max_num_seqs": BUCKET, "compilation_config": compilation}
    if options.get("flag"):
        compilation["pass_config"][config.FLAG] = True
        chosen = {"provider": "reference"}
        chosen |= {name: options[name] for name in NAMED if name in options}
        arguments["additional_config"] = {config.OPTIONS_KEY: chosen}
    if options.keys() & {"one_graph", "custom_pass"}:
        compilation["use_inductor_graph_partition"] = True
        compilation["compile_ranges_endpoints"] = [options.get("bucket", BUCKET)]
    if options.get("custom_pass"):
        from vllm.config import CompilationConfig

        from mla_fusion import ops
        from mla_fusion.passes.pipeline import MLAFusionPass

        compilation["inductor_compile_config"] = {
            "post_grad_custom_post_pass": MLAFusionPass("reference", BUCKET)
        }
        compilation["splitting_ops"] = [*CompilationConfig._attention_ops, *ops.RUNTIME_OPS]
    return arguments


def _configure_cpu(method, by_plugin):
    """Let vLLM start its processes by `method`, which on a CPU it spawns. Keep the compile mode
    that was asked for, as the plugin does for the flag on a CPU; in processes of their own it is
    left to the plugin where the flag is on.
    """
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config

    def check(cls, vllm_config):
        compilation = vllm_config.compilation_config
        asked = compilation.mode, compilation.backend, compilation.ir_enable_torch_wrap
        original(vllm_config)
        if method:
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = method
        if not (method and by_plugin):
            compilation.mode, compilation.backend, compilation.ir_enable_torch_wrap = asked

    CpuPlatform.check_and_update_config = classmethod(check)


def _record_graphs():
    """The printed code of all pieces of a graph after all passes, by its token range."""
    from vllm.compilation.passes import pass_manager
    from vllm.compilation.passes.inductor_pass import InductorPass, get_pass_context

    class Nothing(InductorPass):
        def __init__(self, *args):
            pass

        def __call__(self, graph):
            pass

    graphs = {}
    # vLLM's own last step names CUDA-only ops and raises on a CPU build. Where the flag stays on,
    # the plugin puts pass 5 in its place.
    pass_manager.FixFunctionalizationPass = Nothing
    original = pass_manager.PostGradPassManager.__call__

    def call(self, graph):
        original(self, graph)
        r = get_pass_context().compile_range
        name = f"{r.start}-{r.end}"
        graphs[name] = graphs.get(name, "") + graph.python_code("self").src

    pass_manager.PostGradPassManager.__call__ = call
    return graphs


def _record_kernels():
    """By token range: the sources of the kernels that Inductor made for all pieces, what their code
    calls in order, and the threshold for values that are stored. Buffers have other numbers in each
    run."""
    from torch._inductor import config as inductor
    from torch._inductor.graph import GraphLowering
    from vllm.compilation.passes.inductor_pass import get_pass_context

    kernels = {}

    def save(code):
        try:
            r = get_pass_context().compile_range
        except AssertionError:  # not a graph of the model
            return
        sources = re.findall(r"r?'''(.*?)'''", code, re.DOTALL)
        calls = re.findall(r"^ +(?:\w+ = )?([\w.]+)\(", code, re.MULTILINE)
        name = f"{r.start}-{r.end}"
        before = kernels.get(name, ([], []))
        known = before[0] + sources, before[1] + calls
        kernels[name] = (*known, inductor.realize_reads_threshold)

    GraphLowering.save_output_code = staticmethod(save)
    return kernels


def _take_norms():
    from mla_fusion.kernels import reference as region
    from mla_fusion.passes import norms, pipeline
    from mla_fusion.projections import reference
    from tests.gpus import described

    norms.gpu = types.SimpleNamespace(of=lambda device: described("sm_90"))
    take = pipeline.MLANormPass
    pipeline.MLANormPass = lambda provider, kept: take("triton", kept)
    compiled = torch.compile(reference.normalize, dynamic=True)

    def normalize(xs, *more):
        return [made.contiguous() for made in compiled(xs, *more)]

    reference.normalize = normalize
    region.normalize = lambda x, weight, epsilon: normalize([x], [weight], [epsilon])[0]


def _count_refreshes():
    """(query rows, sequences) of every refresh of a portable plan."""
    from mla_fusion.attention import PersistentDecodePlan

    seen = []
    original = PersistentDecodePlan.refresh

    def refresh(self, **arguments):
        original(self, **arguments)
        seen.append((self.step.num_tokens, self.step.batch))

    PersistentDecodePlan.refresh = refresh
    return seen


def _exported_steps():
    """This library's counter as vLLM's /metrics endpoint shows it."""
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    return {
        sample.labels["path"]: sample.value
        for metric in get_prometheus_registry().collect()
        for sample in metric.samples
        if sample.name == "mla_fusion_steps_total"
    }


def _fault(engine, job):
    """The traceback, if the reference provider raises when it is called for the third time."""
    from mla_fusion.kernels import reference

    original, calls = reference.fused_mla_decode_prep, []

    def raise_at_last(*args, **kwargs):
        calls.append(None)
        if len(calls) == 3:
            raise RuntimeError("planted: an illegal memory access was encountered")
        return original(*args, **kwargs)

    reference.fused_mla_decode_prep = raise_at_last
    try:
        child.complete(engine, job.prompts, job.new_tokens)
    except RuntimeError:
        return traceback.format_exc()
    return "the engine went on"


def _killed(engine, job):
    """The traceback, if the last worker is killed behind the third step."""
    import psutil
    from vllm.v1.engine.exceptions import EngineDeadError

    signal.alarm(120)  # ends an engine that waits for the worker
    try:
        for number, _ in enumerate(child.steps(engine, job.prompts, 100)):
            if number == 2:
                processes = psutil.Process().children(recursive=True)
                [each for each in processes if each.name().startswith("VLLM::Worker")][-1].kill()
    except EngineDeadError:
        return traceback.format_exc()
    finally:
        signal.alarm(0)
    return "the engine went on"
