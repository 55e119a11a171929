"""The products that `mla-fusion calibrate` measures of a model, and what `plan_for` makes of its
file; the measurement itself is a double."""

import argparse
import json

import pytest
import torch

from mla_fusion import projections
from mla_fusion.cli import UserError
from mla_fusion.cli.bench import projections as bench
from mla_fusion.cli.calibrate import products
from mla_fusion.cli.selftest.kernels import Row
from mla_fusion.config import vllm_compat
from mla_fusion.config.identity import tables_folder
from mla_fusion.measure import records, timing
from mla_fusion.ops import Product
from mla_fusion.projections import measured
from mla_fusion.projections.shapes import shapes_of
from mla_fusion.runtime import measured_here
from mla_fusion.runtime.measured_here import PRODUCTS
from tests.cli.test_check import CONFIGS
from tests.gpus import imitate

GPU = "NVIDIA H20"
PLAN, BLOCK = bench.PLANS[4], bench.PLANS[-1]


def sizes(name, ranks=1):
    config = json.loads((CONFIGS / name).read_text())
    shapes = shapes_of(config, ranks)
    eight = {s for s in shapes if s.bits == 8}
    assert eight == ({*shapes[:-1]} if "quantization_config" in config else set())
    return {(s.k, s.sizes) for s in shapes}


def test_the_products_of_a_rank():
    """Of DeepSeek-V3 on 8 GPUs: qkv_a, q_b, o, the dense MLP, the shared expert, and the router,
    which alone is not in block fp8."""
    assert sizes("deepseek-v3.json", 8) == {
        (7168, (2112,)), (1536, (3072,)), (2048, (7168,)), (7168, (4608,)), (2304, (7168,)),
        (7168, (512,)), (256, (7168,)), (7168, (256,)),
    }  # fmt: skip


def test_without_a_latent_of_the_query_both_products_of_the_input_may_be_one_launch():
    pair, apart = {(2048, (3072, 576))}, {(2048, (3072,)), (2048, (576,))}
    assert pair | apart < sizes("deepseek-v2-lite.json")


def test_sizes_that_are_no_numbers_or_missing_have_no_product():
    config = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": [8, 8]}
    assert shapes_of(config, 1) == []


@pytest.fixture
def calibrate(monkeypatch, tmp_path):
    """calibrate(ours, wrong, verdict): the status where ours takes so many microseconds and cuBLAS
    10, and a result or the selftest is wrong."""
    monkeypatch.setattr(vllm_compat, "cache_root", lambda: tmp_path)
    imitate(monkeypatch, "sm_90", name=GPU)
    monkeypatch.setattr(products, "measure_ceilings", lambda: timing.Ceilings(1.0, 1.0))
    monkeypatch.setattr(bench, "_has_peer", lambda: True)
    monkeypatch.setattr(bench, "compile_all", lambda *_: None)
    monkeypatch.setattr(bench, "inputs", lambda shapes, counts: [(s, n) for s in shapes
                                                                 for n in counts])  # fmt: skip
    monkeypatch.setattr(measured, "_own", {})
    tables_folder().mkdir(parents=True)

    def run(ours=5.0, wrong="", verdict="", name="deepseek-v3.json", ranks=8):
        def timed(given, rounds, ceilings):
            shape, tokens = given
            row = {"sizes": " ".join(map(str, shape.sizes)), "k": shape.k,
                   "bits": shape.bits, "tokens": tokens, "wrong": ""}  # fmt: skip
            us = {bench.name_of(BLOCK if shape.bits == 8 else PLAN): ours, bench.TORCH: 10.0}
            return [row | {"candidate": n, **dict.fromkeys(timing.TIMES, t)} | (
                {"wrong": wrong} if n != bench.TORCH else {}) for n, t in us.items()]  # fmt: skip

        monkeypatch.setattr(bench, "measure", timed)
        monkeypatch.setattr(products, "run_checks", lambda names: [Row(names[0], wrong=verdict)])
        arguments = argparse.Namespace(model=CONFIGS / name, tensor_parallel_size=ranks)
        facts = dict.fromkeys(records.FACTS, "") | {"gpu": GPU}
        return products.calibrate(arguments, facts, tables_folder())

    yield run
    measured_here.load.cache_clear()
    measured.chosen.cache_clear()


def plan(sizes, k, bits=16):
    """As a fresh process finds it."""
    measured_here.load.cache_clear()
    measured_here.load(PRODUCTS, GPU)
    return projections.plan_for(torch.device("cuda"), Product(k, sizes, bits), 4)


def test_plans_go_by_the_file(calibrate):
    """A second model joins the first, and a shape that is measured again replaces itself."""
    assert plan((3072,), 1536, 8) is None
    assert calibrate() == 0 and calibrate(name="deepseek-v2-lite.json", ranks=1) == 0
    assert (plan((3072,), 1536, 8), plan((3072, 576), 2048)) == (BLOCK, PLAN)
    assert calibrate(ours=9.9) == 0  # too little to gain
    assert plan((3072,), 1536, 8) is None and plan((3072, 576), 2048) == PLAN


def test_a_router_in_fp32_is_a_shape_of_its_own(calibrate):
    calibrate(name="glm-4.7-flash.json", ranks=1)
    plan((3072,), 1536)
    assert [s for s in measured.shapes(GPU) if s.sizes == (64,)] == [Product(2048, (64,), 32)]


@pytest.mark.parametrize("bad", [{"wrong": "error 1.0"}, {"verdict": "a case: error 3"}])
def test_what_is_wrong_is_not_written(calibrate, bad):
    assert calibrate(**bad) == 1 and not [*tables_folder().iterdir()]


def test_ranks_that_do_not_divide_the_heads(calibrate):
    with pytest.raises(UserError, match="does not divide"):
        calibrate(ranks=3)


@pytest.mark.parametrize(
    "old, new",
    [('"kernels": "', '"kernels": "0'), (f'"{GPU}"', '"other"'), ('"matrix"', '"madrix"'),
     ('"tokens"', '"tkens"'), ("{", "")],
)  # fmt: skip
def test_a_file_of_other_kernels_or_damaged_is_ignored(calibrate, caplog, old, new):
    calibrate()
    [path] = tables_folder().iterdir()
    assert plan((3072,), 1536, 8) == BLOCK
    measured._own.clear()
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    measured.chosen.cache_clear()
    assert plan((3072,), 1536, 8) is None
    assert "is ignored" in caplog.text and "calibrate again" in caplog.text
