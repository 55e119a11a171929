"""docs/quickstart.md, followed to the letter with a fresh folder and a fresh home."""

import os
import re
import shlex
import subprocess
import sys
import time

import pytest

from tests.command import run
from tests.test_docs import ROOT, TEXT

CPU = TEXT["docs/quickstart.md"].split("## On a CPU")[1].split("\n## ")[0]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_the_first_report_comes_within_thirty_minutes(tmp_path, capsys):
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
