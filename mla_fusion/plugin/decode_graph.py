"""A second compiled graph of a model, for its decode steps; vLLM's own stays as it is.

    Dynamo's graph ─┬─► vLLM's backend ─► pieces between attentions, vLLM's ranges ─► any other step
                    └─► cut behind each attention, passes, range (1, bucket) ───────► decode step

In vLLM's pieces an attention and the rotation in front of it lie apart, so nothing can join them.
The decode graph has both in one piece, which Inductor partitions at the attention. Each graph is
right for every batch up to the bucket: which of them runs is a matter of time alone. An operator
who sets `use_inductor_graph_partition`, or empty `splitting_ops`, gets one graph for both instead,
in which the passes run (`config.in_one_graph`)."""

import contextlib
import copy
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from mla_fusion import config
from mla_fusion.config import vllm_compat
from mla_fusion.plugin.wrap import wrap

# On the VllmConfig that a decode graph is compiled with, and in the metadata of the graph.
_OF_DECODE = "_mla_fusion_of_decode"
_DECODE = "_mla_fusion_decode"  # on vLLM's backend: the function of the decode graph
_MARK = b"mla_fusion: two graphs\n"  # in front of the artifacts of both


def compile_decode_graph() -> None:
    """Why: vLLM has one graph of a model for all steps.

    How: `VllmBackend.__call__` compiles a copy of its graph too, with another backend, and returns
    a function that chooses. vLLM's `split_graph` cuts that copy at this library's marks, which then
    leave it. Until: vLLM compiles decode steps apart.
    """
    from vllm.compilation import backends

    wrap(backends.VllmBackend, "__call__", _compile)
    wrap(backends, "split_graph", _split)
    wrap(backends, "wrap_with_cudagraph_if_needed", _wrap_piece)


def keep_both_graphs() -> None:
    """Why: where vLLM stores compiled code itself, a warm start makes no backend.

    How: store the artifacts of both graphs behind a mark, and load both. Until: as above.
    """
    from vllm.compilation.caching import VllmSerializableFunction

    wrap(VllmSerializableFunction, "serialize_compile_artifacts", _serialize)
    wrap(VllmSerializableFunction, "deserialize_compile_artifacts", _deserialize)


def _compile(
    original: Callable[..., Any], self: Any, graph: Any, example_inputs: Sequence[Any]
) -> Any:
    """vLLM's function for `graph`; if it has MLA layers, it runs decode steps by a second graph."""
    if not applies(self.vllm_config) or not any(map(_is_attention, graph.graph.nodes)):
        return original(self, graph, example_inputs)
    from mla_fusion.passes import layers

    decode = copy.deepcopy(graph)  # Inductor takes the other one apart
    served = original(self, graph, example_inputs)
    layers.mark(decode.graph, _is_attention)
    decode.meta[_OF_DECODE] = True
    backend = _another(self, config_of(self.vllm_config))
    with _partitions_captured(self.vllm_config), _clock_of_compilation():
        run = backend(decode, example_inputs)
    setattr(self, _DECODE, run)
    return _choosing(served, run, self.vllm_config)


def applies(vllm_config: Any) -> bool:
    """True if an engine gets a decode graph, and this is not the config of one."""
    compilation = vllm_config.compilation_config
    apart = config.rewrites(compilation) and not config.in_one_graph(compilation)
    return apart and not hasattr(vllm_config, _OF_DECODE)


def _is_attention(node: Any) -> bool:
    from vllm.compilation.partition_rules import should_split

    return bool(should_split(node, ["vllm::unified_mla_attention_with_output"]))


def config_of(vllm_config: Any) -> Any:
    """The config that the decode graph of an engine is compiled with."""
    from mla_fusion import ops

    made, compilation = copy.copy(vllm_config), copy.copy(vllm_config.compilation_config)
    bucket = config.decode_bucket(vllm_config)
    compilation.use_inductor_graph_partition = True
    compilation.splitting_ops = [*compilation.splitting_ops, *ops.RUNTIME_OPS]
    compilation.compile_ranges_endpoints = [bucket]
    compilation.compile_sizes = [n for n in compilation.compile_sizes or () if n <= bucket]
    made.compilation_config = compilation
    setattr(made, _OF_DECODE, True)
    return made


