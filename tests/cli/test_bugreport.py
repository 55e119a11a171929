"""`mla-fusion bugreport`: one file, without paths and without the names of host and user."""

import getpass
import json
import os
import platform
import socket

import pytest

from mla_fusion import cli, report
from mla_fusion.cli.doctor import command
from mla_fusion.cli.report import bugreport
from mla_fusion.config import vllm_compat
from mla_fusion.report.reasons import Decline

SECRETS = ("node17", "acme", "jdoe", "Jane", "Doe", "secret", "models", "10.20.30.40", "gpu-b")
FOUND = command.probe


@pytest.fixture
def written(tmp_path, monkeypatch):
    """written() -> (the text of the file, its data), on a machine with a known name and folders."""
    home = tmp_path / "Jane Doe"
    monkeypatch.setattr(socket, "gethostname", lambda: "node17.acme.example")
    monkeypatch.setattr(platform, "node", lambda: "node17")
    monkeypatch.setattr(getpass, "getuser", lambda: "jdoe")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("MODELS", "/srv/secret models")
    monkeypatch.setattr(vllm_compat, "cache_root", lambda: home)
    broken = (
        f"in {home}/.cache/a b.py, line 3: '/srv/secret models/x.bin', ~jdoe/secret/y, ../secret/z "
        "at node17:8000, user jdoe, tcp://gpu-b:29500/q, 10.20.30.40; "
        "vllm-project/vllm#45798, 448/584"
    )
    monkeypatch.setattr(command, "probe", lambda: FOUND() | {"plugin": broken})
    decline = Decline("error", "/mnt/checkpoints/secret.safetensors on NODE node17.acme.example")
    ranges = [report.RangeReport((1, 8), layers=2, fused=1, declined={decline: 1})]
    report.store(report.folder(home) / "a.json", report.Report("triton", 8, ranges))
    (report.folder(home) / "b.json").write_text("{")
    os.utime(report.folder(home) / "b.json", (1, 1))  # the older one

    def write():
        assert cli.main(["bugreport", str(tmp_path / "out.json")]) == 0
        text = (tmp_path / "out.json").read_text()
        return text, json.loads(text)

    return write


def test_no_path_and_no_name_is_left(written):
    text, data = written()
    assert not [secret for secret in SECRETS if secret in text]
    assert "vllm-project/vllm#45798, 448/584" in data["doctor"]["plugin"]
    first, second = data["reports"]
    assert first["ranges"][0]["fused"] == 1 and "[error]" not in text and '"error"' in text
    assert second.startswith("cannot be read: ")
    assert "torch sees none here" in data["selftest"]
    assert {"works", "torch", "problems", "issues"} <= data["doctor"].keys()


def test_the_rows_of_selftest_where_there_is_a_gpu(written, monkeypatch):
    def run(arguments):
        return arguments.json.write_text('{"rows": ["a kernel"]}')

    monkeypatch.setattr("mla_fusion.cli.selftest.command.run", run)
    assert written()[1]["selftest"] == {"rows": ["a kernel"]}


def test_a_place_that_cannot_be_written_is_refused_first(monkeypatch, capsys):
    monkeypatch.setattr(bugreport, "_reports", pytest.fail)
    assert cli.main(["bugreport", "/nodir/x.json"]) == 2
    assert "cannot write /nodir/x.json" in capsys.readouterr().err
