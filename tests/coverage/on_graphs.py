"""The passes on graphs that a feature of a GPU build has changed.

vLLM's own passes change the graph where a CPU build has them, else an edit with the same result.
"""

import operator

import torch

from tests.coverage import vllm_passes
from tests.passes import declare, edits
from tests.passes.fake_engine import fuse, reasons
from tests.passes.graphs import ROPES, Spec, build, copy, printed

SPECS = [Spec(rope, q_lora=True) for rope in ROPES]


def check(edit, reason):
    """Each layer fuses, and outputs stay equal; or declines, and graphs stay as they were."""
    for spec in SPECS:
        before = build(spec)
        edit(before)
        after = copy(before)
        record = fuse(after, spec)
        assert reasons(record) == [reason] * bool(reason)
        assert record.fused == (not reason)
        if reason:
            assert printed(after) == printed(before)
            continue
        vllm_passes.assert_equal(before, after, spec)


def _vllms_rope_passes(module):
    """The two passes that vLLM runs before RopeKVCacheFusionPass, which has no pattern for MLA."""
    from vllm.compilation.passes.utility.scatter_split_replace import ScatterSplitReplacementPass
    from vllm.compilation.passes.utility.split_coalescing import SplitCoalescingPass
    from vllm.config import VllmConfig

    config = VllmConfig()
    for made in (SplitCoalescingPass(config), ScatterSplitReplacementPass(config)):
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
