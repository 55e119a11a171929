#!/usr/bin/env python3
"""Start engines of two ranks on two GPUs of which the second rank fails, and see how they end.

    python benchmarks/check_ranks.py

missing: the Triton provider is not there on rank 1. Every rank must end with that message.
dies: the process of rank 1 ends while it prepares its kernels. vLLM must end the others.
absent: the same engine without a fault, which must start.

The exit status is 1 if an engine hangs, starts in spite of its fault, or does not say why it ended.
mla_fusion must be installed: workers load it by its entry point.
"""

from __future__ import annotations

import sys
import time

import torch
from engine_jobs import devices, finish, job, start

from mla_fusion.cli.bench.kit import environment

SECONDS = 150  # an engine without a fault starts in 30 to 60
# A fault -> what the console of the engine must say.
EXPECTED = {
    "missing": "could not prepare its kernels on rank 1: ProviderUnavailable: planted",
    "dies": "a rank of this engine ended while mla_fusion prepared its kernels",
    "absent": "",
}


def main() -> None:
    """Start one engine after the other."""
    print(environment(), flush=True)
    if (seen := torch.cuda.device_count()) < 2:
        sys.exit(f"an engine of two ranks needs two GPUs, and torch sees {seen}")
    wrong = 0
    for fault, expected in EXPECTED.items():
        began = time.monotonic()
        arm = "fused" if fault == "absent" else fault
        asked = job(model="v2-lite", arm=arm, tp=2, device=devices(0, 2), tokens=4)
        error = finish(*start(asked), SECONDS).get("error", "")
        seconds = time.monotonic() - began
        right = expected in error and bool(expected) == bool(error) and seconds < SECONDS
        wrong += not right
        print(f"== {fault}: {'right' if right else 'WRONG'} after {seconds:.0f} s", flush=True)
        if not right:
            print(error)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
