"""Every reason for which a model or a layer stays unfused, and what would help.

A code is stable: logs, the report and docs/reasons.md name it. An engine reason switches the flag
off before anything is compiled; a layer reason leaves that layer as it was. A new reason goes into
`REASONS` and, in the same words, into docs/reasons.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """Why there is no fusion, and what an operator can do."""

    scope: str  # "engine" or "layer"
    why: str
    help: str


REASONS: dict[str, Reason] = {
    # Engine: decided in VllmConfig, before any graph exists.
    "vllm-version": Reason(
        "engine",
        "this vLLM release is outside the window the passes were written for",
        "install a vLLM inside the window, or an mla-fusion that supports this one",
    ),
    "no-mla": Reason(
        "engine",
        "the model does not use multi-head latent attention (MLA)",
        "remove the flag: there is nothing to fuse",
    ),
    "not-compiled": Reason(
        "engine",
        "the model is not compiled by vLLM's piecewise Inductor backend, which runs the passes",
        "leave out --enforce-eager and -O0, and use compilation mode 3 with backend inductor",
    ),
    "breakable-cudagraph": Reason(
        "engine",
        "vLLM runs the model in breakable CUDA graphs (VLLM_USE_BREAKABLE_CUDAGRAPH), for which it "
        "switches torch.compile off",
        "unset the variable if you set it; where vLLM set it itself, mla-fusion check says "
        "whether the model class has a graph at all, and VLLM_USE_BREAKABLE_CUDAGRAPH=0 then "
        "compiles it",
    ),
    "graph-partition": Reason(
        "engine",
        "use_inductor_graph_partition=False together with splitting ops puts RoPE, the KV-cache "
        "write and attention into different graphs",
        "remove use_inductor_graph_partition=False",
    ),
    "cudagraph-full": Reason(
        "engine",
        "cudagraph_mode=FULL, to which vLLM also turns FULL_AND_PIECEWISE with empty "
        "splitting_ops, captures one graph for decode and mixed batches alike, and the choice "
        "between them would be frozen at capture",
        "use FULL_DECODE_ONLY, or FULL_AND_PIECEWISE (vLLM's default) or PIECEWISE without "
        "setting splitting_ops",
    ),
    "splitting-ops": Reason(
        "engine",
        "vLLM's attention op is a splitting op and the fused ops are not, so they would be "
        "captured inside a CUDA graph although they read the batch's metadata",
        "load the mla_fusion plugin, which adds them, or add them to splitting_ops",
    ),
    "provider-platform": Reason(
        "engine",
        "the default provider is AITER, which needs ROCm",
        'choose another: --additional-config \'{"mla_fusion": {"provider": "triton"}}\' on a GPU, '
        '"reference" on a CPU',
    ),
    "provider-unavailable": Reason(
        "engine",
        "the chosen provider cannot run here",
        "install what it needs, or choose another provider",
    ),
    "context-parallel": Reason(
        "engine",
        "decode or prefill context parallelism gathers the query across ranks inside attention",
        "use tensor parallelism instead",
    ),
    "microbatches": Reason(
        "engine",
        "two microbatches run at once (dual batch overlap) and would share the one plan of "
        "attention=portable",
        "leave out --enable-dbo and --ubatch-size, or attention",
    ),
    "functionalization-v2": Reason(
        "engine",
        "enable_auto_functionalized_v2 hides the in-place ops from the patterns",
        "remove enable_auto_functionalized_v2 from inductor_compile_config",
    ),
    # Layer: decided by the passes, counted in the report.
    "unknown-rope": Reason(
        "layer",
        "the graph rotates q and k_pe in a way no pattern knows",
        "report the graph: mla-fusion check --dump DIR writes it",
    ),
    "computed-angles": Reason(
        "layer",
        "the graph computes its cosines from the positions; the fused kernel reads them in a table",
        "use vLLM's own model class if it has one: --model-impl vllm",
    ),
    "scaled-query": Reason(
        "layer",
        "the query is scaled by its position after the rotation (llama_4_scaling)",
        "none yet: the fused kernel does not scale",
    ),
    "shared-rotation": Reason(
        "layer",
        "the rotated query or key is also used outside the attention",
        "none: removing the rotation would change another result",
    ),
    "quantized-output": Reason(
        "layer",
        "attention writes a quantized output (fuse_attn_quant)",
        "set pass_config.fuse_attn_quant=False",
    ),
    "attention-argument": Reason(
        "layer",
        "the attention call uses an argument the fused attention op does not take",
        "report the model: the argument is named beside the code",
    ),
    "cache-update": Reason(
        "layer",
        "the KV cache is written by an op or with values the patterns do not know",
        "report the graph: mla-fusion check --dump DIR writes it",
    ),
    "missing-metadata": Reason(
        "layer",
        "a node of the graph carries no shape, so nothing can be proved about it",
        "a pass before this one drops metadata: switch custom passes off one by one",
    ),
    "shape": Reason(
        "layer",
        "q, k_pe or kv_c has a shape the fused op does not take",
        "none: the shapes are named beside the code",
    ),
    "sparse-attention": Reason(
        "layer",
        "the backend attends to selected keys (sparse MLA), whose query takes another path",
        "none yet",
    ),
    "hisparse": Reason("layer", "the KV cache lives on the host (HiSparse)", "none yet"),
    "padded-heads": Reason(
        "layer",
        "the attention backend pads the query heads",
        "choose a tensor-parallel size with a head count the backend takes as it is",
    ),
    "kv-cache-dtype": Reason(
        "layer",
        "this KV-cache type has a layout or conversion the fused kernel does not write",
        "use --kv-cache-dtype auto or fp8",
    ),
    "packed-weights": Reason(
        "layer",
        "W_UK is kept in a packed form (AMX, AITER fp4 or fp8) this provider cannot read",
        "on a CPU with AMX use --attention-backend CPU_MLA; on ROCm use the aiter provider "
        "and --dtype bfloat16",
    ),
    "portable-attention": Reason(
        "layer",
        "attention=portable was chosen, and this layer's decode is not what it computes",
        'leave attention at "auto"',
    ),
    "unfused-pair": Reason(
        "layer",
        "the query preparation was lifted and found no RoPE node to fuse with",
        "report the graph: mla-fusion check --dump DIR writes it",
    ),
    "pass-error": Reason(
        "layer",
        "a pass of this library failed on the graph, which was put back as it was",
        "report the traceback in the log above",
    ),
    "no-graph": Reason(
        "layer",
        "vLLM runs the layer's class without compiling it, so there is no graph to rewrite",
        "none: some model classes, often draft heads, lack support_torch_compile in this vLLM",
    ),
    "unknown-layer": Reason(
        "layer",
        "the layer named in the graph is not an MLA layer of this engine",
        "none: another plugin replaced the attention layer",
    ),
}


@dataclass(frozen=True)
class Decline:
    """Why an engine or a layer stays unfused: a key of `REASONS`, and what was found."""

    code: str
    detail: str = ""

    def explain(self) -> str:
        """One sentence for the log: why, the detail, and what would help."""
        reason = REASONS[self.code]
        seen = f" ({self.detail})" if self.detail else ""
        return f"{reason.why}{seen} [{self.code}]. What would help: {reason.help}."


class Declined(Exception):
    """Raised where a layer cannot be fused; `decline` says why."""

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(code, detail)
        self.decline = Decline(code, detail)


def recognize(text: str) -> Decline | None:
    """The decline whose explanation a log line holds; None if it holds none."""
    for code, reason in REASONS.items():
        before, found, _ = text.partition(f" [{code}]. What would help: ")
        if found:
            detail = before.rpartition(reason.why)[2]
            return Decline(code, detail.removeprefix(" (").removesuffix(")"))
    return None
