"""Torch schemas of the compiled ops, as AITER registers them beside its Python wrappers."""

import inspect

import torch

# Arguments without a default that are no tensors; a default shows its type.
_TYPES = {
    "is_neox": "bool",
    "is_nope_first": "bool",
    "is_causal": "bool",
    "num_heads_per_head_k": "int",
    "num_heads_k": "int",
}


def schema(name, signature):
    """The schema of one op: it claims to change every tensor, and returns nothing."""
    arguments = [_argument(i, p) for i, p in enumerate(signature.parameters.values())]
    return f"{name}({', '.join(arguments)}) -> ()"


def _argument(index, parameter):
    name, default = parameter.name, parameter.default
    if default is inspect.Parameter.empty:
        return f"{_TYPES.get(name, f'Tensor(a{index}!)')} {name}"
    if default is None:
        kind = "ScalarType?" if name.startswith("dtype") else f"Tensor(a{index}!)?"
    else:
        kind = type(default).__name__
    return f"{kind} {name}={default}"


def register(signatures):
    """`torch.ops.aiter.NAME` for each, until the library is destroyed; nothing implements them."""
    library = torch.library.Library("aiter", "FRAGMENT")
    for name, signature in signatures.items():
        library.define(schema(name, signature))
    return library
