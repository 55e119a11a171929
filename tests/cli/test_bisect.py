"""`mla-fusion bisect`: the search by answers that are given, and what it refuses."""

import json

import pytest

from mla_fusion import cli, config
from mla_fusion.cli import child
from mla_fusion.cli.bisect import command
from mla_fusion.report import RangeReport, Report
from mla_fusion.report.reasons import Decline

FUSED = Report("reference", 8, [RangeReport((1, 8), 27, 27)])
UNFUSED = Report("reference", 8, [RangeReport((1, 8), 27, declined={Decline("shape"): 27})])


@pytest.fixture
def bisect(monkeypatch, tmp_path):
    """bisect(wrong layer, words) -> (exit status, the jobs that ran): from that layer on the second
    prompt's third token is another."""
    monkeypatch.setattr(command.tiny_models, "write", lambda name, folder, **layers: folder)

    def run(wrong, *words, report=FUSED):
        jobs = []

        def answer(job, progress):
            jobs.append(job)
            layers = job.engine["additional_config"][config.OPTIONS_KEY].get("layers", "0-99")
            last = int(layers.removeprefix("0-")) if layers.startswith("0-") else -1
            tokens = [[1, 2, 3], [4, 5, 7 if wrong is not None and last >= wrong else 6]]
            return child.Outcome(tokens, [[-0.5] * 3] * 2, [], report, 27)

        monkeypatch.setattr(child, "run", answer)
        return cli.main(["bisect", "--out", str(tmp_path / "out"), *words]), jobs

    return run


@pytest.mark.parametrize("wrong", range(27))
def test_the_first_wrong_layer_is_named(bisect, wrong, capsys):
    status, jobs = bisect(wrong)
    named, where = capsys.readouterr().out.splitlines()[-2:]
    assert (status, named) == (1, f"layer {wrong} is the first whose fusion changes an answer")
    assert where == "  prompt 1, new token 2: token 6 (log-probability -0.500) becomes token 7 " \
                    "(log-probability -0.500)"  # fmt: skip
    assert len(jobs) <= 7 and len({job.workdir for job in jobs}) == len(jobs)


@pytest.mark.parametrize("wrong, status, said, runs", [
    (27, 1, "a draft layer, or a product behind the last attention", 6),
    (None, 0, "no layer changes an answer: 2 prompts, 27 layers fused", 2),
])  # fmt: skip
def test_no_layer_of_the_model_is_wrong(bisect, wrong, status, said, runs, capsys):
    found, jobs = bisect(wrong)
    assert (found, len(jobs)) == (status, runs) and said in capsys.readouterr().out


def test_nothing_fused_says_why(bisect, capsys):
    status, jobs = bisect(0, report=UNFUSED)
    assert (status, len(jobs)) == (2, 1)
    assert "no layer fused: q, k_pe or kv_c has a shape" in capsys.readouterr().err


def test_a_model_and_prompts_of_the_user(bisect, tmp_path):
    """Options of both sides are kept; the sizes hold the longest prompt."""
    file, given = (
        tmp_path / "prompts",
        {"additional_config": {config.OPTIONS_KEY: {"attention": "vllm"}}},
    )
    file.write_text("[1, 2]\n\n" + json.dumps([7] * 300))
    words = "--model", "m", "--prompts", str(file), "--provider", "triton", "--new-tokens", "9"
    _, [every, first] = bisect(None, *words, "--engine-args", json.dumps(given | {"seed": 3}))
    assert first.prompts == [(0, [1, 2]), (0, [7] * 300)] and first.new_tokens == 9
    sizes = {
        name: first.engine[name] for name in ("model", "max_num_seqs", "max_model_len", "seed")
    }
    assert sizes == {"model": "m", "max_num_seqs": 2, "max_model_len": 309, "seed": 3}
    chosen = {"provider": "triton", "attention": "vllm"}
    options = [job.engine["additional_config"][config.OPTIONS_KEY] for job in (first, every)]
    assert options == [chosen | {"layers": command._NONE}, chosen]


@pytest.mark.parametrize("words, text, said", [
    (["--model", "m"], "", "--model needs --prompts"),
    (["--prompts", "{}"], None, "cannot read --prompts"),
    (["--prompts", "{}"], "\n", "has no prompt"),
    (["--prompts", "{}"], "hello", "prompt 1: text needs --model's tokenizer"),
    (["--prompts", "{}"], '[1]\n["a"]', "prompt 2: no list of token ids"),
    (["--prompts", "{}"], "[1", "prompt 1: no list of token ids"),
])  # fmt: skip
def test_refused(bisect, words, text, said, tmp_path, capsys):
    file = tmp_path / "prompts"
    if text is not None:
        file.write_text(text)
    status, jobs = bisect(0, *(word.format(file) for word in words))
    assert (status, jobs) == (2, []) and said in capsys.readouterr().err
