"""Workers of one engine: each tells the others what fused, or that it cannot start.

Two processes join vLLM's world group, as its workers do; they compile nothing. Whole engines with
two ranks are in `tests/engine/test_engine.py`.
"""

import multiprocessing
import os

import pytest

from mla_fusion import plugin
from mla_fusion.config import vllm_compat


def work(rank, port, task, results):
    """One worker; its result or error goes into `results`."""
    from vllm.distributed.parallel_state import init_distributed_environment

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    address = f"tcp://127.0.0.1:{port}"
    init_distributed_environment(2, rank, address, local_rank=rank, backend="gloo")
    try:
        results.put((rank, task(rank)))
    except Exception as error:  # noqa: BLE001 - the test reads it
        results.put((rank, f"{type(error).__name__}: {error}"))


@pytest.fixture
def on_two_ranks():
    """on_two_ranks(task) -> what task(0) returned, or its error."""

    def run(task):
        from vllm.utils.network_utils import get_open_port

        context = multiprocessing.get_context("spawn")
        results, port = context.Queue(), get_open_port()
        workers = [context.Process(target=work, args=(r, port, task, results)) for r in range(2)]
        for worker in workers:
            worker.start()
        rank, found = results.get(timeout=120)
        for worker in workers:
            worker.join(60)
        assert rank == 0
        return found

    return run


def fail_and_die_on_the_second(rank):
    assert vllm_compat.gather(rank) == [0, 1]
    errors = []
    for fault in ("fails", "dies"):
        try:
            with plugin._on_every_rank():
                if rank == 1 and fault == "dies":
                    os._exit(0)
                if rank == 1:
                    raise ImportError("no module named triton")
        except Exception as error:  # noqa: BLE001 - the test reads it
            errors.append(f"{type(error).__name__}: {error}")
        if fault == "fails":
            errors = vllm_compat.gather(errors.pop())
    return errors


def test_an_error_or_the_end_of_one_rank_ends_the_start_of_all(on_two_ranks):
    first, second, dead = on_two_ranks(fail_and_die_on_the_second)
    assert second == "ImportError: no module named triton"
    assert first == (
        "RuntimeError: mla_fusion could not prepare its kernels on rank 1: "
        "ImportError: no module named triton"
    )
    assert dead.startswith("RuntimeError: a rank of this engine ended while mla_fusion prepared")
