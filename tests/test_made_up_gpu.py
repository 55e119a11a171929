"""A GPU, a decode kernel and a region kernel that do not exist: cards, modules and a JSON file."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from mla_fusion import cli, config, gpu
from mla_fusion.attention import cards, triton
from mla_fusion.attention.card import Card, Shape, refused
from mla_fusion.cli.calibrate import measure
from mla_fusion.cli.check import model_config, persistent_decode
from mla_fusion.cli.child import Job
from mla_fusion.cli.doctor import command as doctor
from mla_fusion.cli.selftest import kernels
from mla_fusion.config import Options, eligibility, vllm_compat
from mla_fusion.kernels import PROVIDERS, get_provider, reference
from mla_fusion.kernels.card import Card as RegionCard
from mla_fusion.kernels.launches import Launch
from mla_fusion.report.reasons import Decline
from mla_fusion.runtime import decode_choice, measured
from tests import test_decode_choice, test_eligibility
from tests.attention import without_memory
from tests.attention.decodes import BF16, Launches
from tests.cli import test_doctor
from tests.cli.test_check import V3, asked
from tests.gpus import imitate
from tests.models import write
from tests.test_decode_choice import AUTO, choose, engine, file_of, forget, layer

NAME, KERNEL = "NVIDIA Made Up", "made_up.decode"
MANY = refused("it takes up to 16 query rows")
CARD = Card(
    KERNEL, ("sm_100",), lambda given: None if given.rows <= 16 else MANY,
    lambda of: not of.scopes and of.rows <= 16, lambda here, of: {"ctas": 3 * here.sms},
    (Shape(16, 1, 64),), (Shape(8, 2, 128),), page=128, newest_triton=(3, 8),
)  # fmt: skip
NARROW = Decline("shape", "provider made_up: it takes 512 latents")
REGION = RegionCard(
    "made_up", ("cuda",), lambda widths, cache, here: None if widths.latent == 512 else NARROW,
    row="region made_up", shapes=((3, 16),), thorough=((5, 8),),
)  # fmt: skip
# Fixtures: every other fact of a layer and its engine; no provider outlives its test.
h200, forget_providers = test_decode_choice.h200, test_doctor.forget_providers


@pytest.fixture
def launches(monkeypatch):
    """The card is in the registry, and its kernel keeps its launches."""
    kernel = Launches()
    module = SimpleNamespace(launch_of=lambda given: Launch(kernel, (7, 1), {}, {}))
    monkeypatch.setitem(sys.modules, f"mla_fusion.attention.{KERNEL}", module)
    monkeypatch.setattr(cards, "CARDS", (CARD, *cards.CARDS))
    imitate(monkeypatch, "sm_100", name=NAME)
    return kernel.grids


@pytest.fixture
def auto(h200, launches, monkeypatch, tmp_path):
    """vLLM runs on this GPU, of which a file of measurements is shipped."""
    monkeypatch.setattr(vllm_compat, "gpu_name", lambda: NAME)
    monkeypatch.setattr(vllm_compat, "gpu_arch", lambda: "sm_100")
    monkeypatch.setattr(measured, "FOLDER", tmp_path)
    rows = [[n, 1024, 0, *[1.0] * 3, *[2.0] * 3] for n in (1, 64)]
    file = tmp_path / measured.file_name(NAME)
    file.write_text(json.dumps(file_of(rows, ("bfloat16", 16, 1, "CUTLASS_MLA"), NAME)))
    forget()
    yield
    forget()


def test_the_provider_plans_for_it_and_launches_it(launches):
    here = gpu.of("cuda")
    assert triton.plan_settings(16, 1, BF16, 576, "cuda") == {"ctas": 30}
    assert cards.settings(here, cards.Decodes(64, 1, BF16, 576))["ctas"] == 5
    triton.decode(without_memory.inputs(16))
    assert launches == [(7, 1)]
    assert cards.chosen(here, without_memory.inputs(64)) is cards.PORTABLE


def test_check_names_it(launches, tmp_path):
    settings = asked(write(tmp_path, V3), "--attention", "portable")
    cut = model_config.cut(model_config.read(settings.model), 2, 1)
    [plans] = [line for line in persistent_decode.ask(settings, cut) if "plan" in line]
    assert f"{KERNEL} on sm_100" in plans and "hopper.decode on sm_90" in plans


def test_selftest_and_calibrate_check_it(launches, monkeypatch):
    names = [f"decode {KERNEL} {kind}" for kind in ("bf16", "fp8")]
    assert [name for name in kernels.checks() if KERNEL in name] == names
    given = []
    monkeypatch.setattr(kernels.decode, "check", lambda *of, **_: given.append(of) or ())
    job = Job("", "", options={"name": names[0], "thorough": True})
    assert kernels.run(job, None) == {}
    assert given == [(CARD, [*CARD.shapes, *CARD.thorough])]
    portable = f"decode {cards.PORTABLE.name} bf16"
    assert measure.concerned({BF16}) == ["planner", names[0], portable, "epilogue"]
    imitate(monkeypatch, "sm_90")
    assert kernels.run(job, None) == {"skipped": "it needs sm_100"}


def test_doctor_names_it(auto, monkeypatch, capsys):
    monkeypatch.setitem(test_doctor.GPUS, "sm_100", (NAME, torch.float8_e4m3fn))
    test_doctor.use_gpu(monkeypatch, "sm_100")
    monkeypatch.setattr(doctor, "_why_no_plugin", lambda: "")
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert f"{NAME} (sm_100, cuda)" in said and f"measured with {NAME}" not in said
    assert f"{KERNEL}, {cards.PORTABLE.name}\n" in said and "goes by shipped" in said


def test_auto_goes_by_its_file_and_page(auto, monkeypatch):
    choice = choose(layer(backend="CUTLASS_MLA"), AUTO, engine())
    assert (choice.planner, choice.runs) == ("portable", ((1, 64),))
    assert not choose(layer(64, "CUTLASS_MLA"), AUTO, engine()).planner
    config = engine(page=16, options={"provider": "triton"})
    assert decode_choice.page_of(config, AUTO) == CARD.page
    monkeypatch.setattr(measured, "triton_version", lambda: (3, 9))
    left = choose(layer(backend="CUTLASS_MLA"), AUTO, engine())
    assert not left.planner and "has not run with Triton 3.9" in left.why
    forced = choose(layer(), Options("triton", "portable"), engine())
    assert forced.planner == "portable"


@pytest.fixture
def region(monkeypatch):
    """The region's card is in the registry; its module computes what the reference does."""
    prep = reference.fused_mla_decode_prep
    module = SimpleNamespace(require=lambda: None, fused_mla_decode_prep=prep)
    monkeypatch.setitem(sys.modules, "mla_fusion.kernels.made_up", module)
    monkeypatch.setitem(PROVIDERS, REGION.name, REGION)
    imitate(monkeypatch, "sm_100", name=NAME)
    return module


