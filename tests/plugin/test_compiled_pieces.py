"""Equal pieces of a graph in vLLM's cache; test_engine.py compiles real ones."""

import pytest
from torch._functorch._aot_autograd import autograd_cache
from vllm.compilation.backends import CompilerManager
from vllm.config import CompilationConfig
from vllm.config.utils import Range

from mla_fusion import config

BUCKET = Range(1, 4)


class Compiler:
    """Graphs are their own cache keys; the code of one is a new object."""

    name = "planted"

    def __init__(self):
        self.compiled, self.loaded = [], []

    def initialize_cache(self, **_):
        pass

    def compile(self, graph, *_):
        autograd_cache.autograd_cache_key(graph)
        self.compiled.append(graph)
        return object(), (graph, "path")

    def load(self, handle, *_):
        self.loaded.append(handle[0])
        return object()


@pytest.fixture
def manager(monkeypatch, tmp_path):
    """make(flag), a manager in which `tmp_path` has the cache."""
    key = lambda graph: (f"key {graph}", []) if graph else None  # noqa: E731
    monkeypatch.setattr(autograd_cache, "autograd_cache_key", key)

    def make(flag=True):
        compilation = CompilationConfig(mode=3, pass_config={config.FLAG: flag})
        made = CompilerManager(compilation)
        made.compiler = Compiler()
        made.initialize_cache(str(tmp_path))
        return made

    return make


def compiled(manager, graphs):
    """The code of each, as vLLM's piecewise backend asks for it."""
    given = [], {}, manager.compilation_config
    return [
        manager.compile(graph, *given, compile_range=BUCKET, graph_index=i, num_graphs=len(graphs))
        for i, graph in enumerate(graphs)
    ]


@pytest.mark.parametrize("flag", [True, False])
def test_equal_pieces_are_stored_and_loaded_once(manager, flag):
    graphs = ["first", "layer", "layer", "layer", "last"]
    cold = manager(flag)
    compiled(cold, graphs)
    cold.save_to_file()
    assert cold.compiler.compiled == ["first", "layer", "last"]
    assert len(cold.cache) == (5 if flag else 3)
    warm = manager(flag)
    first, layer, *others, last = compiled(warm, graphs)
    assert others == [layer] * 2 and len({id(code) for code in (first, layer, last)}) == 3
    assert warm.compiler.loaded == ["first", "layer", "last"]


def test_pieces_without_a_key_are_not_taken_for_equal(manager):
    """Graphs for which torch has no key."""
    cold = manager()
    assert len({id(code) for code in compiled(cold, ["", ""])}) == 2
    cold.save_to_file()
    warm = manager()
    assert len({id(code) for code in compiled(warm, ["", ""])}) == 2
    assert warm.compiler.loaded == ["", ""]
