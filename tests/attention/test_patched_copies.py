"""Patches of benchmarks/patches/ beside those of the specialized decode (`test_patches.py`): in a
copy of package and tests, files that say what has to hold with the patch pass."""

import os
import shutil
import subprocess
import sys

import pytest
from patched import PATCHES, ROOT, copy_package

pytest.importorskip("triton")
# Files of this folder, and whether Triton's interpreter runs them.
CHECKS = {
    "epilogue_groups_few": [("patched_epilogue.py", True), ("patched_epilogue_compiled.py", False)],
    "plan_smallest_budget": [("patched_planner.py", False), ("interpreted_planner.py", True)],
}


def test_every_patch_is_checked():
    names = {path.stem for path in PATCHES.glob("*.patch")}
    assert {name for name in names if not name.startswith(("bf16_", "fp8_"))} == CHECKS.keys()


@pytest.mark.parametrize("name", CHECKS)
def test_a_patch_keeps_what_has_to_hold(name, tmp_path):
    folder = copy_package(name, tmp_path)
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=skipped)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for file, interpreted in CHECKS[name]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment["TRITON_INTERPRET"] = "1" if interpreted else "0"
        options = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [sys.executable, *options, f"tests/attention/{file}"], cwd=folder, env=environment,
            capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
