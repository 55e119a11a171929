"""AITER's adapter against a stand-in that records calls, with the published argument lists."""

from __future__ import annotations

import importlib.machinery
import inspect
import sys
import types
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from mla_fusion import attention
from mla_fusion.attention import (
    PersistentDecodePlan,
    buffers,
    planner,
    planner_aiter,
    reference,
    selection,
)  # fmt: skip
from mla_fusion.attention.buffers import AITER_BUFFERS, Rules
from mla_fusion.attention.validate import Inputs
from mla_fusion.kernels import ProviderUnavailable
from tests.attention.captured import Graph, call

if TYPE_CHECKING:
    from collections.abc import Iterator

BF16, FN, FNUZ = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz
WORKERS, PAGE, BLOCKS = 8, 16, 60
INFO = (
    "batch_size, max_seqlen_qo, num_head_qo, q_dtype, kv_dtype, is_sparse, fast_mode=True, "
    "num_kv_splits=32, intra_batch_mode=False, max_split_per_batch=-1"
)
PLAN = (
    "seqlens_qo_indptr, seqlens_kv_indptr, kv_last_page_lens, num_heads_per_head_k, num_heads_k, "
    "is_causal, work_metadata_ptrs, work_info_set, work_indptr, reduce_indptr, reduce_final_map, "
    "reduce_partial_map, page_size=1, kv_granularity=16, max_seqlen_qo=-1, uni_seqlen_qo=-1, "
    "fast_mode=True, topk=-1, max_split_per_batch=-1, intra_batch_mode=False, dtype_q=None, "
    "dtype_kv=None"
)
DECODE = (
    "q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, "
    "page_size=1, nhead_kv=1, sm_scale=None, logit_cap=0.0, num_kv_splits=None, "
    "num_kv_splits_indptr=None, work_meta_data=None, work_indptr=None, work_info_set=None, "
    "reduce_indptr=None, reduce_final_map=None, reduce_partial_map=None, q_scale=None, "
    "kv_scale=None, intra_batch_mode=False, return_logits=False, return_lse=False"
)


