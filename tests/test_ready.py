"""An engine's kernels are compiled ahead, and no step launches another one."""

import functools
import os
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from vllm.utils.torch_utils import _encode_layer_name

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.runtime import KernelInterface, driver
from triton.runtime.jit import JITFunction

from mla_fusion import report, runtime
from mla_fusion.config import Options
from mla_fusion.kernels import ahead, dispatch
from mla_fusion.kernels.dispatch import Plan, Row, Widths
from mla_fusion.ops import Norm, Product, Quantization, Rope, Variant
from mla_fusion.projections import triton as projections
from mla_fusion.runtime import layer_state, projection, ready
from mla_fusion.runtime.output import QuantizedOutput
from tests.attention.decodes import BF16, FN, FP32
from tests.attention.without_memory import meta
from tests.gpus import imitate
from tests.passes.fake_engine import Impl, Layer
from tests.passes.graphs import Spec
from tests.prepared import attach
from tests.step import forward_pass

NAME, SEQUENCES, PAGE = "model.layers.0.attn", 64, 64
NOPE, ROPE, LATENT, VALUE = 128, 64, 512, 128
PREP = Widths(NOPE, ROPE, LATENT)
# Of DeepSeek-V2-Lite, and a router of GLM-4.7-Flash.
PRODUCTS = [Product(2048, (3072, 576)), Product(2048, (2048,)), Product(2048, (64,), 32)]
NORMS = [
    Norm((2048,), 3), Norm((2048,)), Norm((2048,), 2, kept=True), Norm((2048,), 3, one=True),
    Norm((1536, 512)),
]  # fmt: skip


@pytest.fixture
def compiled(monkeypatch):
    """(Name, variant) of each kernel that an imitated H200 is asked for; none is compiled."""
    found = set()

    def note(kernel, key, *args, **kwargs):
        found.add((kernel.__name__, key))

    def launch(kernel, grid):
        return functools.partial(kernel.warmup, grid=grid)

    monkeypatch.setattr(JITFunction, "_do_compile", note)
    monkeypatch.setattr(KernelInterface, "__getitem__", launch)
    imitate(monkeypatch, "sm_90", sms=132, name="NVIDIA H200")
    here = ahead.Target(GPUTarget("cuda", 90, 32))
    here.get_current_device = lambda: "made up"  # whose variants no other test finds
    monkeypatch.setattr(driver, "_active", here)
    monkeypatch.setenv("TRITON_CACHE_DIR", "unused")
    yield found
    report.forget()


def layer(heads, cache):
    """A layer without memory, whose cache vLLM has not allocated yet."""
    made = Layer(NAME, Spec())
    made.num_heads, made.kv_cache_dtype, made.impl = heads, cache, Impl(cache == "fp8")
    made.impl.scale, made._k_scale, made._q_scale = 0.1, meta(dtype=FP32), meta(dtype=FP32)
    made.kv_lora_rank, made.qk_rope_head_dim = LATENT, ROPE
    made.qk_nope_head_dim, made.v_head_dim = NOPE, VALUE
    made.W_UK_T, made.W_UV = meta(heads, NOPE, LATENT), meta(heads, VALUE, LATENT).transpose(1, 2)
    made.kv_cache = torch.empty(0)
    return made


def step(made, batch, length, kind):
    """A decode step as a model makes it: q and k_pe are parts of a product's result."""
    tokens, heads, name = batch * length, made.num_heads, _encode_layer_name(NAME)
    for of in PRODUCTS:
        dtype = FP32 if of.bits == 32 else BF16
        projection.project(meta(tokens, of.k), [meta(n, of.k, dtype=dtype) for n in of.sizes])
    for of in NORMS:
        xs = [meta(tokens, 2112)[:, :size] for size in of.sizes]
        norms = [meta(size) for size in of.sizes], [1e-6] * len(xs)
        types = [BF16, FP32 if of.one else BF16][3 - of.terms :]
        projections.normalize(
            xs, *norms, [meta(tokens, 2048, dtype=t) for t in types], 2.5, of.kept
        )
    lengths, table = meta(batch, dtype=torch.int32), meta(batch, 320, dtype=torch.int32)
    metadata = SimpleNamespace(
        num_actual_tokens=tokens, num_decode_tokens=tokens, max_query_len=length,
        query_start_loc=meta(SEQUENCES + 1, dtype=torch.int32),
        decode=SimpleNamespace(seq_lens=lengths, block_table=table),
    )  # fmt: skip
    q, kv = meta(tokens, heads, NOPE + ROPE), meta(tokens, LATENT + ROPE)
    prepared = meta(tokens, heads, LATENT + ROPE, dtype=layer_state.of(made).facts.query)
    output, quantized = meta(tokens, heads * VALUE), None
    if kind != "none":
        scale = meta(heads, tokens, dtype=FP32).t()
        quantized = QuantizedOutput(output.to(FN), scale, Quantization.GROUP)
    numbers = meta(tokens, dtype=torch.int64)
    with forward_pass({NAME: made}, metadata, numbers):
        runtime.fused_decode_prep(
            q, meta(tokens, LATENT), kv[:, None, LATENT:], prepared, numbers, meta(4096, ROPE),
            None, made._k_scale, name, made.kv_cache_dtype, Rope.NATIVE, False, "triton",
        )  # fmt: skip
        runtime._attention(q, prepared, kv, kv, output, name, quantized)


