"""The check for CUDA graph capture, and the refusal to allocate during it."""

import torch


def capturing() -> bool:
    """True if the current stream is being captured: launches then run at replay only."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def refuse_during_capture(what: str) -> None:
    """Raise RuntimeError if the current stream is being captured; call it before computing what is
    kept. A captured computation is its graph's: until the first replay, other readers of the
    result would read uninitialized memory."""
    if capturing():
        raise RuntimeError(
            f"mla_fusion has to compute {what} once, and was first asked to during CUDA graph "
            "capture, which would only record it. Run one step without a graph before "
            "capturing (vLLM does; compilation_config.cudagraph_num_of_warmups must not be 0), or "
            "set cudagraph_mode to NONE"
        )
