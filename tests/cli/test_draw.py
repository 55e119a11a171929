import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mla_fusion import cli
from mla_fusion.attention.plan.buffers import Rules
from mla_fusion.cli.plan import command

COMMAND = "plan --batch 2 --kv 100000 --ctas 256"
HEADS = "plan --batch 2 --kv 9000 --ctas 4 --heads 40"  # three blocks of 16, or one of 48
LINES = (
    f"{COMMAND} --max-split-per-batch 16",
    "plan --lengths 100,9000,1 --workers 7 --heads 128 --query-len 4",
    HEADS, f"{HEADS} --aiter gfx942", f"{HEADS} --aiter gfx950",
    f"{HEADS} --aiter gfx950 --kv-cache-dtype fp8",
)  # fmt: skip


def main(line):
    return cli.main(line.split())


@pytest.mark.parametrize("line", LINES)
def test_the_plan_in_text(line, golden, capsys):
    assert main(line) == 0
    golden("plan", LINES, line, capsys.readouterr().out.rstrip("\n"))


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
