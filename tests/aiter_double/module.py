"""The module tree of the double, and putting it into sys.modules."""

from __future__ import annotations

import importlib.machinery
import inspect
import sys
import types
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from tests.aiter_double import decode, metadata, products, qk_rope, reduce, schemas, versions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.aiter_double.versions import Architecture, Release

FUSED = "fused_qk_rope_concat_and_cache_mla"
FP8_PRODUCT = "batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant"
FP4_PRODUCT = "batched_gemm_a16wfp4"


class Double:
    """One installed double.

    Attributes:
        modules: by name, what stands in sys.modules.
        ops: every op by name; signatures: the published arguments of each.
        schemas: of the compiled ops, for torch.
    """

    def __init__(self, architecture: str, release: str) -> None:
        self.arch: Architecture = versions.ARCHITECTURES[architecture]
        self.release: Release = versions.RELEASES[release]
        self.modules: dict[str, types.ModuleType] = {}
        self.ops: dict[str, Callable[..., Any]] = {}
        self.signatures: dict[str, inspect.Signature] = {}
        self.schemas: list[str] = []
        self._calls: list[tuple[str, dict[str, Any]]] = []
        self._build()

    def calls(self, name: str) -> list[dict[str, Any]]:
        """The arguments, by name, of every call of one op."""
        return [arguments for op, arguments in self._calls if op == name]

    def counts(self) -> dict[str, int]:
        """How often each op was called."""
        return dict(Counter(op for op, _ in self._calls))

    def forget(self) -> None:
        """Drop what was called so far."""
        self._calls.clear()

    def _op(self, name: str, signature: str, body: Callable[..., Any], compiled: bool) -> Any:
        """A function with the published signature; a compiled op hides it, as AITER's do."""
        namespace: dict[str, Any] = {}
        exec(f"def {name}({signature}): pass", namespace)  # our own text
        published = self.signatures[name] = inspect.signature(namespace[name])

        def wrapper_custom(*args: Any, **kwargs: Any) -> Any:
            bound = published.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = dict(bound.arguments)
            self._calls.append((name, dict(arguments)))
            return body(self.arch, self.release, arguments)

        if compiled:
            self.schemas.append(schemas.schema(name, published))
        else:
            wrapper_custom.__name__ = name
            wrapper_custom.__signature__ = published  # type: ignore[attr-defined]
        self.ops[name] = wrapper_custom
        return wrapper_custom

    def _build(self) -> None:
        release = self.release
        self._module(
            "aiter",
            **{
                FUSED: self._op(FUSED, versions.fused_signature(release), qk_rope.run, True),
                "get_mla_metadata_info_v1": self._op(
                    "get_mla_metadata_info_v1", versions.info_signature(release), metadata.info,
                    False,
                ),
                "get_mla_metadata_v1": self._op(
                    "get_mla_metadata_v1", versions.plan_signature(release), metadata.plan,
                    not release.planner_wrapper,
                ),
                "mla_reduce_v1": self._op(
                    "mla_reduce_v1", versions.reduce_signature(release), reduce.run, True
                ),
                "flash_attn_varlen_func": _prefill,
            },
        )  # fmt: skip
        top = self.modules["aiter"]
        top.dtypes = types.SimpleNamespace(  # type: ignore[attr-defined]
            fp8=self.arch.fp8, bf16=torch.bfloat16, fp16=torch.float16, fp32=torch.float32
        )
        self._module("aiter.jit")
        self._module("aiter.ops")
        self._module("aiter.ops.cache", **{FUSED: getattr(top, FUSED)})
        self._module(
            "aiter.mla",
            mla_decode_fwd=self._op(
                "mla_decode_fwd", versions.decode_signature(release), decode.run, False
            ),
        )
        self._module("aiter.ops.triton")
        for name, signature, body in (
            (FP4_PRODUCT, products.FP4, products.fp4),
            (FP8_PRODUCT, products.FP8, products.fp8),
        ):
            op = self._op(name, signature, body, False)
            self._module(f"aiter.ops.triton.{name}", **{name: op})
        quantize = self._op("dynamic_mxfp4_quant", "x", products.quantize, False)
        self._module("aiter.ops.triton.quant", dynamic_mxfp4_quant=quantize)
        self._module("aiter.ops.triton.gluon")
        gluon = (
            "q_nope, q_pe, kv_c, o, page_table, seq_info, sm_scale, k_pe=None, kv_pe_offset=512, "
            "use_2d_view=False, kv_scale=1.0, min_kv_seq_len=1"
        )
        self._module(
            "aiter.ops.triton.gluon.mla_gluon",
            mla_gluon=self._op("mla_gluon", gluon, decode.gluon, False),
        )

    def _module(self, name: str, **contents: Any) -> None:
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        module.__dict__.update(contents)
        self.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(self.modules[parent], child, module)


def _prefill(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the prefill of ROCm is not part of the double")


@contextmanager
def installed(architecture: str = "gfx942", release: str = "v0.1.20") -> Iterator[Double]:
    """`import aiter` and its submodules give the double while the block runs."""
    before = {name: m for name, m in sys.modules.items() if name.split(".")[0] == "aiter"}
    for name in before:
        del sys.modules[name]
    double = Double(architecture, release)
    sys.modules.update(double.modules)
    library = schemas.register(double.schemas)
    try:
        yield double
    finally:
        library._destroy()
        for name in double.modules:
            sys.modules.pop(name, None)
        sys.modules.update(before)
