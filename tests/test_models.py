"""`models.toml` has only fields of `Facts`, and names what the releases of vLLM have."""

import re
import tomllib
from fnmatch import filter as matching
from pathlib import Path

import pytest
import vllm

from mla_fusion.cli.check import model_classes
from mla_fusion.config import models, vllm_compat
from tests.coverage import page

FILE = Path(models.__file__).with_suffix(".toml")
ENTRIES = tomllib.loads(FILE.read_text())
CLASSES = {name: entry for name, entry in ENTRIES.items() if name[0].isupper()}
INSTALLED = str(vllm.__version__)


def release(version):
    return tuple(map(int, version.split(".")[:2]))


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry(name):
    entry, nothing = ENTRIES[name], models.Facts()
    for field, value in entry.items():
        assert value and type(models._frozen(value)) is type(getattr(nothing, field)), field
    assert entry.get("sparse", "own") in ("custom", "own")
    assert vllm_compat.OLDEST < release(entry.get("since", "0.27")) <= vllm_compat.NEWEST
    if "target" in entry:
        target, kind = entry["target"]
        assert target in model_classes._registry() and model_classes.knows_type(kind)
    if "skipped_on_cpu" in entry:
        module, layer = entry["skipped_on_cpu"].split(":")
        assert re.search(rf"^class {layer}\b", model_classes._file(module).read_text(), re.M)
    assert name in CLASSES or model_classes.knows_type(name)


@pytest.mark.parametrize("version", (INSTALLED, *page.RELEASES))
def test_a_class_is_there_since_the_release_that_its_entry_says(version):
    stored = page.stored(version).get("architectures")
    for name in CLASSES:
        there = bool(matching([*(stored or model_classes._registry())], name))
        since = models.facts(name).since or "0.26"
        assert there == (release(since) <= release(version)), name


def test_the_facts_of_a_name_come_from_every_entry_that_fits():
    v4, v41 = map(models.facts, ("DeepseekV4ForCausalLM", "DeepseekV41ForCausalLM"))
    assert (v4.since, v41.since) == ("", "0.30")
    assert (v4.package, v41.package) == tuple(f"vllm.models.deepseek_v4{n}" for n in ("", "1"))
    assert (v4.sparse, v4.select, v4.slots) == (v41.sparse, v41.select, v41.slots)
    assert dict(v4.kinds)[128] == "c128a" and dict(v41.kinds)[2] == "c2a"
    assert models.facts("LlamaForCausalLM") == models.Facts()