def _another(backend: Any, vllm_config: Any) -> Any:
    """A backend of vLLM like `backend`, of another config, with a cache folder of its own."""
    known = {}
    if hasattr(backend, "use_mega_artifact"):
        known["use_aot_compile"] = backend.use_mega_artifact
    return type(backend)(vllm_config, f"{backend.prefix}_decode", backend.is_encoder, **known)


@contextlib.contextmanager
def _clock_of_compilation() -> Iterator[None]:
    """Let vLLM's log count the time of a compilation from here."""
    from vllm.compilation import monitor

    before = monitor.torch_compile_start_time
    monitor.torch_compile_start_time = time.perf_counter()
    try:
        yield
    finally:
        monitor.torch_compile_start_time = before


def _split(original: Callable[..., Any], graph: Any, splitting_ops: list[str]) -> Any:
    """vLLM's split of a graph, or, if it has marks, one at each mark."""
    from mla_fusion import ops

    if _OF_DECODE not in graph.meta:
        return original(graph, splitting_ops)
    pieces, items = original(graph, [f"{ops.NAMESPACE}::{ops.CUT}"])
    cuts = {item.submod_name for item in items if item.is_splitting_graph}
    for node in pieces.graph.find_nodes(op="call_module"):
        if node.target in cuts:
            pieces.graph.erase_node(node)
            delattr(pieces, node.target)
    pieces.recompile()
    return pieces, [item for item in items if not item.is_splitting_graph]


def _serialize(original: Callable[..., Any], compiled: Any) -> bytes:
    """The artifacts of vLLM's graph, and of the decode graph where vLLM stores compiled code."""
    backend = compiled.vllm_backend
    decode = getattr(backend, _DECODE, None)
    if decode is None or not vllm_compat.stores_compiled_code(backend):
        return original(compiled)  # a warm start compiles both again, from Inductor's cache
    stored = [original(_without_graph(each)) for each in (compiled, decode)]
    return _MARK + pickle.dumps(stored)


def _without_graph(compiled: Any) -> Any:
    """`compiled` to be stored: beside compiled code nothing reads the graph, and vLLM takes 13 s to
    pickle that of 61 layers."""
    stored = copy.copy(compiled)
    stored.graph_module = fx.GraphModule(torch.nn.Module(), fx.Graph())
    return stored


def _deserialize(original: Callable[..., Any], data: bytes) -> Any:
    if not data.startswith(_MARK):
        return original(data)
    from vllm.config import get_current_vllm_config, set_current_vllm_config

    served, decode = pickle.loads(data[len(_MARK) :])  # vLLM unpickles both, too
    vllm_config = get_current_vllm_config()
    with set_current_vllm_config(config_of(vllm_config)), _partitions_captured(vllm_config):
        run = original(decode)
    return _choosing(original(served), run, vllm_config)


def _choosing(served: Any, decode: Any, vllm_config: Any) -> Any:
    """`served`, vLLM's compiled function, which from now on lets `decode` run decode steps."""
    inputs = enumerate(served.example_inputs)
    tokens = next((i for i, value in inputs if isinstance(value, torch.SymInt)), None)
    if tokens is not None:
        choice = Choice(served.optimized_call, decode.optimized_call, tokens, vllm_config)
        served.optimized_call = choice
    return served


