import re
from pathlib import Path
from xml.etree import ElementTree

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
