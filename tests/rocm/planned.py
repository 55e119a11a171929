"""Single steps with attention=aiter through vLLM's ROCm backend; the work of a child process.

As in steps.py, but the fused layer decodes with AITER from a plan of this library, and `watch`
checks every call.
"""

import functools
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from tests import aiter_double
from tests.aiter_double.versions import DECODE, PLANNER
from tests.rocm import imitation, steps
from tests.rocm.cases import BATCHES, PLANNED, Case
from tests.rocm.watch import Watch

NAME = steps.NAME
# Heads, cache, and two steps of one plan.
PAIRS = (
    (12, "auto", "decode", "shared prefix"),
    (64, "fp8", "4 tokens", "3 of 4 tokens"),
    (16, "auto", "full graph", "full graph"),
)


def run_all(job, progress):
    """The results of the `cases` of one `architecture`, of `planted` errors, and of `graphs`."""
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
            "planted": {name: planted(name, made, double) for name in job.options["planted"]},
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
            query.copy_(torch.randn(shape, generator=generator))
            step_plan.out.fill_(torch.nan)
            graph.replay()
            watch.check_output(query, stored, metadata, layer, step_plan.out[:tokens])
        return ""
    except (AssertionError, ValueError, aiter_double.Fault) as fault:
        return f"{type(fault).__name__}: {fault}"
    finally:
        patch.undo()


def planted(name, made, double):
    """The fault that the watch or the double finds with an error planted into the library.

    Two steps of other lengths run: some errors show in the second only.
    """
    watch = Watch(double)
    try:
        with PLANTED[name]():
            for heads, cache, first, second in PAIRS:
                backend = made.of(Case(heads, cache, first), {**BATCHES, **PLANNED}[first])
                attach(backend)
                for batch in (first, second):
                    step(Case(heads, cache, batch), backend, double)
    except (AssertionError, ValueError, aiter_double.Fault) as fault:
        return f"{type(fault).__name__}: {fault}"
    finally:
        watch.stop()
    return ""


@contextmanager
def replaced(owner, name, make):
    """`owner.name` is make(original) while the block runs."""
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _planted():
    from mla_fusion.attention import aiter
    from mla_fusion.attention.aiter import entries
    from mla_fusion.attention.aiter import planner as planner_aiter
    from mla_fusion.attention.allocate import PersistentDecodePlan
    from mla_fusion.runtime.step_plan import StepPlan

    def stale(original):
        """The lengths of the step are read too late."""

        def refresh(self, **a):
            original(self, **a | {"seq_lens": torch.clamp(a["seq_lens"] - 1, min=1)})

        return refresh

    def twice(original):
        def refresh(self, metadata, tokens):
            original(self, metadata, tokens)
            original(self, metadata, tokens)

        return refresh

    def never(original):
        """A plan is made for the first step only."""

        def refresh(self, metadata, tokens):
            if self.plan.step is None:
                original(self, metadata, tokens)

        return refresh

    def moved(original):
        def fill(plan, *a):
            plan.work_info_set = plan.aiter.buffers["work_info_set"] = plan.work_info_set.clone()
            original(plan, *a)

        return fill

    def other_pages(original):
        def found(plan, table, size):
            plan.aiter.entries = original(plan, table, size).clone()
            return plan.aiter.entries

        return found

    def scaled(original):
        def attend(self, q, kv_cache, layer, *rest):
            same = {name: getattr(layer, name) for name in ("_q_scale", "_k_scale", "_v_up_proj")}
            wrong = SimpleNamespace(**same, impl=SimpleNamespace(scale=layer.impl.scale * 2))
            original(self, q, kv_cache, wrong, *rest)

        return attend

    def unpadded(original):
        return lambda q, companions, batch, rows, heads: original(
            q, companions, batch, rows, q.shape[1]
        )

    def ragged(original):
        return lambda plan, rows: plan.qo_indptr

    def padding(original):
        """Rows of no sequence keep what AITER left in them."""

        def store(companions, rows, target, found, nothing):
            companions.written.fill_(True)
            original(companions, rows, target, found, nothing)

        return store

    return {
        "stale lengths": lambda: replaced(PersistentDecodePlan, "refresh", stale),
        "planned twice": lambda: replaced(StepPlan, "_refresh", twice),
        "never planned again": lambda: replaced(StepPlan, "_refresh", never),
        "a buffer is reallocated": lambda: replaced(planner_aiter, "fill", moved),
        "the entries are reallocated": lambda: replaced(entries, "entries", other_pages),
        "another scale": lambda: replaced(StepPlan, "_attend", scaled),
        "unpadded heads": lambda: replaced(aiter, "_query", unpadded),
        "uneven queries": lambda: replaced(planner_aiter, "aiter_rows", ragged),
        "pages of another step": lambda: replaced(entries, "expand", lambda _: lambda *a: None),
        "garbage in padded rows": lambda: replaced(aiter, "_store", padding),
    }


class _Planted(dict):
    """Made when asked for: the library is imported in the child process only."""

    def __missing__(self, name):
        self.update(_planted())
        return self[name]


PLANTED = _Planted()
