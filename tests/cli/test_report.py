"""What the log says of a start: one line for each decode range, or one warning with reasons."""

import dataclasses
import logging
from pathlib import Path

import pytest

from mla_fusion import report
from mla_fusion.config import vllm_compat
from mla_fusion.ops import Norm, Product, Variant
from mla_fusion.report.graphs import PassOps
from mla_fusion.report.reasons import Decline


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.DEBUG, logger="vllm.mla_fusion")
    return caplog


def said(log):
    return [(r.levelname, r.getMessage()) for r in log.records]


def made(*ranges):
    return report.Report("triton", 256, list(ranges))


PREFILL = report.RangeReport((257, 8192), layers=61)
RANGE = report.RangeReport((1, 128), 61, 61)
SOME = report.RangeReport((129, 256), 61, 58, {Decline("shape"): 2, Decline("hisparse"): 1})
NONE = report.RangeReport((1, 128), 61, 0, {Decline("packed-weights", "AMX"): 61})
OTHER = report.RangeReport((1, 128), 61, 60, {Decline("shape", "x"): 1})
# Two graphs of one range.
OUTPUTS = (
    report.RangeReport((1, 4), 2, 2, outputs={"group": 1, "none": 1},
                       plain_outputs={Decline("output-opaque", "gemm"): 1}),
    report.RangeReport((1, 4), 3, 3, outputs={"group": 2, "tensor": 1}),
)  # fmt: skip

PRODUCTS = (
    report.RangeReport((1, 4), 2, 2, products={Product(24, (40, 18)): 2, Product(40, (32,)): 1},
                       norms={Norm((24,), 2): 2},
                       passes={"7": PassOps({"mm": 3}, {"mm": 0, "projection": 2})},
                       plain_products={Decline("product-slower", "8 -> 9"): 4}),
    report.RangeReport((1, 4), products={Product(40, (32,)): 1}, norms={Norm((24,), 2): 1},
                       passes={"7": PassOps({"mm": 1}, {"projection": 1}), "5": PassOps({}, {})},
                       plain_products={Decline("product-opaque", "gemm"): 1}),
)  # fmt: skip


def taken(*ranges, **facts):
    """The report of what was added, with what `report.take` is told."""
    report.forget()
    for each in ranges:
        report.add(each)
    return report.take("triton", 4, **facts)


