"""What the flag does with VLLM_BATCH_INVARIANT=1: one decode in every step, and nothing else."""

from types import SimpleNamespace

import pytest
import torch

from mla_fusion import report
from mla_fusion.attention.plan import buffers
from mla_fusion.config import Options, eligibility, vllm_compat
from mla_fusion.plugin import workers
from mla_fusion.report.reasons import Decline
from mla_fusion.runtime import decode_choice, layer_state
from tests.passes.graphs import LATENT
from tests.test_step_plan import SPEC, Engine, query

BACKEND = SimpleNamespace(get_name=lambda: "ITS")


@pytest.fixture(autouse=True)
def invariant(monkeypatch):
    monkeypatch.setattr(vllm_compat, "is_batch_invariant", lambda: True)


@pytest.mark.parametrize(
    ("heads", "rows", "sequences", "context", "chunks"),
    [
        (16, 1, 256, 131072, (256, 512, 1024)), (128, 1, 64, 131072, (256, 1024, 2048)),
        (128, 1, 256, 131072, (256, 1024, 8192)), (16, 4, 256, 131072, (256, 512, 4096)),
        (128, 4, 1024, 4096, (4096, 16384, 65536)), (128, 4, 4096, 4096, ()),
    ],
)  # fmt: skip
def test_chunks_grow_until_their_partial_rows_fit(heads, rows, sequences, context, chunks):
    assert decode_choice.chunks_of(heads, rows, sequences, context) == chunks
    if chunks:
        settings = {"q_dtype": torch.bfloat16, "kv_dtype": torch.bfloat16, "device": "meta"}
        settings |= {"max_batch": sequences, "max_query_len": rows, "num_heads": heads, "ctas": 9}
        rules = buffers.Settings(
            **settings, max_kv_len=context, batch_invariant=True, chunks=chunks
        ).rules(1)
        splits = len(rules.cuts(context)) * sequences * rows * heads
        assert splits * 513 * 4 <= decode_choice.MOST_PARTIALS


def test_a_layer_without_a_plan_stays_with_its_backend_and_the_log_says_why():
    engine = Engine(change={"sliding_window": 128, "attn_backend": BACKEND})
    with_window, plain = (layer_state.of(layer) for layer in engine.layers.values())
    assert with_window.plan is None and "a sliding window" in with_window.choice.why
    assert "forward_mqa" not in vars(engine.layers["a"].impl)
    assert plain.facts.decline == Decline("batch-invariant") and plain.plan.executor == "reference"
    many = SimpleNamespace(num_heads=128, attn_backend=BACKEND, kv_lora_rank=512,
                           qk_rope_head_dim=64)  # fmt: skip
    sizes = SimpleNamespace(batch_invariant=True, rows=4, sequences=4096, context=4096,
                            options=Options("triton"), page=64, cache="auto")  # fmt: skip
    sizes.measured = SimpleNamespace(why_not_run="{} has not run with Triton 9".format)
    choice = decode_choice.choose(many, sizes, plain.facts)
    assert choice.why.startswith("ITS (") and "partial rows would fill" in choice.why
    sizes.sequences = 4
    assert "('float32', 128, 4) has not run" in decode_choice.choose(many, sizes, plain.facts).why
    sizes.cache = "fp8"  # vLLM's one backend there, TRITON_MLA, takes no fp8 query
    assert "a cache in fp8" in decode_choice.choose(many, sizes, plain.facts).why
    sizes.options = Options("triton", "portable")
    assert decode_choice.choose(many, sizes, plain.facts).planner == "portable"


def test_decode_rows_of_a_mixed_step_have_the_bits_of_a_decode_only_step():
    """vLLM's backend hands over latents and rotated part apart, or joined in fp8."""
    engine = Engine(drafts=1, context=9)
    layer = engine.layers["a"]
    attend = layer.impl.forward_mqa  # Impl's own raises
    decodes = engine.metadata([2, 1], [8, 5])
    decodes.num_prefills = 0
    decodes.decode.block_table = decodes.decode.block_table[:2]
    mixed = SimpleNamespace(**vars(decodes))
    mixed.num_prefills, mixed.max_query_len, mixed.num_actual_tokens = 1, 40, 43
    mixed.query_start_loc = torch.tensor([0, 2, 3, 43], dtype=torch.int32)
    q, found = query(3), []
    for metadata, given in ((decodes, q), (mixed, q.split([LATENT, q.shape[-1] - LATENT], -1))):
        with engine.step(metadata):
            latents, lse = attend(given, layer.kv_cache, metadata, layer)
            found.append(latents.clone())
            assert lse is None and latents.dtype == SPEC.dtype
    assert torch.equal(*found) and found[0].any(2).all()
    decodes.max_query_len = 3
    with engine.step(decodes), pytest.raises(RuntimeError, match="a decode of 3 tokens, planned"):
        attend(q, layer.kv_cache, decodes, layer)


def test_short_prompts_are_prefills(monkeypatch):
    """FLASH_ATTN_MLA takes prompts of up to 512 tokens for decodes."""
    built = []
    for is_invariant in (True, False):
        monkeypatch.setattr(vllm_compat, "is_batch_invariant", lambda to=is_invariant: to)
        engine, builder = Engine(drafts=1), SimpleNamespace(reorder_batch_threshold=512)
        context = SimpleNamespace(static_forward_context=engine.layers)
        config = SimpleNamespace(compilation_config=context)
        workers._init_builder(lambda *_: None, builder, None, ["a"], config)
        built.append(builder.reorder_batch_threshold)
    assert built == [2, 512]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None), ({"arch": "sm_100", "attention": "portable"}, None),
        ({"arch": "sm_100"}, "attention=auto, not measured on this GPU"),
        ({"attention": "vllm"}, "attention=vllm"), ({"provider": "aiter"}, "provider=aiter"),
        ({"ranks": 2}, "context parallelism"), ({"ubatching": True}, "microbatches"),
    ],
)  # fmt: skip
def test_engines_that_are_declined(monkeypatch, changes, why):
    given = {"arch": "sm_90", "attention": "auto", "provider": "triton", "ranks": 1} | changes
    monkeypatch.setattr(vllm_compat, "gpu_arch", lambda: given["arch"])
    parallel = SimpleNamespace(decode_context_parallel_size=given["ranks"],
                               use_ubatching=given.get("ubatching", False))  # fmt: skip
    config = SimpleNamespace(parallel_config=parallel,
                             device_config=SimpleNamespace(device_type="cpu"))  # fmt: skip
    options = Options(given["provider"], given["attention"])
    decline = eligibility._why_not_invariant(config, options)
    assert (decline and (decline.detail or decline.code)) == why


@pytest.mark.parametrize(
    ("attention", "level", "said"),
    [("portable in every step", "INFO", "2 MLA layers, attention portable in every step; graphs"),
     ("ITS (too new)", "WARNING", "is on and fused none of 2 MLA layers: ITS (too new)")],
)  # fmt: skip
def test_the_log_says_who_decodes(vllm_loggers, caplog, attention, level, said):
    caplog.set_level("INFO")
    kept = report.RangeReport((1, 8), 2, declined={Decline("batch-invariant"): 2})
    report.publish(report.Report("triton", 8, [kept], attention=attention), "V3", cached=False)
    [record] = caplog.records
    assert record.levelname == level and said in record.getMessage()
