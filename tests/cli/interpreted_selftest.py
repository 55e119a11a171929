"""What `mla-fusion selftest` says of kernels under the repaired interpreter, and of kernels with a
bug; tests/kernels/test_interpreted.py runs this.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from mla_fusion.attention.plan import planner_triton
from mla_fusion.attention.plan.layouts import FP8_DS_MLA
from mla_fusion.cli.selftest import decode, planner, region, sparse
from mla_fusion.cli.selftest.decode import Shape
from tests.kernels import interpreter

interpreter.install()
FN, KERNEL = torch.float8_e4m3fn, "triton.decode_kernel"
SHAPES = [Shape(8, 2, 16, 64, 16, gap=3), Shape(24, 1, 32, 64, 16, q=FN, kv=FN)]
EPILOGUES = [Shape(8, 1, 16, 64, 16, values=128, batch=2, quantization="group")]


def test_decode(tmp_path, monkeypatch):
    right = [*decode.check(KERNEL, SHAPES, "cpu", 70, 1)]
    right += decode.check("", EPILOGUES, "cpu", 40, 1)
    assert len(right) == 9 and all(outcome.right for outcome in right), right
    # A row sees one token too many, or one too few.
    name = "mla_fusion.attention.planted"
    source = Path(sys.modules[f"mla_fusion.attention.{KERNEL}"].__file__).read_text()
    for number, bug in enumerate(("(item.count - row", "(item.count - 2 - row")):
        file = tmp_path / f"planted_{number}.py"
        file.write_text(source.replace("(item.count - 1 - row", bug))
        assert file.read_text() != source
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        assert not any(each.right for each in decode.check("planted", SHAPES[:1], "cpu", 70, 1))


@pytest.mark.parametrize("bug", [False, True])
def test_region(bug, monkeypatch):
    calls = {"padded": region.Case(), "strided": region.Case(strided=True, neox=True)}
    launch = region.provider.fused_mla_decode_prep
    if bug:
        later = lambda given: launch(given._replace(positions=given.positions + 1))  # noqa: E731
        monkeypatch.setattr(region.provider, "fused_mla_decode_prep", later)
        calls = {"not padded": region.Case(padded=())}
    assert [each.right for each in region.check(calls, "cpu")] == [not bug] * len(calls)


@pytest.mark.parametrize("bug", [False, True])
def test_planner(bug, monkeypatch):
    fill = planner_triton.fill
    if bug:
        longer = lambda plan, starts, lens, most: fill(plan, starts, lens + 1, most)  # noqa: E731
        monkeypatch.setattr(planner_triton, "fill", longer)
    found = [*planner.check([(7, 128, 12, 16, 4)], "cpu", 3)]
    assert [each.right for each in found] == [not bug] * 2


def test_sparse():
    variants = [
        sparse.Variant(8, (70,), FP8_DS_MLA, kv=FN, tokens=3),
        sparse.Variant(16, (20, 70), latent=64, tokens=3),
    ]
    found = [*sparse.check(variants, "cpu", 1)]
    assert len(found) == 4 and all(outcome.right for outcome in found), found
