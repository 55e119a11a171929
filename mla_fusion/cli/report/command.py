"""Prints what fused in the engines of this machine, the latest start first. With an option below,
shows only the latest."""

import argparse
import sys
import time
from pathlib import Path

from mla_fusion.cli import UserError, option, require, write
from mla_fusion.files import printable, read_bounded
from mla_fusion.report import Report, load, stored_reports, views

_NEWEST = 8  # reports that are printed; an engine stores one for each rank


def declare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    what = (
        "a stored report, a folder with some (a dump of mla-fusion check), or a vLLM cache root "
        "(default: that of this user)"
    )
    parser.add_argument("path", nargs="?", type=Path, metavar="PATH", help=what)
    what = "print the graph of one layer before and after"
    parser.add_argument("--graph", action="store_true", help=what)
    what = "print the whole graphs before and after as Python, dumped under PATH (needs depyf)"
    parser.add_argument("--python", action="store_true", help=what)
    option(parser, "--svg", "FILE", "draw that layer into FILE", kind=Path)
    option(parser, "--html", "FILE", "write all of it as one self-contained page", kind=Path)


def run(arguments: argparse.Namespace) -> int:
    """Show the reports; always 0."""
    root = arguments.path or cache_root()
    asked = arguments.graph or arguments.svg or arguments.html
    if arguments.python:
        for stage, files in find_graphs(root).items():
            for file in files:
                print(printable(f"# {stage}: {file}"))
                print(*map(printable, _read(file).splitlines()), sep="\n")
        if not asked:
            return 0
    paths = [root] if arguments.path and not root.is_dir() else stored_reports(root)
    if not paths:
        raise UserError(
            f"no report under {root}: start vLLM once with "
            "-cc.pass_config.fuse_aiter_qk_rope_kvcache_mla=True; if you set VLLM_CACHE_ROOT "
            "there, give that folder as PATH"
        )
    if asked:
        _show(paths[0], arguments)
        return 0
    for index, path in enumerate(paths[:_NEWEST]):
        lines = _load(path).lines()
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
        print("\n" if index else "", printable(f"{when}  {path}"), sep="")
        print("\n".join(lines))
    if len(paths) > _NEWEST:
        print(f"\n{len(paths) - _NEWEST} older ones in {printable(str(paths[0].parent))}")
    return 0


def cache_root() -> Path:
    """The vLLM cache root of this user."""
    require("vllm", purpose="the folder of reports")
    from mla_fusion.config import vllm_compat

    return vllm_compat.cache_root()


def _read(path: Path) -> str:
    try:
        return read_bounded(path).decode(errors="replace")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _load(path: Path) -> Report:
    require("pydantic")
    try:
        return load(path)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise UserError(
            f"{error}; reports are in VLLM_CACHE_ROOT/torch_compile_cache/mla_fusion"
        ) from None


def _show(path: Path, arguments: argparse.Namespace) -> None:
    """The views of one report that were asked for."""
    report = _load(path)
    files = {arguments.html: views.page(report)}
    if arguments.graph or arguments.svg:
        layer = report.decode().layer
        if layer is None:
            raise UserError(f"no layer fused in {path}: no graph to show; see its reasons")
        if arguments.graph:
            print("\n".join(views.text(layer)))
        files[arguments.svg] = views.drawing(layer)
    for file in filter(None, files):
        write(file, files[file])
        print(f"wrote {file}", file=sys.stderr)


def find_graphs(folder: Path) -> dict[str, list[Path]]:
    """{"before" or "after": files at or below `folder`, one for each graph}, of depyf under vLLM's
    debug_dump_path, or copied by `mla-fusion check --dump`; a UserError if there are none."""
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
