"""The graphs before and after the passes, which depyf wrote under vLLM's debug_dump_path."""

from pathlib import Path

from mla_fusion.cli import UserError


def find(folder: Path) -> dict[str, list[Path]]:
    """{"before" or "after": files at or below `folder`, one for each compiled graph}.

    depyf wrote them, or `mla-fusion check --dump` copied them.

    Raises:
        UserError: there are none.
    """
    found = {}
    for stage in ("before", "after"):
        of_depyf = sorted(folder.rglob(f"*.mla_fusion.{stage}.*.py"), key=_place)
        found[stage] = of_depyf or sorted(folder.glob(f"tokens_*.{stage}.py"))
    if not all(found.values()):
        raise UserError(
            f"no graph before and after the passes under {folder}: write them with "
            "mla-fusion check CONFIG --dump DIR, or by starting vLLM with "
            "-cc.debug_dump_path=DIR and depyf installed (a warm compile cache writes none)"
        )
    return found


def _place(path: Path) -> tuple[str, int]:
    first, *_, number, _ = path.name.split(".")
    return first, int(number)
