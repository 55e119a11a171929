"""Replaces a method or a function of vLLM, now or when its module is imported."""

import functools
import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# On a class or module: names of what is replaced there. A mark on the wrapper would be lost where
# another plugin wraps it, and the next worker of the process would wrap once more.
WRAPPED = "_mla_fusion_wrapped"
_NOTHING = object()
_undo: list[Callable[[], object]] = []


def wrap(owner: Any, name: str, instead: Callable[..., Any]) -> None:
    """Let calls of `name` of `owner`, a method or a function of a module, be calls of `instead`,
    once, which gets the original, of a class method the bound one, before their arguments. After
    `put_back` a wrapper that another plugin wrapped calls the original."""
    original = getattr(owner, name)
    classes = owner.__mro__ if inspect.isclass(owner) else (owner,)
    definer = next(each for each in classes if name in vars(each))
    if _is_replaced(definer, name):
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not _is_replaced(owner, name):
            return original(*args, **kwargs)
        return instead(original, *args, **kwargs)

    replace(owner, name, staticmethod(wrapper) if inspect.ismethod(original) else wrapper)


def replace(owner: Any, name: str, value: Any) -> None:
    """Set an attribute of a class or a module of vLLM, once, until `put_back`."""
    if _is_replaced(owner, name):
        return
    undo_by(functools.partial(_restore, owner, name, value, vars(owner).get(name, _NOTHING)))
    setattr(owner, WRAPPED, {*vars(owner).get(WRAPPED, ()), name})
    setattr(owner, name, value)


def undo_by(undo: Callable[[], object]) -> None:
    """Let `put_back` call `undo`, for a change of vLLM that is no attribute."""
    _undo.append(undo)


def put_back() -> None:
    """Undo every change of this process, the last one first."""
    while _undo:
        _undo.pop()()


def _is_replaced(owner: Any, name: str) -> bool:
    return name in vars(owner).get(WRAPPED, ())


def _restore(owner: Any, name: str, value: Any, before: Any) -> None:
    """Give an attribute its old value, unless another plugin replaced `value`."""
    setattr(owner, WRAPPED, vars(owner)[WRAPPED] - {name})
    if vars(owner).get(name) is not value:
        return
    if name == "__new__":
        # Python calls a class's __new__ for good once it had one; object's takes no fields.
        setattr(owner, name, lambda cls, *args, **kwargs: object.__new__(cls))
    elif before is _NOTHING:
        delattr(owner, name)
    else:
        setattr(owner, name, before)


_waiting: dict[str, tuple[Callable[[], None], ...]] = {}
_lock = threading.Lock()  # of the table alone: never held while a module is imported or changed


def when_imported(module: str, change: Callable[[], None]) -> None:
    """Call `change` once `module` is imported: now if it is, else at the end of its import, which
    no process does for it. Forked processes keep what waits; spawned ones load the plugin again."""
    with _lock:
        _waiting[module] = (*_waiting.get(module, ()), change)
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
    if module in sys.modules:
        importlib.import_module(module)  # waits for a thread that is importing it
        _apply(module)


def _apply(module: str) -> None:
    with _lock:
        changes = _waiting.pop(module, ())
    for change in changes:
        change()


class _Finder(MetaPathFinder):
    """Finds what waits as the finders behind it do, and lets the loader that they found, one for
    each spec, call `_apply` at the end; sources and resources are found as before."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _waiting:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _apply(name)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
