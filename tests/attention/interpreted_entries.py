"""The kernel of page indices on random block tables; test_interpreted.py runs this.

It writes the same as torch does on a CPU, and nothing else; bounds and races are checked.
"""

import random

import torch

from mla_fusion.attention.aiter import entries, entries_kernel
from tests.kernels import interpreter

interpreter.install()


def test_the_kernel_writes_what_torch_writes(monkeypatch):
    monkeypatch.setattr(entries_kernel, "BLOCK", 32)
    monkeypatch.setattr(entries_kernel, "CTAS", 2)
    rng = random.Random(0)
    for number in range(20):
        page, batch = rng.choice((1, 16, 24, 64)), rng.randint(1, 5)
        lengths = [rng.choice((0, 1, rng.randint(0, 300), 64)) for _ in range(batch)]
        columns = max(1, -(-max(lengths) // page))
        wide = torch.randint(0, 999, (batch, columns + 3), dtype=torch.int32)
        table = wide[:, :columns]  # its rows are strided, as in vLLM
        kv_indptr = torch.tensor([0, *lengths]).cumsum(0).int()
        want = torch.full((sum(lengths) + 7,), -5, dtype=torch.int32)
        got = want.clone()
        entries.expand(want, kv_indptr, table, page)
        entries_kernel.launch(got, kv_indptr, table, page)
        assert torch.equal(want, got), (number, page, lengths)


def test_nothing_is_written_behind_the_buffer():
    """Sequences longer than the plan was allocated for break a promise, not other memory."""
    found = torch.zeros(40, dtype=torch.int32)
    kv_indptr = torch.tensor([0, 30, 60], dtype=torch.int32)
    table = torch.arange(1, 9, dtype=torch.int32).view(2, 4)
    entries_kernel.launch(found, kv_indptr, table, 8)
    assert found[29] == 4 * 8 + 5 and found[39] == 6 * 8 + 1
