"""`mla-fusion demo` and `mla-fusion check` end to end, on real vLLM engines."""

import ast
import json
import math
import shlex
from pathlib import Path

import pytest

from mla_fusion import cli, report, runtime
from mla_fusion.cli import child
from mla_fusion.cli.bisect import command as bisect
from mla_fusion.cli.demo import command as demo
from tests.command import run
from tests.nightly import daily

pytestmark = pytest.mark.engine
V3 = "deepseek-v3-shaped"
CONFIGS = Path(__file__).parent.parent / "configs"


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """One model of the demo: (whether it succeeded, its folder)."""
    out = tmp_path_factory.mktemp("demo")
    return demo.compare(out, names=[V3]), out


def test_the_demo_ends_with_a_command_that_shows_its_report(shown, tmp_path, capsys):
    demo.say_what_shows(shown[1])
    command = shlex.split(capsys.readouterr().out.partition(": ")[2])
    assert "3 MLA layers, 3 fused" in run(*command, cwd=tmp_path)
    assert "3 MLA layers, 3 fused" in run(*command[:-1], shown[1] / "report.json", cwd=tmp_path)


def test_the_demo_writes_what_fused(shown):
    succeeded, out = shown
    assert succeeded
    ranges = [
        {"range": [1, demo.MAX_NUM_SEQS], "layers": 3, "fused": 3, "declined": 0},
        {"range": [9, 2048], "layers": 3, "fused": 0, "declined": 0},
    ]
    said = {"name": V3, "tokens_equal": True, "ranges": ranges}
    assert json.loads((out / "tokens.json").read_text()) == {"models": [said]}


def planted(job, progress):
    """`child.generate`, where fused steps of layer 1 halve the prepared query."""
    original = runtime.fused_decode_prep

    def halve(q, kv_c, k_pe, prepared_q, *rest):
        original(q, kv_c, k_pe, prepared_q, *rest)
        if any(".1." in str(getattr(each, "value", "")) for each in rest):
            prepared_q.mul_(0.5)

    runtime.fused_decode_prep = halve
    return child.generate(job, progress)


@pytest.mark.nightly
def test_bisect_names_a_layer_that_is_wrong(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bisect, "_WORK", "tests.engine.test_cli_engine:planted")
    monkeypatch.setattr(bisect, "_LAYERS", 3)
    monkeypatch.setenv("PYTHONPATH", str(CONFIGS.parents[1]))
    assert cli.main(["bisect", "--out", str(tmp_path)]) == 1
    assert "\nlayer 1 is the first whose fusion changes an answer\n" in capsys.readouterr().out


def result(shown, flag):
    return json.loads((shown[1] / V3 / flag / "result.json").read_text())


def test_invariant_3_logprobs_are_bit_equal_in_decode_mixed_and_prefill_batches(shown):
    assert result(shown, "on")["logprobs"] == result(shown, "off")["logprobs"]


def test_the_tokens_of_the_demo_could_differ(shown):
    """A model that says the same whatever it reads, or knows nothing, would hide an error."""
    for made in (result(shown, "off"), result(shown, "on")):
        tokens, logprobs = made["tokens"], [x for prompt in made["logprobs"] for x in prompt]
        assert all(len(set(prompt)) > demo.NEW_TOKENS / 2 for prompt in tokens)
        assert len({tuple(prompt[-4:]) for prompt in tokens}) == len(demo.ARRIVALS)
        assert sum(logprobs) / len(logprobs) > -math.log(1024) / 2


def test_the_stored_graph_of_a_layer_shows_what_fused(shown, tmp_path, capsys):
    argv = ["report", str(shown[1] / "cache"), "--graph", "--html", str(tmp_path / "page.html")]
    assert cli.main(argv) == 0
    before, after = capsys.readouterr().out.split("after:\n")
    assert before.count("- unified_mla_kv_cache_update") == 1
    assert "fused_aiter_qk_rope_kvcache_q_concat_quant_mla" not in before
    own = [line for line in after.splitlines() if line.startswith("  * ")]
    assert [line.split(" = ")[1].split("(")[0] for line in own] == [
        "fused_aiter_qk_rope_kvcache_q_concat_quant_mla",
        "mla_attention_with_prepared_query",
    ]
    assert "bf16[T, 4, 576]" in own[0]
    page = (tmp_path / "page.html").read_text()
    assert "3 of 3 MLA layers of the decode graphs fused" in page


def test_check_dumps_graphs_and_compiles_what_a_cpu_cannot_run(shown, tmp_path, capsys):
    """Readable Python before and after the passes, for a bucket widened by draft tokens."""
    model, dump = shown[1] / V3 / "model", tmp_path / "dump"
    argv = ["check", str(model), "--max-num-seqs", "4", "--speculative-tokens", "2"]
    argv += ["--tensor-parallel-size", "2", "--kv-cache-dtype", "fp8", "--dump", str(dump)]
    assert cli.main(argv) == 0
    text, progress = capsys.readouterr()
    assert "fuses. Every MLA layer, in graphs for 1 to 12 tokens" in text.splitlines()[0]
    assert "generates no token" in progress
    stored = report.load(dump / "report.json").lines()
    assert any("tokens 1 to 12: 2 MLA layers, 2 fused" in line for line in stored)
    calls = {
        "before": "torch.ops.vllm.unified_mla_attention_with_output",
        "after": "torch.ops.mla_fusion.fused_aiter_qk_rope_kvcache_q_concat_quant_mla",
    }
    graphs = {f"tokens_1_12.piece{n}.{stage}.py" for n in range(3) for stage in calls}
    assert {p.name for p in dump.iterdir()} == {*graphs, "report.json"}
    for name in graphs:
        tree = ast.parse((dump / name).read_text())
        [module] = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        assert module.name == "GraphModule"
        code = ast.unparse(module)  # without the comments, which quote vLLM's source
        assert {stage: code.count(op) for stage, op in calls.items()} == {
            # The last piece begins behind the last attention.
            stage: int(f".{stage}." in name and "piece2" not in name)
            for stage in calls
        }


HEADS = {"deepseek-v2-lite": 16, "glm-4.7-flash": 20, "longcat-flash": 64,
         "openpangu-ultra-moe": 128, "ring-2.5": 64, "sarvam-105b": 64, "deepseek-v3": 128,
         "kimi-k2": 64, "deepseek-v3-mtp": 128, "mistral-large-3": 128}  # fmt: skip


@pytest.mark.parametrize("name", daily(HEADS, "deepseek-v2-lite"))
def test_check_of_a_public_model(name, capfd):
    """Its config.json alone, on a CPU, without a network: an engine compiles it and generates."""
    assert cli.main(["check", str(CONFIGS / f"{name}.json"), "--json"]) == 0
    out, progress = capfd.readouterr()
    stages = ("checked as", "vLLM is imported", "the model is built", "graph for", "engine ready")
    assert all(stage in progress for stage in stages)
    said, drafts = json.loads(out), name == "deepseek-v3-mtp"
    assert said["checked_by"] == "engine" and said["tokens"] == [1, 512 if drafts else 256]
    assert set(said["backends"]) == {"nvidia", "amd"} and not said["reasons"]
    fused, layers = said["cut_model"].values()
    # Every layer of LongCat-Flash has two attentions; a draft head comes with its target's.
    assert fused == layers == (4 if name == "longcat-flash" else 2)
    details = "\n".join(said["details"])
    # vLLM's attention for CPUs cannot verify drafts, so that engine generates nothing.
    assert f"{HEADS[name]} heads" in details and ("4 tokens each" in details) != drafts
    assert ("--speculative-config" in said["commands"]["nvidia"]) == drafts
