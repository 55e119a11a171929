"""The worked example of docs/new-rope.md: its changes apply, and its test passes only with them."""

import os
import re
import sys
from pathlib import Path

from typecheck import INSIDE, link_tree

from tests.command import run

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "new-rope.md").read_text()
[EXAMPLE] = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def changes():
    """(file, old lines, new lines) of each diff on the page; hunks are found by their context."""
    found = []
    for block in re.findall(r"```diff\n(.*?)```", PAGE, re.S):
        _, target, _, *lines = block.splitlines()
        old = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
        new = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
        found.append((target.removeprefix("+++ b/"), old, new))
    return found


def test_with_the_changes_the_test_of_the_page_passes(tmp_path):
    link_tree(tmp_path)
    assert len(changes()) == 2
    for name, old, new in changes():
        source = (ROOT / name).read_text()
        assert source.count(old) == 1, f"{name} no longer has these lines:\n{old}"
        inside = name.startswith(INSIDE)
        copy = tmp_path / (f"mla_fusion/{name}" if inside else name)
        copy.unlink()  # a link to the checkout's file
        copy.write_text(source.replace(old, new))
    test = tmp_path / "test_acme.py"
    test.write_text(EXAMPLE)
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "mla_fusion"]
    command += ["-p", "tests.conftest", "-c", os.devnull, f"--rootdir={tmp_path}", test]
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    printed = run(*command, cwd=tmp_path, PYTHONPATH=path)
    assert re.search(r"\d+ passed", printed), printed


def test_without_them_the_spelling_is_unknown():
    from tests.passes.fake_engine import fuse, reasons

    page = {}
    exec(compile(EXAMPLE, "docs/new-rope.md", "exec"), page)
    record = fuse(page["acme_graph"](), page["SPEC"])  # type: ignore[operator, arg-type]
    assert (record.fused, reasons(record)) == (0, ["unknown-rope"])
