"""Record the graphs that real engines on a GPU hand to the passes: one layer per spelling.

    python tests/passes/record.py tests/passes/recorded [one NAME]

Each engine runs in a process of its own, all at once, and ends as soon as its graph is written;
`tests/passes/test_recorded.py` reads the files. Spellings that a CPU build of vLLM cannot produce:

    flashinfer   vllm.flashinfer_rotary_embedding: custom RoPE of DeepSeek's scaling class
    vllm_c       _C.rotary_embedding: custom RoPE without scaling
    cat_fused    the op of vLLM's own pass: fused_rope_unified_mla_kv_cache_update
    deepseek     DeepSeek's scaling class in aten ops
    native       RoPE without scaling in aten ops

and quantizations of an fp8 o_proj's input, `output_` and the name in `tests/passes/linears.py`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_fusion.cli import child

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

COMMAND = "python tests/passes/record.py tests/passes/recorded"
TESTS = Path(__file__).resolve().parent.parent


def _module(path: Path) -> Any:
    """A module of the tests by its file: another package called `tests` may be installed."""
    spec = importlib.util.spec_from_file_location(f"mla_fusion_tests_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


models = _module(TESTS / "models" / "__init__.py")


@dataclass(frozen=True)
class Recording:
    """One engine: RoPE by a custom op or in aten ops, and whether vLLM's own pass runs before; the
    environment decides which linear layers vLLM takes."""

    spelling: str
    model: str  # of tests/models: V2-Lite has neither q_lora nor scaling, V3 has both
    custom: bool = False
    cat: bool = False
    partition: bool = True
    changes: tuple[tuple[str, Any], ...] = ()
    custom_ops: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    deep_gemm: bool = False  # where it is missing vLLM would take another linear layer

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        q_lora = dict(self.changes).get("q_lora_rank", models.config_of(self.model)["q_lora_rank"])
        words = [self.spelling, "q_lora" if q_lora else "no_q_lora"]
        return "-".join(words + ["whole"] * (not self.partition))


_NO_LORA = (("q_lora_rank", None),)
_LORA = (("q_lora_rank", 128),)
_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
_NO_FLASHINFER = ("VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER", "0")


def _fp8(
    name: str,
    quantization: dict[str, Any],
    *environment: tuple[str, str],
    custom: bool = False,
    deep_gemm: bool = False,
) -> Recording:
    """An engine with fp8 weights. The dense layer has widths that blocks of 128 divide."""
    widths = {"hidden_size": 512, "intermediate_size": 512, "q_lora_rank": 128}
    changes = {**widths, "quantization_config": quantization}
    return Recording(
        f"output_{name}",
        "deepseek_v3",
        changes=tuple(changes.items()),
        custom_ops=("+quant_fp8",) if custom else (),
        environment=environment,
        deep_gemm=deep_gemm,
    )


RECORDINGS = {
    recording.name: recording
    for recording in (
        Recording("flashinfer", "deepseek_v3", custom=True),
        Recording("flashinfer", "deepseek_v3", custom=True, changes=_NO_LORA),
        Recording("flashinfer", "deepseek_v3", custom=True, partition=False),
        Recording("vllm_c", "deepseek_v2_lite", custom=True),
        Recording("vllm_c", "deepseek_v2_lite", custom=True, changes=_LORA),
        Recording("cat_fused", "deepseek_v3", cat=True),
        Recording("cat_fused", "deepseek_v2_lite", cat=True),
        Recording("deepseek", "deepseek_v3"),
        Recording("native", "deepseek_v2_lite"),
        _fp8("opaque", _BLOCKS),
        _fp8("group_ue8m0", _BLOCKS, _NO_FLASHINFER, deep_gemm=True),
        _fp8(
            "group_tma",
            _BLOCKS,
            _NO_FLASHINFER,
            ("VLLM_USE_DEEP_GEMM_E8M0", "0"),
            deep_gemm=True,
        ),
        _fp8("group_columns", _BLOCKS, _NO_FLASHINFER, ("VLLM_USE_DEEP_GEMM", "0")),
        _fp8("tensor", _STATIC, custom=True),
        _fp8("tensor_native", _STATIC),
    )
}


def record(job: child.Job, progress: TextIO) -> None:
    """Start the engine of a recording, write its decode graph and end the process."""
    recording, path = RECORDINGS[job.options["name"]], Path(job.options["path"])
    import torch
    import vllm
    from vllm.compilation.passes.inductor_pass import get_pass_context
    from vllm.utils.import_utils import has_deep_gemm

    import mla_fusion
    from mla_fusion.passes.pipeline import MLAFusionPass
    from mla_fusion.patterns.site import attention_calls

    if recording.deep_gemm and not has_deep_gemm():
        sys.exit(f"{recording.name} is a graph for DeepGEMM, which is not installed: install it")
    recorded = _module(TESTS / "passes" / "recorded.py")
    mla_fusion.register()

    def dump(self: Any, graph: Any) -> None:
        if get_pass_context().compile_range.end > self.max_tokens:
            return
        if not list(attention_calls(graph)):
            return
        origin = {
            "spelling": recording.spelling,
            "command": f"{COMMAND} one {recording.name}",
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
            "torch": torch.__version__,
            "vllm": vllm.__version__,
        }
        recorded.write(path, graph, origin)
        sys.stdout.flush()
        os._exit(0)

    MLAFusionPass.__call__ = dump  # type: ignore[method-assign]
    compilation: dict[str, Any] = {
        "cudagraph_capture_sizes": [1],
        "pass_config": {
            "fuse_aiter_qk_rope_kvcache_mla": True,
            "fuse_rope_kvcache_cat_mla": recording.cat,
        },
    }
    custom_ops = [*recording.custom_ops, *["+rotary_embedding"] * recording.custom]
    if custom_ops:
        compilation["custom_ops"] = custom_ops
    if not recording.partition:
        # One graph and nothing to split at: the other way for RoPE and attention to meet.
        compilation.update(splitting_ops=[], cudagraph_mode="FULL_DECODE_ONLY")
    changes = {"num_hidden_layers": 1, "first_k_dense_replace": 1, **dict(recording.changes)}
    vllm.LLM(
        model=models.write(Path(job.workdir), models.config_of(recording.model, **changes)),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=4,
        gpu_memory_utilization=0.08,
        kv_cache_memory_bytes=1 << 28,
        additional_config={"mla_fusion": {"provider": "reference"}},
        compilation_config=compilation,
    )
    sys.exit("the engine started and no pass ran")


def main(folder: Path, names: Sequence[str]) -> int:
    """Record `names`; print the end of the log of an engine that wrote nothing."""
    running = {}
    for name in names:
        work, path = tempfile.mkdtemp(), folder / f"{name}.json.gz"
        job = child.Job(
            workdir=work,
            cache=f"{work}/cache",
            work="record:record",
            path=str(Path(__file__).parent),
            options={"name": name, "path": str(path)},
            environment={
                "VLLM_DISABLE_COMPILE_CACHE": "1",
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
                **dict(RECORDINGS[name].environment),
            },
            plugin=False,
        )
        running[path] = work, child.start(job)
    failed = 0
    for path, (work, process) in running.items():
        ok = process.wait() == 0
        failed += not ok
        log = Path(work, child.LOG)
        print(f"{path}: " + (f"{path.stat().st_size} bytes" if ok else "FAILED"))
        if not ok and log.exists():
            print(log.read_text()[-3000:])
    print(json.dumps({"recorded": len(running) - failed, "failed": failed}))
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), sys.argv[3:] or [*RECORDINGS]))