class StandIn:
    """`aiter` with three functions; `calls` holds the arguments of each call by name.

    The plan is this library's. The decode ignores it: it computes attention in float64 from the
    page indices, and leaves garbage where a row sees no key, as AITER does.
    """

    def __init__(self, info: str = INFO, plan: str = PLAN, decode: str = DECODE) -> None:
        self.calls: dict[str, list[dict[str, Any]]] = {}
        self.module = types.ModuleType("aiter")
        self.mla = types.ModuleType("aiter.mla")
        self.module.get_mla_metadata_info_v1 = self._op("info", info, self._info)
        self.module.get_mla_metadata_v1 = self._op("plan", plan, self._plan)
        self.mla.mla_decode_fwd = self._op("decode", decode, self._decode)
        self.module.fused_qk_rope_concat_and_cache_mla = None

    def _op(self, name: str, parameters: str, body: Any) -> Any:
        namespace: dict[str, Any] = {}
        exec(f"def {name}({parameters}): pass", namespace)
        signature = inspect.signature(namespace[name])

        def function(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            self.calls.setdefault(name, []).append(bound.arguments)
            return call(body, SimpleNamespace(**bound.arguments))

        function.__signature__ = signature
        return function

    def _rules(self, heads: int, cap: int) -> Rules:
        return Rules(WORKERS, heads // 16, 16, 16, cap)

    def _info(self, a: Any) -> list[tuple[Any, torch.dtype]]:
        # Only folded head counts and up to 16 heads are asked for here.
        rules = self._rules(a.num_head_qo, getattr(a, "max_split_per_batch", -1))
        tiles, i32 = a.batch_size * rules.fold, torch.int32
        return [
            (2, torch.uint64),
            (WORKERS + 1, i32),
            ((rules.max_works(a.batch_size), 8), i32),
            (tiles + 1, i32),
            ((tiles, 2), i32),
            (rules.partial_map_size(a.batch_size), i32),
        ]

    def _plan(self, a: Any) -> None:
        names = [name for name in AITER_BUFFERS if name != "work_metadata_ptrs"]
        arrays = {name: getattr(a, name).numpy() for name in names}
        indptr = np.zeros(a.seqlens_qo_indptr.shape, np.int32)
        arrays |= {"qo_indptr": indptr, "kv_indptr": indptr.copy()}
        rules = self._rules(a.num_heads_per_head_k, a.max_split_per_batch)
        lens = a.seqlens_kv_indptr.diff().numpy()
        planner.fill_arrays(
            SimpleNamespace(**arrays), rules, a.seqlens_qo_indptr.numpy(), lens, a.max_seqlen_qo
        )

    def _decode(self, a: Any) -> tuple[None, torch.Tensor]:
        query, keys = a.q.double(), a.kv_buffer.double().view(-1, 576)
        if a.q_scale is not None and a.q.dtype != BF16:
            query = query * a.q_scale
        if a.kv_scale is not None:
            keys = keys * a.kv_scale
        lse = torch.full(a.q.shape[:2], torch.inf)
        a.o.fill_(torch.nan)
        for b in range(len(a.qo_indptr) - 1):
            begin, end = a.qo_indptr[b : b + 2].tolist()
            rows = a.kv_indices[a.kv_indptr[b] : a.kv_indptr[b + 1]].long()
            for token in range(begin, end):
                mine = keys[rows[: max(0, len(rows) - (end - 1 - token))]]
                if len(mine):
                    scores = query[token] @ mine.T * a.sm_scale
                    a.o[token] = (scores.softmax(-1) @ mine[:, :512]).to(a.o.dtype)
                    lse[token] = scores.logsumexp(-1)
        return None, lse if getattr(a, "return_lse", False) else None


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Install a stand-in as the AITER of an architecture."""
    attention.get_provider.cache_clear()

    def install(stand_in: StandIn, arch: str = "gfx942") -> StandIn:
        monkeypatch.setattr(selection, "architecture", lambda device: arch)
        monkeypatch.setattr(buffers, "multiprocessors", lambda device: WORKERS)
        modules = {"aiter": stand_in.module, "aiter.mla": stand_in.mla}
        modules["aiter.jit"] = types.ModuleType("aiter.jit")
        stand_in.module.__path__ = []
        fp8 = torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn
        stand_in.module.dtypes = SimpleNamespace(fp8=fp8)
        for name, module in modules.items():
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            monkeypatch.setitem(sys.modules, name, module)
        return stand_in

    yield install
    attention.get_provider.cache_clear()


def allocate(**changes: Any) -> PersistentDecodePlan:
    fields = {
        "max_batch": 4,
        "max_query_len": 2,
        "num_heads": 12,
        "q_dtype": BF16,
        "kv_dtype": BF16,
        "device": "cpu",
        "planner": "aiter",
    }
    return PersistentDecodePlan.allocate(**{**fields, **changes})


def step(plan: PersistentDecodePlan, seed: int = 0) -> dict[str, Any]:
    """Refresh `plan` for a ragged batch of three, and the arguments of its decode."""
    settings, g = plan.settings, torch.Generator().manual_seed(seed)
    query_lens = [settings.max_query_len, 1, settings.max_query_len]
    qo_indptr = torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32)
    tokens = int(qo_indptr[-1])
    plan.refresh(
        qo_indptr=qo_indptr, seq_lens=torch.tensor([700, 33, 1], dtype=torch.int32),
        num_tokens=tokens, max_query_len=settings.max_query_len,
    )  # fmt: skip
    q = torch.randn((tokens, settings.num_heads, 576), generator=g)
    cache = torch.randn((BLOCKS, PAGE, 576), generator=g)
    return {
        "q": q.to(settings.q_dtype),
        "kv_cache": cache.to(settings.kv_dtype),
        "plan": plan,
        "block_table": torch.randint(0, BLOCKS, (3, 44), generator=g, dtype=torch.int32),
        "softmax_scale": 0.05,
        "q_scale": torch.tensor([0.5]),
        "kv_scale": torch.tensor([0.25]),
    }


CASES = [
    ("gfx942", {}),
    ("gfx942", {"num_heads": 64, "max_query_len": 4}),
    ("gfx942", {"num_heads": 16, "max_query_len": 1, "q_dtype": FNUZ, "kv_dtype": FNUZ}),
    ("gfx942", {"num_heads": 16, "kv_dtype": FNUZ}),
    ("gfx950", {"num_heads": 16, "max_query_len": 4, "q_dtype": FN, "kv_dtype": FN}),
    ("gfx950", {"num_heads": 12, "max_split_per_batch": 2}),
]


@pytest.mark.parametrize("arch, changes", CASES)
def test_equal_to_the_reference(use: Any, arch: str, changes: dict[str, Any]) -> None:
    stand_in = use(StandIn(), arch)
    plan = allocate(**changes)
    lse_too = arch == "gfx950"
    given = step(plan)
    out, lse = attention.persistent_mla_decode(**given, return_lse=lse_too)
    expected, expected_lse = torch.empty_like(out), torch.empty(out.shape[:2])
    reference.persistent_mla_decode(Inputs(**given, out=expected, lse=expected_lse))
    error = (out.double() - expected.double()).norm() / expected.double().norm()
    assert error < 4e-3
    if lse_too:
        torch.testing.assert_close(lse, expected_lse)
        # The last sequence has one key: all but its last row see none.
        assert lse[-2].isneginf().all() and not out[-2].any() and lse[-1].isfinite().all()
    [call] = stand_in.calls["decode"]
    buffers = {"work_meta_data": plan.work_metadata_ptrs}
    buffers |= {name: getattr(plan, name) for name in AITER_BUFFERS[1:]}
    assert all(call[name] is tensor for name, tensor in buffers.items())
    assert call["num_kv_splits"] == WORKERS, "else AITER may leave the plan aside"
    assert call["q"].shape[1] == plan.layout.padded == call["o"].shape[1]


def test_the_cap_goes_to_sizing_and_planning_alike(use: Any) -> None:
    stand_in = use(StandIn())
    step(allocate(max_split_per_batch=3))
    [size], [plan] = stand_in.calls["info"], stand_in.calls["plan"]
    assert size["max_split_per_batch"] == plan["max_split_per_batch"] == 3
    assert plan["max_seqlen_qo"] == 2 and plan["uni_seqlen_qo"] == -1
    assert plan["dtype_q"] == plan["dtype_kv"] == BF16


def test_refresh_moves_nothing(use: Any) -> None:
    use(StandIn())
    plan = allocate()

    def addresses() -> list[int]:
        return [x.data_ptr() for x in vars(plan).values() if isinstance(x, torch.Tensor)]

    before = addresses()
    for seed in range(2):
        step(plan, seed)
    assert addresses() == before
    assert plan.qo_indptr.tolist() == [0, 2, 3, 5, 5], "constant after the batch"
    assert plan.kv_indptr.tolist() == [0, 700, 733, 734, 734]


def test_page_indices_are_made_once_a_step(use: Any) -> None:
    stand_in = use(StandIn())
    given = step(allocate())
    for _ in range(2):
        attention.persistent_mla_decode(**given)
    first, second = stand_in.calls["decode"]
    assert first["kv_indices"] is second["kv_indices"]
    given["plan"].refresh(
        qo_indptr=torch.tensor([0, 2, 3, 5], dtype=torch.int32),
        seq_lens=torch.tensor([9, 9, 9], dtype=torch.int32), num_tokens=5, max_query_len=2,
    )  # fmt: skip
    attention.persistent_mla_decode(**given)
    assert stand_in.calls["decode"][2]["kv_indices"] is not first["kv_indices"]


def refresh(plan: PersistentDecodePlan, seq_lens: torch.Tensor, query_lens: list[int]) -> None:
    qo_indptr = torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32)
    plan.refresh(
        qo_indptr=qo_indptr, seq_lens=seq_lens, num_tokens=5, max_query_len=max(query_lens)
    )


def assert_decoded(given: dict[str, Any], out: torch.Tensor) -> None:
    """`out` is what the reference makes of the plan and the tables as they are now."""
    expected = torch.empty_like(out)
    reference.persistent_mla_decode(Inputs(**given, out=expected, lse=None))
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)


class TestInAGraph:
    @pytest.mark.parametrize("refreshed_inside", [False, True])
    @pytest.mark.parametrize("ran_before", [False, True])
    def test_a_replay_decodes_its_own_step(
        self,
        use: Any,
        monkeypatch: pytest.MonkeyPatch,
        ran_before: bool,
        refreshed_inside: bool,
    ) -> None:
        """Two layers; lengths and block table change in place between replays, as vLLM's do."""
        use(StandIn())
        given = step(allocate())
        plan, lens = given["plan"], torch.tensor([700, 33, 1], dtype=torch.int32)
        layers = [given, given | {"kv_cache": given["kv_cache"].flip(0).contiguous()}]
        outs = [torch.empty(5, 12, 512, dtype=BF16) for _ in layers]
        if ran_before:
            for layer, out in zip(layers, outs, strict=True):
                attention.persistent_mla_decode(**layer, out=out)
        with Graph(monkeypatch) as graph:
            if refreshed_inside:
                refresh(plan, lens, [2, 1, 2])
            for layer, out in zip(layers, outs, strict=True):
                attention.persistent_mla_decode(**layer, out=out)
        for seed, changed in enumerate(([40, 5, 9], [2, 300, 64])):
            lens.copy_(torch.tensor(changed))
            given["block_table"].random_(0, BLOCKS, generator=torch.Generator().manual_seed(seed))
            if not refreshed_inside:
                refresh(plan, lens, [2, 1, 2])
            for out in outs:
                out.fill_(torch.nan)
            graph.replay()
            for layer, out in zip(layers, outs, strict=True):
                assert_decoded(layer, out)

    def test_only_replays_read_what_a_graph_computes(
        self, use: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use(StandIn())
        given = step(allocate())
        out = torch.empty(5, 12, 512, dtype=BF16)
        with Graph(monkeypatch):
            attention.persistent_mla_decode(**given, out=out)
        attention.persistent_mla_decode(**given, out=out)
        assert_decoded(given, out)


def test_rows_after_the_last_sequence_are_not_written(use: Any) -> None:
    """vLLM pads a batch with rows of no sequence; AITER leaves garbage there."""
    use(StandIn(), "gfx950")
    given = step(allocate())
    refresh(given["plan"], torch.tensor([700, 0, 0], dtype=torch.int32), [2, 0, 0])
    out = torch.full((5, 12, 512), 7.0, dtype=BF16)
    _, lse = attention.persistent_mla_decode(**given, out=out, return_lse=True)
    assert lse is not None and lse[:2].isfinite().all()
    assert out[2:].eq(7).all()
    assert_decoded(given | {"q": given["q"][:2]}, out[:2])


def test_entries_of_no_token_are_in_the_cache(use: Any) -> None:
    """Blocks after the end of a sequence may be anything; AITER gets all the indices."""
    stand_in = use(StandIn())
    given = step(allocate())
    given["block_table"][2, 1:] = 2**24
    attention.persistent_mla_decode(**given)
    [call] = stand_in.calls["decode"]
    assert call["kv_indices"].min() >= 0 and call["kv_indices"].max() < BLOCKS * PAGE


class TestReleases:
    def test_types_have_four_names_in_some(self, use: Any) -> None:
        parts = "dtype_q_nope=None, dtype_q_rope=None, dtype_kv_nope=None, dtype_kv_rope=None"
        stand_in = use(StandIn(plan=PLAN.replace("dtype_q=None, dtype_kv=None", parts)))
        step(allocate())
        [call] = stand_in.calls["plan"]
        assert call["dtype_q_rope"] == call["dtype_kv_nope"] == BF16

    def test_a_cap_needs_a_release_that_sizes_with_it(self, use: Any) -> None:
        use(StandIn(info=INFO.replace(", max_split_per_batch=-1", "")))
        allocate()
        with pytest.raises(ValueError, match=r"v0\.1\.16"):
            allocate(max_split_per_batch=4)

    def test_the_first_planners_are_refused(self, use: Any) -> None:
        use(StandIn(plan=PLAN.replace("kv_last_page_lens, ", "")))
        with pytest.raises(ProviderUnavailable, match=r"v0\.1\.10\.post2"):
            allocate()

    def test_without_the_decode(self, use: Any) -> None:
        stand_in = use(StandIn())
        del stand_in.module.get_mla_metadata_info_v1
        with pytest.raises(ProviderUnavailable, match="no persistent MLA decode"):
            allocate()

    def test_the_log_sum_exp_is_newer(self, use: Any) -> None:
        use(StandIn(decode=DECODE.replace(", return_lse=False", "")), "gfx950")
        given = step(allocate())
        with pytest.raises(ValueError, match="return_lse"):
            attention.persistent_mla_decode(**given, return_lse=True)


class TestRefusedBeforeTheCall:
    @pytest.mark.parametrize(
        "change, message",
        [
            (lambda given: {"kv_cache": torch.zeros(60, 16, 640).to(BF16)[..., :576]}, "strided"),
            (lambda given: {"return_lse": True}, "writes no log-sum-exp"),
            (lambda given: {"provider": "triton"}, "for aiter and reference, not for triton"),
        ],
    )
    def test_value_error(self, use: Any, change: Any, message: str) -> None:
        stand_in = use(StandIn())
        given = step(allocate())
        with pytest.raises(ValueError, match=message):
            attention.persistent_mla_decode(**{**given, **change(given)})
        assert "decode" not in stand_in.calls

    def test_all_six_or_none(self, use: Any) -> None:
        stand_in = use(StandIn())
        given = step(allocate())
        given["plan"].reduce_final_map = torch.zeros(0, 2, dtype=torch.int32)
        with pytest.raises(ValueError, match="or none; reduce_final_map is another"):
            attention.persistent_mla_decode(**given)
        assert "decode" not in stand_in.calls

    def test_another_width(self, use: Any) -> None:
        use(StandIn())
        given = step(allocate(v_head_dim=256))
        with pytest.raises(ValueError, match="entries of 576 with values of 512"):
            attention.persistent_mla_decode(**given)


class TestAuto:
    def test_aiter_where_nothing_speaks_against_it(self, use: Any) -> None:
        use(StandIn())
        plan = allocate(planner="auto")
        assert (plan.planner, plan.why_not_aiter) == (planner_aiter, "")
        assert plan.layout.padded == 16

    @pytest.mark.parametrize(
        "changes, reason",
        [
            ({"max_query_len": 5}, "queries of 5"),
            ({"workers": 8}, "only the portable planner takes workers"),
            ({"kv_granularity": 24}, "power of two as kv_granularity, got 24"),
        ],
    )
    def test_portable_with_the_reason(self, use: Any, changes: dict[str, Any], reason: str) -> None:
        use(StandIn())
        plan = allocate(planner="auto", **changes)
        assert plan.planner is planner and reason in plan.why_not_aiter
        with pytest.raises(ValueError, match=reason):
            allocate(**changes)

    def test_slower_is_still_possible_when_asked_for(self, use: Any) -> None:
        use(StandIn(), "gfx950")
        changes = {"num_heads": 16, "max_query_len": 1, "max_batch": 32}
        assert "faster on gfx950" in allocate(planner="auto", **changes).why_not_aiter
        assert allocate(**changes).planner is planner_aiter

    def test_without_aiter(self, use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        use(StandIn())
        monkeypatch.delitem(sys.modules, "aiter")
        monkeypatch.delitem(sys.modules, "aiter.jit")
        assert "missing" in allocate(planner="auto").why_not_aiter
        with pytest.raises(ProviderUnavailable, match="missing"):
            allocate()
