"""AITER's adapter on the double of AITER: what its rules (test_adapter.py there) do not show."""

import contextlib
import functools
import sys

import pytest
import torch

from mla_fusion import attention
from mla_fusion.attention.plan.buffers import AITER_BUFFERS
from mla_fusion.kernels import ProviderUnavailable
from mla_fusion.measure.distances import distance
from tests import aiter_double
from tests.aiter_double import uses, versions
from tests.aiter_double.versions import DECODE, INFO, PLANNER
from tests.attention import decodes
from tests.attention.captured import Graph, call
from tests.attention.decodes import BF16, refresh

ROWS, LENGTHS = [2, 1, 2], [700, 33, 1]
WIDTHS = {"v_head_dim": 512, "rope": 64}
allocate = functools.partial(decodes.plan_for, planner="aiter", num_heads=12, max_query_len=2)


@pytest.fixture
def use(monkeypatch):
    """Install the double of v0.1.20 as the AITER of an architecture."""
    with contextlib.ExitStack() as stack:

        def install(arch="gfx942"):
            double = stack.enter_context(aiter_double.installed(arch))
            uses.found(double, monkeypatch)
            return double

        yield install


@pytest.fixture
def published(monkeypatch):
    """Change the text of the arguments that a function of AITER takes."""

    def change(name, old, new=""):
        text = versions._ARGUMENTS[name]
        assert old in text
        monkeypatch.setitem(versions._ARGUMENTS, name, text.replace(old, new))

    return change


def arguments(**changes):
    options = {"planner": "aiter", "num_heads": 12} | changes
    return decodes.arguments(ROWS, LENGTHS, **WIDTHS, **options)


def assert_decoded(given, out, rows, lengths):
    """`out` is what the tensors as they are now give."""
    expected, _ = decodes.definition(given, rows, lengths)
    assert distance(out, expected) < 4e-3


def test_equal_to_the_definition(use):
    """With the log-sum-exp and a cap; test_adapter.py has the other shapes."""
    double = use("gfx950")
    given = arguments(max_split_per_batch=2)
    out, lse = attention.persistent_mla_decode(**given, return_lse=True)
    assert_decoded(given, out, ROWS, LENGTHS)
    _, expected_lse = decodes.definition(given, ROWS, LENGTHS)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    # The last sequence has one key: all but its last row see none.
    assert lse[-2].isneginf().all() and not out[-2].any() and lse[-1].isfinite().all()
    [size], [plan], [decode] = map(double.calls, (INFO, PLANNER, DECODE))
    buffers = {"work_meta_data": given["plan"].work_metadata_ptrs}
    buffers |= {name: getattr(given["plan"], name) for name in AITER_BUFFERS[1:]}
    assert all(decode[name] is tensor for name, tensor in buffers.items())
    assert decode["num_kv_splits"] == 256, "else AITER may leave the plan aside"
    assert decode["q"].shape[1] == given["plan"].layout.padded == decode["o"].shape[1]
    assert size["max_split_per_batch"] == plan["max_split_per_batch"] == 2
    assert plan["max_seqlen_qo"] == plan["uni_seqlen_qo"] == 2
    assert plan["dtype_q"] == plan["dtype_kv"] == BF16


def test_with_a_longest_sequence_the_page_indices_stay_where_they_are(use):
    """For other lengths and another table; entries behind the last token are never read."""
    double = use()
    given = arguments(max_kv_len=720)
    plan, lengths = given["plan"], LENGTHS
    for table in (given["block_table"], given["block_table"][:, :3].contiguous()):
        out, _ = attention.persistent_mla_decode(**given | {"block_table": table})
        assert_decoded(given | {"block_table": table}, out, ROWS, lengths)
        lengths = [40, 2, 1]
        refresh(plan, ROWS, lengths)
    first, second = (made["kv_indices"] for made in double.calls(DECODE))
    assert first is second is plan.aiter.entries and len(first) == 4 * 720


def test_page_indices_are_made_once_a_step(use):
    double = use()
    given = arguments()
    # Blocks after the end of a sequence may be anything; AITER gets all the indices.
    given["block_table"][2, 1:] = 2**24
    for _ in range(2):
        attention.persistent_mla_decode(**given)
    refresh(given["plan"], ROWS, [9, 9, 9])
    attention.persistent_mla_decode(**given)
    first, second, third = (made["kv_indices"] for made in double.calls(DECODE))
    assert first is second is not third
    assert first.min() >= 0 and first.max() < given["kv_cache"].shape[:2].numel()


