"""docs/coverage.md is true: of its results, of the installed vLLM, and of the library as it is."""

import copy
import dataclasses
import functools
from pathlib import Path

import pytest
import torch
import vllm
from vllm.config import CompilationConfig, VllmConfig

from mla_fusion import config, plugin, report
from mla_fusion.cli.check import model_classes
from mla_fusion.report.reasons import Decline
from tests.coverage import jobs, page, vllm_passes
from tests.coverage.__main__ import run
from tests.models import DEEPSEEK_V2, write
from tests.nightly import daily
from tests.passes import linears
from tests.passes.fake_engine import fuse, reasons
from tests.passes.graphs import Spec, build, printed
from tests.passes.graphs import copy as copy_graph

VERSION = str(vllm.__version__).split("+")[0]
# Of all classes on their default configuration: limits of the kernel.
# The first layer computes the angles, others get the cosines from the piece in front.
DECLINED = {page.TRANSFORMERS: {"computed-angles", "unknown-rope"}}
DRAFT_HEADS = ("glm4_moe_lite+mtp", "longcat_flash+mtp")  # which vLLM does not compile


@pytest.fixture(scope="module")
def sources():
    return page.read_sources(Path(vllm.__file__).parent)


@pytest.fixture(scope="module")
def model_config(tmp_path_factory):
    """vLLM's config of a small MLA model."""
    from vllm.engine.arg_utils import EngineArgs

    plugin.register()
    folder = write(tmp_path_factory.mktemp("model"), DEEPSEEK_V2)
    args = EngineArgs(model=folder, skip_tokenizer_init=True, max_model_len=256)
    return args.create_engine_config().model_config


def test_the_page_has_the_table_of_its_results():
    assert page.text(page.PAGE.read_text()) == page.PAGE.read_text()


@pytest.mark.parametrize("version", [page.NEW, page.OLD])
def test_engines_show_every_compiled_class_and_each_layer_fused_or_declined(version):
    shown = page.shown(version)
    compiled = {
        name
        for architecture, classes in page.stored(version)["architectures"].items()
        for name in classes
        if not page.why_unreached(version, architecture)
    }
    assert set(shown) == compiled
    for name, counts in shown.items():
        assert 2 * counts["layers"] == counts.total() > 0, name
        assert set(counts) <= {"layers", "fused", *DECLINED.get(name, ())}, name


def test_products_of_every_compiled_class_can_be_ours():
    found = [*page.of_classes(page.NEW, "products")]
    assert {name for name, _ in found} == set(page.shown(page.NEW))
    assert all(counts["ours"] > 0 for _, counts in found)


def test_the_installed_vllm_has_no_other_mla_class(sources):
    if known := page.stored(VERSION):
        assert sources == {key: known[key] for key in sources}
    assert not page.of_its_own(sources)


def test_check_finds_the_mla_layers_of_every_class_that_has_some(sources):
    assert all(map(model_classes.may_build_mla, sources["architectures"]))


@pytest.mark.parametrize("name", page.UNREACHED)
def test_the_user_is_told_why_an_architecture_is_not_reached(
    name, sources, model_config, monkeypatch, caplog
):
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")  # which vLLM sets itself, for good
    monkeypatch.delenv("VLLM_USE_BREAKABLE_CUDAGRAPH")
    caplog.set_level("INFO", logger="vllm.mla_fusion")
    code = page.UNREACHED[name]
    topk = 2048 if code == page.SPARSE else None
    model = copy.copy(model_config)
    model.model_arch_config = dataclasses.replace(model.model_arch_config, architectures=[name])
    model._architecture, model.hf_text_config = name, copy.copy(model.hf_text_config)
    model.hf_text_config.index_topk = topk
    VllmConfig(
        model_config=model,
        compilation_config=CompilationConfig(pass_config={config.FLAG: True}),
        additional_config={config.OPTIONS_KEY: {"provider": "reference"}},
    )
    said = " ".join(r.getMessage() for r in caplog.records if r.name == "vllm.mla_fusion")
    if code:
        assert f"[{code}]" in said
        assert topk is None or f"(index_topk {topk})" in said
        assert model_classes.decide({"kv_lora_rank": 512, "index_topk": topk}, name).code == code
    elif name in sources["breakable"]:
        why = Decline(page.BREAKABLE, name).explain()
        assert said == f"mla-fusion: {config.FLAG} is switched off: {why}"
    else:
        assert "is switched off" not in said
    # Where vLLM has another list, as on ROCm.
    report.publish(None, name, cached=False)
    assert f"[{page.NO_GRAPH}]" in caplog.messages[-1] and name in caplog.messages[-1]


