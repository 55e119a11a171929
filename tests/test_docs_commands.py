"""The output that docs/commands.md shows is what the commands print; measurements start."""

import logging
import re
import runpy
import shlex
import subprocess
import sys

import pytest
import torch

from mla_fusion import cli, report
from mla_fusion.cli import child
from tests.cli.test_check import V3, checked  # noqa: F401  a fixture
from tests.test_docs import ROOT, TEXT, code_of

PAGE = TEXT["docs/commands.md"]


def shows(lines, page=PAGE):
    assert "\n".join(["```", *lines, "```"]) in page, "\n".join(lines)


def test_check_of_a_model_that_fuses(monkeypatch, tmp_path, checked):  # noqa: F811
    """The answer to the command that the page shows above it, with a mocked engine."""
    [arguments] = re.findall(r"^mla-fusion check CONFIG (.+)$", PAGE, re.M)
    monkeypatch.setitem(V3, "num_attention_heads", 128)
    status, _, printed = checked(2, *arguments.split())
    assert status == 0
    shows(printed.replace(str(tmp_path), "MODEL").splitlines())


def test_the_log_line(caplog):
    caplog.set_level(logging.INFO, logger="vllm.mla_fusion")
    made = report.Report("triton", 1024, [report.RangeReport((1, 1024), 27, 27)])
    report.publish(made, "V3", False)
    shows(caplog.messages, TEXT["docs/operate.md"])


MEASUREMENTS = {
    line
    for text in TEXT.values()
    for code in code_of(text)
    for line in re.findall(r"^(?:python benchmarks/|mla-fusion bench ).+$", code, re.M)
}


class Device(Exception):
    """What a measurement meets here instead of a GPU or an engine that runs for minutes."""


@pytest.mark.parametrize("line", sorted(MEASUREMENTS))
def test_a_measurement_runs_up_to_its_first_device_call(line, monkeypatch, tmp_path):
    """An engine of `benchmarks/engine.py` is a process that measures nothing."""

    def meet(*_, **__):
        raise Device

    def start(job, **pipes):
        return subprocess.Popen(["sh", "-c", "echo ready; cat"], text=True, **pipes)

    for module, name, mock in (
        (cli, "GPU_DEVICES", ("*",)),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: 8),
        (torch.cuda, "current_device", meet),
        (torch.cuda, "get_device_name", meet),
        (torch.cuda, "get_device_properties", meet),
        (child, "run", meet),
        (child, "start", start),
    ):
        monkeypatch.setattr(module, name, mock)
    name, *words = shlex.split(line)
    monkeypatch.chdir(tmp_path)
    with pytest.raises((Device, SystemExit)) as ended:
        if name == "mla-fusion":
            cli.main(words)
        else:
            monkeypatch.setattr(sys, "argv", words)
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")
    assert ended.type is Device or "nothing was measured" in str(ended.value)


def test_every_measurement_was_seen():
    assert len(MEASUREMENTS) >= 7
