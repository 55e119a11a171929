"""The facts of an engine that its layers, kernels and report need, read once from vLLM's config."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mla_fusion import config
from mla_fusion.config import vllm_compat
from mla_fusion.runtime import measured_here
from mla_fusion.runtime.measured import Measurements


@dataclass(frozen=True)
class Engine:
    """An engine whose flag is on, as each of its workers knows it when its model is loaded.

    options: additional_config["mla_fusion"].
    bucket: most tokens of a fused graph.
    rows: most query tokens of a sequence in a decode step: its newest token and its drafts.
    sequences: most sequences of a decode step in a fused graph. vLLM pads tokens to the size of a
        CUDA graph, never sequences beyond max_num_seqs.
    activation: type of the model's activations; a draft model's may be another.
    layers: vLLM's MLA layers, of the model and its draft, by name.
    other_layers: number of layers that keep a state and are not MLA attention.
    model: class of the model.
    context: most tokens of a sequence.
    page: tokens of a page of the KV cache.
    cache: vLLM's type of the KV cache.
    pads_sequences: AITER's backend lengthens sequences by queries left out.
    measured: what `attention=auto` decides by.
    tables: all that `runtime.tables` derives for its layers.
    """

    options: config.Options
    bucket: int
    rows: int
    sequences: int
    activation: torch.dtype
    layers: Mapping[str, Any]
    other_layers: int = 0
    model: str = ""
    context: int = 0
    page: int = 0
    cache: str = "auto"
    pads_sequences: bool = False
    measured: Measurements = field(default_factory=Measurements)
    tables: dict[Any, Any] = field(default_factory=dict)

    @property
    def batch_invariant(self) -> bool:
        """True if vLLM promises results that do not depend on the batch."""
        return vllm_compat.is_batch_invariant()

    @property
    def planner(self) -> str:
        """The persistent decode that `attention` may come to; empty if vLLM's backend decodes."""
        if self.batch_invariant:
            return "portable"
        if self.options.attention == "auto":
            return "portable" if self.measured.spans and not self.measured.why_not else ""
        return self.options.attention if self.options.attention in config.PLANNED else ""

    @classmethod
    def of(cls, vllm_config: Any) -> "Engine":
        """The engine of a worker that has loaded its model. What was measured of region and
        products on this machine counts from here on, before a graph is compiled."""
        options = config.read_options(vllm_config.additional_config)
        bucket, model = config.decode_bucket(vllm_config), vllm_config.model_config
        found = vllm_config.compilation_config.static_forward_context
        name = vllm_compat.gpu_name()
        if options.provider == "triton":
            measured_here.load(measured_here.REGION, name)
        if options.projections == "auto":
            measured_here.load(measured_here.PRODUCTS, name)
        return cls(
            options, bucket, config.query_rows(vllm_config),
            min(vllm_config.scheduler_config.max_num_seqs, bucket), model.dtype,
            layers=vllm_compat.mla_layers(found), other_layers=vllm_compat.other_layers(found),
            model=model.architecture, context=model.max_model_len,
            page=vllm_config.cache_config.block_size, cache=vllm_config.cache_config.cache_dtype,
            pads_sequences=vllm_compat.pads_sequences(vllm_config),
            measured=Measurements.of(vllm_config, options),
        )  # fmt: skip
