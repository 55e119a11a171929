"""Files that someone named or that an earlier start left, and their text: it may be anything.

Nothing here imports torch, which a command without a GPU does not wait for."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_BYTES = 32 * 2**20  # a config has some kilobytes, a report less than one for a layer
_MAX_DEPTH = 64  # of lists and objects in each other; a report has less than ten


def read_bounded(path: Path, most: int = MAX_BYTES) -> bytes:
    """Content of a regular file of at most `most` bytes.

    Raises OSError, which names the file, if it cannot be read, is no regular file or is larger. The
    file is checked once it is open, so that no other can take its place in between."""
    special = OSError(errno.EINVAL, "it is a device, a pipe or a socket, not a file", str(path))
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if error.errno == errno.ENXIO:  # of a socket
            raise special from None
        raise
    try:
        status = os.fstat(opened)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, "it is a folder, not a file", str(path))
        if not stat.S_ISREG(status.st_mode):
            raise special
        with open(opened, "rb", closefd=False) as file:
            content = file.read(most + 1)
    finally:
        os.close(opened)
    if len(content) > most:
        size = max(status.st_size, len(content))  # it may have grown, and /proc says 0
        why = f"it has {size:,} bytes, more than {most >> 20} MiB ({most:,} bytes)"
        raise OSError(errno.EFBIG, why, str(path))
    return content


def printable(text: str) -> str:
    """`text` with escapes, such as \\x1b, for the characters that a terminal obeys or cannot show:
    controls, line ends, changes of the writing direction, lone surrogates."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def each_text(
    value: Any, change: Callable[[str], str], key: Callable[[str], str], depth: int = 0
) -> Any:
    """Plain data with every text changed by `change`, and every key of an object by `key`.

    Keys that become equal get numbers, so that no entry is lost. Raises ValueError if the data is
    nested deeper than any that is stored here."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {_MAX_DEPTH} lists and objects")
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        return [each_text(each, change, key, depth + 1) for each in value]
    if not isinstance(value, dict):
        return value
    found: dict[str, Any] = {}
    for old, each in value.items():
        name = key(old)
        name = f"{name} {len(found)}" if name in found else name
        found[name] = each_text(each, change, key, depth + 1)
    return found