@pytest.mark.parametrize("variant", daily(page.VARIANTS, page.VARIANTS[0]))
@pytest.mark.parametrize("name", page.SPELLINGS)
def test_a_spelling(name, variant, plain_kernels):
    (given, styles, by_vllm), (q_lora, layer_name, partition) = page.SPELLINGS[name], variant
    for is_neox in styles:
        spec = Spec(is_neox=is_neox, q_lora=q_lora, layer_name=layer_name, **given)
        made = vllm_passes.compare(spec, partition, by_vllm)
        assert (made.layers, made.fused, made.declined) == (1, 1, {})


@pytest.mark.parametrize("variant", daily(page.OUTPUT_VARIANTS, page.OUTPUT_VARIANTS[0]))
@pytest.mark.parametrize("name", page.OUTPUTS)
def test_quantizations_in_front_of_o_proj(name, variant, plain_kernels):
    (quantized, reason), (layer_name, partition) = page.OUTPUTS[name], variant
    spec = Spec("nope", dtype=torch.bfloat16, quantized=quantized, layer_name=layer_name)
    runs = quantized not in page.NOT_RUN
    made = vllm_passes.compare(spec, partition, attention="portable", runs=runs)
    assert (made.fused, made.declined) == (1, {})
    assert [decline.code for decline in made.plain_outputs] == [reason] * bool(reason)
    assert (reason == "") is (made.outputs.keys() != {"none"}) is (quantized in linears.FUSED)


@pytest.mark.parametrize("name", vllm_passes.ON_GRAPHS)
def test_graphs_of_a_neighbour(name, plain_kernels):
    """Each layer fuses, and outputs stay equal; or declines, and graphs stay as they were."""
    edit, reason = vllm_passes.ON_GRAPHS[name]
    for spec in vllm_passes.SPECS:
        before = build(spec)
        edit(before)
        after = copy_graph(before)
        record = fuse(after, spec)
        assert reasons(record) == [reason] * bool(reason)
        assert record.fused == (not reason)
        if reason:
            assert printed(after) == printed(before)
        else:
            vllm_passes.assert_equal(before, after, spec)


def check_neighbour(neighbour, results):
    """Its cell is that of the page, and no engine passed because the feature did nothing."""
    cell = page.neighbour_cell(neighbour, results)
    assert cell == page.neighbour_cell(neighbour, page.stored("neighbours"))
    assert "DIFFERENT" not in cell and "FAILED" not in cell
    if neighbour.refused:
        return
    off, on = (results[f"{neighbour.name} ({flag})"] for flag in ("off", "on"))
    for result in (off, on):
        for path, least in neighbour.signs.items():
            assert functools.reduce(dict.get, path.split("."), result) >= least, path
    prompts = len(on["tokens"]) // neighbour.times
    assert on["tokens"] == on["tokens"][:prompts] * neighbour.times
    fused = [made["fused"] for made in on["reports"]]
    assert fused or cell.startswith("none, ")
    # One report for all ranks; each counts its passes.
    assert len(on["passes"]) == neighbour.engine.get("tensor_parallel_size", 1) * len(fused)
    assert all(layers > 0 for layers in fused)
    assert all(passes["fused"] > len(on["tokens"]) for passes in on["passes"])


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_all_engines():
    kept = page.stored(VERSION).get("engines") or page.stored(page.NEW)["engines"]
    for name, result in run(jobs.MODELS).items():
        assert result.get("classes") == kept[name]["classes"], (name, result.get("error"))
        assert result["products"] == kept[name].get("products", result["products"])
        outside = [line for line in result["log"] if "[no-graph]" in line]
        assert len(outside) == (name in DRAFT_HEADS)


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_all_neighbours(tmp_path):
    results = run(jobs.of_neighbours(tmp_path))
    for neighbour in jobs.NEIGHBOURS:
        check_neighbour(neighbour, results)
