"""Every flag, file, command and reason that the docs name exists, and every one is documented."""

import re
from pathlib import Path

import pytest

from mla_fusion import cli, config, kernels, report
from mla_fusion.config import FLAG
from mla_fusion.report import reasons
from tests.test_architecture import SOURCES

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "examples/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
TEXT = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}
# Written by the commands the docs describe.
MADE = ("build/",)


def inline_code_of(text):
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))


def code_of(text):
    """Inline code and code blocks."""
    return [*re.findall(r"```\w*\n(.*?)```", text, re.S), *inline_code_of(text)]


def makefile_targets():
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))


@pytest.mark.parametrize("name", TEXT)
def test_links_and_paths_exist(name):
    folder = (ROOT / name).parent
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", TEXT[name]):
        if not target.startswith("http"):
            assert (folder / target).exists(), target
    for word in inline_code_of(TEXT[name]):
        looks_like_path = re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", word) and (
            "/" in word or word.endswith((".py", ".md", ".toml"))
        )
        if looks_like_path and not word.startswith(MADE):
            assert (ROOT / word).exists() or (ROOT / "docs" / word).exists(), word


def test_the_first_screen_of_the_readme_has_picture_command_and_log_line(caplog):
    lines = TEXT["README.md"].splitlines()
    assert len(lines) <= 90 and "REPOSITORY" not in TEXT["README.md"]
    first = "\n".join(lines[:40])
    caplog.set_level("INFO", logger="vllm.mla_fusion")
    made = report.Report("triton", 1024, [report.RangeReport((1, 1024), layers=27, fused=27)])
    report.publish(made, "DeepseekV2ForCausalLM", cached=False)
    [line] = caplog.messages
    assert f"-cc.pass_config.{FLAG}=True" in first and "](docs/images/steps.svg)" in first
    assert line.removeprefix(f"{report.FLAG_LINE}: ") in first


COMMANDS = cli._parser(cli._COMMANDS)._subparsers._group_actions[0].choices


@pytest.mark.parametrize("name", TEXT)
def test_commands_make_targets_and_options_exist(name):
    for snippet in code_of(TEXT[name]):
        for target in re.findall(r"^make (?:-C \S+ )?([a-z][\w-]*)", snippet, re.M):
            assert target in makefile_targets(), target
        for line in re.findall(r"^mla-fusion (.+)$", snippet, re.M):
            command, *words = line.split()
            assert command in COMMANDS, line
            options = {word for word in words if word.startswith("--")}
            assert options <= COMMANDS[command]._option_string_actions.keys(), line


def test_every_command_is_documented():
    text = "".join(TEXT.values())
    assert [each for each in COMMANDS if not re.search(f"(mla-fusion|make) {each}", text)] == []


def test_flags():
    for field in (config.FLAG, config.THRESHOLD):
        assert f"## `{field}`" in TEXT["docs/flags.md"]
    for provider in kernels.PROVIDERS:
        assert f"`{provider}`" in TEXT["docs/flags.md"]
    named = set(re.findall(r"\b((?:fuse_)?aiter_qk_rope_kvcache\w+)\b", "".join(TEXT.values())))
    assert named <= {config.FLAG, config.THRESHOLD}


# Models that the README names, and their classes.
SERVED = {
    "DeepSeek-V2": "DeepseekV2ForCausalLM",
    "V3": "DeepseekV3ForCausalLM",
    "Kimi-K2.5": "KimiK25ForConditionalGeneration",
    "GLM-4.7-Flash": "Glm4MoeLiteForCausalLM",
    "Mistral Large 3": "MistralLarge3ForCausalLM",
    "LongCat-Flash": "LongcatFlashForCausalLM",
    "Ring 2.5": "BailingMoeV2_5ForCausalLM",
    "DeepSeek-V3.2 and GLM-5": "DeepseekV32ForCausalLM",
    "GLM-5": "GlmMoeDsaForCausalLM",
    "Kimi-K3": "KimiK3ForConditionalGeneration",
}


@pytest.mark.parametrize("model, name", SERVED.items())
def test_the_models_of_the_readme_are_those_of_the_coverage_page(model, name):
    """README gives the verdict of vLLM 0.32, or the reason why no pass reaches the class."""
    section = " ".join(TEXT["README.md"].split("## Models")[1].split())
    fuses, others = section.split("These do not:")
    [row] = re.findall(rf"^\|.*`{name}`.*$", TEXT["docs/coverage.md"], re.M)
    said = row.split(" | ")[2]
    assert model in fuses if said == "fused" else f"{model} ({said})" in others


def test_reasons_page_says_what_the_log_says():
    page = TEXT["docs/reasons.md"]
    assert re.findall(r"^### `(.+)`$", page, re.M) == [
        code
        for scope in ("engine", "layer", "output", "product", "decode")
        for code, reason in reasons.REASONS.items()
        if reason.scope == scope
    ]
    for code, reason in reasons.REASONS.items():
        section = page.split(f"### `{code}`")[1].split("###")[0]
        assert f"Why: {reason.why}." in section
        assert f"Help: {reason.help}." in section


def test_every_reason_code_in_the_source_is_in_the_table():
    source = "".join(SOURCES.values())
    for code in re.findall(r'Declined?\(\s*"([\w-]+)"', source):
        assert code in reasons.REASONS, code
    for code in reasons.REASONS:
        assert f'"{code}"' in source, f"{code} is explained and never given"


def test_tests_that_the_docs_name_exist():
    source = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", "".join(TEXT.values())))
    assert len(named) > 10
    for name in named:
        assert f"def {name}(" in source, name


def test_every_fault_has_a_test():
    """Each row of the table of faults has what the user reads, and the test."""
    table = TEXT["docs/development.md"].split("## Faults")[1].split("## ")[0]
    rows = [row for row in table.splitlines() if row.startswith("|")][2:]
    assert len(rows) > 10
    for row in rows:
        fault, read, test = (cell.strip() for cell in row.strip("|").split("|"))
        assert fault and read
        assert re.fullmatch(r"`test_\w+`", test), row
