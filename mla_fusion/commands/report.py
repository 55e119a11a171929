"""`mla-fusion report`: what fused in the engines of this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from mla_fusion.commands import declare
from mla_fusion.engine import UserError, require, stored_reports

if TYPE_CHECKING:
    import argparse

    from mla_fusion.commands import Commands

_NEWEST = 8  # reports that are printed; an engine stores one for each rank


def add(commands: Commands) -> None:
    """Declare the arguments."""
    parser = declare(
        commands,
        "report",
        run,
        help="print the stored reports of engines that were started with the flag on",
        description="Prints what fused in the engines of this machine, the latest start first.",
    )
    parser.add_argument(
        "path",
        nargs="?",
        type=Path,
        metavar="PATH",
        help="one stored report, or a vLLM cache root (default: that of this user)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print them; always 0, for what was found is what is shown."""
    from mla_fusion import report

    root = arguments.path
    if root is None:
        require("vllm", purpose="mla-fusion report without PATH")
        from vllm import envs

        root = Path(envs.VLLM_CACHE_ROOT)
    paths = stored_reports(root) if root.is_dir() else [root]
    if not paths:
        raise UserError(
            f"no report under {root}: start vLLM once with "
            "-cc.pass_config.fuse_aiter_qk_rope_kvcache_mla=True; if you set VLLM_CACHE_ROOT "
            "there, give that folder as PATH"
        )
    for index, path in enumerate(paths[:_NEWEST]):
        try:
            lines = report.load(path).lines()
            stored = path.stat().st_mtime
        except FileNotFoundError:
            raise UserError(f"{path} does not exist") from None
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            raise UserError(
                f"{path} is not a stored report; they lie in "
                "VLLM_CACHE_ROOT/torch_compile_cache/mla_fusion"
            ) from None
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stored))
        print("\n" if index else "", f"{when}  {path}\n", "\n".join(lines), sep="")
    if len(paths) > _NEWEST:
        print(f"\n{len(paths) - _NEWEST} older ones in {paths[0].parent}")
    return 0
