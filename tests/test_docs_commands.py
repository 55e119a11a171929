"""The output that docs/commands.md shows is what the commands print."""

import logging
import re

from mla_fusion import cli, report
from mla_fusion.cli import doctor
from tests.test_check import CONFIGS, V3, checked  # noqa: F401  a fixture
from tests.test_docs import TEXT

PAGE = TEXT["docs/commands.md"]


def shows(lines):
    assert "\n".join(["```", *lines, "```"]) in PAGE, "\n".join(lines)


def test_doctor():
    """The environment of docs/performance.md, with a VLLM_PLUGINS that lacks the plugin."""
    found = doctor.Environment(
        vllm="0.26.0",
        torch="2.11.0+cu130",
        triton="3.6.0",
        aiter="",
        aiter_offers={},
        platform="cuda",
        device="NVIDIA H200",
        arch="sm_90",
        fp8="float8_e4m3fn",
        providers={
            "reference": "",
            "triton": "",
            "aiter": "the module aiter is missing: install ROCm's AITER",
        },
        plugin="VLLM_PLUGINS=other leaves it out: add mla_fusion, or unset it",
    )
    shows(doctor.lines(doctor.diagnose(found)))


def test_check_of_a_model_that_fuses(monkeypatch, tmp_path, checked):  # noqa: F811
    """The answer to the command that the page shows above it, with a mocked engine."""
    [arguments] = re.findall(r"^mla-fusion check CONFIG (.+)$", PAGE, re.M)
    monkeypatch.setitem(V3, "num_attention_heads", 128)
    status, _, printed = checked(2, *arguments.split())
    answer = printed.replace(str(tmp_path), "MODEL").splitlines()
    assert status == 0
    shows(answer[: answer.index("")])


def test_check_of_a_model_that_does_not(capsys):
    assert cli.main(["check", str(CONFIGS / "kimi-k3.json")]) == 1
    shows(capsys.readouterr().out.splitlines())


def test_the_log_line(caplog):
    caplog.set_level(logging.INFO, logger="vllm.mla_fusion")
    report.publish(
        report.Report("triton", 128, [report.RangeReport((1, 128), 61, 61)]), "V3", False
    )
    shows(caplog.messages)
