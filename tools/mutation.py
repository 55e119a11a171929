"""Mutation testing of passes, patterns and runtime: does a test fail when a line is wrong?

    python tools/mutation.py run [PATTERN ...]   mutate, test, print the score and the survivors
    python tools/mutation.py show                the score and the survivors of the last run

mutmut (`pip install -e '.[mutation]'`) mutates packages where they lie, and forks one process per
mutant from one that has imported torch and vLLM. Ours lie beside each other and are installed
inside `mla_fusion`, so the tree is first laid out in `build/mutation` as it is installed. A second
run goes on where the first one stopped; a PATTERN such as `mla_fusion.runtime*` runs a part.
"""

from __future__ import annotations

import collections
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "mutation"
MUTATED = [f"src/mla_fusion/{room}/*.py" for room in ("passes", "patterns", "runtime")]
# Those that run in seconds: no engine, and no fuzzer, so the score is that of the written tests.
FILES = (
    "test_kv_transfer",
    "test_faults",
    "test_step_plan",
    "test_metrics",
    "kernels/test_capture",
)
TESTS = ["tests/passes", *(f"tests/{name}.py" for name in FILES)]
FUZZERS = ("tests/passes/test_fuzz.py", "tests/passes/test_fuzz_batches.py")
# Exit status of pytest under a mutant -> what became of it; as in mutmut's documentation.
KILLED, SURVIVED, TIMEOUT, UNTESTED = "killed", "survived", "timeout", "no tests"
STATUS = {0: SURVIVED, 1: KILLED, 3: KILLED, 5: UNTESTED, 33: UNTESTED, 36: TIMEOUT}
TIMED_OUT = {-24, 24, 152, 255}


def lay_out() -> None:
    """Copy the tree into `TREE` with passes/ and patterns/ inside mla_fusion/."""
    copies = {"mla_fusion": "src/mla_fusion", "tests": "tests"}
    copies |= {name: f"src/mla_fusion/{name}" for name in ("passes", "patterns")}
    for target in copies.values():
        shutil.rmtree(TREE / target, ignore_errors=True)
    for source, target in copies.items():
        ignore = shutil.ignore_patterns("__pycache__", "py.typed" if source == "tests" else "")
        shutil.copytree(ROOT / source, TREE / target, ignore=ignore)
    options = ["-m", "not engine and not nightly", "-p", "no:cacheprovider"]
    options += [f"--ignore={path}" for path in FUZZERS]
    settings = {
        "source_paths": ["src"],
        "only_mutate": MUTATED,
        "pytest_add_cli_args": options,
        "pytest_add_cli_args_test_selection": TESTS,
        "process_isolation": "fork",
        "use_git_change_detection": False,
        "timeout_constant": 30.0,
    }
    pytest = (ROOT / "pyproject.toml").read_text().split("[tool.pytest.ini_options]")[1]
    pytest = "[tool.pytest.ini_options]" + pytest.split("\n[")[0]
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    text = "\n".join([pytest, "", "[tool.mutmut]", *lines, ""])
    (TREE / "pyproject.toml").write_text(text)


def results() -> dict[str, int | None]:
    """Exit status of the tests for each mutant of the last run; None where it was not run."""
    found: dict[str, int | None] = {}
    for path in (TREE / "mutants").rglob("*.py.meta"):
        found |= json.loads(path.read_text())["exit_code_by_key"]
    return found


def status(code: int | None) -> str:
    """What became of a mutant."""
    if code is None:
        return "not run"
    return TIMEOUT if code in TIMED_OUT else STATUS.get(code, f"exit {code}")


def show() -> None:
    """Print the score by module, then the mutants that survived."""
    modules: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    alive = []
    for name, code in sorted(results().items()):
        modules[name.rsplit(".", 1)[0]][status(code)] += 1
        if status(code) in (SURVIVED, UNTESTED):
            alive.append(name)
    total = sum(modules.values(), collections.Counter[str]())
    for module, counts in [*sorted(modules.items()), ("total", total)]:
        caught = counts[KILLED] + counts[TIMEOUT]
        run = sum(counts.values()) - counts["not run"]
        print(f"{module:45} {caught:5d} of {run:5d} caught  {dict(counts)}")
    for name in alive:
        print(f"\n{name}")
        done = mutmut("show", name, capture=True)
        changed = [line for line in done.splitlines() if line[:1] in "+-"]
        print("\n".join(changed[2:]))


def mutmut(*arguments: str, capture: bool = False) -> str:
    """Run mutmut in `TREE`; its output if `capture`."""
    done = subprocess.run(
        [sys.executable, "-m", "mutmut", *arguments],
        cwd=TREE,
        # One thread: a forked process must not inherit a thread pool.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE if capture else None,
        text=True,
    )
    return done.stdout or ""


def main(arguments: list[str]) -> int:
    """Run the command that the first argument names."""
    if not arguments or arguments[0] not in ("run", "show"):
        print(__doc__)
        return 2
    if arguments[0] == "run":
        lay_out()
        mutmut("run", "--max-children", "1", *arguments[1:])
    show()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
