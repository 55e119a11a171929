"""Who decodes a layer: the table of measurements, and what `attention=auto` comes to by it."""

import math
from types import SimpleNamespace

import figures
import pytest
import torch

from mla_fusion.config import Options, eligibility, vllm_compat
from mla_fusion.report.reasons import Decline
from mla_fusion.runtime import decode_choice, measured, step_plan

TYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
BACKENDS = {"bf16": ("fa3", "FLASH_ATTN_MLA"), "fp8": ("flashmla", "FLASHMLA")}
H200, AUTO = "NVIDIA H200", Options("triton")


def table(rows):
    """SEQUENCES by rows of `mla-fusion bench decode`: for each GPU, type, heads and query rows the
    longest run of batches that are not slower than the backend in the mean of their shapes, nor by
    more than MOST_LOST in one. Rows of the decode alone count only where none has the product too:
    a layer runs both."""
    alone, behind, found = {}, {}, {}
    for row in rows:
        # Older files are of one query row, and of the decode alone.
        key = row["gpu"], row["dtype"], int(row["heads"]), int(row.get("queries", 1))
        values = int(row.get("values", 0))
        shape = int(row["batch"]), row["context"], row["ragged"], values
        times = (behind if values else alone).setdefault(key, {}).setdefault(shape, {})
        times[row["candidate"]] = float(row["p50_us"])
    for (gpu, dtype, *shape), shapes in (alone | behind).items():
        peer, backend = BACKENDS[dtype]
        runs = [[]]
        for batch in sorted({batch for batch, *_ in shapes}):
            here = [us for (each, *_), us in shapes.items() if each == batch]
            ratios = [us[peer] / us["ours"] for us in here]
            if math.prod(ratios) < 1 or min(ratios) < 1 - measured.MOST_LOST:
                runs.append([])
            else:
                runs[-1].append(batch)
        longest = max(runs, key=len)
        found[gpu, TYPES[dtype], *shape, backend] = (longest[0], longest[-1]) if longest else None
    return found


def stored():
    """All rows of results that the table is of."""
    for path in (*figures.ATTENTION, *sorted(figures.RESULTS.glob("step*_h200.csv"))):
        yield from figures.read(path)


def test_the_table_is_what_the_rows_say():
    rows = list(stored())
    for row in rows:
        assert (int(row["latent"]), int(row["rope"])) == measured.WIDTHS
        assert int(row["page"]) == measured.PAGE
        assert row["candidate"] != "ours" or float(row["error"]) < 0.004
    assert table(rows) == measured.SEQUENCES


def test_query_rows_are_told_apart():
    """Each number of them has batches of its own; one without rows has none."""
    us = {
        1: {1: 1.0, 4: 1.0, 16: 1.0},
        2: {1: 1.0, 4: 1.03, 16: 1.0, 64: 0.9},
        4: {1: 1.0, 4: 1.0, 16: 1.03},
        8: {1: 1.03, 4: 1.03},
    }
    rows = [
        {"gpu": "G", "dtype": "bf16", "heads": "8", "queries": str(queries), "batch": str(batch),
         "context": "70", "ragged": "0", "candidate": name, "p50_us": str(time)}
        for queries, batches in us.items() for batch, ours in batches.items()
        for name, time in (("ours", ours), ("fa3", 1.0))
    ]  # fmt: skip
    key = "G", torch.bfloat16, 8
    found = (1, (1, 16)), (2, (16, 64)), (4, (1, 4)), (8, None)
    wanted = {(*key, n, "FLASH_ATTN_MLA"): most for n, most in found}
    assert table(rows) == wanted


