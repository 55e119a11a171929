"""The command line: mla-fusion demo | check | report.

Exit status: 0 all fused (and tokens equal), 1 not so, 2 something the user can put right.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mla_fusion import __version__, kernels
from mla_fusion.engine import UserError, require, stored_reports

if TYPE_CHECKING:
    from collections.abc import Sequence

_NEWEST = 8  # reports that are printed; an engine stores one for each rank
_AS_IN_VLLM = "as in vLLM (default: %(default)s)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; `argv` defaults to the command line's."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except UserError as error:
        print(f"mla-fusion {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"mla-fusion {arguments.command}: interrupted", file=sys.stderr)
        return 130


def _positive(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return number


def _zero_or_more(text: str) -> int:
    return 0 if text == "0" else _positive(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mla-fusion", description="Fused MLA decode query preparation for vLLM."
    )
    parser.add_argument("--version", action="version", version=f"mla-fusion {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo",
        help="run two small models with the fusion off and on, and compare their tokens",
        description="Builds two small models with random weights, DeepSeek-V2- and V3-shaped, runs "
        "a vLLM engine for each with the flag off and on, and compares the tokens. Needs no GPU.",
    )
    demo.add_argument(
        "--out",
        type=Path,
        default=Path("build/demo"),
        help="folder for the models, the logs and report.json (default: %(default)s)",
    )
    demo.set_defaults(run=_demo)

    check = commands.add_parser(
        "check",
        help="tell whether and why a model would fuse",
        description="Cuts a model to a few layers with random weights, starts a vLLM engine on it "
        "with the flag on, and prints which MLA layers fuse and why others do not. Needs "
        "config.json alone, and no GPU.",
    )
    check.add_argument("model_dir", type=Path, metavar="MODEL_DIR", help="folder of config.json")
    check.add_argument("--max-num-seqs", type=_positive, default=256, metavar="N", help=_AS_IN_VLLM)
    check.add_argument(
        "--speculative-tokens",
        type=_zero_or_more,
        default=0,
        metavar="K",
        help="draft tokens a step: the decode bucket is N * (1 + K) tokens (default: %(default)s)",
    )
    check.add_argument(
        "--tensor-parallel-size",
        type=_positive,
        default=1,
        metavar="TP",
        help="emulated: the heads of one rank of TP (default: %(default)s)",
    )
    check.add_argument("--kv-cache-dtype", default="auto", metavar="T", help=_AS_IN_VLLM)
    check.add_argument(
        "--layers",
        type=_positive,
        default=2,
        metavar="L",
        help="layers that are kept (default: %(default)s)",
    )
    check.add_argument(
        "--provider",
        choices=kernels.PROVIDERS,
        default="reference",
        help="who computes the fused op (default: %(default)s)",
    )
    check.add_argument(
        "--dump",
        type=Path,
        metavar="DIR",
        help="write the graph before and after the passes as readable Python (needs depyf)",
    )
    check.set_defaults(run=_check)

    report = commands.add_parser(
        "report",
        help="print the stored reports of engines that were started with the flag on",
        description="Prints what fused in the engines of this machine, the latest start first.",
    )
    report.add_argument(
        "path",
        nargs="?",
        type=Path,
        metavar="PATH",
        help="one stored report, or a vLLM cache root (default: that of this user)",
    )
    report.set_defaults(run=_report)
    return parser


def _demo(arguments: argparse.Namespace) -> int:
    from mla_fusion import demo

    return 0 if demo.run(arguments.out) else 1


def _check(arguments: argparse.Namespace) -> int:
    from mla_fusion import check

    named = {k: v for k, v in vars(arguments).items() if k not in ("run", "command")}
    return 0 if check.run(check.Settings(**named)) else 1


def _report(arguments: argparse.Namespace) -> int:
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


if __name__ == "__main__":
    sys.exit(main())
