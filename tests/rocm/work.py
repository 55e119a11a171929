"""Steps of one MLA layer, and whole engines, on vLLM's ROCm backend; the work of a child process.

`imitation.imitate` comes before any import of vLLM's layers.
"""

import contextlib
import dataclasses
import functools
from pathlib import Path

import torch

from mla_fusion.measure.distances import agreement
from tests import aiter_double
from tests.aiter_double.versions import DECODE, GLUON, PLANNER
from tests.rocm import imitation, steps
from tests.rocm.steps import LATENT, NAME, ROPE, Case
from tests.rocm.watch import Watch
from tests.step import forward_pass


def serve(job, progress):
    """`tests.engine.work.serve`, and how often AITER's ops were called.

    Further options: architecture; heads and vocab_size (of the model, which has two layers and
    weights of unit gain). What `watch` saw of the plans of attention=aiter is added; what it
    refuses ends the job.
    """
    with aiter_double.installed(job.options["architecture"]) as double:
        imitation.imitate(job.options["architecture"])
        from mla_fusion.cli.demo import tiny_models
        from tests.engine import work

        heads, words = job.options["heads"], job.options["vocab_size"]
        sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": words}
        folder = Path(job.workdir, "model")
        model = tiny_models.write("deepseek-v3-shaped", folder, num_hidden_layers=2, **sizes)
        engine = {**job.engine, "model": str(model)}
        with Watch(double) as watch:
            served = work.serve(dataclasses.replace(job, engine=engine), progress)
        return served["engines"][0] | {"calls": double.counts(), "watched": watch.found()}


def run_all(job, progress):
    """For each kind of work in the options, the results of its cases on one `architecture`.

    A result is a dictionary; its fault says why the double, the passes or a check refused, or is
    empty.
    """
    torch.set_num_threads(1)
    architecture = job.options["architecture"]
    with aiter_double.installed(architecture) as double:
        imitation.imitate(architecture)
        import pytest

        from tests.passes import cuda_ops

        kernels = cuda_ops.plain_kernels(pytest.MonkeyPatch())
        next(kernels)
        backend = functools.cache(lambda *made_for: steps.Backend(*made_for, job.workdir))

        def result(work, case):
            batch = case.of
            made_for = case.heads, case.cache, case.products, batch.drafts, batch.dummies > 0
            try:
                return {"fault": "", **work(case, backend(*made_for), double)}
            except (Unfused, AssertionError, ValueError, aiter_double.Fault) as fault:
                return {"fault": f"{type(fault).__name__}: {fault}"}

        return {
            kind: [result(WORK[kind], Case(*case)) for case in cases]
            for kind, cases in job.options["cases"].items()
        }


class Unfused(Exception):
    """The passes declined the layer; the message is their reason."""


def step(case, backend, double, provider="", attention="auto"):
    """(output, bytes of the cache) of a step, with the passes if there is a provider; `double` has
    its calls."""
    module, spec = steps.graph(case)
    if provider:
        record = steps.fuse(module, backend.layer, provider, attention, 1 + case.of.drafts)
        for decline in record.declined:
            raise Unfused(decline.explain())
        assert record.fused == 1
    double.forget()
    return steps.run(module, spec, backend, case.of)


def compared(case, backend, double):
    """A step with the passes, compared with the same step without them.

    calls: how often each op of AITER was called in the fused run. same_as_reference: whether cache
    and output equal the reference provider's bytes. latent_steps, rope_steps: the largest
    difference of the two halves of the decode's query, in steps of its type. error: as `difference`
    of the outputs. cache_equal, cache_steps: the share of equal bytes in the written cache entries,
    and the largest difference there in steps of the stored type.
    """
    before_out, before_cache = step(case, backend, double)
    before_query = attended(double, case.of)
    out, cache = step(case, backend, double, "aiter")
    calls, query = double.counts(), attended(double, case.of)
    same_as_reference = False
    if hasattr(backend.layer, "W_UK_T"):
        reference = step(case, backend, double, "reference")
        same_as_reference = all(map(torch.equal, (out, cache), reference))
    slots = steps.places(case.of)[0]
    a, b = (x[slots[slots >= 0]] for x in (cache, before_cache))
    return {
        "calls": calls,
        "same_as_reference": same_as_reference,
        "latent_steps": _steps(query[..., :LATENT], before_query[..., :LATENT]),
        "rope_steps": _steps(query[..., LATENT:], before_query[..., LATENT:]),
        "error": difference(out, before_out),
        "cache_equal": float((a == b).float().mean()),
        "cache_steps": _steps(a.view(backend.stored), b.view(backend.stored)),
    }


