"""The graphs before and after the passes, which depyf wrote under vLLM's debug_dump_path."""

from pathlib import Path

from mla_fusion.cli import UserError

STAGES = ("before", "after")


def find(folder: Path) -> dict[str, list[Path]]:
    """{"before" or "after": files at or below `folder`, one for each compiled graph}.

    depyf wrote them, or `mla-fusion check --dump` copied them.

    Raises:
        UserError: there are none.
    """
    found = {stage: _of_depyf(folder, stage) or _copied(folder, stage) for stage in STAGES}
    if not all(found.values()):
        raise UserError(
            f"no graph before and after the passes under {folder}: write them with "
            "mla-fusion check CONFIG --dump DIR, or by starting vLLM with "
            "-cc.debug_dump_path=DIR and depyf installed (a warm compile cache writes none)"
        )
    return found


def _of_depyf(folder: Path, stage: str) -> list[Path]:
    paths = folder.rglob(f"*.mla_fusion.{stage}.*.py")
    return sorted(paths, key=lambda path: (path.name.split(".")[0], int(path.name.split(".")[-2])))


def _copied(folder: Path, stage: str) -> list[Path]:
    return sorted(folder.glob(f"tokens_*.{stage}.py"))
