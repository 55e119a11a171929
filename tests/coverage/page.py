"""The table of docs/coverage.md, between `<!-- table -->` and `<!-- end -->`, from stored results.

Whatever has the same cells is one row. Graphs of spellings and quantizations are traced from vLLM's
own code (`tests/passes/graphs.py`) on a CPU, which stands in for a GPU, or were recorded on a GPU
(`tests/passes/recorded.py`).
"""

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from mla_fusion.cli.check import model_classes
from tests.coverage import classes
from tests.coverage.jobs import NEIGHBOURS
from tests.coverage.vllm_passes import ON_GRAPHS

RESULTS = Path(__file__).with_name("results")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "coverage.md"
NEW, OLD, SOURCES = RELEASES = "0.32.0", "0.29.0", "0.26.0"  # the columns
TRANSFORMERS = "transformers.base:Base"
_MODELS = "vllm.model_executor.models."

BOTH = (False, True)
# name -> the fields of `Spec`, `is_neox` of each graph, and whether vLLM's own fusion of RoPE and
# cache write is on, and must find it
SPELLINGS = {
    "native": ({"rope": "native"}, BOTH, False),
    "native, DeepSeek scaling": ({"rope": "deepseek"}, BOTH, False),
    "`_C.rotary_embedding`": ({"rope": "vllm_c"}, BOTH, False),
    "`vllm.flashinfer_rotary_embedding`": ({"rope": "flashinfer"}, BOTH, False),
    "`vllm.rocm_aiter_triton_rotary_embedding`": ({"rope": "aiter"}, BOTH, False),
    "vLLM's fused RoPE and cache write": ({"rope": "deepseek"}, BOTH, True),
    "no RoPE": ({"rope": "nope"}, (False,), False),
    "native, DeepSeek scaling, then a scaled query": (
        {"rope": "deepseek", "scaled": "in_place"}, BOTH, False),
    "`vllm.flashinfer_rotary_embedding`, then a scaled query": (
        {"rope": "flashinfer", "scaled": "in_place"}, BOTH, False),
}  # fmt: skip
# How the graph comes to the passes: with q_lora; `layer_name` as in `Spec`; and whether Inductor
# splits the graph at the attention, after the passes, or vLLM was told to split nowhere.
VARIANTS = list(itertools.product(BOTH, ("input", "constant"), (True, False)))

GROUPS = "`_C.per_token_group_fp8_quant`, scales"
# The linear layers of vLLM 0.26, 0.32 and 0.33 in brackets -> the name of `linears.project`, and
# why the quantization is not fused.
OUTPUTS = {
    f"{GROUPS} in rows (Triton)": ("group", ""),
    f"{GROUPS} in columns (CUTLASS)": ("group_columns", ""),
    f"{GROUPS} in aligned columns (DeepGEMM with `VLLM_USE_DEEP_GEMM_E8M0=0`)": ("group_tma", ""),
    f"{GROUPS} in aligned columns, powers of two (DeepGEMM on Hopper)": ("group_ue8m0", ""),
    "`_C.static_scaled_fp8_quant` (given scales, with `+quant_fp8`)": ("tensor", ""),
    "aten ops, one given scale (given scales, the default)": ("tensor_native", ""),
    "`_C.per_token_group_fp8_quant_packed` (DeepGEMM on Blackwell)": (
        "group_packed", "output-quantization"),
    "inside the op of o_proj (FlashInfer with DeepGEMM: vLLM's first choice on Hopper)": (
        "opaque", "output-opaque"),
    "aten ops, groups of 128 (groups, with `-quant_fp8`)": ("group_native", "output-quantization"),
    "an op with a scale for each token (dynamic scales of tokens)": (
        "per_token", "output-quantization"),
    "none (weights in bf16 or fp16, or quantized alone)": ("", "output-unquantized"),
}  # fmt: skip
# Nothing here runs them; their graphs are compared after passes 2 to 4 as they are declined.
NOT_RUN = ("opaque", "group_packed")
OUTPUT_VARIANTS = list(itertools.product(("input", "constant"), (True, False)))  # the last two

BREAKABLE, NO_GRAPH, SPARSE, SPARSE_MODEL = (
    "breakable-cudagraph", "no-graph", "sparse-attention", "sparse-model"
)  # fmt: skip
_UNREACHED = {
    SPARSE: """DeepseekV32ForCausalLM DeepseekV32MTPModel GlmMoeDsaForCausalLM DeepSeekV4MTPModel
        DeepseekV4ForCausalLM DeepseekV4ForConditionalGeneration DeepseekV41ForCausalLM""",
    SPARSE_MODEL: """HYV4ForCausalLM HYV4MTPModel Dots3NoteForCausalLM Dots3NoteMTPModel
        Glm5NextForCausalLM Glm5NextForConditionalGeneration Glm5NextMTPModel""",
    "": """DSparkDraftModel DSparkV41DraftModel KimiLinearForCausalLM KimiK3MTPModel
        KimiK3ForConditionalGeneration SarvamMLAForCausalLM Glm4MoeLiteMTPModel
        LongCatFlashMTPModel""",
}
# Architectures with MLA layers that no pass reaches -> the code of a sparse attention, which holds
# in every release; with `SPARSE` the config has an index_topk. Sources give the others' reasons.
UNREACHED = {name: code for code, names in _UNREACHED.items() for name in names.split()}


def stored(name):
    """The results kept under a name, if any."""
    path = RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def read_sources(package):
    """The kept facts of a release: architectures with MLA layers, and those not compiled.

    vLLM's list of fallbacks to transformers is one architecture.
    """
    found = {
        name: compiled
        for name, compiled in classes.architectures(package).items()
        if TRANSFORMERS not in compiled or name == "TransformersForCausalLM"
    }
    breakable = sorted(model_classes.breakable(package) & found.keys())
    return {"architectures": found, "breakable": breakable}


