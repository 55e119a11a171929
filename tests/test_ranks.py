"""Workers of one engine: each tells the others what fused, or that it cannot start.

In one test two processes join vLLM's world group, as its workers do; they compile nothing. In the
others the second rank's answer is made up. Whole engines with two ranks are in
`tests/engine/test_engine.py`.
"""

import contextlib
import multiprocessing
import os
from types import SimpleNamespace

import pytest
import torch

from mla_fusion import report
from mla_fusion.config import Options, vllm_compat
from mla_fusion.runtime import collectives
from mla_fusion.runtime.engine import Engine


def work(rank, port, results):
    """One worker; the result or error of its task goes into `results`."""
    from vllm.distributed.parallel_state import init_distributed_environment

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    address = f"tcp://127.0.0.1:{port}"
    init_distributed_environment(2, rank, address, local_rank=rank, backend="gloo")
    try:
        results.put((rank, fail_and_die_on_the_second(rank)))
    except Exception as error:  # noqa: BLE001 - the test reads it
        results.put((rank, f"{type(error).__name__}: {error}"))


def fail_and_die_on_the_second(rank):
    assert vllm_compat.gather(rank) == [0, 1]
    alone, errors = vllm_compat.gather(collect_where_the_first_fails()), []
    for fault in ("fails", "dies"):
        try:
            with collectives.on_every_rank():
                if rank == 1 and fault == "dies":
                    os._exit(0)
                if rank == 1:
                    raise ImportError("no module named triton")
        except Exception as error:  # noqa: BLE001 - the test reads it
            errors.append(f"{type(error).__name__}: {error}")
        if fault == "fails":
            errors = vllm_compat.gather(errors.pop())
    return [alone, *errors]


CONFIG = SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=1))
ENGINE = Engine(Options("triton"), 4, 1, 4, torch.bfloat16, {}, model="V3")


def collect_where_the_first_fails():
    """The first rank alone reads what is stored."""

    def find(path):
        raise RecursionError("too deep")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "report_path", lambda _: None)
        patch.setattr(report, "find", find)
        with pytest.raises((RecursionError, RuntimeError)) as raised:
            collectives.collect(ENGINE, CONFIG)
    return f"{raised.type.__name__}: {raised.value}"


def test_an_error_or_the_end_of_one_rank_ends_the_start_of_all():
    from vllm.utils.network_utils import get_open_port

    context = multiprocessing.get_context("spawn")
    results, port = context.Queue(), get_open_port()
    workers = [context.Process(target=work, args=(rank, port, results)) for rank in range(2)]
    for worker in workers:
        worker.start()
    rank, found = results.get(timeout=120)
    for worker in workers:
        worker.join(60)
    assert rank == 0
    alone, first, second, dead = found
    assert alone[0] == "RecursionError: too deep"
    assert alone[1].endswith("on rank 0: RecursionError: too deep")
    assert second == "ImportError: no module named triton"
    assert first == (
        "RuntimeError: mla_fusion could not prepare its kernels on rank 1: "
        "ImportError: no module named triton"
    )
    assert dead.startswith("RuntimeError: a rank of this engine ended while mla_fusion prepared")


def compiled(fused):
    """The report of a rank that compiled a graph with two layers."""
    return report.Report("triton", 4, [report.RangeReport((1, 4), 2, fused)])


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("own", "others", "stored", "found"),
    [
        ("own", "other", None, ("own", "other")),  # both compiled
        ("own", None, "stored", ("own", "stored")),  # the other took its graphs from a warm cache
        (None, "other", "stored", ("stored", "other")),
        (None, None, "stored", None),  # both did
        (None, None, None, None),
        ("own", None, None, ("own",)),  # nobody knows what is in the other's cache
    ],
)
def test_the_first_rank_stores_what_all_compiled(
    monkeypatch, tmp_path, first, own, others, stored, found
):
    made = {"own": compiled(2), "other": compiled(1), "stored": compiled(0), None: None}
    path, kept, asked = tmp_path / "report.json", [], []
    monkeypatch.setattr(collectives, "report_path", lambda _: path)
    monkeypatch.setattr(report, "take", lambda *_, **__: made[own])
    monkeypatch.setattr(report, "find", lambda at: asked.append(at) or made[stored])
    monkeypatch.setattr(report, "store", lambda at, merged: kept.append((at, merged)))
    monkeypatch.setattr(vllm_compat, "is_first_rank", lambda: first)

    def gather(value):
        """What this rank says and what the other one does; the first knows what is stored."""
        if value is made[own] and not gather.called:
            gather.called = True
            return [value, made[others]]
        known = made[stored] if None in (own, others) else None
        assert value is (known if first else None)
        return [known, None]

    gather.called = False
    monkeypatch.setattr(vllm_compat, "gather", gather)
    monkeypatch.setattr(collectives, "on_every_rank", contextlib.nullcontext)
    merged, cached = collectives.collect(ENGINE, CONFIG)
    assert asked == ([path] if first and None in (own, others) else [])
    if found is None:
        assert merged is made[stored] and cached is (stored is not None) and not kept
        return
    assert not cached and kept == ([(path, merged)] if first else [])
    fused = [made[name].ranges[0].fused for name in found]
    assert merged.ranks == len(found) and merged.ranges[0].fused == fused[0]
    differs = [f"rank 1: {fused[1]} of 2"] if len(found) > 1 else []
    assert [line[: len("rank 1: 0 of 2")] for line in merged.differing] == differs


@pytest.mark.parametrize("stages", [1, 2])
def test_ranks_of_a_stage_have_the_same_products(monkeypatch, stages):
    own, other = compiled(2), compiled(2)
    own.ranges[0].products["8 -> 8"] = other.ranges[0].products["8 -> 9"] = 1
    monkeypatch.setattr(CONFIG.parallel_config, "pipeline_parallel_size", stages)
    monkeypatch.setattr(collectives, "report_path", lambda _: None)
    monkeypatch.setattr(collectives, "on_every_rank", contextlib.nullcontext)
    monkeypatch.setattr(report, "take", lambda *_, **__: own)
    monkeypatch.setattr(report, "store", lambda *_: None)
    monkeypatch.setattr(vllm_compat, "gather", lambda value: [value, value and other])
    merged, _ = collectives.collect(ENGINE, CONFIG)
    assert len(merged.differing) == (stages == 1)
