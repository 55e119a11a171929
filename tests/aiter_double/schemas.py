"""Torch schemas of the compiled ops, as AITER registers them beside its Python wrappers."""

from __future__ import annotations

import inspect

import torch

# Arguments without a default that are no tensors; the others say their type by their default.
_TYPES = {
    "is_neox": "bool",
    "is_nope_first": "bool",
    "is_causal": "bool",
    "num_heads_per_head_k": "int",
    "num_heads_k": "int",
    "max_seqlen_q": "int",
    "num_kv_splits": "int",
}


def schema(name: str, signature: inspect.Signature) -> str:
    """The schema of one op: it claims to change every tensor, and returns nothing."""
    arguments = [_argument(i, p) for i, p in enumerate(signature.parameters.values())]
    return f"{name}({', '.join(arguments)}) -> ()"


def _argument(index: int, parameter: inspect.Parameter) -> str:
    name, default = parameter.name, parameter.default
    if default is inspect.Parameter.empty:
        return f"{_TYPES.get(name, f'Tensor(a{index}!)')} {name}"
    if default is None:
        kind = "ScalarType?" if name.startswith("dtype") else f"Tensor(a{index}!)?"
    else:
        kind = type(default).__name__
    return f"{kind} {name}={default}"


def register(schemas: list[str]) -> torch.library.Library:
    """`torch.ops.aiter.X` for each, until the library is destroyed; nothing implements them."""
    library = torch.library.Library("aiter", "FRAGMENT")
    for text in schemas:
        library.define(text)
    return library