def test_a_step_may_lose_in_one_context_what_it_gains_in_the_mean():
    times = {1: (0.8, 1.07), 2: (0.8, 1.09), 4: (1.01, 1.0), 8: (0.99, 1.0)}
    rows = [
        {"gpu": "G", "dtype": "fp8", "heads": "8", "batch": str(batch), "context": str(context),
         "ragged": "0", "candidate": name, "p50_us": str(us)}
        for batch, ours in times.items() for context, time in enumerate(ours)
        for name, us in (("ours", time), ("flashmla", 1.0))
    ]  # fmt: skip
    of_one = [row for row in rows if row["batch"] in "12"]
    key = "G", torch.float8_e4m3fn, 8, 1, "FLASHMLA"
    assert table(of_one) == {key: (1, 1)} and table(rows[4:]) == {key: (8, 8)}


def test_rows_with_the_product_decide_where_there_are_some():
    """For each width of W_UV; the range may begin and end anywhere."""

    def rows(heads, values, times):
        shared = {"gpu": "G", "dtype": "fp8", "heads": heads, "context": "70", "ragged": "0"}
        return [
            {**shared, **values, "batch": str(batch), "candidate": name, "p50_us": str(us)}
            for batch, time in times.items()
            for name, us in (("ours", time), ("flashmla", 1.0))
        ]

    every = [
        *rows("8", {}, {1: 1.5, 4: 1.5, 16: 1.5}),
        *rows("8", {"values": "128"}, {1: 1.5, 2: 0.9, 4: 1.0, 16: 1.0, 32: 1.5}),
        *rows("8", {"values": "256"}, {1: 0.9, 2: 0.9, 4: 1.0, 16: 1.5}),
        *rows("16", {}, {1: 0.9, 4: 1.5}),
        *rows("32", {"values": "0"}, {1: 1.5, 4: 0.9}),
    ]
    found = {heads: span for (_, _, heads, *_), span in table(every).items()}
    assert found == {8: (2, 4), 16: (1, 1), 32: (4, 4)}
    assert table(reversed(every)) == table(every)


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.setattr(vllm_compat, "gpu_name", lambda: H200)
    monkeypatch.setattr(vllm_compat, "is_hopper", lambda: True)
    monkeypatch.setattr(measured, "triton_version", lambda: (3, 6))
    facts = {"found": eligibility.LayerFacts(None, quantized_query=False)}
    monkeypatch.setattr(eligibility, "facts", lambda *_: facts["found"])
    return facts


def layer(heads=16, backend="FLASH_ATTN_MLA", widths=(512, 64)):
    return SimpleNamespace(
        num_heads=heads,
        kv_lora_rank=widths[0],
        qk_rope_head_dim=widths[1],
        attn_backend=SimpleNamespace(get_name=lambda: backend),
    )


def engine(seqs=256, drafts=0, dcp=1, ubatching=False, page=64, cache="auto", options=None,
           latent=512):  # fmt: skip
    model = SimpleNamespace(
        dtype=torch.bfloat16,
        get_num_attention_heads=lambda parallel: 16,
        hf_text_config=SimpleNamespace(kv_lora_rank=latent, qk_rope_head_dim=64),
    )
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=seqs),
        speculative_config=SimpleNamespace(num_speculative_tokens=drafts) if drafts else None,
        parallel_config=SimpleNamespace(decode_context_parallel_size=dcp, use_ubatching=ubatching),
        cache_config=SimpleNamespace(
            block_size=page, user_specified_block_size=False, cache_dtype=cache
        ),
        model_config=model,
        device_config=SimpleNamespace(device_type="cpu"),
        additional_config={"mla_fusion": options or {}},
    )


@pytest.mark.parametrize("triton, sequences", [((3, 8), 256), ((3, 9), 0)])
def test_a_kernel_that_has_not_run_with_this_triton_is_left_out(
    h200, monkeypatch, triton, sequences
):
    monkeypatch.setattr(measured, "triton_version", lambda: triton)
    choice = decode_choice.choose(layer(heads=64), AUTO, engine())
    assert choice.sequences == sequences
    named = "FLASH_ATTN_MLA (auto: the kernel for 64 heads has not run with Triton 3.9)"
    assert sequences or choice.why == named
    assert measured.is_listed(H200, torch.bfloat16, 64, 1) == bool(sequences)
    assert measured.is_listed(H200, torch.bfloat16, 16, 4) == bool(sequences)
    assert decode_choice.choose(layer(heads=32), AUTO, engine()).sequences == 256


