"""The answer of `mla-fusion check` to any config at all."""

import copy
import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from mla_fusion import cli, report
from mla_fusion.cli import child
from tests.cli.test_check import CONFIGS
from tests.cli.test_cli import store

ODD = [None, "512", "", -1, 0, 10**30, 1.5, True, [], ["a\nb"], {}, "x" * 10_000, [[]] * 9]
RAW = [json.loads(path.read_text()) for path in sorted(CONFIGS.glob("*.json"))]


def _inside(value):
    """The places in nested dictionaries and lists, each as (container, key)."""
    keys = value if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _inside(value[key])


@st.composite
def mutants(draw):
    """A real config, perhaps as the part of a multimodal one, with odd fields at any depth, and
    others missing or taken from another model."""
    model, other = (copy.deepcopy(draw(st.sampled_from(RAW))) for _ in range(2))
    if draw(st.booleans()):
        model = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": model}
        model |= {"model_type": "kimi_k25", "vision_config": {"hidden_size": [{}]}}
    model.setdefault("quantization_config", {"quant_method": "fp8", "weight_block_size": [128] * 2})
    model.setdefault("rope_scaling", {"type": "yarn", "factor": 40, "mscale": [1.0]})
    for box, key in draw(st.lists(st.sampled_from([*_inside(model)]), max_size=4)):
        box[key] = draw(st.sampled_from(ODD))
    for key in draw(st.lists(st.sampled_from(sorted({*model, *other})), max_size=3)):
        model.pop(key, None)
        if key in other and draw(st.booleans()):
            model[key] = other[key]
    return model


@settings(max_examples=500, deadline=5000)
@given(model=mutants(), fused=st.sampled_from([None, 0, 1, 2]))
def test_check_of_any_config_is_a_short_answer(model, fused, monkeypatch, tmp_path, capsys):
    """All of `check` but the engine, whose answer is mocked: it fails, or has 0 to 2 layers fused.

    What vLLM itself says to such a config is not tested here: an error in its process is one line.
    """

    def play(job, progress):
        if fused is None:
            log = Path(job.workdir, child.LOG)
            log.write_text("ValueError: " + "odd " * 3000)
            raise child.EngineError(job, f"{child.last_error(log)} (exit status 1)")
        return child.Outcome([], [], [], report.load(store(Path(job.cache), "a.json", fused)))

    monkeypatch.setattr(child, "run", play)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(model))
    status = cli.main(["check", str(path)])
    printed = capsys.readouterr()
    answer = printed.err if status == 2 else printed.out
    assert status in (0, 1, 2) and 0 < answer.count("\n") <= 6
    lines = (printed.out + printed.err).replace(str(path), "config.json").splitlines()
    assert max(map(len, lines)) <= 200
    assert (status == 0) == ("fuses. Every" in printed.out)
    assert "Traceback" not in printed.err
