"""docs/coverage.md is true: of its results, of the installed vLLM, and of the library as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import vllm

from mla_fusion import reasons
from tests.coverage import models, neighbours, on_graphs, page, spellings, unreachable
from tests.coverage.__main__ import read_sources, run

VERSION = str(vllm.__version__).split("+")[0]
# Of all classes on their default configuration: limits of the kernel.
DECLINED = {
    "deepseek_v2:DeepseekV2Model": {"scaled-query"},  # Mistral Large 3
    "mistral_large_3_eagle:EagleMistralLarge3Model": {"scaled-query"},
    page.TRANSFORMERS: {"computed-angles"},
}
QUICK_ENGINES = ("deepseek_v3+mtp", "glm4_moe_lite+mtp")
QUICK_NEIGHBOURS = (
    "speculative decoding, 3 draft tokens",
    "KV-transfer connector",
    "decode context",
    "prefill context",
)


@pytest.fixture(scope="module")
def sources() -> dict[str, list[str]]:
    return read_sources(Path(vllm.__file__).parent)


def test_the_page_has_the_tables_of_its_results() -> None:
    assert page.text(page.PAGE.read_text()) == page.PAGE.read_text()


@pytest.mark.parametrize("version", [page.NEW, page.OLD])
def test_every_compiled_class_was_shown_by_an_engine(version: str) -> None:
    assert set(page.shown(version)) == set(page.compiled(version))


@pytest.mark.parametrize("version", [page.NEW, page.OLD])
def test_every_layer_fused_or_declined_for_a_known_limit(version: str) -> None:
    for name, (_, counts) in page.shown(version).items():
        declined = counts["declined"]
        assert counts["layers"] == counts["fused"] + sum(declined.values()) > 0, name
        assert set(declined) <= DECLINED.get(name, set()), name


def test_the_installed_vllm_has_no_other_mla_class(sources: dict[str, list[str]]) -> None:
    known = page.stored(VERSION).get("architectures")
    if known:
        assert sources == known
    else:  # a release between those of the page
        assert set(sources) <= set(page.stored(page.NEW)["architectures"])


def test_every_architecture_without_a_graph_has_its_reason(sources: dict[str, list[str]]) -> None:
    without = {name for name, compiled in sources.items() if not compiled}
    assert without <= set(unreachable.OF_ARCHITECTURE)
    if page.NEW == VERSION:
        assert set(unreachable.OF_ARCHITECTURE) <= set(sources)


@pytest.mark.parametrize("name", unreachable.OF_ARCHITECTURE)
def test_the_user_is_told_why_an_architecture_is_not_reached(name: str) -> None:
    code, _ = unreachable.OF_ARCHITECTURE[name]
    assert code in reasons.REASONS
    said = unreachable.said(name)
    assert f"[{code}]" in said and name in said


def test_spellings() -> None:
    found = spellings.table()
    assert found == page.stored("spellings")
    assert {outcome for row in found.values() for outcome in row.values()} == {"fused"}


@pytest.mark.parametrize("neighbour", on_graphs.ON_GRAPHS, ids=lambda n: n.name)
def test_graphs_of_a_neighbour(neighbour: on_graphs.OnGraphs) -> None:
    outcome = neighbour.outcome()
    assert outcome == page.stored("graphs")[neighbour.name]
    assert outcome["equal"]
    assert set(outcome["declined"]) == ({neighbour.reason} if neighbour.reason else set())


def check_engine(name: str, found: dict[str, Any]) -> None:
    kept = page.stored(VERSION).get("engines") or page.stored(page.NEW)["engines"]
    assert found.get("classes") == kept[name]["classes"], (name, found.get("error"))


def check_neighbour(neighbour: neighbours.Neighbour, results: dict[str, Any]) -> None:
    """Its row is that of the page, and no engine passed because the feature did nothing."""
    row = page.neighbour_row(neighbour, results)
    assert row == page.neighbour_row(neighbour, page.stored("neighbours"))
    assert not [cell for cell in row if cell.startswith(("DIFFERENT", "NOT DECLINED", "FAILED"))]
    if neighbour.refused or neighbour.reason:
        return
    off, on = (results[f"{neighbour.name} ({flag})"] for flag in ("off", "on"))
    for result in (off, on):
        for sign in neighbour.signs:
            assert sign.number(result) >= sign.least, sign.words
    prompts = len(on["tokens"]) // neighbour.times
    assert on["tokens"] == on["tokens"][:prompts] * neighbour.times
    fused = [made["fused"] for made in on["reports"]]
    assert fused or row[3].startswith("all, ")
    assert len(on["passes"]) == len(fused)
    for layers, passes in zip(fused, on["passes"], strict=True):
        assert layers > 0 and passes["fused"] > len(on["tokens"])


@pytest.mark.parametrize("neighbour", neighbours.NEIGHBOURS, ids=lambda n: n.name)
def test_the_kept_results_of_a_neighbour(neighbour: neighbours.Neighbour) -> None:
    """The engines of most of them run at night only."""
    check_neighbour(neighbour, page.stored("neighbours"))


@pytest.mark.engine
def test_quick_engines() -> None:
    jobs = [e.job() for e in models.ENGINES if e.name in QUICK_ENGINES]
    assert len(jobs) == len(QUICK_ENGINES)
    for name, result in run(jobs).items():
        check_engine(name, result)
        outside = [line for line in result["log"] if "[no-graph]" in line]
        assert len(outside) == (name == "glm4_moe_lite+mtp")  # its draft head is not compiled


@pytest.mark.engine
def test_quick_neighbours(tmp_path: Path) -> None:
    chosen = [n for n in neighbours.NEIGHBOURS if n.name.startswith(QUICK_NEIGHBOURS)]
    assert len(chosen) == len(QUICK_NEIGHBOURS)
    model = neighbours.write_model(tmp_path)
    results = run([job for n in chosen for job in n.jobs(model)])
    for neighbour in chosen:
        check_neighbour(neighbour, results)


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_all_engines() -> None:
    for name, result in run([engine.job() for engine in models.ENGINES]).items():
        check_engine(name, result)


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_all_neighbours(tmp_path: Path) -> None:
    model = neighbours.write_model(tmp_path)
    results = run([job for n in neighbours.NEIGHBOURS for job in n.jobs(model)])
    for neighbour in neighbours.NEIGHBOURS:
        check_neighbour(neighbour, results)
