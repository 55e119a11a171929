"""Every rule of the ledger of known failures, each broken once in a small project of its own."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ledger

ROOT = Path(__file__).resolve().parent.parent
TESTS = """
import pytest

def test_fails():
    assert False

def test_passes():
    pass

@pytest.mark.parametrize("x", [1, 2])
def test_half(x):
    assert x == 1
"""
CONFTEST = """
import ledger

def pytest_collection_modifyitems(config, items):
    ledger.mark(items, ledger.read(config.rootpath / ledger.NAME), config.rootpath)
"""
ENTRY = '[[failure]]\ntest = "{}"\ncause = "{}"\nsince = "{}"\n'


@pytest.fixture
def pytest_with(tmp_path):
    """Run pytest on `TESTS` with a ledger; (exit status, output)."""
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    shutil.copy(ledger.__file__, tmp_path)

    def run(text, *arguments):
        (tmp_path / ledger.NAME).write_text(text)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.returncode, done.stdout + done.stderr

    return run


def entry(test, cause="planted", since="2026-11-21"):
    return ENTRY.format(f"test_it.py::{test}", cause, since)


def test_a_listed_failure_does_not_fail_the_run_and_another_one_does(pytest_with):
    both = entry("test_fails") + entry("test_half[2]")
    status, output = pytest_with(both)
    assert status == 0 and "2 passed, 2 xfailed" in output
    status, output = pytest_with(entry("test_fails"))
    assert status == 1 and "1 failed" in output


def test_an_unexpected_pass_fails_the_run(pytest_with):
    status, output = pytest_with(entry("test_passes"), "test_it.py::test_passes")
    assert status == 1
    assert "[XPASS(strict)] planted (since 2026-11-21)" in output


@pytest.mark.parametrize(
    "text, says",
    [
        (entry("test_fails", cause=" "), "must have test, cause, since"),
        ('[[failure]]\ntest = "test_it.py::test_fails"\n', "must have test, cause, since"),
        (entry("test_fails", since="spring"), "since must be a date"),
        (entry("test_fails") * 2, "stands there twice"),
        (entry("test_gone"), "there is no test test_it.py::test_gone"),
        (entry("test_half[3]"), "there is no test test_it.py::test_half[3]"),
        (ENTRY.format("test_gone.py::test_fails", "c", "2026-11-21"), "there is no test test_gone"),
    ],
)
def test_a_bad_entry_stops_the_run(pytest_with, text, says):
    status, output = pytest_with(text)
    assert status == 4
    assert says in output


def test_a_run_of_other_tests_leaves_the_entry_alone(pytest_with):
    assert pytest_with(entry("test_fails"), "test_it.py::test_passes")[0] == 0
    assert pytest_with(entry("test_gone"), "test_it.py::test_passes")[0] == 4


def test_this_projects_ledger_keeps_the_rules():
    for failure in ledger.read(ROOT / "tests" / ledger.NAME):
        assert ledger.exists(failure["test"], ROOT)
