"""How a method of vLLM is replaced."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

WRAPPED = "_mla_fusion_wrapped"  # on what was replaced, or on a class whose method was


def wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace method `name` of `owner` by make(original), once."""
    original = getattr(owner, name)
    if getattr(original, WRAPPED, False):
        return
    wrapper = functools.wraps(original)(make(original))
    setattr(wrapper, WRAPPED, True)
    setattr(owner, name, wrapper)
