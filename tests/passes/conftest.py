from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plain torch bodies for the RoPE kernels that a CPU build of vLLM lacks or has wrong."""
    import torch

    from tests.passes import fake_engine

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors of a few hundred elements: more threads only wait
    yield from fake_engine.plain_kernels(monkeypatch)
    torch.set_num_threads(threads)