def difference(out, expected):
    """The largest, as a share of the largest value expected."""
    return float((out.float() - expected.float()).abs().max() / expected.float().abs().max())


def attended(double, batch):
    """The live rows [T, H, L + R] of the query that the decode of the last step was given.

    Heads may be padded. In a mixed batch T counts the decode tokens, and is 0 without any.
    """
    for call in double.calls(DECODE):
        return call["q"][: batch.live]
    for call in double.calls(GLUON):  # [B, H, *], or [B, n, H, *] for drafts
        return torch.cat((call["q_nope"], call["q_pe"]), dim=-1).flatten(0, -3)[: batch.live]
    return torch.empty((0, 1, LATENT + ROPE), dtype=torch.bfloat16)


def _steps(a, b):
    """The largest distance in representable values."""
    assert a.dtype == b.dtype
    return agreement((a.contiguous(), b.contiguous()))[1]


def planned(case, backend, double):
    """A step of which AITER decodes from a plan of this library: what the watch found, and the rest
    as `compared` has it; no error where vLLM's own backend has no kernel.
    """
    with Watch(double) as watch:
        attach(backend)
        try:
            out, _ = step(case, backend, double, "aiter", "aiter")
        except Unfused:
            assert not watch.made, "a layer that stays unfused has no plan"
            raise
        calls, expected = double.counts(), out
        with contextlib.suppress(aiter_double.Fault):
            expected, _ = step(case, backend, double)
    return {"calls": calls, "error": difference(out, expected), **watch.found()}


def attach(backend):
    """The plan of the layer by the library's own start-up, or None."""
    from mla_fusion.config import Options
    from mla_fusion.plugin import workers
    from mla_fusion.runtime import layer_state
    from mla_fusion.runtime.engine import Engine

    engine = Engine.of(backend.config)
    options = Options("aiter", "aiter", -1)
    workers.attach(dataclasses.replace(engine, options=options, layers={NAME: backend.layer}))
    return layer_state.of(backend.layer).plan


def replayed(case, backend, double):
    """A captured decode, replayed for other lengths, tables and queries in the same memory.

    vLLM pads a decode batch to a captured size: here the last sequences have no tokens.
    """
    import pytest

    from mla_fusion import runtime
    from tests.attention.captured import Graph, call
    from tests.passes import fake_engine

    batch = case.of
    with Watch(double) as watch:  # not the capture, which computes nothing
        step_plan = attach(backend)
    layer, live, size = backend.layer, len(batch.requests), 1 + batch.drafts
    layer.kv_cache = backend.cache.clone()
    stored = layer.kv_cache.view(backend.stored)
    stored.copy_(stored.float().nan_to_num(nan=0.5))
    slots, _, tables = steps.places(batch)
    metadata = backend.metadata(batch, slots, tables)
    tokens = metadata.num_actual_tokens
    shape = (tokens, case.heads, LATENT + ROPE)
    query = torch.zeros(shape, dtype=step_plan.plan.settings.q_dtype)
    output = torch.zeros((tokens, case.heads * steps.VALUE), dtype=torch.bfloat16)
    unused = torch.empty(0)

    def attention():
        with forward_pass({NAME: layer}, metadata, slots), torch.no_grad():
            name = fake_engine._encode(NAME)
            runtime._attention(unused, query, unused, unused, output, name)

    with pytest.MonkeyPatch.context() as patch:
        for module, name in (("aiter", PLANNER), ("aiter.mla", DECODE)):
            op = functools.wraps(double.ops[name])(functools.partial(call, double.ops[name]))
            patch.setattr(double.modules[module], name, op)
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
    return {}


WORK = {"compared": compared, "planned": planned, "replayed": replayed}
