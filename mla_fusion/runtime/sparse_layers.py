"""What sparse layers get when a model is loaded, and what the log says of them."""

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from mla_fusion.config import vllm_compat
from mla_fusion.report.reasons import Decline
from mla_fusion.runtime import deepseek_v4, sparse_step

logger = logging.getLogger("vllm.mla_fusion")


def attach(layers: Mapping[str, Any], vllm_config: Any) -> None:
    """Give each layer of the backend CUSTOM, or its implementation, what it shares with those of
    its shape in `layers`, which own it; None where vLLM decodes every step. The log says both, and
    each reason, once; also of sparse layers with another backend than CUSTOM, which was chosen."""
    said: Counter[tuple[int, str]] = Counter()
    shared: dict[tuple[Any, ...], Any] = {}
    chosen = vllm_compat.chose_sparse_backend(vllm_config)
    for layer in layers.values():
        v4 = hasattr(layer, "swa_cache_layer")
        owner = layer if v4 else getattr(layer, "impl", None)
        of: Any = deepseek_v4 if v4 else sparse_step
        if hasattr(owner, sparse_step.ATTRIBUTE):
            backend = layer.backend_cls if v4 else vllm_compat.sparse_backend()[0]
            decline = of.why_not(owner, vllm_config)
        elif chosen and (v4 or getattr(owner, "is_sparse", False)):
            backend = layer.backend_cls if v4 else layer.attn_backend
            decline = Decline("sparse-unasked")
        else:
            continue
        name = backend.get_name()
        if decline is not None:
            left = f"every step is left to {name}: {decline.explain()}"
            said[logging.WARNING, left] += 1
            continue
        shape = of, *of.shape(owner, vllm_config)
        if shape not in shared:
            shared[shape] = of.Step(*shape[1:])
        step = shared[shape]
        setattr(owner, sparse_step.ATTRIBUTE, step)
        said[logging.INFO, describe(step, name)] += 1
    if said and vllm_compat.is_first_rank():
        for (level, what), count in said.items():
            logger.log(level, "attention backend CUSTOM, %d layers: %s", count, what)


def describe(step: Any, backend: str) -> str:
    """What a step is for, in a line of the log; `backend` takes the other steps."""
    settings = step.scratch.plan.settings
    size = sum(x.nbytes for x in step.tensors()) / 2**20
    plain = "bf16" if settings.kv_dtype.itemsize == 2 else "fp8"
    cache = plain if step.layout is None else f"{step.layout.bytes} bytes an entry"
    slots = " + ".join(map(str, step.scratch.widths))
    kind = f"{step.kind}, " if step.kind else ""
    return (
        f"decode steps of up to {settings.max_batch} tokens are this library's "
        f"({kind}{settings.num_heads} heads, {slots} slots, {cache}, {size:.1f} MiB "
        f"for all layers), larger ones are {backend}'s"
    )
