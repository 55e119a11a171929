"""Make docs/coverage.md, step by step: python -m tests.coverage STEP.

models       engines of all compiled classes, with the vLLM of this environment
neighbours   engines with the fusion off and on beside other features
             (models and neighbours take names, and then run those alone)
sources RELEASE DIR
             which classes the vLLM package in DIR has, read from its sources; an error if the
             release has no column and needs one
page         the table of docs/coverage.md from their results, and from what the tests check
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests import child as children
from tests.coverage import jobs, page

ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # else two ranks want two NUMA nodes


def run(engines, only=()):
    """What became of those `engines` whose name starts with one of `only`, or of all, in one
    process for each set of imitations."""
    engines = [job for job in engines if not only or job["name"].startswith(tuple(only))]
    results: dict[str, Any] = {}
    for imitate in sorted({engine["imitate"] for engine in engines}):
        group = [engine for engine in engines if engine["imitate"] == imitate]
        with tempfile.TemporaryDirectory(prefix="mla-fusion-coverage-") as folder:
            work = "tests.coverage.engines:run_all"
            options = {"engines": group, "imitate": imitate}
            results |= children.run(children.job(work, Path(folder), options=options,
                                                 environment=ENVIRONMENT))  # fmt: skip
    return results


def save(name, results):
    """Keep results under a name."""
    path = page.RESULTS / f"{name}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"coverage: wrote {path.name}")


def main(command, arguments):
    """Run one command."""
    if command == "page":
        page.PAGE.write_text(page.text(page.PAGE.read_text()))
    elif command == "sources":
        release, folder = arguments
        found = page.read_sources(Path(folder))
        if release in page.RELEASES:
            save(release, found)
        elif own := page.of_its_own(found):
            raise SystemExit(f"coverage: {release} needs a column for {', '.join(sorted(own))}")
    elif command == "neighbours":
        with tempfile.TemporaryDirectory() as folder:
            results = run(jobs.of_neighbours(Path(folder)), arguments)
            save("neighbours", page.stored("neighbours") | results)
    elif command == "models":
        import vllm

        version = str(vllm.__version__).split("+")[0]
        engines = page.stored(version).get("engines", {}) | run(jobs.MODELS, arguments)
        save(version, {**page.read_sources(Path(vllm.__file__).parent), "engines": engines})
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else "", sys.argv[2:])
