"""A script whose kernels may wait for ever: a process watches, and its child runs them."""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import subprocess
import sys
from pathlib import Path

import torch

from mla_fusion.cli.bench.kit import FACTS, environment


def declare(parser: argparse.ArgumentParser) -> None:
    """Add what `begin` reads."""
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--seconds", type=float, default=60, help="of silence before it is killed")
    parser.add_argument("--commit", default="", help="commit, where git does not know it")
    parser.add_argument("--child", action="store_true", help="run here, unwatched")


def begin(script: str, options: argparse.Namespace) -> dict[str, str]:
    """In a child: seed torch; the facts of its rows. Else watch a child, and end as it ends."""
    known = environment(options.commit)
    if not options.child:
        print(known, f"--seed {options.seed}", flush=True)
        again = [sys.executable, script, "--child", *sys.argv[1:], "--seed", str(options.seed)]
        sys.exit(watch(again, options.seconds))
    torch.manual_seed(options.seed)
    words = (word for word in sys.argv[1:] if word != "--child")
    known["command"] = " ".join([f"python benchmarks/{Path(script).name}", *words])
    return {fact: known[fact] for fact in FACTS}


def watch(command: list[str], seconds: float) -> int:
    """Run `command`, print what it prints, and kill it after `seconds` of silence."""
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    assert child.stdout is not None
    while select.select([child.stdout], [], [], seconds)[0]:
        text = os.read(child.stdout.fileno(), 65536)
        if not text:
            return child.wait()
        sys.stdout.write(text.decode(errors="replace"))
        sys.stdout.flush()
    # And those who compile for it.
    os.killpg(child.pid, signal.SIGKILL)
    print(f"FAIL nothing printed for {seconds:.0f} s: the kernel waits for ever; killed")
    return 1
