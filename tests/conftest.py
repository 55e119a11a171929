"""How many examples the property tests make, and how many tests a run leaves out."""

import logging
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported, here and in the processes that tests start. Tensors are small: more
# threads only spin at each other's barriers, on cores that two pytest processes share.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor probes the compiler for each vector extension of the CPU in every fresh cache, ten
# seconds of an engine's start. The answer is known: the compiler of the tests has them.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# torch writes every graph as text for a logger that has handlers, and pytest gives it some.
logging.getLogger("torch.__trace").addHandler = lambda handler: None

# The same graphs in every run of a profile: a red build is the change's, not the dice's.
_IGNORED = HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much
_COMMON = settings(deadline=None, derandomize=True, database=None, suppress_health_check=_IGNORED)
for _profile, _examples in (("default", 250), ("nightly", 20_000)):
    settings.register_profile(_profile, _COMMON, max_examples=_examples)
settings.load_profile("default")
_DESELECTED = pytest.StashKey[int]()


def pytest_addoption(parser):
    """See tests/cli/conftest.py."""
    parser.addoption("--renew-golden", action="store_true", help="write tests/cli/golden/ again")


def pytest_configure(config):
    """Let engines share what g++ has made of a kernel, for one run: see `tests/compiler/g++`."""
    if "CXX" not in os.environ:  # as in the workers of xdist, which inherit both
        folder = tempfile.TemporaryDirectory(prefix="mla-fusion-kernels-")
        config.add_cleanup(folder.cleanup)
        os.environ["COMPILED_KERNELS"] = folder.name
        os.environ["CXX"] = str(Path(__file__).parent / "compiler" / "g++")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Files that start engines come first: of two processes none shall begin one at the end."""
    engines = {item.path for item in items if item.get_closest_marker("engine")}
    items.sort(key=lambda item: item.path not in engines)


def pytest_deselected(items):
    """Count them: pytest does, and the workers of xdist keep it to themselves."""
    if items:
        stash = items[0].config.stash
        stash[_DESELECTED] = stash.get(_DESELECTED, 0) + len(items)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node):
    """Take over what a worker counted; each of them collects, and deselects, the whole."""
    node.config.stash[_DESELECTED] = getattr(node, "workeroutput", {}).get("deselected", 0)


def pytest_sessionfinish(session):
    """A worker hands over what it counted."""
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["deselected"] = config.stash.get(_DESELECTED, 0)


def pytest_terminal_summary(terminalreporter, config):
    """How many tests were left out."""
    if deselected := config.stash.get(_DESELECTED, 0):
        terminalreporter.write_line(f"left out by -m and -k: {deselected} tests")


@pytest.fixture
def plain_kernels(monkeypatch):
    """Plain torch bodies for the RoPE kernels that a CPU build of vLLM lacks or has wrong."""
    from tests.passes import cuda_ops

    yield from cuda_ops.plain_kernels(monkeypatch)


@pytest.fixture(scope="session")
def vllm_loggers():
    """vLLM's loggers as its first config sets them up.

    pytest reads a logger that does not propagate from the start of a test: in the test that makes
    the first config of a process, it would see nothing.
    """
    import vllm.logger

    if not hasattr(vllm.logger, "configure_logging_if_needed"):
        return  # an older vLLM sets them up when it is imported
    from vllm.config.logging import LoggingConfig

    vllm.logger.configure_logging_if_needed(LoggingConfig())
