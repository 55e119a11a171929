"""Reading a file that someone named or that an earlier start left: it may be anything."""

import stat
from pathlib import Path

MOST_BYTES = 32 * 2**20  # a config has some kilobytes, a report less than one for a layer


def read_bounded(path: Path) -> bytes:
    """What a regular file holds; a ValueError if it is none or has more than `MOST_BYTES`."""
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"{path} is a folder")
    if not stat.S_ISREG(mode):
        raise ValueError("it is a device, a pipe or a socket, not a file")
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES >> 20} MiB")
    return content
