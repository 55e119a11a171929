"""Every code block of the docs is run or checked, and so are the commands of examples/*.sh.

Python is executed; vLLM's own check of the arguments replaces an engine. Every shell command is
known here: vLLM parses `vllm serve` and the library `mla-fusion`, down to the value of each flag.
"""

import builtins
import inspect
import json
import os
import re
import shlex
import tomllib
from collections import defaultdict
from pathlib import Path
from unittest.mock import MagicMock, Mock

import pytest
from packaging.requirements import Requirement

from mla_fusion import cli, config, plugin, report
from mla_fusion.attention import sparse
from mla_fusion.config import FLAG
from tests.command import run
from tests.test_docs import ROOT, TEXT, makefile_targets

plugin.register()

import vllm  # noqa: E402
from vllm.benchmarks import serve as benchmark  # noqa: E402
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
BLOCKS = [
    (f"{name}-{index}", language, body)
    for name, text in TEXT.items()
    for index, (language, body) in enumerate(FENCE.findall(text))
]
SHELL = ("bash", "sh", "console")
PARSERS = {"json": json.loads, "toml": tomllib.loads}
LANGUAGES = ("", "text", "python", "diff", *PARSERS, *SHELL)
# Run by tests/test_docs_followed.py, against a changed copy of the source.
ELSEWHERE = "docs/new-rope.md"


def commands(language, body):
    """The commands of a block, as words without variables in front; none if it is not shell.

    A block without a language is shell if it starts with one of `COMMANDS`, but not with what the
    log has in front of a line. In a `console` block commands have a prompt, and the rest is their
    output.
    """
    lines = body.replace("\\\n", " ").splitlines()
    if language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    found = []
    for line in lines:
        shell = line.startswith(tuple(COMMANDS)) and not line.startswith("mla-fusion: ")
        if language not in SHELL and not found and not shell:
            return []
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z][A-Z0-9_]*=.*", words[0]):
            words.pop(0)
        if words:
            found.append([re.sub(r"^\.venv[\d.-]*/bin/", "", words[0]), *words[1:]])
    return found


def check_vllm(words):
    """The arguments as vLLM's own parser takes them; the fusion's flag is on and its options are
    known, or the attention backend is this library's.

    Raises:
        ValueError, SystemExit: it does not.
    """
    if words[:2] == ["bench", "serve"]:
        client = FlexibleArgumentParser()
        benchmark.add_cli_args(client)
        client.parse_args(words[2:])
        return
    assert words[0] == "serve", words
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("model_tag")
    engine = AsyncEngineArgs.from_cli_args(parser.parse_args(words[1:]))
    fused = getattr(engine.compilation_config.pass_config, FLAG, False)
    assert fused or engine.attention_backend == "CUSTOM"
    assert isinstance(engine.additional_config, dict)  # vLLM takes broken JSON as a string
    config.read_options(engine.additional_config)
    return engine


def check_pip(words):
    assert words[0] == "install"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in words[1:]:
        if re.match(r"\.|mla-fusion", word):
            asked = Requirement(re.sub(r"^\.", "mla-fusion", word))
            assert asked.extras <= {*project["optional-dependencies"]}, word


def check_make(words):
    words = words[2:] if words[0] == "-C" else words
    targets = [word for word in words if "=" not in word]
    assert targets and set(targets) <= makefile_targets(), words


def check_python(words):
    assert words[0] == "-m" or (ROOT / words[0]).is_file(), words


# Each with the check of its arguments.
COMMANDS = {
    "mla-fusion": cli._parser(cli._COMMANDS).parse_args, "vllm": check_vllm, "pip": check_pip,
    "make": check_make, "python": check_python,
    **dict.fromkeys(("git", "mkdocs", "pre-commit"), lambda words: None),
}  # fmt: skip


@pytest.mark.parametrize("label, language, body", BLOCKS, ids=[block[0] for block in BLOCKS])
def test_block(label, language, body):
    """Every block is shell, data, Python or text (drawings and output)."""
    assert language in LANGUAGES, f"no test knows what {language} is"
    assert language != "diff" or label.startswith(ELSEWHERE)
    for name, *words in commands(language, body):
        assert name in COMMANDS, f"{name}: no check knows this command"
        COMMANDS[name](words)
    if language in PARSERS:
        PARSERS[language](body)


def test_the_report_of_the_quick_start_is_what_the_demo_prints():
    ranges = [report.RangeReport((1, 8), 3, 3), report.RangeReport((9, 2048), 3)]
    printed = "\n".join(report.Report("reference", 8, ranges).lines())
    assert f"```text\n{printed}\n```" in TEXT["docs/quickstart.md"]


PYTHON = [(label, body) for label, language, body in BLOCKS if language == "python"]
GPU = "# on a GPU\n"
RUN = [b for b in PYTHON if not b[0].startswith(ELSEWHERE) and not b[1].startswith(GPU)]


def test_python_for_a_gpu_calls_what_exists_with_arguments_it_takes(monkeypatch):
    blocks = [body for _, body in PYTHON if body.startswith(GPU)]
    called = []

    def stand_in(signature):
        def call(*args, **kwargs):
            called.append(signature.bind(*args, **kwargs))
            return MagicMock(__iter__=lambda self: iter((None, None)))

        return call

    for name in ("sparse_scratch", "sparse_mla_decode"):
        monkeypatch.setattr(sparse, name, stand_in(inspect.signature(getattr(sparse, name))))
    for body in blocks:
        # What a block for a GPU does not define is a mock.
        exec(compile(body, "docs", "exec"), {}, defaultdict(Mock, vars(builtins)))
        with pytest.raises(TypeError):
            wrong = compile(body.replace("num_heads", "heads"), "docs", "exec")
            exec(wrong, {}, defaultdict(Mock, vars(builtins)))
    assert len(blocks) == 1 and len(called) == 2


@pytest.mark.parametrize("label, body", RUN, ids=[block[0] for block in RUN])
def test_python(label, body, monkeypatch):
    engines = []

    def engine(model, **arguments):
        engines.append(EngineArgs(model, **arguments))
        return Mock()

    monkeypatch.setattr(vllm, "LLM", engine)
    exec(compile(body, label, "exec"), {})
    for engine in engines:
        assert getattr(engine.compilation_config.pass_config, FLAG, False)


FOR_GPUS = {path.name for path in (ROOT / "examples").glob("*.sh")} - {"serve_cpu.sh"}


@pytest.mark.parametrize("name", sorted(FOR_GPUS))
def test_scripts_for_gpus_call_vllm_with_arguments_it_takes(name, tmp_path):
    """A mock of the `vllm` command, which no CPU has, prints the arguments of the script."""
    fake = tmp_path / "vllm"
    fake.write_text("#!/usr/bin/env python3\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    fake.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    command = ("bash", ROOT / "examples" / name, "MODEL", "--max-num-seqs", "32")
    words = json.loads(run(*command, PATH=path))
    assert words[:4] == ["serve", "MODEL", "--max-num-seqs", "32"]
    check_vllm(words)


def test_every_shell_page_was_seen():
    """A change of the fences must not leave the tests above without blocks."""
    assert Path("docs/quickstart.md") in {Path(label.rsplit("-", 1)[0]) for label, _, _ in BLOCKS}
    assert sum(bool(commands(language, body)) for _, language, body in BLOCKS) >= 8
    assert len(RUN) >= 2
