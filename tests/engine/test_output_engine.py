"""The quantization in front of o_proj in a real engine on a CPU, from a checkpoint with static fp8.

vLLM's CPU build multiplies such an o_proj by `torch._scaled_mm` and quantizes its input in aten
ops, as on a GPU without `+quant_fp8`. Its loader wants the op of a GPU, of which
tests/passes/linears.py has a body. It has no block-fp8 product with a quantization in the graph.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mla_fusion import ops
from mla_fusion.cli.demo import tiny_models
from tests.engine.test_engine import FLAG, job, prefill_range, run  # noqa: F401  a fixture

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


def quantize(folder):
    """Give every o_proj of the model in `folder` fp8 weights and one scale for its input."""
    [path] = folder.glob("*.safetensors")
    tensors, plain = load_file(path), set()
    for name in [n for n in tensors if n.endswith("proj.weight") or "kv_a_proj" in n]:
        layer = name.removesuffix(".weight")
        if not layer.endswith("o_proj"):
            plain.add(layer)
            continue
        weight = tensors[name].float()
        scale = weight.abs().max() / 448
        tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
        tensors[f"{layer}.weight_scale"] = scale
        tensors[f"{layer}.input_scale"] = torch.tensor(0.02)
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "ignored_layers": sorted(plain | {"lm_head"}),
    }
    (folder / "config.json").write_text(json.dumps(config))


def test_a_static_fp8_checkpoint(tmp_path, job):  # noqa: F811
    """Prefill is vLLM's to the bit; decode steps quantize in the epilogue."""
    model = tiny_models.write("deepseek-v2-shaped", tmp_path / "model")
    quantize(model)
    off, on = (
        run(job({"fp8_ops": True, **flag}, "bfloat16", model=str(model)))
        for flag in ({}, FLAG | {"attention": "portable"})
    )
    graph = on["graphs"]["1-4"]
    assert graph.count(f"{ops.TENSOR_ATTENTION}.default(") == 3
    assert ops.ATTENTION not in graph and "aten.reciprocal" not in graph
    assert on["graphs"][prefill_range(on)].count("aten.reciprocal") == 3
    assert on["tokens"] == off["tokens"]
    for ours, theirs in zip(on["logprobs"], off["logprobs"], strict=True):
        assert ours[0] == theirs[0]  # of the prefill
        # Twice that of bf16 in test_engine.py: a sum in another order may move an fp8 value.
        assert ours == pytest.approx(theirs, abs=1e-1)
