"""Every name of vLLM that the plugin needs, missing in turn: nothing is half changed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugin.hooks import names


@pytest.fixture(scope="module")
def found():
    command = [sys.executable, "-m", "tests.plugin.hooks"]
    environment = {"PATH": "", "VLLM_PLUGINS": "", "HOME": "/tmp"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [".".join(each) for each in names()] + ["later"])
def test_without_a_name_nothing_is_changed_and_one_warning_names_it(found, name):
    changed, taken, said = found[name]
    assert changed == [] and taken == ["eliminate_noops"] * (not name.endswith("n.PassConfig"))
    [warning] = said
    assert warning.endswith("json.nothing" if name == "later" else name), warning
    assert "mla_fusion is inactive" in warning


def test_vllm_outside_the_window_whose_names_are_gone(found):
    changed, taken, [said] = found["outside"]
    assert (changed, taken) == ([], ["eliminate_noops"])
    assert "mla_fusion is inactive: this vLLM release is outside the window" in said
    assert "0.99.0, supported are 0.26 to 0.33" in said and "_set_compile_ranges" in said


def test_with_all_names_everything_is(found):
    changed, taken, said = found["none"]
    classes = ["VllmConfig", "WorkerBase", "MLACommonMetadataBuilder"]
    assert (changed, len(taken), said) == ([*classes, "CUSTOM"], 2, [])


def test_what_another_plugin_wrapped_stays_theirs_and_reaches_vllm(found):
    assert found["wrapped"] == [True, "theirs, then vLLM's", []]


def test_registering_imports_no_config_of_vllm(found):
    """2.2 s and 78 MiB in a process that loads plugins before it makes a config."""
    assert found["imported"] == []