CASES = {
    "two decode ranges, cached": lambda: made(RANGE, SOME, PREFILL),
    "a hybrid": lambda: taken(report.RangeReport((1, 4), 2, 2), model_layers=2, others=14),
    "a layer in no graph": lambda: taken(
        report.RangeReport((1, 4), 2, 2), report.RangeReport((5, 64), 2),
        report.RangeReport((1, 4), pass_ms=1.0), model_layers=3),  # the last one of the last step
    "nothing fused": lambda: made(NONE, PREFILL),
    "no graph": lambda: None,
    "no layer": made,
    "no layer in a decode range": lambda: made(PREFILL),
    "four ranks that agree": lambda: report.merge([made(RANGE, PREFILL)] * 4),
    "ranks that differ": lambda: report.merge([made(RANGE), made(RANGE), made(OTHER), made()]),
    "outputs": lambda: taken(*OUTPUTS, attention="portable", epilogue="W_UV"),
    "outputs without a plan": lambda: taken(*OUTPUTS),
    "products": lambda: taken(*PRODUCTS),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_log_and_the_lines_of_a_report(case, log, golden, tmp_path):
    """Also those of the report that is read from its file."""
    stored = CASES[case]()
    report.publish(stored, "V3", cached=case.endswith("cached"))
    text = [f"{level}: {message}" for level, message in said(log)]
    if stored is not None:
        report.store(tmp_path / "r.json", stored)
        assert report.find(tmp_path / "r.json") == stored
        text += stored.lines()
    golden("report", CASES, case, "\n".join(text))


def test_a_layer_with_a_state_that_is_not_mla_is_another(monkeypatch):
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    class Layer(AttentionLayerBase):
        def get_attn_backend(self):
            raise NotImplementedError

        def get_kv_cache_spec(self, vllm_config):
            raise NotImplementedError

    layers = {"mla": Layer(), "linear": Layer(), "experts": object()}
    monkeypatch.setattr(vllm_compat, "mla_layers", lambda all_: {"mla": all_["mla"]})
    assert vllm_compat.other_layers(layers) == 1


def test_the_ops_of_each_pass_are_those_of_all_graphs():
    passes = taken(*PRODUCTS).ranges[0].passes
    assert passes == {"7": PassOps({"mm": 4}, {"projection": 3}), "5": PassOps({}, {})}
    assert passes["7"].changes() == [("mm", 4, 0), ("projection", 0, 3)]


def test_layers_are_counted_by_code_with_the_detail_of_the_first():
    for name in ("a", "b"):
        declined = [*(Decline("shape", f"{name}{i}") for i in range(2)), Decline("hisparse")]
        report.add(report.RangeReport((1, 4), layers=3, declined=report.counted(declined)))
    stored = report.take("reference", 4)
    assert stored is not None
    assert stored.ranges[0].declined == {Decline("shape", "a0"): 4, Decline("hisparse"): 2}


def test_a_start_without_graphs_or_file_knows_nothing(tmp_path, log):
    """A file that is no report is a warning, and so is a folder that takes no file."""
    path = tmp_path / "r.json"
    assert report.take("reference", 4) is None and report.find(path) is None and not said(log)
    path.touch()
    assert report.find(path) is None
    report.store(path / "r.json", made())
    (found, why), (stored, why_not) = said(log)
    assert found == stored == "WARNING" and str(path) in why
    assert "VLLM_DISABLE_COMPILE_CACHE=1" in why and "could not store its report" in why_not


def test_a_report_is_stored_in_one_step(tmp_path, monkeypatch):
    """Who reads while another start writes, or after it was killed, reads the report before."""
    path = tmp_path / "r.json"
    report.store(path, made())

    def killed(part, target):
        assert report.load(target) == made()
        raise OSError("killed")

    monkeypatch.setattr(Path, "replace", killed)
    report.store(path, made(PREFILL))
    assert report.load(path) == made()


def test_stages_of_unlike_size_do_not_differ():
    """Of a pipeline: all layers of both fuse, decline for the same reason, or but for one."""
    for declined in ({}, {"shape": 1}, {"shape": None}):
        stages = []
        for layers in (31, 30):
            counts = {Decline(code): n or layers for code, n in declined.items()}
            fused = layers - sum(counts.values())
            stages.append(made(report.RangeReport((1, 128), layers, fused, counts)))
        assert not report.merge(stages).differing


@pytest.mark.parametrize(
    "other, said",
    [({"products": {"8 -> 9": 2}}, "2 launches of 8 -> 9"),
     ({"norms": {"7": 3}}, "3 launches of 7"),
     ({"plain_products": {Decline("product-slower"): 1}}, "1 products kept [product-slower]")],
)  # fmt: skip
def test_a_rank_with_other_products_differs_but_a_stage_may_have_others(other, said):
    alike = made(dataclasses.replace(RANGE, products={"8 -> 8": 2}, norms={"8": 3},
                                     plain_products={Decline("product-form"): 1}))  # fmt: skip
    odd = made(dataclasses.replace(alike.ranges[0], **other))
    assert not report.merge([alike, alike, odd, odd], 2).differing
    [line] = report.merge([alike, alike, odd, alike], 2).differing
    assert line.startswith("rank 3: 61 of 61 fused")
    told = report.merge([alike, alike, odd]).differing
    assert [line[:6] for line in told] == ["rank 2"] and said in told[0]


def test_a_rank_that_took_a_piece_from_the_cache_of_another_does_not_differ():
    """No pass counted its products."""
    few, all_ = (made(dataclasses.replace(RANGE, products={"8 -> 8": n})) for n in (2, 3))
    assert not report.merge([few, few, all_]).differing + report.merge([all_, few]).differing


def test_variants_are_those_of_all_ranks():
    """Each rank compiles what any of them needs: a start from a warm cache only has this report."""
    a, b = (Variant(neox, 64, "float32", "bfloat16", "auto") for neox in (False, True))
    ranges = [dataclasses.replace(RANGE, variants=[v]) for v in (a, b)]
    assert report.merge([made(r) for r in ranges]).ranges[0].variants == [a, b]


def test_the_outputs_of_layers_are_counted():
    made = taken(*OUTPUTS, attention="portable", epilogue="W_UV")
    assert made.quantizations() == {"group", "none", "tensor"}
    other = report.Report("triton", 4, [report.RangeReport((1, 4), 5, 5, outputs={"x": 5})])
    [only] = report.merge([made, other]).ranges
    assert only.outputs == {"x": 0, "group": 3, "none": 1, "tensor": 1}
