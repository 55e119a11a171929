"""`mla-fusion check`: whether and why the MLA layers of a model would fuse, seen on a CPU."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mla_fusion import config, engine, reasons, report, shrink
from mla_fusion.engine import UserError

# All that vLLM's CPU attention can run; other models and caches are compiled, not run.
_CPU_HEAD_SIZE = 576
_CPU_CACHES = ("auto", "bfloat16")
_PROMPTS = [(0, [1, 2, 3]), (1, [4, 5])]
_NEW_TOKENS = 4


@dataclass(frozen=True)
class Settings:
    """The engine the user would start, and how it is cut."""

    model_dir: Path
    max_num_seqs: int = 256
    speculative_tokens: int = 0
    tensor_parallel_size: int = 1
    kv_cache_dtype: str = "auto"
    layers: int = 2
    provider: str = "reference"
    dump: Path | None = None


def run(settings: Settings) -> bool:
    """Print what fuses and why; whether every MLA layer of the decode range does.

    Raises:
        UserError: the model or the settings cannot be used.
    """
    model = shrink.read(settings.model_dir)
    cut = shrink.cut(model, settings.layers, settings.tensor_parallel_size)
    print(f"model: {cut.found}")
    if model.get("index_topk"):
        print(f"check: it would not fuse: {reasons.explain('sparse-attention', 'index_topk')}")
        return False
    engine.require("vllm", purpose="mla-fusion check")
    if settings.dump:
        engine.require("depyf", purpose="--dump")
        _claim(settings.dump)
    _check_cache_type(settings.kv_cache_dtype)
    print(f"checked as: {cut.changed}")
    work = Path(tempfile.mkdtemp(prefix="mla-fusion-check-"))
    ran = cut.head_size == _CPU_HEAD_SIZE and settings.kv_cache_dtype in _CPU_CACHES
    outcome = engine.run(_job(settings, cut, work, run_it=ran))  # on an error its log is kept
    stored = report.load(outcome.reports[0]) if outcome.reports else None
    if settings.dump and stored:
        _collect(work / "depyf", settings.dump, stored)
    shutil.rmtree(work)
    lines = stored.lines() if stored else []
    for line in [*(text for text in outcome.warnings if text not in lines), *lines]:
        print(line)
    _print_limits(settings, cut, ran)
    return _verdict(stored)


def _job(settings: Settings, cut: shrink.Cut, work: Path, run_it: bool) -> engine.Job:
    model = work / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(cut.config, indent=1))
    # Drafts widen the decode bucket; which method proposes them does not change the graph.
    bucket = settings.max_num_seqs * (1 + settings.speculative_tokens)
    return engine.Job(
        model=str(model),
        workdir=str(work),
        cache=str(work / "cache"),
        fuse=True,
        provider=settings.provider,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=max(2048, 2 * bucket),  # more than the bucket: prefill is seen too
        max_model_len=256,
        load_format="dummy",
        kv_cache_dtype=settings.kv_cache_dtype,
        bucket=bucket if settings.speculative_tokens else None,
        dump=str(work / "depyf") if settings.dump else None,
        prompts=_PROMPTS if run_it else [],
        new_tokens=_NEW_TOKENS,
    )


def _print_limits(settings: Settings, cut: shrink.Cut, ran: bool) -> None:
    if ran:
        print(f"ran: {len(_PROMPTS)} prompts, {_NEW_TOKENS} tokens each, through these graphs")
        return
    why = (
        f"takes a head size of {_CPU_HEAD_SIZE} (kv_lora_rank + qk_rope_head_dim), not "
        f"{cut.head_size}"
        if cut.head_size != _CPU_HEAD_SIZE
        else f"takes no {settings.kv_cache_dtype} cache"
    )
    print(
        f"not run: vLLM's CPU attention {why}. The graphs were compiled for it and the report is "
        "theirs; no token was generated. Backends for a GPU may take the query in fp8 too: that "
        "changes the type of the fused op's output, not what fuses"
    )


def _verdict(stored: report.Report | None) -> bool:
    decode = [r for r in stored.ranges if r.range[1] <= stored.bucket] if stored else []
    layers, fused = sum(r.layers for r in decode), sum(r.fused for r in decode)
    if not layers:
        print(f"check: nothing fuses: no graph with an MLA layer was compiled with {config.FLAG}")
    elif fused == layers:
        print(f"check: every MLA layer of the decode range fuses ({fused} of {layers})")
    else:
        print(f"check: {layers - fused} of {layers} MLA layers of the decode range do not fuse")
    return 0 < fused == layers


def _check_cache_type(name: str) -> None:
    if name in (*_CPU_CACHES, "fp8"):
        return
    from typing import get_args

    from vllm.config.cache import CacheDType

    known = get_args(CacheDType)
    if name not in known:
        raise UserError(f"unknown --kv-cache-dtype {name!r}; vLLM has {', '.join(known)}")


def _claim(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to --dump {folder}: {error}") from None


def _collect(depyf: Path, folder: Path, stored: report.Report) -> None:
    """Copy what depyf wrote before and after the passes, named after the token range."""
    # One range lies in the bucket here; vLLM compiles one graph for it, or one for each piece.
    decode = [r for r in stored.ranges if r.range[1] <= stored.bucket and r.layers]
    for stage in ("before", "after"):
        sources = sorted(
            depyf.rglob(f"*.mla_fusion.{stage}.*.py"),
            key=lambda path: (path.name.split(".")[0], int(path.name.split(".")[-2])),
        )
        if not sources or not decode:
            raise UserError(f"the passes met no MLA layer: no graph to put in {folder}")
        first, last = decode[0].range
        for index, source in enumerate(sources):
            piece = f".piece{index}" if len(sources) > 1 else ""
            name = f"tokens_{first}_{last}{piece}.{stage}.py"
            shutil.copyfile(source, folder / name)
            print(f"wrote {folder / name}")