class TestInAGraph:
    @pytest.fixture(autouse=True)
    def kernels(self, use):
        """A graph records a call of AITER, not what the double computes it with."""
        double = use()
        for module, name in (("aiter", PLANNER), ("aiter.mla", DECODE)):
            op = functools.wraps(double.ops[name])(functools.partial(call, double.ops[name]))
            setattr(double.modules[module], name, op)

    @pytest.mark.parametrize("refreshed_inside", [False, True])
    @pytest.mark.parametrize("ran_before", [False, True])
    def test_a_replay_decodes_its_own_step(self, monkeypatch, ran_before, refreshed_inside):
        """Two layers; lengths and block table change in place between replays, as vLLM's do."""
        given = arguments()
        plan, lens = given["plan"], torch.tensor(LENGTHS, dtype=torch.int32)
        # Every block, as a replay may name any.
        given["kv_cache"].nan_to_num_(nan=1.0)
        blocks = len(given["kv_cache"])
        layers = [given, given | {"kv_cache": given["kv_cache"].flip(0).contiguous()}]
        outs = [torch.empty(5, 12, 512, dtype=BF16) for _ in layers]

        def decode():
            for layer, out in zip(layers, outs, strict=True):
                attention.persistent_mla_decode(**layer, out=out)

        if ran_before:
            decode()
        with Graph(monkeypatch) as graph:
            if refreshed_inside:
                refresh(plan, ROWS, lens)
            decode()
        for seed, changed in enumerate(([40, 5, 9], [2, 300, 64])):
            lens.copy_(torch.tensor(changed))
            given["block_table"].random_(0, blocks, generator=torch.Generator().manual_seed(seed))
            if not refreshed_inside:
                refresh(plan, ROWS, lens)
            for out in outs:
                out.fill_(torch.nan)
            graph.replay()
            for layer, out in zip(layers, outs, strict=True):
                assert_decoded(layer, out, ROWS, changed)

    def test_only_replays_read_what_a_graph_computes(self, monkeypatch):
        given, out = arguments(), torch.empty(5, 12, 512, dtype=BF16)
        with Graph(monkeypatch):
            attention.persistent_mla_decode(**given, out=out)
        attention.persistent_mla_decode(**given, out=out)
        assert_decoded(given, out, ROWS, LENGTHS)


def test_rows_after_the_last_sequence_are_not_written(use):
    """vLLM pads a batch with rows of no sequence; AITER leaves garbage there."""
    use("gfx950")
    given = arguments()
    refresh(given["plan"], [2, 0, 0], [700, 0, 0], num_tokens=5)
    out = torch.full((5, 12, 512), 7.0, dtype=BF16)
    _, lse = attention.persistent_mla_decode(**given, out=out, return_lse=True)
    assert lse[:2].isfinite().all()
    assert out[2:].eq(7).all()
    assert_decoded(given, out[:2], [2, 0, 0], [700, 0, 0])


def test_types_have_four_names_in_some_releases(use, published):
    published(PLANNER, "dtype_q=None, dtype_kv=None", "unused=None")
    double = use()
    refresh(allocate(), ROWS, LENGTHS)
    [made] = double.calls(PLANNER)
    assert made["dtype_q_rope"] == made["dtype_kv_nope"] == BF16


def test_the_first_releases_are_refused(use, published):
    published(PLANNER, "kv_last_page_lens, ")
    double = use()
    with pytest.raises(ProviderUnavailable, match=r"v0\.1\.10\.post2"):
        allocate()
    delattr(double.modules["aiter"], INFO)
    with pytest.raises(ProviderUnavailable, match="no persistent MLA decode"):
        allocate()


@pytest.mark.parametrize(
    "options, why",
    [({"return_lse": True}, "return_lse"),
     ({"provider": "triton"}, "for aiter and reference, not for triton")],
)  # fmt: skip
def test_a_decode_that_is_refused(use, published, options, why):
    published(DECODE, ", return_lse=False")  # as older releases have it
    use("gfx950")
    with pytest.raises(ValueError, match=why):
        attention.persistent_mla_decode(**arguments(), **options)


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"planner": "auto"}, "planner must be .portable. or .aiter."),
        ({"max_query_len": 5}, "queries of 5"),
        ({"ctas": 8}, "only the portable planner takes ctas"),
        ({"v_head_dim": 256}, "kernels for latents of 512, not 256"),
    ],
)
def test_a_plan_that_is_refused(use, changes, why):
    use()
    with pytest.raises(ValueError, match=why):
        allocate(**changes)


def test_without_aiter(use):
    use()
    for name in [name for name in sys.modules if name.split(".")[0] == "aiter"]:
        del sys.modules[name]
    with pytest.raises(ProviderUnavailable, match="missing"):
        allocate()