def test_auto_is_ours_where_it_was_measured(h200):
    choice = decode_choice.choose(layer(), AUTO, engine())
    assert (choice.planner, choice.sequences) == ("portable", 256)
    assert choice.why == "portable up to 256 sequences (auto: as measured)"
    choice = decode_choice.choose(layer(heads=20), AUTO, engine())
    assert (choice.planner, choice.sequences) == ("portable", 128)
    assert "up to 128 sequences, FLASH_ATTN_MLA beyond" in choice.why


@pytest.mark.parametrize(
    ("of_layer", "of_engine", "why"),
    [
        ({"heads": 24}, {}, "FLASH_ATTN_MLA (auto: not measured against it with 24 heads in bfl"),
        ({"backend": "TRITON_MLA"}, {}, "TRITON_MLA (auto: not measured against it with 16 heads "),
        ({"widths": (256, 64)}, {}, "not measured with 256 + 64"),
        ({}, {"drafts": 2}, "not measured against it with 16 heads x 3 query rows in bfloat16)"),
        ({}, {"dcp": 2}, "ranks share the cache"),
        ({}, {"ubatching": True}, "microbatches"),
        ({}, {"page": 16}, "not measured with pages of 16 tokens"),
    ],
)
def test_auto_is_vllms_elsewhere_and_says_why(h200, of_layer, of_engine, why):
    one, config = layer(**of_layer), engine(**of_engine)
    choice = decode_choice.choose(one, AUTO, config)
    assert not choice.planner and why in choice.why


def test_auto_leaves_a_layer_that_the_portable_decode_cannot_serve(h200):
    h200["found"] = eligibility.LayerFacts(Decline("portable-attention", "a sliding window"), False)
    choice = decode_choice.choose(layer(), AUTO, engine())
    assert not choice.planner and "a sliding window" in choice.why


def test_an_fp8_query_has_rows_of_its_own(h200, monkeypatch):
    monkeypatch.setattr(vllm_compat, "fp8_dtype", lambda: torch.float8_e4m3fn)
    h200["found"] = eligibility.LayerFacts(None, quantized_query=True)
    assert decode_choice.choose(layer(backend="FLASHMLA"), AUTO, engine()).planner == "portable"
    slower = decode_choice.choose(layer(64, "FLASHMLA"), AUTO, engine(seqs=64))
    slow = "FLASHMLA (auto: measured slower than it with 64 heads in float8_e4m3fn)"
    assert (slower.planner, slower.why) == ("", slow)
    many = decode_choice.choose(layer(128, "FLASHMLA"), AUTO, engine())
    assert many.why == "portable from 32 to 256 sequences, FLASHMLA else (auto: as measured)"


def test_drafts_have_rows_of_their_own(h200, monkeypatch):
    """A table with 4 query rows: steps with 3 drafts are ours up to its batch, others are not."""
    key = H200, torch.bfloat16, 16, 4, "FLASH_ATTN_MLA"
    monkeypatch.setattr(measured, "SEQUENCES", measured.SEQUENCES | {key: (1, 32)})
    choice = decode_choice.choose(layer(), AUTO, engine(drafts=3))
    assert (choice.planner, choice.sequences) == ("portable", 32)
    assert not decode_choice.choose(layer(), AUTO, engine(drafts=2)).planner
    for drafts, page in ((3, 64), (2, 16)):
        config = engine(page=16, drafts=drafts, options={"provider": "triton"})
        decode_choice.choose_page(config)
        assert config.cache_config.block_size == page


