"""What the docs tell a reader to do works: the worked example, the quick start, and the site."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time

import pytest
from typecheck import INSIDE, link_tree

from tests.command import run
from tests.test_docs import ROOT, TEXT

ROPE = TEXT["docs/new-rope.md"]
[EXAMPLE] = re.findall(r"```python\n(.*?)```", ROPE, re.S)
CPU = TEXT["docs/quickstart.md"].split("## On a CPU")[1].split("\n## ")[0]


def changes():
    """(file, old lines, new lines) of each diff on docs/new-rope.md; hunks are found by their
    context."""
    found = []
    for block in re.findall(r"```diff\n(.*?)```", ROPE, re.S):
        _, target, _, *lines = block.splitlines()
        old, new = (
            "".join(f"{line[1:]}\n" for line in lines if line[0] in kept) for kept in (" -", " +")
        )
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


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_the_first_report_comes_within_thirty_minutes(tmp_path, capsys):
    """The quick start, followed to the letter with a fresh folder and a fresh home."""
    [script], [report] = (
        re.findall(rf"```{language}\n(.*?)```", CPU, re.S) for language in ("bash", "text")
    )
    own = os.path.dirname(sys.executable)
    path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if p != own)
    fresh = {**os.environ, "HOME": str(tmp_path), "PATH": path, "PYTHONUNBUFFERED": "1"}
    run("git", "clone", "-q", ROOT, tmp_path / "clone")
    words = ["bash", "-euc", script]
    began, waiting = time.monotonic(), report.splitlines()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(words, cwd=tmp_path / "clone", env=fresh, **pipes) as shell:
        shown = []
        for line in shell.stdout:
            shown.append(line)
            if waiting and line.strip() == waiting[0].strip():
                waiting.pop(0)
                seconds = time.monotonic() - began
    assert shell.returncode == 0 and not waiting, "".join(shown)
    assert "tokens equal: yes\n" in shown
    command = [*shlex.split(next(line for line in shown if "mla-fusion report" in line))[-3:]]
    assert "3 MLA layers, 3 fused" in run(*command, cwd=tmp_path)
    with capsys.disabled():
        whole = time.monotonic() - began
        print(f"\nfirst report after {seconds:.0f} s, last line after {whole:.0f}")
    assert seconds < 1800


def fetched_from_the_network(site):
    """Addresses outside the site that its pages and style sheets load; links to click on do not."""
    found = []
    fetching = re.compile(r"<(?:script|img|iframe|source|video|link) [^>]+>")
    for page in site.rglob("*.html"):
        tags = [tag for tag in fetching.findall(page.read_text()) if 'rel="canonical"' not in tag]
        found += re.findall(r"""\b(?:src|href)=["']?([^"' >]+)""", "".join(tags))
    for sheet in site.rglob("*.css"):
        found += re.findall(r"(?:@import\s+|url\()['\"]?([^'\")\s]+)", sheet.read_text())
    return [address for address in found if re.match(r"(?:\w+:)?//", address)]


def test_the_site_builds_offline_and_whole(tmp_path):
    """As `make docs` calls it, in a copy of its sources; a warning fails the build."""
    for name in ("docs", "tools", "mla_fusion", "passes", "patterns"):
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=skip)
    for name in ("mkdocs.yml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    command = sys.executable, "-P", "-m", "mkdocs", "build", "--strict"
    run(*command, cwd=tmp_path, NO_MKDOCS_2_WARNING="1")
    site = tmp_path / "build" / "site"
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")}
    assert pages <= {page.stem for page in site.glob("*.html")}
    assert fetched_from_the_network(site) == []
    api = (site / "api.html").read_text()
    for name in ("kernels.fused_mla_decode_prep", "passes.pipeline.MLAFusionPass", "config.Options",
                 "attention.PersistentDecodePlan"):  # fmt: skip
        assert f'id="mla_fusion.{name}"' in api
    # The theme fetches a worker from a CDN unless it finds this one.
    assert "js/iframe-worker.js" in (site / "index.html").read_text()
