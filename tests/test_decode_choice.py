import dataclasses
import json
import os
from types import SimpleNamespace

import pytest
import torch

from mla_fusion.attention.aiter import planner
from mla_fusion.attention.plan.buffers import Settings
from mla_fusion.config import THRESHOLD, Options, eligibility, identity, vllm_compat
from mla_fusion.plugin import workers
from mla_fusion.report.reasons import Decline
from mla_fusion.runtime import decode_choice, layer_state, measured, measured_here, step_plan
from mla_fusion.runtime.decode_choice import Choice
from mla_fusion.runtime.engine import Engine
from tests.gpus import imitate

H200, AUTO = "NVIDIA H200", Options("triton")
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
KEY = "bfloat16", 16, 1, "FLASH_ATTN_MLA"


def forget():
    for cached in (measured.spans, measured._shipped, measured._own):
        cached.cache_clear()


@pytest.fixture
def h200(monkeypatch, tmp_path):
    monkeypatch.setattr(vllm_compat, "cache_root", lambda: tmp_path)
    monkeypatch.setattr(measured, "triton_version", lambda: (3, 6))
    forget()
    monkeypatch.setattr(vllm_compat, "fp8_dtype", lambda: torch.float8_e4m3fn)
    monkeypatch.setattr(vllm_compat, "gpu_name", lambda: H200)
    monkeypatch.setattr(vllm_compat, "gpu_arch", lambda: "sm_90")
    facts = {"found": eligibility.LayerFacts(None, BF16, BF16, BF16)}
    monkeypatch.setattr(eligibility, "facts", lambda *_: facts["found"])
    return facts


def choose(layer, options, config):
    """The choice for a layer of the engine that a worker makes of vLLM's config."""
    made = dataclasses.replace(Engine.of(config), options=options)
    return decode_choice.choose(layer, made, eligibility.facts())


def layer(heads=16, backend="FLASH_ATTN_MLA", latent=512):
    return SimpleNamespace(
        kv_cache_dtype="auto", _k_scale=torch.ones(1), num_heads=heads, kv_lora_rank=latent,
        qk_rope_head_dim=64, attn_backend=SimpleNamespace(get_name=lambda: backend),
    )  # fmt: skip


def step(sequences, rows=1):
    lens = torch.ones(sequences, dtype=torch.int32)
    return SimpleNamespace(max_query_len=rows, decode=SimpleNamespace(seq_lens=lens))


def engine(seqs=256, drafts=0, dcp=1, ubatching=False, page=64, cache="auto", options=None,
           latent=512):  # fmt: skip
    sizes = SimpleNamespace(kv_lora_rank=latent, qk_rope_head_dim=64)
    model = {"dtype": torch.bfloat16, "max_model_len": 131072, "hf_text_config": sizes,
             "architecture": "V3", "get_num_attention_heads": lambda parallel: 16}  # fmt: skip
    configs = {
        "scheduler": {"max_num_seqs": seqs, "max_num_batched_tokens": 8192},
        "speculative": {"num_speculative_tokens": drafts},
        "parallel": {"decode_context_parallel_size": dcp, "use_ubatching": ubatching},
        "cache": {"block_size": page, "user_specified_block_size": False, "cache_dtype": cache},
        "model": model,
        "device": {"device_type": "cpu"},
    }
    made = {f"{name}_config": SimpleNamespace(**fields) for name, fields in configs.items()}
    made["compilation_config"] = SimpleNamespace(
        pass_config=None, cudagraph_capture_sizes=[], static_forward_context={}
    )
    return SimpleNamespace(additional_config={"mla_fusion": options or {}}, **made)


