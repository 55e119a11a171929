"""Modules of vLLM that are changed when they are imported."""

import importlib.util
import inspect
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mla_fusion.plugin.wrap import when_imported


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module whose `value` is 1, and a change that adds 1."""
    name = f"waits_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text("import time\ntime.sleep(0.05)\nvalue = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])

    def change():
        sys.modules[name].value += 1

    yield name, change
    sys.modules.pop(name, None)


def value(name):
    return importlib.import_module(name).value


def test_it_is_changed_once_however_it_is_imported_later(module):
    """Looked up before, by a forked process, again after an import failed, by many threads."""
    name, change = module
    when_imported(name, change)
    when_imported(name, change)
    file = Path(importlib.util.find_spec(name).origin)
    text = file.read_text()
    if not (child := os.fork()):
        os._exit(value(name))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    file.write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        value(name)
    file.write_text(text)
    importlib.invalidate_caches()
    with ThreadPoolExecutor(8) as threads:
        assert {*threads.map(value, [name] * 8)} == {3}
    assert inspect.getsource(sys.modules[name]) == text


def test_it_is_changed_at_once_if_it_is_imported_or_a_thread_is_importing_it(module):
    name, change = module
    with ThreadPoolExecutor(1) as threads:
        importing = threads.submit(value, name)
        while name not in sys.modules:
            pass
        when_imported(name, change)
        importing.result()
    assert value(name) == 2
    when_imported(name, change)
    assert value(name) == 3
