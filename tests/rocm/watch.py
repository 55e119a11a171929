"""Checks every call of AITER that a plan of this library makes inside vLLM.

What a call must be is read from vLLM's metadata and layer, not from the plan: which queries, keys
and scales; and how often. The double itself refuses what AITER would.
"""

from collections import Counter
from unittest import mock

import torch

from tests.aiter_double import decode
from tests.aiter_double import metadata as sizes
from tests.aiter_double.uses import dense
from tests.aiter_double.versions import DECODE, INFO, PLANNER

LATENT, ENTRY = 512, 576
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
        self.passes: Counter[int] = Counter()
        self.decodes, self.busy, self.rows = 0, [], []
        self._contexts, self._homes, self._now = [], {}, None

    def __enter__(self):
        from mla_fusion.runtime.step_plan import StepPlan

        watch, stock_init, stock_decode = self, StepPlan.__init__, StepPlan.decode

        def init(self, plan, *args):
            stock_init(self, plan, *args)
            watch._know(plan)

        def decode(self, q, kv_cache, metadata, layer, *outputs):
            watch._now = self.plan, kv_cache, metadata, layer
            stock_decode(self, q, kv_cache, metadata, layer, *outputs)
            watch._now = None
            watch.check_output(q, kv_cache, metadata, layer, self.out[: len(q)])

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

    def _know(self, plan):
        """The sizes that AITER asked for are those of the plan, and its addresses are for ever."""
        asked = self.double.calls(INFO)[-1]
        settings = plan.settings
        assert asked["batch_size"] == settings.max_batch
        assert asked["max_seqlen_qo"] >= settings.max_query_len
        assert asked["num_head_qo"] == -(-settings.num_heads // 16) * 16
        assert (asked["q_dtype"], asked["kv_dtype"]) == (settings.q_dtype, settings.kv_dtype)
        assert asked["max_split_per_batch"] == settings.max_split_per_batch
        shapes = sizes.info(self.double.at, asked)
        for name, (shape, dtype) in zip(sizes.BUFFERS, shapes, strict=True):
            tensor = getattr(plan, name)
            assert tensor.shape == (shape if isinstance(shape, tuple) else (shape,)), name
            assert tensor.dtype == dtype and tensor.is_contiguous(), name
        assert plan.aiter.entries is None, "the pages have a second list"
        self._homes[id(plan)] = {name: _home(x) for name, x in plan.tensors().items()}
        self.made.append([settings.num_heads, asked["max_seqlen_qo"], plan.layout.fold])

    def _see(self, name, a, result):
        if self._now is not None and name in (PLANNER, DECODE):
            (self._check_plan if name == PLANNER else self._check_decode)(a)

    def _check_common(self, a, names):
        """The six buffers are the plan's, in AITER's order, and nothing of it has moved."""
        plan, _, metadata, _ = self._now
        homes = self._homes[id(plan)]
        for name, tensor in plan.tensors().items():
            assert _home(tensor) == homes[name], f"{name} of the plan moved"
        for name, given in zip(sizes.BUFFERS, names, strict=True):
            assert _home(a[given]) == homes[name], f"{given} is another buffer"
        lengths = metadata.decode.seq_lens
        rows = a["max_seqlen_qo"] if "max_seqlen_qo" in a else a["max_seqlen_q"]
        starts = metadata.query_start_loc[: len(lengths) + 1]
        if rows > 1:
            starts = torch.arange(0, (len(lengths) + 1) * rows, rows)
        assert rows >= metadata.query_start_loc[: len(lengths) + 1].diff().max()
        return rows, starts.tolist(), [0, *lengths.cumsum(0).tolist()]

    def _check_plan(self, a):
        plan, _, metadata, _ = self._now
        rows, starts, ends = self._check_common(a, sizes.BUFFERS)
        context = _context()
        if not any(known is context for known in self._contexts):
            self._contexts.append(context)
        self.passes[id(context), id(metadata)] += 1
        assert self.passes[id(context), id(metadata)] == 1, "a step was planned twice"
        settings = plan.settings
        assert a["seqlens_qo_indptr"].tolist() == starts, "other queries"
        assert a["seqlens_kv_indptr"].tolist() == ends, "other keys"
        assert a["num_heads_per_head_k"] == -(-settings.num_heads // 16) * 16
        assert (a["num_heads_k"], a["is_causal"], a["page_size"]) == (1, True, 1)
        assert (a["kv_granularity"], a["fast_mode"], a["topk"]) == (16, True, -1)
        assert a["max_split_per_batch"] == settings.max_split_per_batch
        assert (a["dtype_q"], a["dtype_kv"]) == (settings.q_dtype, settings.kv_dtype)
        self.busy.append(int((a["work_indptr"].diff() > 0).sum()))
        self.rows.append([rows, int(metadata.max_query_len)])

    def _check_decode(self, a):
        plan, kv_cache, metadata, layer = self._now
        rows, starts, ends = self._check_common(a, decode.PLAN)
        self.decodes += 1
        assert self.passes[id(_context()), id(metadata)] == 1, "the plan is of another step"
        assert a["qo_indptr"].tolist() == starts, "other queries"
        assert a["kv_indptr"].tolist() == ends, "other keys"
        pages, size = [], kv_cache.shape[1]
        table, lengths = metadata.decode.block_table, metadata.decode.seq_lens.tolist()
        for blocks, length in zip(table, lengths, strict=True):
            at = torch.arange(length)
            pages += (blocks[at // size].long() * size + at % size).tolist()
        assert a["kv_indices"][: ends[-1]].tolist() == pages, "other pages"
        assert _home(a["kv_indices"]) == _home(metadata.decode.paged_kv_indices), "a second list"
        assert _home(a["kv_buffer"])[0] == _home(kv_cache)[0], "another layer's cache"
        assert a["kv_buffer"].shape == (kv_cache.shape[0] * size, 1, 1, ENTRY)
        heads = -(-layer.num_heads // 16) * 16
        count = starts[-1] if rows > 1 else len(a["q"])
        assert a["q"].shape == (count, heads, ENTRY)
        assert a["o"].shape == (count, heads, LATENT)
        assert a["q"].dtype == plan.settings.q_dtype and a["o"].dtype == torch.bfloat16
        assert a["sm_scale"] == layer.impl.scale, "another scale"
        if a["q"].dtype.itemsize == 1:
            assert a["q_scale"] == layer._q_scale and a["kv_scale"] == layer._k_scale
        assert a["num_kv_splits"] == self.double.arch.compute_units
        assert (a["page_size"], a["nhead_kv"], a["logit_cap"]) == (1, 1, 0)

    def check_output(self, q, kv_cache, metadata, layer, out):
        """Against dense attention over the blocks that vLLM's table names."""
        lengths = metadata.decode.seq_lens.tolist()
        starts = metadata.query_start_loc[: len(lengths) + 1].tolist()
        given = {"q": q, "kv_cache": kv_cache, "block_table": metadata.decode.block_table}
        given |= {"q_scale": layer._q_scale, "kv_scale": layer._k_scale}
        given["softmax_scale"] = layer.impl.scale
        expected, live = dense(given, starts, lengths), starts[-1]
        error = (out[:live].double() - expected[:live]).abs().max()
        assert error <= BOUND * expected[:live].abs().max(), f"wrong by {float(error)}"
        assert not out[live:].any(), "padded rows are not zero"


def _home(tensor):
    return [tensor.data_ptr(), list(tensor.shape), str(tensor.dtype)]


def _context():
    from mla_fusion.config import vllm_compat

    return vllm_compat.forward_context()
