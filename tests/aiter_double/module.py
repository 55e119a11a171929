"""The module tree of the double, and putting it into sys.modules."""

import importlib.machinery
import inspect
import sys
import types
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch

from tests.aiter_double import decode, metadata, products, qk_rope, versions

_TRITON = "aiter.ops.triton"
_ENTRIES = "mla_fusion.attention.aiter.entries_kernel"  # Triton's, for a GPU
# Op -> its body, and the modules that have it.
_OPS = {
    versions.FUSED: (qk_rope.run, ("aiter", "aiter.ops.cache")),
    versions.INFO: (metadata.info, ("aiter",)),
    versions.PLANNER: (metadata.plan, ("aiter",)),
    versions.DECODE: (decode.run, ("aiter.mla",)),
    versions.GLUON: (decode.gluon, (f"{_TRITON}.gluon.mla_gluon",)),
    versions.FP4_PRODUCT: (products.fp4, (f"{_TRITON}.{versions.FP4_PRODUCT}",)),
    versions.FP8_PRODUCT: (products.fp8, (f"{_TRITON}.{versions.FP8_PRODUCT}",)),
    versions.QUANTIZE: (products.quantize, (f"{_TRITON}.quant",)),
}


class Double:
    """One installed double.

    modules: by name, as in sys.modules. ops: every op by name; signatures: the published arguments
    of each. compiled: the ops that hide their arguments, as AITER's compiled ops do. observers:
    called after each op, with its name, its arguments and its result.
    """

    def __init__(self, architecture, release):
        self.arch = versions.ARCHITECTURES[architecture]
        self.at = versions.Place(self.arch, release)
        self.modules: dict[str, types.ModuleType] = {}
        self.ops = {}
        self.signatures: dict[str, inspect.Signature] = {}
        self.compiled = [versions.FUSED] + [versions.PLANNER] * (not self.at.has("planner_wrapper"))
        self.observers: list[Callable[[str, dict[str, Any], Any], None]] = []
        self._calls: list[tuple[str, dict[str, Any]]] = []
        top: Any = self._module("aiter")
        named = {"fp8": self.arch.fp8, "bf16": torch.bfloat16, "fp16": torch.float16,
                 "fp32": torch.float32}  # fmt: skip
        top.dtypes = types.SimpleNamespace(**named, d_dtypes=named)
        top.flash_attn_varlen_func = top.mla_reduce_v1 = _prefill
        self._module("aiter.jit")
        for name, (body, modules) in _OPS.items():
            self.ops[name] = self._op(name, body)
            for module in modules:
                setattr(self._module(module), name, self.ops[name])
        self.modules[_ENTRIES] = entries = types.ModuleType(_ENTRIES)
        entries.write_entries = metadata.entries  # type: ignore[attr-defined]

    def calls(self, name):
        """The arguments, by name, of every call of one op."""
        return [arguments for op, arguments in self._calls if op == name]

    def counts(self):
        """How often each op was called."""
        return dict(Counter(op for op, _ in self._calls))

    def forget(self, *names):
        """Drop the calls so far, or those of some ops."""
        self._calls = [call for call in self._calls if names and call[0] not in names]

    def _op(self, name, body):
        """A function with the published signature, which a compiled op hides."""
        namespace: dict[str, Any] = {}
        exec(f"def {name}({versions.arguments(name, self.at)}): pass", namespace)  # our own text
        published = self.signatures[name] = inspect.signature(namespace[name])

        def wrapper_custom(*args, **kwargs):
            bound = published.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = dict(bound.arguments)
            self._calls.append((name, dict(arguments)))
            result = body(self.at, arguments)
            for observe in self.observers:
                observe(name, arguments, result)
            return result

        if name not in self.compiled:
            wrapper_custom.__name__ = name
            wrapper_custom.__signature__ = published  # type: ignore[attr-defined]
        return wrapper_custom

    def _module(self, name):
        """The module of that name, made with its parents if need be."""
        if name not in self.modules:
            module = self.modules[name] = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            module.__path__ = []
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(self._module(parent), child, module)
        return self.modules[name]


def _schema(name, signature):
    """As AITER registers a compiled op beside its Python wrapper: it claims to change every tensor,
    and returns nothing."""
    arguments = [_argument(i, p) for i, p in enumerate(signature.parameters.values())]
    return f"{name}({', '.join(arguments)}) -> ()"


def _argument(index, parameter):
    """A default shows a type; of those without one that are no tensors the names do."""
    name, default, tensor = parameter.name, parameter.default, f"Tensor(a{index}!)"
    if default is inspect.Parameter.empty:
        kind = {"is": "bool", "num": "int"}.get(name.partition("_")[0], tensor)
        return f"{kind} {name}"
    if default is None:
        kind = "ScalarType?" if name.startswith("dtype") else f"{tensor}?"
    else:
        kind = type(default).__name__
    return f"{kind} {name}={default}"


def _prefill(*args, **kwargs):
    raise AssertionError("the prefill of ROCm is not part of the double")


@contextmanager
def installed(architecture="gfx942", release="v0.1.20"):
    """`import aiter` and its submodules give the double while the block runs."""
    ours = (name for name in sys.modules if name.split(".")[0] == "aiter" or name == _ENTRIES)
    before = {name: sys.modules[name] for name in ours}
    for name in before:
        del sys.modules[name]
    double = Double(architecture, release)
    sys.modules.update(double.modules)
    library = torch.library.Library("aiter", "FRAGMENT")  # nothing implements its ops
    for name in double.compiled:
        library.define(_schema(name, double.signatures[name]))
    try:
        yield double
    finally:
        library._destroy()
        for name in double.modules:
            sys.modules.pop(name, None)
        sys.modules.update(before)
