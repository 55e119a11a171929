"""vLLM's own passes on graphs of tests/passes, with the passes of this library among them or after.

`compare` runs vLLM's pass manager. What runs, in vLLM's order: no-op elimination, vLLM's fusion of
RoPE and cache write if it is on, passes 2 to 4 and 6, cleanup, lowering of vLLM's IR, clone
elimination, cleanup, pass 5 and vLLM's functionalization fix.

`ON_GRAPHS` changes graphs as a feature of a GPU build does: by vLLM's own passes where a CPU build
has them, else by an edit with the same result.
"""

import functools
import operator

import pytest
import torch
from vllm.compilation.passes import pass_manager
from vllm.compilation.passes.fusion.mla_rope_kvcache_cat_fusion import MLARoPEKVCacheCatFusionPass
from vllm.compilation.passes.inductor_pass import InductorPass, pass_context
from vllm.compilation.passes.utility.scatter_split_replace import ScatterSplitReplacementPass
from vllm.compilation.passes.utility.split_coalescing import SplitCoalescingPass
from vllm.config import VllmConfig
from vllm.config.utils import Range
from vllm.forward_context import override_forward_context

from mla_fusion import ops, report
from mla_fusion.passes.pipeline import LastStep, MLAFusionPass
from mla_fusion.patterns.site import ATTENTION
from tests.passes import declare, edits
from tests.passes.cuda_ops import define_cuda_ops
from tests.passes.fake_engine import BATCHES, DECODE, Engine, assert_same, run
from tests.passes.graphs import LATENT, ROPE, Spec, build, copy, find_all
from tests.passes.rotations import ROPES

BUCKET = 4
TOLERANCE = 1e-5  # of fp32: 2**-24 times a few dozen additions
SPECS = [Spec(rope, q_lora=True) for rope in ROPES]


def _vllms_rope_passes(module):
    """The two passes that vLLM runs before RopeKVCacheFusionPass, which has no pattern for MLA."""
    for made in (SplitCoalescingPass(VllmConfig()), ScatterSplitReplacementPass(VllmConfig())):
        made(module.graph)
    module.graph.lint()


def _dual_norm(module):
    """One op normalizes the query's and the key's latent: kv_c is an output of it."""
    kv_c = edits.attention(module).kwargs["kv_c_normed"]
    pair = edits.add(module, kv_c.next, torch.ops.mla_fusion_tests.both.default, kv_c, kv_c)
    first = edits.add(module, pair.next, operator.getitem, pair, 0)
    kv_c.replace_all_uses_with(first, delete_user_cb=lambda user: user is not pair)
    module.graph.lint()


# A stand-in for AITER's op, which normalizes two tensors at once.
_both = lambda a, b: (a.clone(), b.clone())  # noqa: E731
declare.op("mla_fusion_tests", "both(Tensor a, Tensor b) -> (Tensor, Tensor)", _both, _both)

# name -> how the feature changes a graph, and the code if the layer must decline
ON_GRAPHS = {
    "attention and quantization fused": (edits.quantized_output, "quantized-output"),
    "dual RMSNorm fused": (_dual_norm, ""),
    "fuse_rope_kvcache": (_vllms_rope_passes, ""),
}


class _Look(InductorPass):
    """Counts the calls of vLLM's fused op in the graph that passes 2 to 4 are given."""

    def __call__(self, graph):
        self.fused_by_vllm = len(find_all(graph.owning_module, edits.CAT_FUSED))


def compare(spec, partition, fused_by_vllm=False, attention="auto", runs=True):
    """Run them on the graph of `spec`; what became of its layer.

    partition: Inductor splits the graph at the attention, after the passes. runs: whether the graph
    can be run.

    Raises:
        AssertionError: what the graph computes has changed, or vLLM's own fusion did before what it
            should not, or the reverse.
    """
    before = build(spec)
    after = copy(before)
    manager, look = _manager(fused_by_vllm, attention)
    report.forget()
    split_at = [ATTENTION, *ops.RUNTIME_OPS] if partition else []
    with (
        torch._inductor.config.patch(custom_should_partition_ops=split_at),
        override_forward_context(Engine(spec).context(DECODE)),
        pass_context(Range(1, BUCKET)),
    ):
        manager(after.graph)
    after.graph.lint()
    assert look.fused_by_vllm == fused_by_vllm
    if runs:
        assert_equal(before, after, spec)
    made = report.take("reference", BUCKET)
    assert made is not None
    [only] = made.ranges
    return only


def assert_equal(before, after, spec):
    """What two graphs compute is the same; in the fixture `plain_kernels`."""
    for batch in (BATCHES["decode"], BATCHES["mixed"]):
        results = run(before, spec, batch), run(after, spec, batch)
        assert_same(*results, batch, tolerance=TOLERANCE)


@functools.cache
def _manager(fused_by_vllm, attention):
    """As the plugin sets it up. vLLM leaves its fusion out of a CPU build, where it runs too."""
    config = VllmConfig()
    config.compilation_config.pass_config.eliminate_noops = True
    config.compilation_config.pass_config.fuse_rope_kvcache_cat_mla = fused_by_vllm
    for name, layer in Engine(Spec()).layers.items():
        layer.num_kv_heads, layer.kv_lora_rank, layer.qk_rope_head_dim = 1, LATENT, ROPE
        config.compilation_config.static_forward_context[name] = layer
    define_cuda_ops()
    manager, look = pass_manager.PostGradPassManager(), _Look()
    with pytest.MonkeyPatch.context() as patch:
        name = "MLARoPEKVCacheCatFusionPass"
        patch.setattr(pass_manager, name, MLARoPEKVCacheCatFusionPass, raising=False)
        manager.configure(config)
    manager.add(look)
    manager.add(MLAFusionPass("reference", BUCKET, attention))
    manager.fix_functionalization = LastStep(manager.fix_functionalization)
    return manager, look
