"""Reads config.json or params.json; where that does not decide, cuts the model to a few layers with
random weights and starts a vLLM engine on it with the flag on. Prints whether every MLA layer
fuses, where, and what to type, or why not. Needs no GPU and no network."""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import get_args

from mla_fusion import cli, config, kernels, report
from mla_fusion.cli import UserError, child, option
from mla_fusion.cli.check import model_classes, model_config, persistent_decode, sizes
from mla_fusion.cli.check.answer import Answer, Settings
from mla_fusion.cli.doctor.command import ISSUES, is_before
from mla_fusion.cli.report.command import find_graphs
from mla_fusion.config import eligibility
from mla_fusion.measure.versions import version_of
from mla_fusion.report.reasons import Decline, Declined, recognize

# What vLLM's CPU attention can run; other models and caches are only compiled.
_CPU_HEAD_SIZE, _CPU_CACHES = 576, ("auto", "bfloat16")
_PROMPTS, _NEW_TOKENS = [(0, [1, 2, 3]), (1, [4, 5])], 4
_MOST_LAYERS = 64  # that an engine compiles in minutes
_COMPILES = (
    "compiles graphs and generates no token: vLLM's CPU attention {}. Some of a GPU take the query "
    "in fp8: that changes nothing in what fuses"
)


def declare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    text = "the model's config.json or params.json, or its folder; not a name on the Hub"
    parser.add_argument("model", type=Path, metavar="CONFIG", help=text)
    text = "as the server will get it (without it 256 are assumed; vLLM's own depends on the GPU)"
    option(parser, "--max-num-seqs", "N", text)
    text = "draft tokens a step: the decode bucket is N * (1 + K) tokens"
    option(parser, "--speculative-tokens", "K", text, 0, cli.zero_or_more)
    text = "emulated: the heads of one rank of TP"
    option(parser, "--tensor-parallel-size", "TP", text, 1)
    text = "ranks of TP that share a cache; not run, see the note of the answer"
    option(parser, "--decode-context-parallel-size", "DCP", text, 1)
    option(parser, "--kv-cache-dtype", "T", "as in vLLM", "auto", str)
    option(parser, "--layers", "L", "layers that are kept", 2)
    text = "who computes the fused op"
    option(parser, "--provider", None, text, "reference", choices=kernels.PROVIDERS)
    text = "who decodes: aiter and portable are persistent decodes"
    option(parser, "--attention", None, text, "auto", choices=config.ATTENTION)
    text = "write the report, and the graphs before and after the passes as readable Python, for "
    option(parser, "--dump", "DIR", f"{text}mla-fusion report DIR (needs depyf)", kind=Path)
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the answer; 0 if every MLA layer of the decode range fuses, else 1."""
    answer = find(Settings(**vars(arguments)))
    print(json.dumps(answer.to_json(), indent=1) if arguments.json else "\n".join(answer.lines()))
    return 0 if answer.fuses else 1


def find(settings: Settings) -> Answer:
    """The answer, by the configuration or else an engine; a UserError if the input is unusable."""
    cli.require("vllm")
    _refuse(settings)
    model = model_config.read(settings.model)
    if "auto_map" not in model.config and not any(map(model_classes.knows_type, model.kinds)):
        raise UserError(
            f"{model.path}: neither this vLLM nor Transformers knows the model type "
            f"{model.config['model_type']!r}, and no auto_map names its code"
        )
    details = ["checked by its configuration, this vLLM's source and environment, no engine"]
    try:
        decline = model_classes.decide(model.config, model.architecture)
        if decline is None or decline.code != "no-mla":
            decline = eligibility.why_not_here() or decline
        if decline:
            raise Declined(decline.code, decline.detail)
        cut = _cut(model, settings)
        details = [f"checked as: {cut.changed}"]
        brings_code = bool(model.config.get("auto_map"))
        predicts = bool(model.config.get("num_nextn_predict_layers"))
        serve = settings.serve(cut.draft, predicts, brings_code)
        weights = _of_checkpoint(settings, model, cut)
        notes = persistent_decode.ask(settings, cut)
    except Declined as error:
        print(*details, sep="\n", file=sys.stderr)
        return Answer(model.name, settings, "configuration", [error.decline], details)
    _prepare(settings)
    lacks = _cpu_lacks(settings, cut)
    runs = f"runs {len(_PROMPTS)} prompts, {_NEW_TOKENS} tokens each, through its graphs"
    details.append(_COMPILES.format(lacks) if lacks else runs)
    print(*details, sep="\n", file=sys.stderr, flush=True)
    outcome = _ask_engine(settings, cut, not lacks)
    why, stored = _reasons(outcome.report, outcome.warnings), outcome.report
    if settings.kv_cache_dtype.startswith("fp8"):
        triton = version_of("triton")
        notes += [
            f"  on {each['arch']} with the Triton that is installed here, {triton}: {each['text']}"
            for each in ISSUES
            if is_before(triton, each["triton before"])
        ]
    backends = _backends(settings, cut, model.architecture)
    notes = weights + notes
    return Answer(model.name, settings, "engine", why, details, stored, backends, serve, notes)


def _of_checkpoint(
    settings: Settings, model: model_config.Model, cut: model_config.Cut
) -> list[str]:
    """A line on the checkpoint's types and size, if they matter. Its cache becomes that of the
    settings where the user names none; Declined if no attention backend has such a cache."""
    said = []
    if settings.kv_cache_dtype == "auto" != model.cache:
        settings.kv_cache_dtype = model.cache
        said.append(f"KV cache in {model.cache}, by the checkpoint")
        if not _backends(settings, cut, model.architecture):
            detail = (
                f"the checkpoint's {model.cache}, which no attention backend of an MLA layer has"
            )
            raise Declined("kv-cache-dtype", detail)
    if cut.quantization:
        method = cli.short(str(cut.quantization.get("quant_method", "a type of its own")), 20)
        said.append(f"weights in {method}, of which vLLM unpacks W_UK and W_UV for the fused op")
    heads = model.config["num_attention_heads"]
    large = sizes.too_large(cut.weights, heads, settings.tensor_parallel_size)
    if large and not cut.draft:  # whose config tells the sizes of its target
        said.append(large)
    return [f"  checkpoint: {'; '.join(said)}"] if said else []


def _cut(model: model_config.Model, settings: Settings) -> model_config.Cut:
    """The model that an engine compiles; a draft head asks for a draft token at least."""
    architecture = model.architecture
    if not model_classes.is_known(architecture):
        raise UserError(
            f'{model.path}: "architectures" has to name a class of this vLLM or of Transformers, '
            f"and {architecture} is none"
        )
    cut = model_config.cut(model, settings.layers, settings.tensor_parallel_size)
    if cut.draft:
        settings.speculative_tokens = max(settings.speculative_tokens, 1)
    elif model_classes.is_draft_head(architecture):
        raise UserError(
            f"{architecture} is a draft head, which vLLM runs beside its target: give the target's "
            "config"
        )
    return cut


def _refuse(settings: Settings) -> None:
    """Refuse what no engine can have, and a provider that cannot run here."""
    ranks, shared = settings.tensor_parallel_size, settings.decode_context_parallel_size
    if ranks % shared:
        raise UserError(
            f"--decode-context-parallel-size {shared} shares a cache among ranks of "
            f"--tensor-parallel-size {ranks}, and does not divide it"
        )
    if settings.layers > _MOST_LAYERS:
        raise UserError(f"--layers {settings.layers}: an engine has {_MOST_LAYERS} at most")
    if why := kernels.why_unavailable(settings.provider):
        needs = why.partition(";")[0]
        raise UserError(f"--provider: {needs}; the default, reference, needs nothing")


def _prepare(settings: Settings) -> None:
    """Refuse what only an engine needs, and make the folder of its dump."""
    if settings.dump:
        cli.require("depyf", purpose="--dump")
        cli.make_folder(settings.dump, "--dump")
    if (name := settings.kv_cache_dtype) not in (*_CPU_CACHES, "fp8"):
        from vllm.config.cache import CacheDType

        if name not in (known := get_args(CacheDType)):
            raise UserError(f"unknown --kv-cache-dtype {name!r}; vLLM has {', '.join(known)}")


def _cpu_lacks(settings: Settings, cut: model_config.Cut) -> str:
    """Why vLLM's CPU attention cannot run the cut model; empty if it can."""
    if cut.draft:
        return "cannot verify drafts"
    if cut.head_size != _CPU_HEAD_SIZE:
        return f"takes a head size of {_CPU_HEAD_SIZE} (latent + rope), not {cut.head_size}"
    cache = settings.kv_cache_dtype
    return "" if cache in _CPU_CACHES else f"takes no {cache} cache"


