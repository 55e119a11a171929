"""Stand-ins for the library's Triton kernels: what it launches is executed on the machine.

The providers are called as on a GPU, and nothing of theirs is repeated here: plans, arguments and
grids are the library's.
"""

import contextlib
from unittest import mock

from mla_fusion.attention.cdna import decode as cdna_kernel
from mla_fusion.attention.plan import chunks_triton, planner_triton
from mla_fusion.attention.triton import decode_kernel, quantize_kernel, reduce_kernel
from mla_fusion.kernels import triton_kernels as region_kernels
from tests.amd import compile, execute
from tests.gpus import imitated

DECODED = "out_ptr", "lse_ptr", "partial_ptr", "partial_lse_ptr"
PLANNED = (
    "work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map",
    "qo_indptr", "kv_indptr",
)  # fmt: skip
# The parameters that a kernel may write.
WRITABLE = {
    "mla_prep": ("out_ptr", "cache_ptr"),
    **dict.fromkeys(("mla_decode_triton", "mla_decode_cdna"), DECODED),
    "mla_reduce": ("out_ptr", "lse_ptr"),
    "mla_quantize": ("out_ptr", "scale_ptr"),
    "mla_plan": (*PLANNED, "scratch"), "mla_plan_chunks": PLANNED,
}  # fmt: skip
KERNELS = (
    (region_kernels, "mla_prep"), (planner_triton, "mla_plan"),
    (chunks_triton, "mla_plan_chunks"),
    (decode_kernel, "mla_decode_triton"), (cdna_kernel, "mla_decode_cdna"),
    (reduce_kernel, "mla_reduce"), (quantize_kernel, "mla_quantize"),
)  # fmt: skip


class _OnMachine:
    """Is launched as a Triton kernel is: `kernel[grid](*arguments, **options)`."""

    def __init__(self, target, kernel, run):
        self.target, self.kernel, self.run = target, kernel, run
        self.arg_names = kernel.arg_names

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.run(
            compile.launch(self.target, self.kernel, arguments, options, grid)
        )


def machine(target, settings=None):
    """Within it, the library's kernels run on the machine; yields the list of their launches."""

    def run(given):
        outcome = execute.run(given, WRITABLE[given.kernel.program.name], settings)
        assert not outcome.faults, f"{outcome.faults}; the first: {outcome.first}"

    return launched(target, run)


def judged(bench, target, settings=None):
    """Execute the step of a `selftest` bench, which is filled, and judge it; its launches."""
    with machine(target, settings) as launches:
        bench.step()
    outcome = bench.judged(target)
    assert outcome.right, outcome
    return launches


@contextlib.contextmanager
def launched(target, run=lambda given: None):
    """Within it, what the library launches is compiled for `target` and given to `run`; yields the
    list of launches."""
    launches = []

    def keep(given):
        launches.append(given)
        run(given)

    with contextlib.ExitStack() as stack:
        for module, name in KERNELS:
            kernel = _OnMachine(target, getattr(module, name), keep)
            stack.enter_context(mock.patch.object(module, name, kernel))
        stack.enter_context(imitated(target))
        yield launches
