"""Prints what fused in the engines of this machine, the latest start first. With an option below,
shows only the latest.
"""

import argparse
import sys
import time
from pathlib import Path

from mla_fusion.cli import UserError, option, require, write
from mla_fusion.cli.report import dumps
from mla_fusion.report import Report, stored_reports
from mla_fusion.report.files import FormatError
from mla_fusion.report.layer_graph import LayerGraph

_NEWEST = 8  # reports that are printed; an engine stores one for each rank


def declare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    text = (
        "a stored report, a folder with some (a dump of mla-fusion check), or a vLLM cache root "
        "(default: that of this user)"
    )
    parser.add_argument("path", nargs="?", type=Path, metavar="PATH", help=text)
    text = "print the graph of one layer before and after"
    parser.add_argument("--graph", action="store_true", help=text)
    text = (
        "print the whole graphs before and after as Python; PATH is a folder to which they were "
        "dumped (needs depyf when they are written)"
    )
    parser.add_argument("--python", action="store_true", help=text)
    option(parser, "--svg", "FILE", "draw that layer into FILE", kind=Path)
    option(parser, "--html", "FILE", "write all of it as one self-contained page", kind=Path)


def run(arguments: argparse.Namespace) -> int:
    """Show the reports; always 0."""
    root = arguments.path or _cache_root()
    views = arguments.graph or arguments.svg or arguments.html
    if arguments.python:
        _print_python(root)
        if not views:
            return 0
    named_file = arguments.path and not root.is_dir()
    paths = [root] if named_file else stored_reports(root)
    if not paths:
        raise UserError(
            f"no report under {root}: start vLLM once with "
            "-cc.pass_config.fuse_aiter_qk_rope_kvcache_mla=True; if you set VLLM_CACHE_ROOT "
            "there, give that folder as PATH"
        )
    if views:
        _show(_load(paths[0]), paths[0], arguments)
        return 0
    for index, path in enumerate(paths[:_NEWEST]):
        lines = _load(path).lines()
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
        print("\n" if index else "", f"{when}  {path}\n", "\n".join(lines), sep="")
    if len(paths) > _NEWEST:
        print(f"\n{len(paths) - _NEWEST} older ones in {paths[0].parent}")
    return 0


def _cache_root() -> Path:
    require("vllm", purpose="the default of PATH")
    from mla_fusion.config import vllm_compat

    return vllm_compat.cache_root()


def _load(path: Path) -> Report:
    require("pydantic")
    from mla_fusion import report

    try:
        return report.load(path)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (OSError, FormatError) as error:
        raise UserError(
            f"{error}; reports are in VLLM_CACHE_ROOT/torch_compile_cache/mla_fusion"
        ) from None


def _show(report: Report, path: Path, arguments: argparse.Namespace) -> None:
    from mla_fusion.report import page, svg, text

    if arguments.graph:
        print("\n".join(text.graph(_layer(report, path))))
    if arguments.svg:
        _write(arguments.svg, svg.drawing(_layer(report, path)))
    if arguments.html:
        _write(arguments.html, page.page(report))


def _layer(report: Report, path: Path) -> LayerGraph:
    layer = next((r.layer for r in report.decode_ranges() if r.layer), None)
    if layer is None:
        raise UserError(f"no layer fused in {path}, so there is no graph to show; see its reasons")
    return layer


def _write(path: Path, content: str) -> None:
    write(path, content)
    print(f"wrote {path}", file=sys.stderr)


def _print_python(folder: Path) -> None:
    for stage, paths in dumps.find(folder).items():
        for path in paths:
            print(f"# {stage}: {path}\n{path.read_text()}")