def _backends(settings: Settings, cut: model_config.Cut, architecture: str) -> dict[str, list[str]]:
    """For each platform, the attention backends for which the engine's answer holds."""
    compiled = model_classes.where_compiled(architecture)
    heads = cut.config["num_attention_heads"] * settings.decode_context_parallel_size
    found = {
        platform: model_classes.backends(platform, heads, cut.head_size, settings.kv_cache_dtype)
        for platform in model_classes.PLATFORMS
        if compiled is None or platform in compiled
    }
    # AITER's decode is for AMD GPUs, and the portable one is not for vLLM's backends with AITER's.
    amd = found.get("amd", [])
    if settings.attention == "aiter":
        found = {"amd": [name for name in amd if name == "ROCM_AITER_MLA"]}
    elif settings.attention == "portable":
        found["amd"] = [name for name in amd if "AITER" not in name]
    return {platform: names for platform, names in found.items() if names}


def _ask_engine(settings: Settings, cut: model_config.Cut, run_it: bool) -> child.Outcome:
    """The report of an engine with the cut model and the flag on."""
    with tempfile.TemporaryDirectory(prefix="mla-fusion-check-") as folder:
        work = Path(folder)
        try:
            outcome = child.run(_job(settings, cut, work, run_it), progress=sys.stderr)
        except child.EngineError as error:
            log = cli.mend_vllm(error.why) or "--dump DIR keeps the engine's log there"
            if settings.dump and error.log.exists():
                log = f"What led to it: {shutil.copy(error.log, settings.dump)}"
            raise UserError(f"vLLM cannot run the cut model: {error.why}. {log}") from None
        if settings.dump and outcome.report:
            _copy_dump(work / "depyf", settings.dump, outcome.report)
    return outcome


