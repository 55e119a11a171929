"""Jobs of tests: processes of `mla_fusion.cli.child` whose work is a function of the tests."""

from pathlib import Path

from mla_fusion.cli import child

ROOT = Path(__file__).resolve().parents[1]


def job(work, folder, **fields):
    """A job in `folder`, with a cache of its own there unless `cache` is among its `fields`."""
    cache = fields.pop("cache", folder / "cache")
    return child.Job(str(folder), str(cache), work, str(ROOT), **fields)


def run(asked):
    """Run a job to its end and return what its work returned."""
    return child.result(asked, child.start(asked))
