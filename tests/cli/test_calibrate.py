"""`mla-fusion calibrate` with a double of the benchmark: its file, and what `auto` makes of it."""

import dataclasses
import json
import subprocess
import sys

import pytest

from mla_fusion import cli
from mla_fusion.cli.bench import decode
from mla_fusion.cli.calibrate import command, measure, products, region
from mla_fusion.cli.selftest.kernels import Row
from mla_fusion.config import vllm_compat
from mla_fusion.kernels import dispatch
from mla_fusion.measure import decode_peers as peers
from mla_fusion.measure import records, timing
from mla_fusion.measure.region_cases import DEEPSEEK
from mla_fusion.runtime import measured
from tests.cli.test_check import CONFIGS
from tests.gpus import imitate

GPU = "NVIDIA H20"
MODEL = json.loads((CONFIGS / "deepseek-v3.json").read_text())


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """Calls `calibrate` where ours takes half of the peers' time, and errs by `error`; a peer errs
    as FlashMLA does in fp8, beyond the bound."""
    monkeypatch.setattr(vllm_compat, "cache_root", lambda: tmp_path)
    monkeypatch.setattr(command, "require_gpu", lambda: None)
    checked = []
    monkeypatch.setattr(measure, "run_checks", lambda names: checked.append(names) or bad)
    imitate(monkeypatch, "sm_90", name=GPU)
    monkeypatch.setattr(measure, "environment", lambda: dict.fromkeys(records.FACTS, ""))
    monkeypatch.setattr(vllm_compat, "gpu_name", lambda: GPU)
    monkeypatch.setattr(decode, "compile_ours", lambda cases: None)
    monkeypatch.setattr(products, "calibrate", lambda *_: 0)  # test_calibrate_products.py has it
    regions = []  # test_calibrate_region.py has it
    monkeypatch.setattr(region, "calibrate", lambda shapes, *_: regions.extend(shapes) or 0)
    config = tmp_path / "config.json"

    bad = []

    def calibrate(*options, error=0.001, wrong="", shapes=False, **changes):
        config.write_text(json.dumps(MODEL | changes))
        bad[:] = [Row("planner"), Row("epilogue", wrong=wrong)]

        def timed(case, candidates, rounds):
            return [
                {**dataclasses.asdict(case), "dtype": case.kind, "candidate": name,
                 "error": error if name == "ours" else 0.027,
                 **dict.fromkeys(timing.TIMES, 1.0 if name == "ours" else 2.0)}
                for name in candidates
            ]  # fmt: skip

        monkeypatch.setattr(decode, "measure", timed)
        return cli.main(["calibrate", *([] if shapes else [str(config)]), *options])

    calibrate.checked, calibrate.regions = checked, regions
    return calibrate


def test_auto_goes_by_what_it_writes(gpu, capsys):
    """A second model's shapes join the first's, and one that is measured again replaces itself."""
    fp8 = "--tensor-parallel-size", "8", "--kv-cache-dtype", "fp8", "--speculative-tokens", "1"
    for options in ((), fp8, fp8):
        assert gpu(*options) == 0
    measured._own.cache_clear(), measured.spans.cache_clear()
    assert measured.spans(GPU, 65536) == {
        ("bfloat16", 128, 1, "FLASH_ATTN_MLA"): ((1, 1024),),
        (str(peers.FP8)[6:], 16, 2, "FLASHMLA"): ((1, 1024),),
    }
    assert str(measured.own_file(GPU)) in capsys.readouterr().out
    shapes = json.loads(measured.own_file(GPU).read_bytes())["shapes"]
    assert len(shapes) == 2 and all(shape["values"] == 128 for shape in shapes)
    assert gpu.regions == [(False, DEEPSEEK, 128), *[(True, DEEPSEEK, 16)] * 2]


def test_on_amd_no_decode_is_timed(gpu, monkeypatch, capsys):
    imitate(monkeypatch, "gfx942", name=GPU)
    assert gpu() == 0 and "no decode is timed" in capsys.readouterr().out
    assert gpu.regions and not measured.own_file(GPU).exists()


@pytest.mark.parametrize(
    "bad", [{"error": 0.1}, {"error": float("nan")}, {"wrong": "a case: two launches differ"}]
)
def test_a_wrong_kernel_has_no_time(gpu, capsys, bad):
    assert gpu(**bad) == 1 and "nothing is" in capsys.readouterr().out
    assert not measured.own_file(GPU).exists()
    hopper = (f"hopper.{kernel}" for kernel in ("warp_specialized", "few_rows", "decode"))
    decodes = (f"decode {kernel} bf16" for kernel in (*hopper, "triton.decode_kernel"))
    assert {*gpu.checked[0]} == {"planner", "epilogue", *decodes}


def test_without_a_model_all_shipped_shapes_are_measured(gpu):
    assert gpu(shapes=True) == 0
    assert {*gpu.regions} == {(row.fp8, row.widths, row.heads) for row in dispatch.measured()}
    measured._own.cache_clear()
    gpus = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
    assert measured._own(GPU).keys() == {key for name in gpus for key in measured._shipped(name)}


@pytest.mark.parametrize(
    ("options", "changes", "why"),
    [
        ((), {"kv_lora_rank": 256}, "entries of 512 + 64 only"),
        (("--tensor-parallel-size", "3"), {}, "does not divide"),
    ],
)
def test_a_model_that_auto_does_not_decode_is_refused(gpu, capsys, options, changes, why):
    assert gpu(*options, **changes) == 2 and why in capsys.readouterr().err


@pytest.mark.parametrize("words", [["calibrate", "nowhere"], ["selftest"]])
def test_without_a_device_it_says_so_before_torch_is_imported(words):
    source = (
        "import sys; from mla_fusion import cli; cli.GPU_DEVICES = (); "
        f"print(cli.main({words}), 'torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert ended.stdout.split() == ["2", "False"] and "needs a CUDA or ROCm GPU" in ended.stderr


def test_time_ends_it_between_numbers_of_sequences(monkeypatch):
    """A number of sequences that has begun gets all its contexts."""
    clock = iter([0.0, *(150.0 * n for n in range(9))])
    monkeypatch.setattr(measure.time, "monotonic", lambda: next(clock))
    cases = [peers.Case(b, n, 16, peers.BF16) for b in (1, 4, 16) for n in (1, 2, 3)]
    done = [(case.batch, case.context) for case in measure.paced(cases)]
    assert done == [(1, 1), (1, 2), (1, 3)]