@pytest.mark.parametrize("triton, sequences", [((3, 8), 256), ((3, 9), 0)])
def test_a_kernel_that_has_not_run_with_this_triton_is_left_out(
    h200, monkeypatch, triton, sequences
):
    monkeypatch.setattr(measured, "triton_version", lambda: triton)
    choice = choose(layer(heads=64), AUTO, engine())
    assert choice.runs == ((1, sequences),) * bool(sequences)
    named = "FLASH_ATTN_MLA (auto: the kernel for 64 heads has not run with Triton 3.9)"
    assert sequences or choice.why == named
    found = measured.Measurements.of(engine(), AUTO)
    assert found.favour(("bfloat16", 64, 1)) == bool(sequences)
    assert found.favour(("bfloat16", 16, 4)) == bool(sequences)
    assert choose(layer(), AUTO, engine()).planner


MOST = ((1, 256),)
OF_FP8 = {"query": FP8, "cache": FP8}
WINDOW = {"decline": Decline("portable-attention", "a sliding window")}


@pytest.mark.parametrize(
    ("of_layer", "of_engine", "facts", "runs", "why"),
    [
        ({}, {}, {}, MOST, "portable with 1 to 256 sequences (auto: as measured)"),
        ({"heads": 32}, {"seqs": 1024}, {}, ((1, 512),), "1 to 512 sequences, FLASH_ATTN_MLA else"),
        # 4 query rows, and an fp8 query, have rows of their own.
        ({}, {"drafts": 3}, {}, MOST, ""), ({"backend": "FLASHMLA"}, {}, OF_FP8, MOST, ""),
        ({"backend": "FLASHMLA"}, {"drafts": 3}, OF_FP8, MOST, "1 to 256 sequences (auto: as m"),
        ({"heads": 24}, {}, {}, (), "FLASH_ATTN_MLA (auto: not measured against it with 24 heads "),
        ({"backend": "TRITON_MLA"}, {}, {}, (), "TRITON_MLA (auto: not measured against it with"),
        ({}, {"drafts": 2}, {}, (), "not measured against it with 16 heads x 3 query rows in"),
        ({}, {}, OF_FP8, (), "FLASH_ATTN_MLA (auto: not measured against it with 16 heads in fl"),
        ({"latent": 256}, {}, {}, (), "not measured with 256 + 64"),
        ({}, {"dcp": 2}, {}, (), "ranks share the cache"),
        ({}, {"ubatching": True}, {}, (), "microbatches"),
        ({}, {"page": 16}, {}, (), "not measured with pages of 16 tokens"),
        ({}, {}, WINDOW, (), "a sliding window"),
        ({}, {}, {"no_plan": WINDOW["decline"]}, (), "a sliding window"),
    ],
)  # fmt: skip
def test_auto_is_ours_where_it_was_measured_else_vllms(h200, of_layer, of_engine, facts, runs, why):
    h200["found"] = dataclasses.replace(h200["found"], **facts)
    choice = choose(layer(**of_layer), AUTO, engine(**of_engine))
    assert (choice.planner, choice.runs) == ("portable" * bool(runs), runs) and why in choice.why


@pytest.mark.parametrize(
    ("options", "changes", "planner"),
    [({}, {}, "portable"), ({}, {"dcp": 2}, ""), ({"attention": "vllm"}, {}, ""),
     ({"attention": "aiter"}, {}, "aiter")],
)  # fmt: skip
def test_layers_are_asked_for_the_decode_that_their_engine_may_come_to(
    h200, options, changes, planner
):
    asked = {"provider": "triton", **options}
    assert Engine.of(engine(options=asked, **changes)).planner == planner


@pytest.fixture
def plant(h200):
    """Writes what `calibrate` would, or bytes, for an H200; the path."""

    def write(content):
        path = measured.own_file(H200)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        forget()
        return path

    yield write
    forget()


def file_of(rows, shape=KEY, gpu=H200, kernels=None, **other):
    named = dict(zip(("dtype", "heads", "queries", "backend"), shape, strict=True))
    kernels = measured.kernels() if kernels is None else kernels
    return {"gpu": gpu, "kernels": kernels, "shapes": [named | {"rows": rows} | other]}


