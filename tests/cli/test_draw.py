import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mla_fusion import cli
from mla_fusion.attention.plan.buffers import Rules
from mla_fusion.cli.plan import command

COMMAND = "plan --batch 2 --kv 100000 --ctas 256"


def main(line):
    return cli.main(line.split())


def run(capsys, line):
    assert main(line) == 0
    return capsys.readouterr().out.splitlines()


def test_a_cap_of_16_leaves_32_of_256_busy(capsys):
    rows = run(capsys, f"{COMMAND} --max-split-per-batch 16")
    text = "\n".join(rows)
    assert "busy CTAs      32 of 256" in text
    assert "utilisation    12.5%" in text
    assert "without a cap  256 of 256 busy, largest load 65: 6.3 times less" in text
    plot = {row.split("|")[0].strip(): row.split("|")[1] for row in rows if "|" in row}
    assert list(plot) == ["0-7", "8-15", "16-23", "24-31", "32-255"]
    assert set(plot["0-7"]) == {"0"} and set(plot["16-23"]) == {"1"}
    assert plot["32-255"].strip() == "idle"
    text = "\n".join(run(capsys, COMMAND))
    assert "busy CTAs      256 of 256" in text and "without a cap" not in text


def test_ragged_lengths_with_drafts_and_many_heads(capsys):
    rows = run(capsys, "plan --lengths 100,9000,1 --workers 7 --heads 128 --query-len 4")
    assert "4 query rows each, 4 head blocks; 7 CTAs" in rows[0]
    bars = [row.split("|")[1] for row in rows if "|" in row]
    assert len(bars) == 7 and {*"".join(bars)} <= {*"012 "}  # a head block is of its sequence


def test_the_picture_has_a_bar_for_each_item(tmp_path):
    file = tmp_path / "plan.svg"
    assert main(f"plan --lengths 100,9000,1 --workers 4 --svg {file}") == 0
    rules = Rules(4, 1, 16, 16, -1)
    items = sum(map(len, command.make(rules, (100, 9000, 1), 1).shares))
    names = [element.tag for element in ElementTree.parse(file).iter()]
    assert sum(name.endswith("title") for name in names) == items


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--kv 5 --workers 0", "'0' is not a positive whole number"),
        ("--lengths 5,,5 --workers 2", "'' is not a positive whole number"),
        ("--workers 2", "one of the arguments --lengths --kv is required"),
        ("--workers 2 --lengths 5,5 --batch 2", "--batch goes with --kv"),
        ("--workers 2 --kv 5 --kv-cache-dtype fp8", "--kv-cache-dtype goes with --aiter"),
        ("--workers 2 --kv 5 --heads 128 --aiter gfx942 --kv-cache-dtype fp8", "faults on gfx942"),
        ("--kv 100000000 --workers 304 --batch 256", "25600000000 KV tokens"),
        ("--kv 4096 --workers 100000000", "65536 at most"),
        ("--kv 1 --workers 8 --batch 2000000000", "1048576 at most"),
    ],
)
def test_refused(capsys, arguments, message):
    """What is no number, what does not go together, and more than a plan can count or draw."""
    with pytest.raises(SystemExit, match="2"):
        sys.exit(main(f"plan {arguments}"))
    assert message in capsys.readouterr().err


def test_a_file_that_cannot_be_written(tmp_path, capsys):
    missing = tmp_path / "no" / "plan.svg"
    assert main(f"{COMMAND} --svg {missing}") == 2
    text = capsys.readouterr()
    assert "cannot write" in text.err and not text.out


DRAWN = re.compile(r"<!-- (plan [^\n]+) --svg ([^\n]+) -->\n")


def test_the_drawn_plan_of_the_docs_is_current(tmp_path):
    root = Path(__file__).parents[2]
    [(line, picture)] = DRAWN.findall((root / "docs" / "persistent-decode.md").read_text())
    assert main(f"{line} --svg {tmp_path / 'plan.svg'}") == 0
    assert (tmp_path / "plan.svg").read_text() == (root / picture).read_text()


def test_the_heads_of_aiters_kernels(capsys):
    """40 heads are three blocks of 16 there, and one of 48 for the portable kernel."""
    line = f"{COMMAND} --heads 40"
    assert "1 head block;" in run(capsys, line)[0]
    assert "3 head blocks;" in run(capsys, f"{line} --aiter gfx942")[0]
    assert "1 head block;" in run(capsys, f"{line} --aiter gfx950")[0]
    assert "3 head blocks;" in run(capsys, f"{line} --aiter gfx950 --kv-cache-dtype fp8")[0]
