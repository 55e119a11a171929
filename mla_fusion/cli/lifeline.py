"""A child process that does not outlive its parent, however that ends.

The parent holds one end of a pipe and gives its children the other: the pipe closes when the parent
is gone, which a thread of each child waits for. A signal from the kernel (PR_SET_PDEATHSIG) would
leave what the child had started, and its folder.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# A shell outside the group $0 ends it, and then removes the folder $1, to which nobody writes now.
_END = 'kill -9 "-$0"; sleep 0.5; if [ -n "$1" ]; then rm -rf -- "$1"; fi'


@functools.cache
def line() -> int:
    """The end of the pipe that children get; the other stays open as long as this process."""
    reading, _ = os.pipe()
    return reading


def end_with_parent(reading: int, folder: Path | None) -> None:
    """End this process and its group when the parent is gone, and remove `folder`."""

    def wait() -> None:
        os.read(reading, 1)
        words = ["sh", "-c", _END, str(os.getpgrp()), str(folder or "")]
        subprocess.Popen(words, start_new_session=True)

    threading.Thread(target=wait, daemon=True).start()


def end(process: subprocess.Popen[str]) -> None:
    """End a child that has a group of its own, with all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
