"""A GPU's tensors on the CPU, for benchmarks of decodes."""

import contextlib
from types import SimpleNamespace

from torch.overrides import TorchFunctionMode

from mla_fusion.attention import PersistentDecodePlan
from mla_fusion.measure import decode_peers as peers


class OnCpu(TorchFunctionMode):
    """Tensors for the GPU are made on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextlib.contextmanager
def decodes_on_cpu(monkeypatch):
    """Inputs on the CPU, where the reference executes our plans; two caches for a case."""
    settings = {"ctas": 4, "kv_granularity": 64, "overhead": 4}

    def allocate(**arguments):
        return PersistentDecodePlan.allocate(**arguments | {"device": "cpu"})

    monkeypatch.setattr(peers, "plan_settings", lambda *_: settings)
    monkeypatch.setattr(peers, "PersistentDecodePlan", SimpleNamespace(allocate=allocate))
    monkeypatch.setattr(peers, "ROTATED", 0)
    with OnCpu():
        yield