class Choice:
    """A model's forward pass: vLLM's graph, or in a decode step the decode graph.

    Args:
        served: vLLM's graph.
        decode: the decode graph.
        tokens: index of the argument that is the number of tokens.
        vllm_config: of the engine."""

    def __init__(
        self, served: Callable[..., Any], decode: Callable[..., Any], tokens: int, vllm_config: Any
    ) -> None:
        self.served, self.decode, self.tokens = served, decode, tokens
        self.vllm_config, self.bucket = vllm_config, config.decode_bucket(vllm_config)
        self.layers = vllm_compat.mla_layers(vllm_config.compilation_config.static_forward_context)
        self.captured: set[Any] = set()  # batch descriptors

    def __call__(self, *args: Any) -> Any:
        if args[self.tokens] > self.bucket:
            return self.served(*args)
        context = vllm_compat.forward_context()
        pieces = context.cudagraph_runtime_mode.name == "PIECEWISE"
        if _starting and self._runs_both():
            # So vLLM captures pieces, on all ranks at once.
            self._run(args)
            if pieces:
                self.captured.add(context.batch_descriptor)
            return self.served(*args)
        ready = not pieces or context.batch_descriptor in self.captured
        decodes = ready and self._is_decode_step(context.attn_metadata)
        return self._run(args) if decodes else self.served(*args)

    def _runs_both(self) -> bool:
        """Whether pieces of both graphs are captured, and this is not the capture of a full one."""
        from mla_fusion.kernels import capture

        return self._decodes_in_pieces() and not capture.capturing()

    def _run(self, args: tuple[Any, ...]) -> Any:
        with _partitions_captured(self.vllm_config):
            return self.decode(*args)

    def _is_decode_step(self, metadata: Any) -> bool:
        """Whether all tokens of the step are decode tokens; False without metadata."""
        from mla_fusion import runtime

        found = metadata if isinstance(metadata, dict) else {}
        return runtime.is_decode_only(next((found[n] for n in self.layers if n in found), None))

    def _decodes_in_pieces(self) -> bool:
        """Whether a decode step may run without a full CUDA graph, but with those of pieces."""
        mode = self.vllm_config.compilation_config.cudagraph_mode
        drafts = self.vllm_config.speculative_config is not None
        return mode.has_piecewise_cudagraphs() and (
            drafts or mode.decode_mode().name == "PIECEWISE"
        )


_starting = False


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """While a worker warms up, vLLM captures CUDA graphs of pieces."""
    global _starting
    _starting = True
    try:
        yield
    finally:
        _starting = False


class _Piece:
    """A piece of the decode graph with the CUDA graphs of its partitions. Equal pieces share their
    compiled code, so its partitions find here whose graph they replay."""

    current: "_Piece"

    def __init__(self, runnable: Any) -> None:
        self.runnable = runnable  # where vLLM looks for it
        self.graphs: dict[Callable[..., Any], Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> Any:
        _Piece.current = self
        return self.runnable(*args)


def _wrap_piece(
    original: Callable[..., Any], piece: Any, vllm_config: Any, *args: Any, **kwargs: Any
) -> Any:
    if hasattr(vllm_config, _OF_DECODE):
        return _Piece(piece)
    return original(piece, vllm_config, *args, **kwargs)


@contextlib.contextmanager
def _partitions_captured(vllm_config: Any) -> Iterator[None]:
    """Let Inductor's partitions of a decode graph have the CUDA graphs of vLLM's pieces."""
    mode = vllm_config.compilation_config.cudagraph_mode
    if not mode.has_piecewise_cudagraphs():
        yield
        return
    from torch._inductor.utils import set_customized_partition_wrappers

    def wrapper(run: Callable[..., Any], metadata: Any) -> Callable[..., Any]:
        def partition(*args: Any) -> Any:
            graphs = _Piece.current.graphs
            if run not in graphs:
                graphs[run] = _piecewise_graph(run, vllm_config)
            return graphs[run](*args)

        return partition

    set_customized_partition_wrappers(wrapper)
    try:
        yield
    finally:
        set_customized_partition_wrappers(None)  # type: ignore[arg-type]


def _piecewise_graph(run: Callable[..., Any], vllm_config: Any) -> Callable[..., Any]:
    """`run`, a partition, with vLLM's CUDA graphs of pieces, one for each batch size."""
    from vllm.compilation.cuda_graph import CUDAGraphOptions
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname

    made = resolve_obj_by_qualname(current_platform.get_static_graph_wrapper_cls())
    options = CUDAGraphOptions(debug_log_enable=False, gc_disable=True, weak_ref_output=False)
    wrapped: Callable[..., Any] = made(run, vllm_config, CUDAGraphMode.PIECEWISE, options)
    return wrapped