def test_fewer_sequences_than_ours_pays_with_are_vllms(h200, monkeypatch):
    key = H200, torch.bfloat16, 16, 1, "FLASH_ATTN_MLA"
    monkeypatch.setattr(measured, "SEQUENCES", {key: (16, 1024)})
    choice = decode_choice.choose(layer(), AUTO, engine())
    assert (choice.planner, choice.least, choice.sequences) == ("portable", 16, 256)
    assert (
        choice.why == "portable from 16 to 256 sequences, FLASH_ATTN_MLA else (auto: as measured)"
    )
    assert not decode_choice.choose(layer(), AUTO, engine(seqs=8)).planner


def test_a_gpu_without_measurements_keeps_vllms_decode_silently(monkeypatch):
    for name in ("NVIDIA H100 80GB HBM3", ""):
        monkeypatch.setattr(vllm_compat, "gpu_name", lambda name=name: name)
        assert decode_choice.choose(layer(), AUTO, engine()) == decode_choice.Choice()


@pytest.mark.parametrize(("attention", "planner"), [("portable", "portable"), ("vllm", "")])
def test_an_operator_forces_either(h200, attention, planner):
    choice = decode_choice.choose(layer(24), Options("triton", attention), engine(seqs=2000))
    assert (choice.planner, choice.why) == (planner, "")
    assert choice.sequences == (2000 if planner else 0)


def test_the_report_names_who_decodes_once(h200, monkeypatch):
    """By the choices that were made, whatever would be chosen now; a layer without one has none."""
    layers = {"a": layer(), "b": layer(), "c": layer(heads=24)}
    for one in layers.values():
        setattr(one, decode_choice.ATTRIBUTE, decode_choice.choose(one, AUTO, engine()))
    monkeypatch.setattr(vllm_compat, "gpu_name", lambda: "")
    never = {"never chosen": layer(heads=40)}
    found = decode_choice.described(layers | never, AUTO)
    assert found.count("portable") == 1 and "24 heads" in found and "40 heads" not in found
    assert decode_choice.described(never, AUTO) == "auto"
    assert decode_choice.described(never, Options("triton", "vllm")) == "vllm"


@pytest.mark.parametrize(
    ("options", "changes", "page"),
    [
        ({}, {}, 64),
        ({}, {"cache": "fp8"}, 64),
        ({}, {"drafts": 1}, 64),
        ({}, {"drafts": 2}, 16),
        ({}, {"dcp": 2}, 16),
        ({}, {"latent": 256}, 16),
        ({"attention": "vllm"}, {}, 16),
        ({"attention": "portable"}, {"drafts": 1}, 64),
    ],
)
def test_a_page_holds_a_tile_where_the_portable_decode_may_run(h200, options, changes, page):
    config = engine(page=16, options={"provider": "triton", **options}, **changes)
    decode_choice.choose_page(config)
    assert config.cache_config.block_size == page
    chosen = engine(page=16, options={"provider": "triton", "attention": "portable"})
    chosen.cache_config.user_specified_block_size = True
    decode_choice.choose_page(chosen)
    assert chosen.cache_config.block_size == 16


def test_a_larger_step_than_was_measured_is_left_to_the_backend():
    plan = SimpleNamespace(
        settings=SimpleNamespace(max_batch=4, max_query_len=1, num_heads=2, v_head_dim=8),
        planner=SimpleNamespace(PROVIDERS=("triton",)),
        device="cpu",
    )

    def step(sequences):
        lens = torch.ones(sequences, dtype=torch.int32)
        return SimpleNamespace(max_query_len=1, decode=SimpleNamespace(seq_lens=lens))

    limited = step_plan.StepPlan(plan, torch.bfloat16, most=4)
    assert limited.serves(step(4)) and not limited.serves(step(5))
    several = step_plan.StepPlan(plan, torch.bfloat16, most=4, least=2)
    assert several.serves(step(2)) and not several.serves(step(1))
    assert step_plan.StepPlan(plan, torch.bfloat16).serves(step(5))
