"""The graph of decode steps beside vLLM's: where it is cut, which steps it runs, whose CUDA graphs
its pieces replay. tests/engine/test_engine.py runs both, cold and from a warm cache."""

import importlib
import itertools
import pickle
from types import SimpleNamespace as Namespace

import pytest
import torch
from torch import fx
from torch._inductor import utils
from vllm.config import CUDAGraphMode

from mla_fusion import ops, runtime
from mla_fusion.config import vllm_compat
from mla_fusion.kernels import capture
from mla_fusion.passes import layers
from mla_fusion.plugin import decode_graph

BUCKET = 4
importlib.import_module("vllm.model_executor.layers.attention.mla_attention")
ATTENTION = torch.ops.vllm.unified_mla_attention_with_output


def placeholder(graph, name, *shape):
    node = graph.placeholder(name)
    node.meta["example_value"] = torch.empty(shape, device="meta")
    return node


def test_a_cut_lies_in_front_of_the_product_behind_each_attention():
    runtime.register_ops()
    graph = fx.Graph()
    x, table = placeholder(graph, "x", 7), placeholder(graph, "scale", 1)
    weights = [placeholder(graph, f"w{i}", 3, 3) for i in range(3)]
    for weight in weights[:2]:
        graph.call_function(ATTENTION, (x,))
        quantized = graph.call_function(torch.mul, (x, table))
        x = graph.call_function(torch.mm, (quantized, weight))
        x = graph.call_function(torch.mm, (x, weights[2]))
    graph.call_function(ATTENTION, (x,))
    graph.output(x)
    assert layers.mark(graph, decode_graph._is_attention) == 2
    called = [node.target for node in graph.nodes if node.op == "call_function"]
    piece = [ATTENTION, torch.mul, ops.get(ops.CUT), torch.mm, torch.mm]
    assert called == [*piece, *piece, ATTENTION]


@pytest.fixture
def choice(monkeypatch):
    """make(mode, drafts), a choice, and run(choice, tokens, decoded, mode), the graphs that ran."""
    ran = []

    def make(mode="FULL_AND_PIECEWISE", drafts=None):
        compilation = Namespace(
            cudagraph_mode=CUDAGraphMode[mode], static_forward_context={"layer": None},
            pass_config=Namespace(), cudagraph_capture_sizes=[],
        )  # fmt: skip
        engine = Namespace(
            compilation_config=compilation, speculative_config=drafts,
            scheduler_config=Namespace(max_num_seqs=BUCKET, max_num_batched_tokens=99),
        )  # fmt: skip
        graphs = (lambda *_, name=name: ran.append(name) for name in ("vLLM's", "decode"))
        monkeypatch.setattr(vllm_compat, "mla_layers", dict)
        return decode_graph.Choice(*graphs, 1, engine)

    def run(chosen, tokens, decoded, mode="NONE"):
        metadata = Namespace(num_actual_tokens=tokens, num_decode_tokens=decoded)
        context = Namespace(
            attn_metadata=None if decoded is None else {"other": None, "layer": metadata},
            cudagraph_runtime_mode=CUDAGraphMode[mode], batch_descriptor=tokens,
        )  # fmt: skip
        monkeypatch.setattr(vllm_compat, "forward_context", lambda: context)
        ran.clear()
        chosen("weights", tokens)
        return [*ran]

    return make, run


@pytest.mark.parametrize(
    "tokens, decoded, mode, graph",
    [
        (4, 4, "NONE", "decode"),
        (5, 5, "NONE", "vLLM's"),  # above the bucket
        (4, 3, "NONE", "vLLM's"),
        (4, 0, "NONE", "vLLM's"),
        (4, None, "NONE", "vLLM's"),
        (4, 4, "PIECEWISE", "vLLM's"),  # whose pieces are captured
    ],
)
def test_a_decode_step_runs_the_decode_graph_and_any_other_vllms(
    choice, tokens, decoded, mode, graph
):
    make, run = choice
    assert run(make(), tokens, decoded, mode) == [graph]


@pytest.mark.parametrize(
    "mode, drafts, both",
    [
        ("PIECEWISE", None, True),
        ("FULL_AND_PIECEWISE", 1, True),
        ("FULL_AND_PIECEWISE", None, False),
        ("FULL_DECODE_ONLY", 1, False),
    ],
)
@pytest.mark.parametrize("decoded", [None, 4])  # of the runners V1 and V2
def test_pieces_of_both_graphs_are_captured_where_decode_steps_may_replay_them(
    choice, monkeypatch, mode, drafts, both, decoded
):
    make, run = choice
    chosen = make(mode, drafts)
    with decode_graph.starting():
        captured = run(chosen, 4, decoded, "PIECEWISE")
        monkeypatch.setattr(capture, "capturing", lambda: True)
        assert run(chosen, 4, 4) == ["decode"]  # a full graph
    assert captured == ["decode"] * both + ["vLLM's"]
    assert run(chosen, 4, None, "PIECEWISE") == ["vLLM's"]  # an idle rank, later
    assert run(chosen, 4, 4, "PIECEWISE") == ["decode" if both else "vLLM's"]
    assert run(chosen, 2, 2, "PIECEWISE") == ["vLLM's"]  # not captured


def test_equal_pieces_share_their_code_and_not_their_cuda_graphs(monkeypatch):
    """vLLM compiles equal pieces once: what one layer captured is no other's."""
    made = itertools.count()

    def captured(run, _):
        number = next(made)
        return lambda: number

    monkeypatch.setattr(decode_graph, "_piecewise_graph", captured)
    engine = Namespace(compilation_config=Namespace(cudagraph_mode=CUDAGraphMode.PIECEWISE))
    with decode_graph._partitions_captured(engine):
        wrapper = utils._unstable_customized_partition_wrapper.wrapper
    assert utils._unstable_customized_partition_wrapper.wrapper is None
    shared = wrapper(lambda: None, None)
    first, second = decode_graph._Piece(shared), decode_graph._Piece(shared)
    assert [first(), second(), first(), second()] == [0, 1, 0, 1]


@pytest.mark.parametrize("code", [True, False])
def test_graphs_are_stored_where_no_compiled_code_is(code):
    """vLLM pickles a graph of many layers for as long as it compiles one."""
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    made = [Namespace(graph_module=fx.GraphModule({}, graph)) for _ in range(2)]
    backend = Namespace(use_mega_artifact=code)
    setattr(backend, decode_graph._DECODE, made[1])
    made[0].vllm_backend = backend
    stored = decode_graph._serialize(lambda of: bytes([len(of.graph_module.graph.nodes)]), made[0])
    if code:
        assert pickle.loads(stored.removeprefix(decode_graph._MARK)) == [b"\0", b"\0"]
    else:
        assert stored == b"\2"
    assert [len(each.graph_module.graph.nodes) for each in made] == [2, 2]
