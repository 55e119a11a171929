"""The output that docs/commands.md shows is what the commands print."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from mla_fusion import cli, doctor, report
from mla_fusion.answer import Answer
from tests.test_views import stored

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "commands.md").read_text()


def shows(lines: list[str]) -> None:
    assert "\n".join(["```", *lines, "```"]) in PAGE, "\n".join(lines)


def test_doctor() -> None:
    found = doctor.Environment(
        vllm="0.32.0",
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


def test_check_of_a_model_that_fuses() -> None:
    made = stored()
    made.ranges[0].fused = made.ranges[0].layers
    platforms = frozenset(("nvidia", "amd"))
    answer = Answer("DeepseekV3ForCausalLM", platforms, 256, "engine", ["MODEL"], report=made)
    shows(answer.lines())


def test_check_of_a_model_that_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vllm")
    assert cli.main(["check", str(ROOT / "tests" / "configs" / "kimi-k3.json")]) == 1
    shows(capsys.readouterr().out.splitlines())


def test_the_log_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="vllm.mla_fusion")
    report.publish(
        report.Report("triton", 128, [report.RangeReport((1, 128), 61, 61)]), "V3", False
    )
    shows(caplog.messages)