GOOD = [1, 1024, 0, 1, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_a_file_that_says_the_opposite_turns_the_choice_around(plant, vllm_loggers, caplog):
    """In both directions, and the report and the log name it; fewer sequences than ours pays with
    are vLLM's, and so are other shapes as they were."""
    caplog.set_level("INFO")
    slow, fast = [2.0] * 3, [1.0] * 3
    compiled = identity.graphs_hash()
    path = plant(file_of([[1, 1024, 0, *slow, *fast]]))
    choice = choose(layer(), AUTO, engine())
    slower = f"FLASH_ATTN_MLA (auto: measured slower than it, {path} with 16 heads in bfloat16)"
    assert (choice.planner, choice.why) == ("", slower)
    assert [r.getMessage() for r in caplog.records] == [f"attention=auto: goes by {path}"]
    assert identity.graphs_hash() != compiled
    assert measured.files(H200) == f"{path}, then shipped measurements"
    assert measured.files("NVIDIA H20") == "nothing: vLLM decodes"
    assert choose(layer(heads=32), AUTO, engine()).why.endswith("(auto: as measured)")
    steps = [[1, *slow, *fast], [16, *fast, *slow], [1024, *fast, *slow]]
    plant(file_of([[n, 1024, 0, *times] for n, *times in steps]))
    choice = choose(layer(), AUTO, engine())
    assert (choice.planner, choice.runs) == ("portable", ((16, 256),))
    wanted = "portable with 16 to 256 sequences, FLASH_ATTN_MLA else"
    assert choice.why == f"{wanted} (auto: as measured, {path})"
    assert not choose(layer(), AUTO, engine(seqs=8)).planner


@pytest.mark.timeout(30)
def test_the_hash_of_graphs_reads_files_of_a_bounded_size(plant, vllm_loggers, caplog):
    """An engine's start takes it: a pipe among calibrate's tables ended none, and never began."""
    path = plant(file_of([GOOD]))
    os.mkfifo(path.with_name("pipe.json"))
    path.with_name("link.json").symlink_to("nowhere")
    with path.with_name("large.json").open("wb") as file:
        file.truncate(2**40)
    compiled = identity.graphs_hash()
    plant(file_of([[*GOOD[:-1], 2.0]]))
    assert identity.graphs_hash() != compiled
    path.unlink()
    path.with_name("large.json").rename(path)
    assert not measured.read(path, H200)
    assert f"{path} is damaged" in caplog.text and "more than 32 MiB" in caplog.text


def test_a_triton_with_which_calibrate_passed_keeps_the_kernels(plant, monkeypatch):
    monkeypatch.setattr(measured, "triton_version", lambda: (3, 9))
    assert not choose(layer(heads=64), AUTO, engine()).planner
    plant(file_of([GOOD], shape=("bfloat16", 64, 1, "FLASH_ATTN_MLA")))
    assert choose(layer(heads=64), AUTO, engine()).planner == "portable"
    assert not choose(layer(heads=128), AUTO, engine()).planner
    monkeypatch.setattr(measured, "triton_version", lambda: (3, 10))
    forget()
    assert not choose(layer(heads=64), AUTO, engine()).planner


def test_a_gpu_that_is_not_shipped_goes_by_its_own_file(plant, monkeypatch):
    monkeypatch.setattr(vllm_compat, "gpu_name", lambda: "NVIDIA A100-SXM4/80GB")
    assert choose(layer(backend="TRITON_MLA"), AUTO, engine()).why == ""
    path = measured.own_file("NVIDIA A100-SXM4/80GB")
    plant(b"").rename(path)
    path.write_text(json.dumps(file_of([GOOD], (*KEY[:3], "TRITON_MLA"), "NVIDIA A100-SXM4/80GB")))
    forget()
    assert choose(layer(backend="TRITON_MLA"), AUTO, engine()).planner == "portable"
    fp8 = choose(layer(backend="TRITON_MLA"), AUTO, engine(cache="fp8"))
    assert "a query in bfloat16 and a cache in fp8" in fp8.why


@pytest.mark.parametrize(
    ("content", "why"),
    [
        *((content, "is damaged") for content in (
            b"", b"\0", b"\xff\xfe", b"{", b"[", b"null", b"true", b"1", b'"gpu"', b"[]", b"{}",
            b"[" * 100_000, b"9" * 10_000, json.dumps(file_of([GOOD])).encode()[:-1],
            {"gpu": H200}, {"shapes": []}, {"gpu": H200, "shapes": []},
            file_of([GOOD], gpu="NVIDIA H100"), file_of([GOOD], gpu=None),
            {"gpu": H200, "shapes": None}, {"gpu": H200, "shapes": [None]},
            {"gpu": H200, "shapes": [{"rows": [GOOD]}]}, {"gpu": H200, "shapes": {"a": 1}},
            file_of([]), file_of(None), file_of([None]), file_of([GOOD, GOOD[1:]]),
            file_of([GOOD[1:]]), file_of([GOOD], heads="16"), file_of([GOOD], queries=True),
            file_of([GOOD], dtype=[]),
            *(file_of([GOOD, [*GOOD[:at], value, *GOOD[at + 1:]]]) for at, value in (
                (0, 0), (0, 1.5), (1, -1), (2, -1), (4, 0), (7, 0), (7, -1.0), (7, float("nan")),
                (4, float("inf")), (4, 10**400), (4, "1"), (4, None), (4, True), (4, []))))),
        (file_of([GOOD], kernels="0123456789ab, Triton 3.6"), "other kernels"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_one_warning_with_its_name(plant, vllm_loggers, caplog, content, why):
    shipped = choose(layer(), AUTO, engine())
    path = plant(content)
    for _ in range(2):
        assert choose(layer(), AUTO, engine()) == shipped
    [said] = [record.getMessage() for record in caplog.records]
    assert str(path) in said and why in said and "run mla-fusion calibrate again" in said


def test_a_gpu_without_measurements_keeps_vllms_decode_silently(h200, monkeypatch):
    for name in ("NVIDIA H20", ""):
        monkeypatch.setattr(vllm_compat, "gpu_name", lambda name=name: name)
        assert choose(layer(), AUTO, engine()) == Choice()


@pytest.mark.parametrize(
    ("attention", "choice"), [("portable", Choice("portable", ((1, 2000),))), ("vllm", Choice())]
)
def test_an_operator_forces_either(h200, attention, choice):
    options = Options("triton", attention)
    assert choose(layer(24), options, engine(seqs=2000)) == choice


@pytest.mark.parametrize(
    ("arch", "backend", "heads", "drafts", "seqs", "sequences", "steps"),
    [
        ("gfx950", "ROCM_AITER_MLA", 8, 0, 64, 31, "32 sequences or more (by AITER's table"),
        ("gfx950", "ROCM_AITER_MLA", 16, 0, 31, 31, ""),
        ("gfx950", "ROCM_AITER_MLA", 8, 1, 64, 64, "32 sequences or more without drafts (by AI"),
        ("gfx950", "ROCM_AITER_MLA", 17, 0, 64, 64, ""),
        ("gfx950", "TRITON_MLA", 8, 0, 64, 64, ""),
        ("gfx942", "ROCM_AITER_MLA", 8, 0, 64, 64, ""),
    ],
)
def test_a_step_takes_aiters_plan_where_its_own_table_has_none_faster(
    h200, monkeypatch, arch, backend, heads, drafts, seqs, sequences, steps
):
    """With drafts too, where a step has none; the report names the steps and the reason."""
    imitate(monkeypatch, arch)
    config, given = engine(seqs=seqs, drafts=drafts), {}
    monkeypatch.setattr(
        step_plan.attention.PersistentDecodePlan, "allocate",
        lambda **settings: given.update(settings) or SimpleNamespace(
            settings=Settings(**settings), planner=planner, device="cpu", aiter=None,
        ),
    )  # fmt: skip
    monkeypatch.setattr(step_plan.StepPlan, "describe", lambda *_: "")
    monkeypatch.setattr(vllm_compat, "is_first_rank", lambda: True)
    one, options = layer(heads, backend), Options("aiter", "aiter")
    workers.attach(dataclasses.replace(Engine.of(config), options=options, layers={"a": one}))
    assert given["max_batch"] == sequences
    assert given.get("max_kv_len") == (131072 if backend == "TRITON_MLA" else None)
    said = decode_choice.described([layer_state.of(one).choice], options)
    assert said.startswith(f"aiter, ROCM_AITER_MLA for {steps}" if steps else "aiter")
    assert bool(steps) == (said != "aiter")
    plan = layer_state.of(one).plan
    assert plan.serves(step(31)) and plan.serves(step(min(32, seqs))) == (not steps)
    assert plan.serves(step(64, 2)) == (drafts > 0)


def test_sequences_that_vllm_pads_are_left_to_its_backend(h200):
    """vLLM 0.33, adaptive verification: the last row of a padded sequence is no token of it."""
    config, options = engine(drafts=1), Options("aiter", "aiter")
    config.speculative_config.enable_adaptive_verification = True
    choice = choose(layer(backend="ROCM_AITER_MLA"), options, config)
    assert not choice.planner and "adaptive verification pads" in choice.why
    assert choose(layer(backend="TRITON_MLA"), options, config).planner == "aiter"


@pytest.mark.parametrize(
    ("seqs", "drafts", "bucket", "sequences"),
    [(100, 0, None, 100), (100, 2, None, 100), (100, 2, 16, 16), (4, 0, 64, 4)],
)
def test_a_plan_holds_no_more_sequences_than_a_fused_graph(seqs, drafts, bucket, sequences):
    """The graph of a full batch is padded to 104 tokens; the operator may name fewer."""
    config = engine(seqs=seqs, drafts=drafts)
    config.compilation_config.cudagraph_capture_sizes = [104, 304]
    config.compilation_config.pass_config = SimpleNamespace(**{THRESHOLD: bucket})
    assert Engine.of(config).sequences == sequences


@pytest.mark.parametrize(
    "provider, option, kinds",
    [("triton", "vllm", ["region"]), ("triton", "auto", ["region", "projections"]),
     ("reference", "auto", ["projections"])],
)  # fmt: skip
def test_an_engine_goes_by_what_was_measured_here(h200, monkeypatch, provider, option, kinds):
    loaded = []
    monkeypatch.setattr(measured_here, "load", lambda *of: loaded.append(of))
    Engine.of(engine(options={"provider": provider, "projections": option}))
    assert loaded == [(kind, H200) for kind in kinds]


def test_the_report_names_who_decodes_once(h200):
    made = [choose(one, AUTO, engine()) for one in (layer(), layer(), layer(heads=24))]
    found = decode_choice.described(made, AUTO)
    assert found.count("portable") == 1 and "24 heads" in found
    assert decode_choice.described([Choice()], AUTO) == "auto"
    assert decode_choice.described([], Options("triton", "vllm")) == "vllm"


@pytest.mark.parametrize(
    ("options", "changes", "page"),
    [
        *(({}, {}, 64), ({}, {"cache": "fp8"}, 64), ({}, {"drafts": 1}, 64)),
        *(({}, {"drafts": 2}, 0), ({}, {"dcp": 2}, 0), ({}, {"latent": 256}, 0)),
        ({"attention": "vllm"}, {}, 0),
        ({"attention": "portable"}, {"drafts": 1}, 64),
    ],
)
def test_a_page_holds_a_tile_where_the_portable_decode_may_run(h200, options, changes, page):
    config, given = engine(page=16, **changes), Options("triton", **options)
    assert decode_choice.page_of(config, given) == page
    config.cache_config.user_specified_block_size = True
    assert decode_choice.page_of(config, given) == 0