def _job(settings: Settings, cut: model_config.Cut, work: Path, run_it: bool) -> child.Job:
    model = work / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(cut.config, indent=1))
    engine = child.flag_on(
        settings.bucket if settings.speculative_tokens else None, provider=settings.provider
    )
    if settings.dump:
        engine["compilation_config"]["debug_dump_path"] = str(work / "depyf")
    engine |= {"model": str(model), "load_format": "dummy", "max_num_seqs": settings.requests}
    engine["kv_cache_dtype"] = settings.kv_cache_dtype
    engine["num_gpu_blocks_override"] = 256  # 4,096 tokens, in place of a GiB of them
    # Above the bucket, so that a prefill graph is compiled too.
    engine["max_num_batched_tokens"] = max(2048, 2 * settings.bucket)
    if cut.draft:
        backend = {"attention_backend": "CPU_MLA"}  # as `child.small_engine` for the target
        engine["speculative_config"] = settings.drafts("mtp") | backend
    return child.Job(
        str(work), str(work / "cache"), engine=engine, temporary=True,
        prompts=_PROMPTS if run_it else [], new_tokens=_NEW_TOKENS,
    )  # fmt: skip


def _reasons(stored: report.Report | None, warnings: list[str]) -> list[Decline]:
    """The declines of the report, or the one of the warning that switched the flag off."""
    if stored:
        uncompiled = [Decline("no-graph")] if stored.uncompiled else []
        return [*report.counted(stored.decode().declined, uncompiled)]
    return [found for text in warnings if (found := recognize(text))]


def _copy_dump(of_depyf: Path, folder: Path, stored: report.Report) -> None:
    """Copy what depyf wrote, named after the token range, and the report, into `folder`."""
    # One range is in the bucket; vLLM compiles one graph for it, or one for each piece.
    decode = stored.decode_ranges()
    if not decode:
        raise UserError(f"the passes met no MLA layer: no graph to put in {folder}")
    first, last = decode[0].range
    report.store(folder / "report.json", stored)
    for stage, sources in find_graphs(of_depyf).items():
        for index, source in enumerate(sources):
            piece = f".piece{index}" if len(sources) > 1 else ""
            shutil.copyfile(source, folder / f"tokens_{first}_{last}{piece}.{stage}.py")
    print(f"wrote the graphs and the report to {folder}", file=sys.stderr)
