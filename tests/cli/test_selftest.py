"""`mla-fusion selftest` without its kernels: processes that end well, badly or never, no GPU."""

import json
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.spawn import ProcessException

from mla_fusion import cli
from mla_fusion.cli.child import Job
from mla_fusion.cli.selftest import command, kernels, ranks
from mla_fusion.measure.outcome import CannotRun
from tests.gpus import imitate

CHILD = """
import json, sys, time
def case(error, wrong=""):
    print(json.dumps({"case": "a case", "error": error, "bound": 1.0, "wrong": wrong}), flush=True)
kind, workdir = sys.argv[1:]
case(0.5)
if kind == "nan": case(float("nan"))
if kind == "repeated": case(0.1, "two launches differ")
if kind == "hangs": time.sleep(600)
if kind == "dies":
    print("illegal memory access", file=open(workdir + "/engine.log", "w"))
    sys.exit(1)
with open(workdir + "/result.json", "w") as file:
    json.dump({"skipped": "no such GPU"} if kind == "other" else {}, file)
"""
ENDS = {
    "right": ("right", ""),
    "nan": ("WRONG", "a case: error nan, bound 1"),
    "repeated": ("WRONG", "a case: two launches differ"),
    "hangs": ("WRONG", "killed after 2 s of silence behind case 1"),
    "dies": ("WRONG", "the process ended: illegal memory access (exit status 1)"),
    "other": ("cannot run", ""),
}


@pytest.fixture
def on_a_gpu(monkeypatch):
    """A GPU that six made-up kernels run on."""

    def start(job, **streams):
        words = [sys.executable, "-c", CHILD, job.options["name"], job.workdir]
        return subprocess.Popen(words, text=True, start_new_session=True, **streams)

    monkeypatch.setattr(command, "require_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100 * 2**30, 0))
    imitate(monkeypatch, "sm_90", name="a GPU")
    monkeypatch.setattr(kernels, "checks", lambda: ENDS)
    monkeypatch.setattr(kernels, "start", start)
    monkeypatch.setattr(kernels, "SILENCE", 2.0)


def test_each_kernel_has_its_verdict(on_a_gpu, tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert cli.main(["selftest", "--json", str(file)]) == 1
    stored = json.loads(file.read_text())
    rows = {row["kernel"]: row for row in stored["rows"]}
    for kernel, (verdict, wrong) in ENDS.items():
        found = rows[kernel]["wrong"]
        assert rows[kernel]["verdict"] == verdict
        assert found.startswith(wrong) and bool(found) == bool(wrong)
    assert stored["gpu"] == "a GPU" and math.isnan(rows["nan"]["error"])
    said = capsys.readouterr().out
    assert "1 kernels right, 4 WRONG" in said and "cannot run no such GPU" in said


@pytest.mark.parametrize("devices", [(), ("*",)])
@pytest.mark.parametrize("words", ["selftest", "bench --layers 3", "bench decode"])
def test_without_a_gpu(capsys, monkeypatch, tmp_path, words, devices):
    """Of a device that is no GPU's, torch says so. Nothing is written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "GPU_DEVICES", devices)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(words.split()) == 2 and not [*tmp_path.iterdir()]
    assert "needs a CUDA or ROCm GPU" in capsys.readouterr().err


def test_a_child_says_why_its_kernel_cannot_run(monkeypatch, tmp_path):
    imitate(monkeypatch, "sm_100")
    options = {"name": "decode hopper.decode bf16", "thorough": False}
    job = Job(str(tmp_path), str(tmp_path), options=options)
    assert kernels.run(job, None) == {"skipped": "it needs sm_90"}


def test_a_child_says_what_its_check_raised():
    """No kernel has this name."""
    row = kernels.watch("decode nothing", False, print)
    assert row.verdict == "WRONG" and row.cases == 0
    assert row.wrong.startswith("the next case: KeyError: 'decode nothing'")


RIGHT, WRONG = ("16 tokens, rank 0", 0, 0), ("16 tokens, rank 1", 3, 0)


@pytest.mark.parametrize(
    ("gpus", "told", "end", "found"),
    [
        (1, [], True, "it needs two GPUs"),
        (2, [], "\n-- Process 1\nOSError: no NCCL\n", "do not start: OSError: no NCCL"),
        (2, [], False, "do not start in 0 s"),
        (2, [None, RIGHT], "an illegal memory access", "an illegal memory access"),
        (2, [None, RIGHT, None, WRONG], True, [True, False]),
    ],
)
def test_ranks_that_start_and_those_that_do_not(monkeypatch, gpus, told, end, found):
    def spawn(work, given, nprocs, join):
        for each in told:
            given[1].put(each)
        processes = [SimpleNamespace(kill=lambda: killed.append(0))] * 2
        return SimpleNamespace(processes=processes, join=lambda seconds: next(answers)())

    def ends():
        if end is not True:
            raise ProcessException(end, 1, 0)
        return True

    answers, killed = iter([lambda: False, ends]), []
    if end is False:
        monkeypatch.setattr(ranks, "START", 0)
    imitate(monkeypatch, "sm_90")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(ranks.multiprocessing, "spawn", spawn)
    if isinstance(found, str):
        kind = ProcessException if None in told else CannotRun
        with pytest.raises(kind, match=found):
            [*ranks.check_all(False)]
    else:
        assert [each.right for each in ranks.check_all(False)] == found
    assert len(killed) == (2 if end is False else 0)
