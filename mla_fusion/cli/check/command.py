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
from mla_fusion.cli.check import model_classes, model_config, persistent_decode, products
from mla_fusion.cli.check.answer import Answer, Settings
from mla_fusion.cli.doctor.command import ISSUES, is_before
from mla_fusion.cli.report.command import find_graphs
from mla_fusion.measure.records import version_of
from mla_fusion.report.reasons import Declined

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
    settings.checkpoint = model.cache
    details = ["checked by its configuration, this vLLM's source and environment, no engine"]
    try:
        offered = model_classes.look_up(model)
        cut = model_config.cut(model, settings.layers, settings.tensor_parallel_size)
        settings.speculative_tokens = max(settings.speculative_tokens, int(cut.draft))
        details = [f"checked as: {cut.changed}"]
        serve = settings.serve(model.config, cut.draft)
        backends = _backends(settings, cut, offered)
        notes = _of_checkpoint(settings, cut, backends)
        notes += persistent_decode.ask(settings, cut) + _known_trouble(settings.cache)
        if not cut.quantization or cut.quantization.get("weight_block_size") == [128, 128]:
            notes += products.ask(model.config, settings.tensor_parallel_size)
    except Declined as error:
        print(*details, sep="\n", file=sys.stderr)
        return Answer(model.name, settings, "configuration", [error.decline], details)
    _prepare(settings)
    lacks = _cpu_lacks(settings, cut)
    runs = f"runs {len(_PROMPTS)} prompts, {_NEW_TOKENS} tokens each, through its graphs"
    details.append(_COMPILES.format(lacks) if lacks else runs)
    print(*details, sep="\n", file=sys.stderr, flush=True)
    outcome = _ask_engine(settings, cut, not lacks)
    why, stored = outcome.declines, outcome.report
    return Answer(model.name, settings, "engine", why, details, stored, backends, serve, notes)


def _of_checkpoint(
    settings: Settings, cut: model_config.Cut, backends: dict[str, list[str]]
) -> list[str]:
    """A line on the checkpoint's types and size, if they matter; Declined if no attention backend
    has its cache."""
    said = []
    if settings.cache != settings.kv_cache_dtype:
        said.append(f"KV cache in {settings.cache}, by the checkpoint")
        if not backends:
            detail = "which no attention backend of an MLA layer has"
            raise Declined("kv-cache-dtype", f"the checkpoint's {settings.cache}, {detail}")
    if cut.quantization:
        method = cli.short(str(cut.quantization.get("quant_method", "a type of its own")), 20)
        said.append(f"weights in {method}, of which vLLM unpacks W_UK and W_UV for the fused op")
    if cut.large:
        said.append(cut.large)
    return [f"  checkpoint: {'; '.join(said)}"] if said else []


def _known_trouble(cache: str) -> list[str]:
    """A line for each known trouble of the installed Triton with an fp8 cache."""
    triton = version_of("triton")
    return [
        f"  on {each['arch']} with the Triton that is installed here, {triton}: {each['text']}"
        for each in ISSUES
        if cache.startswith("fp8") and is_before(triton, each["triton before"])
    ]


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
    if (name := settings.cache) not in (*_CPU_CACHES, "fp8"):
        from vllm.config.cache import CacheDType

        if name not in (known := get_args(CacheDType)):
            raise UserError(f"unknown --kv-cache-dtype {name!r}; vLLM has {', '.join(known)}")


def _cpu_lacks(settings: Settings, cut: model_config.Cut) -> str:
    """Why vLLM's CPU attention cannot run the cut model; empty if it can."""
    if cut.draft:
        return "cannot verify drafts"
    if cut.head_size != _CPU_HEAD_SIZE:
        return f"takes a head size of {_CPU_HEAD_SIZE} (latent + rope), not {cut.head_size}"
    return "" if settings.cache in _CPU_CACHES else f"takes no {settings.cache} cache"


def _backends(
    settings: Settings, cut: model_config.Cut, offered: dict[str, list[model_classes.Backend]]
) -> dict[str, list[str]]:
    """For each platform, the attention backends for which the engine's answer holds."""
    heads = cut.config["num_attention_heads"] * settings.decode_context_parallel_size
    found = {
        platform: [x.name for x in backends if x.takes(heads, cut.head_size, settings.cache)]
        for platform, backends in offered.items()
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
        job = _job(settings, cut, Path(folder), run_it)
        try:
            outcome = child.run(job, progress=sys.stderr)
        except child.EngineError as error:
            log = cli.mend_vllm(error.why) or "--dump DIR keeps the engine's log there"
            if settings.dump and error.log.exists():
                log = f"What led to it: {shutil.copy(error.log, settings.dump)}"
            raise UserError(f"vLLM cannot run the cut model: {error.why}. {log}") from None
        if settings.dump and outcome.report:
            _copy_dump(Path(folder, "depyf"), settings.dump, outcome.report)
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
    engine["kv_cache_dtype"] = settings.cache
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
