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


def test_it_is_changed_at_once_if_it_is_imported(module):
    name, change = module
    assert value(name) == 1
    when_imported(name, change)
    assert value(name) == 2


def test_it_is_changed_once_however_it_is_imported_later(module):
    """Looked up before, by many threads, with its source, and again after a first one failed."""
    name, change = module
    when_imported(name, change)
    when_imported(name, change)
    file = Path(importlib.util.find_spec(name).origin)
    text = file.read_text()
    file.write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        value(name)
    file.write_text(text)
    importlib.invalidate_caches()
    with ThreadPoolExecutor(8) as threads:
        assert {*threads.map(value, [name] * 8)} == {3}
    assert inspect.getsource(sys.modules[name]) == text


def test_a_thread_that_is_importing_it_is_waited_for(module):
    name, change = module
    with ThreadPoolExecutor(1) as threads:
        importing = threads.submit(value, name)
        while name not in sys.modules:
            pass
        when_imported(name, change)
        importing.result()
    assert value(name) == 2


def test_a_forked_process_changes_it_too(module):
    name, change = module
    when_imported(name, change)
    child = os.fork()
    if not child:
        os._exit(value(name))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert value(name) == 2


def test_a_module_that_does_not_exist_is_still_missing(module):
    when_imported(module[0] + "_not", module[1])
    with pytest.raises(ModuleNotFoundError, match="_not"):
        value(module[0] + "_not")
