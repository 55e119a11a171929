"""What `mla-fusion selftest` says of kernels with a bug, under the repaired interpreter;
tests/kernels/test_interpreted.py runs this. interpreted_decode.py has those that are right.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

from mla_fusion.attention import cards
from mla_fusion.attention.card import Card, Shape
from mla_fusion.attention.plan import planner_triton
from mla_fusion.attention.triton import decode_kernel
from mla_fusion.cli.selftest import decode, planner, region
from mla_fusion.kernels import triton as provider
from tests.kernels import interpreter

interpreter.install()
DECODE = Shape(8, 1, 16, 64, 16, batch=3)


@pytest.mark.parametrize("bug", ["(item.count - row", "(item.count - 2 - row"])
def test_decode(bug, tmp_path, monkeypatch):
    """A row sees one token too many, or one too few."""
    source, file = Path(decode_kernel.__file__).read_text(), tmp_path / "planted.py"
    file.write_text(source.replace("(item.count - 1 - row", bug))
    assert file.read_text() != source
    name = "mla_fusion.attention.planted"
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    shape = Shape(8, 2, 16, 64, 16, gap=3, batch=3)
    assert not next(
        decode.check(Card("planted", (), lambda given: None), [shape], "cpu", 70, repeats=0)
    ).right


def test_a_launch_that_gives_another_output(monkeypatch):
    """In one of them alone, the second time."""
    results, times = decode.Bench.results, iter(range(2))

    def differing(bench):
        out, lse = (each.clone() for each in results(bench))
        out.view(-1)[0] += next(times)
        return [out, lse]

    monkeypatch.setattr(decode.Bench, "results", differing)
    found = next(decode.check(cards.PORTABLE, [DECODE], "cpu", 70, repeats=1))
    assert found.wrong == "two launches differ"


def test_an_lse_that_is_off(monkeypatch):
    merge = decode.provider.merge
    off = lambda given: (merge(given), given.lse.add_(0.1))  # noqa: E731
    monkeypatch.setattr(decode.provider, "merge", off)
    found = next(decode.check(cards.PORTABLE, [DECODE], "cpu", 70, repeats=0))
    assert found.wrong == "LSE off by 1.0e-01, bound 1e-05"


@pytest.mark.parametrize("bug", [False, True])
def test_region(bug, monkeypatch):
    calls = {"padded": region.Case(), "strided": region.Case(strided=True, neox=True)}
    launch = provider.fused_mla_decode_prep
    if bug:
        later = lambda given: launch(given._replace(positions=given.positions + 1))  # noqa: E731
        monkeypatch.setattr(provider, "fused_mla_decode_prep", later)
        calls = {"not padded": region.Case(padded=())}
    assert [each.right for each in region.check(provider, calls, "cpu")] == [not bug] * len(calls)


def test_planner(monkeypatch):
    fill = planner_triton.fill
    longer = lambda plan, starts, lens, most: fill(plan, starts, lens + 1, most)  # noqa: E731
    monkeypatch.setattr(planner_triton, "fill", longer)
    found = [*planner.check([(7, 128, 12, 16, 4)], "cpu", plans=1)]
    assert not any(each.right for each in found)
