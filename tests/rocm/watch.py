"""Checks every plan and decode that this library makes of AITER inside vLLM.

Outputs are compared with dense attention over vLLM's metadata and layer, so other queries, keys,
pages or scales are seen there. Here is the rest: how often, and in which memory. The double itself
refuses what AITER would.
"""

from collections import Counter
from unittest import mock

from tests.aiter_double.versions import DECODE, INFO, PLANNER
from tests.attention.decodes import definition

# Of the largest value: one rounding of the output to bf16, and of the sums before it.
BOUND = 2**-7


class Watch:
    """Watches the plans that are made while it is entered.

    Attributes:
        made: what AITER was asked for the sizes of each plan.
        passes: plans written in each forward pass, by metadata.
        decodes: calls of the decode. busy: compute units with work, of each plan written.
        rows: (AITER's rows of a sequence, the longest query) of each plan written.
    """

    def __init__(self, double):
        self.double, self.made = double, []
        self.passes: Counter[tuple[int, int]] = Counter()
        self.decodes, self.busy, self.rows = 0, [], []
        self._homes, self._contexts, self._metadata = {}, [], None

    def __enter__(self):
        from mla_fusion.runtime.step_plan import StepPlan, cache_view

        watch, stock_init, stock_decode = self, StepPlan.__init__, StepPlan.decode

        def init(self, plan, *args):
            stock_init(self, plan, *args)
            asked = watch.double.calls(INFO)[-1]
            assert asked["batch_size"] == plan.settings.max_batch
            assert plan.aiter.entries is None, "the pages have a second list"
            watch._homes[plan] = _homes(plan)
            watch.made.append([plan.settings.num_heads, asked["max_seqlen_qo"], plan.layout.fold])

        def decode(self, q, kv_cache, metadata, layer, *outputs):
            watch._metadata = metadata
            stock_decode(self, q, kv_cache, metadata, layer, *outputs)
            watch._metadata = None
            assert _homes(self.plan) == watch._homes[self.plan], "a buffer of the plan moved"
            q, cache = q[: metadata.num_actual_tokens], cache_view(layer, kv_cache)
            watch.check_output(q, cache, metadata, layer, self.out[: len(q)])

        self._patch = mock.patch.multiple(StepPlan, __init__=init, decode=decode)
        self._patch.start()
        self.double.observers.append(self._see)
        return self

    def __exit__(self, *exception):
        self._patch.stop()
        self.double.observers.remove(self._see)

    def found(self):
        """What was seen, for a test to compare."""
        seen = {name: getattr(self, name) for name in ("made", "decodes", "busy", "rows")}
        return seen | {"plans": sorted(self.passes.values())}

    def _see(self, name, a, result):
        """A call of an op by a plan of this library; vLLM's own calls are outside of its decode."""
        from mla_fusion.config import vllm_compat

        if self._metadata is None or name not in (PLANNER, DECODE):
            return
        context = vllm_compat.forward_context()
        step = id(context), id(self._metadata)
        if name == PLANNER:
            self._contexts.append(context)  # while it lives, no other has its id
            self.passes[step] += 1
            self.busy.append(int((a["work_indptr"].diff() > 0).sum()))
            self.rows.append([a["max_seqlen_qo"], int(self._metadata.max_query_len)])
        else:
            self.decodes += 1
            pages = self._metadata.decode.paged_kv_indices
            assert a["kv_indices"].data_ptr() == pages.data_ptr(), "a second list of pages"
        assert self.passes[step] == 1, "a step has one plan, of its own"

    def check_output(self, q, kv_cache, metadata, layer, out):
        """Against dense attention over the blocks that vLLM's table names."""
        lengths = metadata.decode.seq_lens.tolist()
        rows = metadata.query_start_loc[: len(lengths) + 1].diff().tolist()
        given = {"q": q, "kv_cache": kv_cache, "block_table": metadata.decode.block_table}
        given |= {"q_scale": layer._q_scale, "kv_scale": layer._k_scale}
        given["softmax_scale"] = layer.impl.scale
        expected, _ = definition(given, rows, lengths, latent=512)
        live = sum(rows)
        error = (out[:live].double() - expected).abs().max()
        assert error <= BOUND * expected.abs().max(), f"wrong by {float(error)}"
        assert not out[live:].any(), "padded rows are not zero"


def _homes(plan):
    return {name: (x.data_ptr(), x.shape, x.dtype) for name, x in plan.tensors().items()}
