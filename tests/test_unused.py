"""Installed and unused, the library changes nothing that handles vLLM's configs, and costs little.

`tests/unused.py` prints what vLLM makes of them, in a process with the plugin and in one that
VLLM_PLUGINS keeps it out of. `tests/engine/test_engine.py` compares whole engines.
"""

import compileall
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mla_fusion.cli import child
from tests.models import DEEPSEEK_V2, write

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """{VLLM_PLUGINS: the lines of the process with it, the last as JSON, and its errors}; both run
    at once."""
    compileall.compile_dir(ROOT / "mla_fusion", quiet=1)  # as an installation has it
    folder = tmp_path_factory.mktemp("unused")
    child.share_facts(folder / ".cache" / "vllm")
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

    found = {}
    for plugin, process in [(plugin, start(plugin)) for plugin in ("mla_fusion", "")]:
        printed, errors = process.communicate()
        *lines, last = printed.splitlines() or ["{}"]
        found[plugin] = lines, json.loads(last), errors
    return found


def test_configs_and_their_log_are_the_same_with_the_plugin(processes):
    installed, alone = (
        re.sub(r"pid=\d+|\d\d-\d\d \d\d:\d\d:\d\d", "", "\n".join(processes[plugin][0]))
        for plugin in ("mla_fusion", "")
    )
    assert processes["mla_fusion"][1]["wrapped"], processes["mla_fusion"][2]
    assert not processes[""][1]["wrapped"]
    assert installed == alone
    assert "non-default args" in alone
    assert processes["mla_fusion"][2] == processes[""][2]


def test_a_process_that_makes_arguments_imports_little(processes):
    """1.1 s and 718 modules, when the plugin imported what it changes in a worker."""
    installed, alone = ({*processes[plugin][1]["modules"]} for plugin in ("mla_fusion", ""))
    more = installed - alone
    assert 0 < len(more) < 20
    assert not [name for name in more if name.startswith(("torch", "vllm"))]