def of_its_own(found):
    """Architectures of a release that differ from every column; `found` as `read_sources`."""
    columns = [stored(release) for release in RELEASES]
    return {
        name
        for name, compiled in found["architectures"].items()
        if compiled not in [column["architectures"].get(name) for column in columns]
        or (name in found["breakable"] and all(name not in c["breakable"] for c in columns))
    }


def why_unreached(version, architecture):
    """The reason why no pass reaches it in a release; empty if engines show its classes."""
    release = stored(version)
    if code := UNREACHED.get(architecture):
        return code
    if architecture in release["breakable"]:
        return BREAKABLE
    return "" if release["architectures"][architecture] else NO_GRAPH


def shown(version):
    """Compiled class -> "layers", "fused" and the reasons of the others, counted in all engines."""
    out: dict[str, Counter[str]] = {}
    for name, counts in of_classes(version, "classes"):
        total = out.setdefault(name, Counter())
        total.update(counts["declined"], layers=counts["layers"], fused=counts["fused"])
    return out


def of_classes(version, key):
    """Compiled class, and what each engine found out about it under a key."""
    for result in stored(version)["engines"].values():
        for name, found in result.get(key, {}).items():
            of = TRANSFORMERS if name.startswith("transformers.") else name.removeprefix(_MODELS)
            yield of, found


def text(page):
    """The page with its table as the results have it."""
    before, after = page.split("<!-- table -->\n")[0], page.split("<!-- end -->")[1]
    return f"{before}<!-- table -->\n{table()}\n<!-- end -->{after}"


def table():
    """A row for all of a kind that have the same cells."""
    header = ("", "which", f"vLLM {NEW}", OLD, f"sources of {SOURCES}")
    rows: dict[tuple[str, ...], list[str]] = {}
    for kind, name, *cells in (*_models(), *_products(), *_others()):
        rows.setdefault((kind, *cells), []).append(name)
    lines = [(kind, "; ".join(names), *cells) for (kind, *cells), names in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * 5, *lines))


def _models():
    found = {version: shown(version) for version in (NEW, OLD)}
    every = {version: stored(version)["architectures"] for version in RELEASES}
    for name in sorted(set().union(*every.values())):
        cells = []
        for version, there in every.items():
            counts = [found.get(version, {}).get(of, Counter()) for of in there.get(name, ())]
            cells.append(
                _model(version, name, sum(counts, Counter())) if name in there else "not there"
            )
        of_any = any(TRANSFORMERS in there.get(name, ()) for there in every.values())
        yield "models", "any, with `model_impl=transformers`" if of_any else _code(name), *cells


def _model(version, name, counts):
    """The result of an architecture in one release."""
    if code := why_unreached(version, name):
        return _code(code)
    if version == SOURCES:
        return "compiled"
    layers, fused = counts.pop("layers"), counts.pop("fused", 0)
    return "fused" if fused == layers else ", ".join([f"{fused} of {layers}", *map(_code, counts)])


def _products():
    """How many products of a class pass 7 takes where each was measured faster."""
    found: dict[str, Counter[str]] = {}
    for name, counts in of_classes(NEW, "products"):
        found.setdefault(name, Counter()).update(counts)
    for name, counts in sorted(found.items()):
        left = [
            f"{count} {_code(code)}" for code, count in sorted(counts.items()) if code != "ours"
        ]
        if left:
            yield "products", _code(name), f"all but {' and '.join(left)}", "-", "-"
    yield "products", "every other compiled class", "all", "-", "-"


def _code(reason):
    return f"`{reason}`"


def _others():
    for name, (_, reason) in OUTPUTS.items():
        yield "quantizations", name, _code(reason) if reason else "fused", "-", "-"
    for name in SPELLINGS:
        yield "spellings", name, "fused", "-", "-"
    for neighbour in NEIGHBOURS:
        cell = neighbour_cell(neighbour, stored("neighbours"))
        yield "neighbours", neighbour.name, cell, "-", "-"
    for name, (_, reason) in ON_GRAPHS.items():
        cell = (
            f"{_code(reason)}; graph unchanged" if reason else "fused; outputs of the graphs equal"
        )
        yield "neighbours", name, cell, "-", "-"


def neighbour_cell(neighbour, results):
    """The result of a neighbour: the layers that fused on each rank, the reasons of the others, and
    whether both engines gave the same tokens, and the same entries to a connector."""
    off, on = (results[f"{neighbour.name} ({flag})"] for flag in ("off", "on"))
    if error := off.get("error") or on.get("error"):
        if neighbour.refused and neighbour.refused in error:
            return f"vLLM refuses it on a CPU: {neighbour.refused}"
        return f"FAILED: {error}"
    layers = " + ".join(f"{made['fused']} of {made['layers']}" for made in on["reports"])
    codes = sorted({code for made in on["reports"] for code in made["declined"]})
    if switched_off := re.search(r"switched off.*?\[([a-z-]+)\]", "\n".join(on["log"])):
        layers, codes = "none", [switched_off[1]]
    count = sum(map(len, on["tokens"]))
    same = "DIFFERENT"
    if count and on["tokens"] == off["tokens"] and on["kv"] == off["kv"]:
        same = f"equal ({count})" + "; entries equal to the bit" * bool(on["kv"]["saved"])
    return ", ".join([layers or "0 of 0", *map(_code, codes)]) + f"; tokens {same}"
