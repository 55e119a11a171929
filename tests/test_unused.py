"""Installed and unused, the library changes nothing that handles vLLM's configs.

`tests/unused.py` prints what vLLM makes of them, in a process with the plugin and in one that
VLLM_PLUGINS keeps it out of. `tests/engine/test_engine.py` compares whole engines.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import DEEPSEEK_V2, write

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """{VLLM_PLUGINS: what the process with it printed, and its errors}; both run at once."""
    folder = tmp_path_factory.mktemp("unused")
    yaml = folder / "serve.yaml"
    yaml.write_text(
        f"model: {write(folder / 'model', DEEPSEEK_V2)}\nskip-tokenizer-init: true\n"
        'max-model-len: 256\ncompilation-config: \'{"pass_config": {"fuse_act_quant": false}}\'\n'
    )

    def start(plugin):
        command = [sys.executable, "-m", "tests.unused", folder / "model", yaml]
        environment = {"PATH": "", "HOME": str(folder), "VLLM_PLUGINS": plugin}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)

    started = {plugin: start(plugin) for plugin in ("mla_fusion", "")}
    return {plugin: process.communicate() for plugin, process in started.items()}


def test_configs_and_their_log_are_the_same_with_the_plugin(processes):
    installed, alone = (
        re.sub(r"pid=\d+|\d\d-\d\d \d\d:\d\d:\d\d", "", processes[plugin][0]).splitlines()
        for plugin in ("mla_fusion", "")
    )
    assert installed.pop() == "wrapped: True", processes["mla_fusion"][1]
    assert alone.pop() == "wrapped: False"
    assert installed == alone
    assert "non-default args" in "".join(alone)
    assert processes["mla_fusion"][1] == processes[""][1]
