"""Command lines that are refused before anything is run or written, and what is said of each."""

import sys

import pytest

from mla_fusion import cli
from mla_fusion.cli.bench import command as bench
from mla_fusion.measure.timing import Ceilings

LINES = """
-
serve
chek m
check
check m --max-num-seqs 0
check m --layers two
check m --speculative-tokens -1
check m --provider cuda
check m --unknown
bisect --engine-args [1]
plan --kv 5 --workers 0
plan --lengths 5,,5 --workers 2
plan --workers 2
plan --workers 2 --lengths 5,5 --batch 2
plan --workers 2 --kv 5 --kv-cache-dtype fp8
plan --workers 2 --kv 5 --heads 128 --aiter gfx942 --kv-cache-dtype fp8
plan --kv 100000000 --workers 304 --batch 256
plan --kv 4096 --workers 100000000
plan --kv 1 --workers 8 --batch 2000000000
plan --kv 5 --workers 2 --svg no/plan.svg
bench region --batches 4
bench region --page 64
bench decode --tokens 8
bench decode --layers 61
bench region --max-split-per-batch 4
bench region --fp8
bench decode --peers ours fa4 --csv out/rows.csv
bench decode --fp8 --peers fa3 --csv out/rows.csv
bench region --peers fa3 --csv out/rows.csv
""".strip().splitlines()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("line", LINES)
def test_refused(line, golden, monkeypatch, tmp_path, capsys):
    """An option of another bench also with its default: it would say nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "require_gpu", lambda: None)
    monkeypatch.setattr(bench, "environment", lambda commit: {})
    monkeypatch.setattr(bench, "measure_ceilings", lambda: Ceilings(1.0, 1.0))
    with pytest.raises(SystemExit, match="2"):
        sys.exit(cli.main(line.strip("-").split()))
    said = capsys.readouterr()
    assert not [*tmp_path.iterdir()] and "Traceback" not in said.err
    # Releases of Python list the choices in two ways.
    golden("refused", LINES, line, said.err.splitlines()[-1].partition(" (choose from")[0])
