"""Single steps with attention=aiter through vLLM's ROCm backend; the work of a child process.

As in steps.py, but the fused layer decodes with AITER from a plan of this library, and `watch`
checks every call.
"""

import dataclasses
import functools

import torch

from tests import aiter_double
from tests.aiter_double.versions import DECODE, PLANNER
from tests.rocm import imitation, steps
from tests.rocm.cases import BATCHES, PLANNED, Case
from tests.rocm.watch import Watch

NAME = steps.NAME


def run_all(job, progress):
    """The results of the `cases` of one `architecture`, and of `graphs`."""
    torch.set_num_threads(1)
    architecture = job.options["architecture"]
    with aiter_double.installed(architecture) as double:
        imitation.imitate(architecture)
        import pytest

        from tests.passes import cuda_ops

        kernels = cuda_ops.plain_kernels(pytest.MonkeyPatch())
        next(kernels)
        made = Backends(job.workdir)
        return {
            "steps": [one(Case(*c), made, double) for c in job.options["cases"]],
            "graphs": [replayed(Case(*c), made, double) for c in job.options["graphs"]],
        }


class Backends:
    """Backends by what they are made for."""

    def __init__(self, folder):
        self.folder, self._made = folder, {}

    def of(self, case, batch):
        key = (case.heads, case.cache, "", batch.drafts, batch.dummies > 0)
        if key not in self._made:
            self._made[key] = steps.Backend(*key, self.folder)
        return self._made[key]


def attach(backend, cap=-1):
    """The plan of the layer by the library's own start-up, or None."""
    from mla_fusion.config import Options
    from mla_fusion.runtime import step_plan

    vars(backend.layer).pop(step_plan.ATTRIBUTE, None)
    options = Options("aiter", "aiter", cap)
    step_plan.attach({NAME: backend.layer}, options, backend.config)
    return getattr(backend.layer, step_plan.ATTRIBUTE, None)


def step(case, backend, double):
    """One step of a layer that fuses: the live rows of its output, and the cache."""
    batch = {**BATCHES, **PLANNED}[case.batch]
    module, spec = steps.graph(case)
    record = steps.fuse(module, backend.layer, "aiter", "aiter", 1 + batch.drafts)
    if record.declined:
        [decline] = record.declined.values()
        raise Unfused(decline.explain())
    assert record.fused == 1
    double.forget()
    return steps.run(module, spec, backend, batch)


class Unfused(Exception):
    """The passes declined the layer; the message is their reason."""


def one(case, made, double, cap=-1):
    """A step: what the watch found, and how far it is from the step without the passes.

    alike: the largest difference of the live outputs, as a share of the largest value; -1 where
    vLLM's own backend has no kernel.
    """
    batch = {**BATCHES, **PLANNED}[case.batch]
    backend, watch = made.of(case, batch), Watch(double)
    try:
        attach(backend, cap)
        out, cache = step(case, backend, double)
        calls = double.counts()
        slots = steps.places(batch)[0]
        written = torch.zeros(len(cache), dtype=torch.bool)
        written[slots[slots >= 0]] = True
        start = backend.cache.flatten(0, 1).view(torch.uint8)
        return {
            "fault": "",
            "calls": calls,
            "alike": against_vllm(case, backend, batch, out),
            "elsewhere": torch.equal(cache[~written], start[~written]),
            **watch.found(),
        }
    except (Unfused, AssertionError, ValueError, aiter_double.Fault) as fault:
        return {"fault": f"{type(fault).__name__}: {fault}", **watch.found()}
    finally:
        watch.stop()


def against_vllm(case, backend, batch, out):
    """See `one`."""
    module, spec = steps.graph(case)
    try:
        expected, _ = steps.run(module, spec, backend, batch)
    except aiter_double.Fault:
        return -1
    return float((out.float() - expected.float()).abs().max() / expected.float().abs().max())


def replayed(case, made, double):
    """A captured decode, replayed for other lengths, tables and queries in the same memory.

    vLLM pads a decode batch to a captured size: here the last sequences have no tokens. The result
    is the fault of a check, or an empty string.
    """
    import pytest

    from mla_fusion import runtime
    from tests.attention.captured import Graph, call
    from tests.passes import fake_engine

    batch = {**BATCHES, **PLANNED}[case.batch]
    backend, patch = made.of(case, batch), pytest.MonkeyPatch()
    watch = Watch(double)
    step_plan = attach(backend)
    watch.stop()  # a capture computes nothing
    try:
        layer, live, size = backend.layer, len(batch.requests), 1 + batch.drafts
        for module, name in (("aiter", PLANNER), ("aiter.mla", DECODE)):
            op = functools.wraps(double.ops[name])(functools.partial(call, double.ops[name]))
            patch.setattr(double.modules[module], name, op)
        layer.kv_cache = backend.cache.clone()
        stored = layer.kv_cache.view(backend.stored)
        stored.copy_(stored.float().nan_to_num(nan=0.5))
        slots, _, tables = steps.places(batch)
        metadata = backend.metadata(batch, slots, tables)
        tokens = metadata.num_actual_tokens
        shape = (tokens, case.heads, steps.LATENT + steps.ROPE)
        query = torch.zeros(shape, dtype=step_plan.plan.settings.q_dtype)
        output = torch.zeros((tokens, case.heads * steps.VALUE), dtype=torch.bfloat16)
        unused = torch.empty(0)

        def attention():
            with steps.forward_pass(layer, metadata, slots), torch.no_grad():
                name = fake_engine._encode(NAME)
                runtime._attention(unused, query, unused, unused, output, name)

        attention()
        with Graph(patch) as graph:
            attention()
        generator = torch.Generator().manual_seed(1)
        for lengths, seed in (((50, 21), 3), ((size, 90), 4)):
            lens = torch.zeros_like(metadata.decode.seq_lens)
            lens[:live] = torch.tensor(lengths[:live], dtype=torch.int32)
            metadata.decode.seq_lens.copy_(lens)
            blocks = torch.randperm(steps.BLOCKS, generator=torch.Generator().manual_seed(seed))
            tables[:live] = blocks[: tables[:live].numel()].view(live, -1)[:, : tables.shape[1]]
            requests = tuple((length - size, size) for length in lengths[:live])
            # vLLM lists the pages before each replay.
            backend.metadata(dataclasses.replace(batch, requests=requests), slots, tables)
            query.copy_(torch.randn(shape, generator=generator))
            step_plan.out.fill_(torch.nan)
            graph.replay()
            watch.check_output(query, stored, metadata, layer, step_plan.out[:tokens])
        return ""
    except (AssertionError, ValueError, aiter_double.Fault) as fault:
        return f"{type(fault).__name__}: {fault}"
    finally:
        patch.undo()
