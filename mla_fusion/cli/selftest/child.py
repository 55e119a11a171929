"""The process that checks one kernel: python -m mla_fusion.cli.selftest.child NAME [thorough].

A line of JSON on stdout for each outcome; the last one is how it ended: {"end": reason}, empty if
all cases ran. A kernel that never ends or ends the process takes only this process with it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import traceback

from mla_fusion.cli.selftest.kernels import checks
from mla_fusion.cli.selftest.outcome import CannotRun, Outcome


def main(name: str, thorough: bool) -> None:
    """Run the check of one kernel."""
    try:
        for outcome in checks()[name](thorough):
            say(dataclasses.asdict(outcome))
        say({"end": ""})
    except CannotRun as why:
        say({"end": str(why)})
    except Exception as error:  # noqa: BLE001 - whatever it is, the kernel did not run
        traceback.print_exc()
        problem = f"{type(error).__name__}: {error}".split("\n")[0][:300]
        say(dataclasses.asdict(Outcome("the next case", 0.0, 0.0, problem)))
        say({"end": ""})


def say(line: dict[str, object]) -> None:
    """One line for the parent."""
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], "thorough" in sys.argv[2:])
