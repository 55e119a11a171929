"""The passes on graphs that a feature of a GPU build has changed.

vLLM's own passes change the graph where a CPU build has them, else an edit with the same result.
"""

from __future__ import annotations

import operator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from tests.passes import edits
from tests.passes.cuda_ops import plain_kernels
from tests.passes.fake_engine import BATCHES, assert_same, fuse, reasons, run
from tests.passes.graphs import ROPES, Spec, build, copy, printed

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx


@dataclass(frozen=True)
class OnGraphs:
    """A feature, on traced graphs of several spellings.

    `edit` changes a graph as the feature does; `reason` is the code if the layer must decline.
    """

    name: str
    specs: tuple[Spec, ...]
    edit: Callable[[fx.GraphModule], None]
    reason: str = ""

    def check(self):
        """Each layer fuses, and outputs stay equal; or declines, and graphs stay as they were."""
        for spec in self.specs:
            before = build(spec)
            self.edit(before)
            after = copy(before)
            record = fuse(after, spec)
            assert reasons(record) == [self.reason] * bool(self.reason)
            assert record.fused == (not self.reason)
            if self.reason:
                assert printed(after) == printed(before)
            else:
                _check_outputs(before, after, spec)


def _check_outputs(before, after, spec):
    with pytest.MonkeyPatch.context() as patch, contextmanager(plain_kernels)(patch):
        for name in ("mixed", "decode"):
            batch = BATCHES[name]
            results = run(before, spec, batch), run(after, spec, batch)
            assert_same(*results, batch, tolerance=1e-5)


def _quantized_output(module):
    scale = edits.node_named(module, "k_scale")
    edits.set_argument(edits.attention(module), output_scale=scale)


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
    call = edits.attention(module)
    kv_c = call.kwargs["kv_c_normed"]
    both = torch.ops.mla_fusion_tests.both.default
    with module.graph.inserting_after(kv_c):
        pair = module.graph.call_function(both, (kv_c, kv_c))
    value = kv_c.meta["val"]
    pair.meta["val"] = (value, value)
    with module.graph.inserting_after(pair):
        first = module.graph.call_function(operator.getitem, (pair, 0))
    first.meta["val"] = value
    kv_c.replace_all_uses_with(first, delete_user_cb=lambda user: user is not pair)
    module.graph.lint()


def _declare_ops():
    """A stand-in for AITER's op, which normalizes two tensors at once."""
    library = torch.library.Library("mla_fusion_tests", "FRAGMENT")
    library.define("both(Tensor a, Tensor b) -> (Tensor, Tensor)")
    library.impl("both", lambda a, b: (a.clone(), b.clone()), "CompositeExplicitAutograd")
    return library


_library = _declare_ops()


_LORA = tuple(Spec(rope, q_lora=True) for rope in ROPES)
ON_GRAPHS = (
    OnGraphs("attention and quantization fused", _LORA, _quantized_output, "quantized-output"),
    OnGraphs("dual RMSNorm fused", _LORA, _dual_norm),
    OnGraphs("fuse_rope_kvcache", _LORA, _vllms_rope_passes),
)
