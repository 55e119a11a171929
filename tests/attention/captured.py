"""A CUDA graph imitated on a CPU: calls are recorded, and replayed on the same tensors.

    with Graph(monkeypatch) as graph:
        ...                # as in torch.cuda.graph: torch ops, and what `call` runs
    graph.replay()

Until its first replay a real graph has computed nothing, so what its calls returned is overwritten
with garbage when the recording ends.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class Graph(TorchDispatchMode):
    """Records while it is entered; to the code inside, the stream of a GPU is being captured."""

    recording = None

    def __init__(self, monkeypatch):
        super().__init__()
        self._calls = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(
            torch.cuda, "is_current_stream_capturing", lambda: Graph.recording is not None
        )

    def __enter__(self):
        Graph.recording = self
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        Graph.recording = None
        for _, args, kwargs, result in self._calls:
            given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
            for tensor in _tensors(result):
                if tensor.untyped_storage().data_ptr() not in given:
                    tensor.view(torch.uint8).fill_(0x5A if tensor.dtype != torch.bool else 1)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return self._record(op, args, kwargs or {})

    def _record(self, function, args, kwargs):
        result = function(*args, **kwargs)
        self._calls.append((function, args, kwargs, result))
        return result

    def replay(self):
        """Run the recorded calls on the recorded tensors, into the recorded results."""
        for function, args, kwargs, result in self._calls:
            again = function(*args, **kwargs)
            for old, new in zip(_tensors(result), _tensors(again), strict=True):
                old.copy_(new)


def call(function, *args, **kwargs):
    """`function(*args, **kwargs)` as one kernel: a graph records it, not the ops inside."""
    if Graph.recording is None:
        return function(*args, **kwargs)
    with _disable_current_modes():
        return Graph.recording._record(function, args, kwargs)


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
