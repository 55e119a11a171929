"""Whether a CUDA graph is being captured, and what must not happen then."""

from __future__ import annotations

import torch


def capturing() -> bool:
    """Whether the current stream is being captured: what is launched now runs at replay."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def refuse_during_capture(what: str) -> None:
    """Raise RuntimeError if the current stream is being captured; call it before making `what`.

    `what` is computed once and kept. Captured, the computation would belong to that one graph:
    until its first replay, every other reader of the result would get memory nobody wrote.
    """
    if capturing():
        raise RuntimeError(
            f"mla_fusion has to compute {what} once, and was first asked to during CUDA graph "
            "capture, where it would only be recorded. Run one step without a graph before "
            "capturing (vLLM does; compilation_config.cudagraph_num_of_warmups must not be 0), or "
            "set cudagraph_mode to NONE"
        )