def test_a_region_kernel_is_chosen_and_asked(region, monkeypatch, tmp_path):
    assert get_provider("made_up") is region
    assert asked(write(tmp_path, V3), "--provider", "made_up").provider == "made_up"
    assert not eligibility.facts(test_eligibility.layer(), "made_up", BF16).decline
    narrow = test_eligibility.layer(kv_lora_rank=256)
    assert eligibility.facts(narrow, "made_up", BF16).decline == NARROW
    assert vllm_compat.default_provider() == ""
    test_doctor.use_gpu(monkeypatch, "sm_90")
    assert config.read_options(None).provider == "made_up"


def test_selftest_checks_a_region_kernel(region, monkeypatch):
    names = [f"region made_up {kind}" for kind in ("bf16", "fp8")]
    assert [name for name in kernels.checks() if "made_up" in name] == names
    given = []
    monkeypatch.setattr(kernels.region, "check", lambda *of: given.append(of) or ())
    job = Job("", "", options={"name": names[0], "thorough": True})
    assert kernels.run(job, None) == {}
    [(module, calls)] = given
    assert module is region and {"3 tokens, 16 heads", "5 tokens, 8 heads"} <= calls.keys()
    assert "scaled" in calls and "256 latents" not in calls


def test_doctor_names_a_region_kernel(region, auto, monkeypatch, capsys):
    monkeypatch.setitem(test_doctor.GPUS, "sm_100", (NAME, torch.float8_e4m3fn))
    test_doctor.use_gpu(monkeypatch, "sm_100")
    monkeypatch.setattr(doctor, "_why_no_plugin", lambda: "")
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "can work here, with provider made_up or triton" in said
    assert "name it beside the flag" not in said