@pytest.mark.parametrize(
    "heads, cache, drafts, kind, decode",
    [
        (16, "fp8", 0, "none", "mla_decode_few_rows"), (8, "auto", 1, "none", "mla_decode_hopper"),
        (128, "fp8", 0, "group", "mla_decode_hopper_ws"),
    ],
)  # fmt: skip
def test_no_step_launches_what_was_not_compiled_ahead(
    compiled, monkeypatch, heads, cache, drafts, kind, decode
):
    made = layer(heads, cache)
    engine = attach({NAME: made}, Options("triton", "portable"), BF16, SEQUENCES, drafts, page=PAGE)
    query = str(layer_state.of(made).facts.query).removeprefix("torch.")
    variants = [Variant(False, ROPE, "bfloat16", query, cache)]
    graph = report.RangeReport(
        (1, engine.bucket), 1, 1, variants=variants, outputs={kind: 1},
        products=dict.fromkeys(PRODUCTS, 1), norms=dict.fromkeys(NORMS, 1),
    )  # fmt: skip
    # What `calibrate` measured here, which a process does not know.
    odd = Row("NVIDIA H200", "sm_90", cache == "fp8", PREP, heads, 64, Plan(block_m=32))
    monkeypatch.setattr(dispatch, "own", {})
    dispatch.prefer(odd.gpu, [odd])
    sent = []
    monkeypatch.setattr(ready, "compile_apart", lambda launches, device: sent.append(launches))
    config = SimpleNamespace(cache_config=SimpleNamespace(block_size=None))
    ready.compile_ahead(engine, config, 0)
    config.cache_config.block_size = PAGE
    for each in (replace(graph, range=(engine.bucket + 1, 8192)), graph, graph):
        report.add(each)
    ready.wait()
    assert len(sent) == 3  # products and norms together
    dispatch.prefer(odd.gpu, [])
    for launch in chain(*sent):
        launch()
    dispatch.prefer(odd.gpu, [odd])
    expected = set(compiled)
    names = {
        "mla_prep",
        "mla_plan",
        "mla_reduce",
        "mla_product",
        "vector",
        "matrix",
        "rms_norm",
        decode,
    }
    assert {name for name, _ in expected} == names
    made.kv_cache = meta(1000, PAGE, LATENT + ROPE, dtype=torch.uint8 if cache == "fp8" else BF16)
    for batch in range(1, SEQUENCES + 1):
        for length in range(1, 2 + drafts):
            step(made, batch, length, kind)
    assert compiled == expected
    dispatch.prefer(odd.gpu, [])


@pytest.fixture
def jobs(monkeypatch, tmp_path):
    """Launches that a process compiles, of which it says that it has no memory."""
    jobs = []

    def told(launches, device):
        jobs.append(launches)
        if len(jobs) > 1:
            raise OSError("no memory")
        return "status -9: no memory"

    monkeypatch.setattr(ready, "compile_apart", told)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    yield jobs
    report.forget()


@pytest.mark.parametrize("arch, rank, works", [("sm_90", 0, 2), ("sm_90", 1, 0), ("", 0, 0)])
def test_one_rank_of_a_host_compiles_in_the_folder_of_all(
    jobs, monkeypatch, tmp_path, caplog, arch, rank, works
):
    imitate(monkeypatch, "sm_90", name="NVIDIA H200")
    made = layer(16, "fp8")
    engine = attach({NAME: made}, Options("triton", "vllm"), BF16, page=PAGE)
    imitate(monkeypatch, arch, name="NVIDIA H200")
    ready.compile_ahead(engine, Mock(), rank)
    for found in (PRODUCTS[:1], PRODUCTS):
        report.add(report.RangeReport((1, 4), products=dict.fromkeys(found, 1)))
    ready.wait()
    assert len(jobs) == works == caplog.text.count("failed, ")
    folder = os.environ.get("TRITON_CACHE_DIR")
    assert folder == (str(report.folder(tmp_path) / "triton") if arch else None)
