"""`mla-fusion check`: which decode goes with a model, asked without an engine."""

import json
import shlex

import pytest

from mla_fusion import cli, report
from mla_fusion.cli import child
from mla_fusion.cli.check import command as check
from mla_fusion.cli.check import persistent_decode
from tests.cli.test_check import V3, asked
from tests.cli.test_check_configs import cut_of
from tests.models import write

MANY = {**V3, "num_attention_heads": 128}


def test_check_says_on_which_gpu_aiter_decodes(monkeypatch, tmp_path, capsys):
    """The engine on the CPU, which has no AITER, runs as with attention=auto."""
    write(tmp_path, MANY)
    ran = report.Report("reference", 256, [report.RangeReport((1, 256), layers=2, fused=2)])
    monkeypatch.setattr(check, "_ask_engine", lambda *given: child.Outcome([], [], [], ran))
    argv = ["check", str(tmp_path), "--attention", "aiter", "--kv-cache-dtype", "fp8"]
    assert cli.main(argv) == 0
    fuses, platform, command, *notes = capsys.readouterr().out.splitlines()
    assert "fuses" in fuses and platform.endswith("attention backend ROCM_AITER_MLA:")
    [words] = [shlex.split(command)]
    given = json.loads(words[words.index("--additional-config") + 1])
    assert given == {"mla_fusion": {"attention": "aiter"}}
    assert notes == [
        "  gfx942: fp8 with 128 heads faults on gfx942 (vllm-project/vllm#43067)",
        "  gfx950: 128 heads as 1 x 128",
    ]
    assert cli.main([*argv, "--tensor-parallel-size", "8", "--speculative-tokens", "2"]) == 0
    assert "gfx942: 16 heads as 1 x 16" in capsys.readouterr().out
    argv = ["check", str(tmp_path), "--attention", "aiter", "--tensor-parallel-size", "16"]
    for sequences, slow in ((31, False), (32, True)):
        assert cli.main([*argv, "--max-num-seqs", str(sequences)]) == 0
        said = capsys.readouterr().out
        named = "gfx950: 8 heads as 1 x 16; vLLM's backend for 32 sequences or more (by AITER's"
        assert (named in said) == slow and said.count("vLLM's backend for") == slow


@pytest.mark.parametrize(
    "changes, argv, said",
    [
        ({"kv_lora_rank": 256}, ("aiter",), "latents of 512 and 64 rotated, got 256 and 64"),
        ({}, ("aiter", "--speculative-tokens", 4), "128 heads, gfx942 has no persistent bf16"),
        ({"kv_lora_rank": 2048}, ("portable",), "triton: "),
    ],
)
def test_check_needs_no_engine_to_say_that_no_gpu_decodes(changes, argv, said, tmp_path, capsys):
    write(tmp_path, {**MANY, **changes})
    assert cli.main(["check", str(tmp_path), "--attention", *map(str, argv)]) == 1
    out = capsys.readouterr().out
    assert said in out and f"[{argv[0]}-attention]" in out


def test_check_names_the_epilogue_of_the_portable_decode():
    assert persistent_decode.ask(asked("m", "--attention", "portable"), cut_of(MANY)) == [
        "  epilogue of the decode: product with W_UV"
    ]


@pytest.mark.parametrize(
    "quantization, said",
    [
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            "on Hopper with VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER=0",
        ),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "o_proj: in the epilogue"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "the server's report says"),
        ({"quant_method": "compressed-tensors"}, "the server's report says"),
    ],
)
def test_check_names_the_quantization_in_front_of_o_proj(quantization, said):
    cut = cut_of({**MANY, "quantization_config": quantization})
    assert "quantization_config" not in cut.config
    _, note = persistent_decode.ask(asked("m", "--attention", "portable"), cut)
    assert note.startswith("  quantization in front of o_proj: ") and said in note
    assert not persistent_decode.ask(asked("m"), cut)


@pytest.mark.parametrize(
    "attention, platforms, aiters", [("auto", 2, True), ("portable", 2, False), ("aiter", 1, True)]
)
def test_check_names_the_backends_that_go_with_the_decode(attention, platforms, aiters):
    cut = cut_of(MANY, ranks=8)
    settings = asked("m", "--attention", attention)
    found = check._backends(settings, cut, "DeepseekV3ForCausalLM")
    assert (len(found), any("AITER" in name for name in found["amd"])) == (platforms, aiters)
