"""Which graphs a start takes from vLLM's compile cache, by their key: the rows of a table in
docs/operate.md. Engines start from a warm cache in tests/engine, kernels in tests/kernels."""

import re
from pathlib import Path

import pytest

from mla_fusion import config
from mla_fusion.config import identity
from tests.plugin.configs import FLAG_ON, REFERENCE

PAGE = (Path(__file__).parents[2] / "docs/operate.md").read_text()
SAID = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|", PAGE.split("\n| next |")[1], re.M))
OF_ANOTHER_START = "kept", "of starts without it"
OPTIONS = {"layers": "0"}, {"attention": "vllm"}, {"projections": "vllm"}


def release(at):
    at.setattr(identity, "source_hash", lambda: "another")


def calibrate(at):
    (identity.tables_folder() / "measured.json").write_text("{}")


@pytest.mark.parametrize(
    "row, flag, options, change",
    [
        ("the same command", FLAG_ON, {}, lambda at: None),
        *(("another option of `mla_fusion`", FLAG_ON, of, lambda at: None) for of in OPTIONS),
        ("another release, `mla-fusion calibrate`", FLAG_ON, {}, release),
        ("another release, `mla-fusion calibrate`", FLAG_ON, {}, calibrate),
        ("no flag", {config.THRESHOLD: 4}, {}, release),
        ("no flag", {config.THRESHOLD: 4}, {}, calibrate),
    ],
)
def test_a_start_compiles_as_the_page_says(make, monkeypatch, tmp_path, row, flag, options, change):
    monkeypatch.setattr(identity, "tables_folder", lambda: tmp_path)
    first = make(flag).compute_hash()
    change(monkeypatch)
    given = {"mla_fusion": REFERENCE["mla_fusion"] | options}
    found = make(flag, options=given).compute_hash() == first
    assert found is (SAID[row] in OF_ANOTHER_START)
