"""Texts without paths, addresses, and the names of hosts and of the user.

A path may hold blanks and commas, so nothing tells where it ends in a sentence. A text is split
into clauses, at line ends and at semicolons and colons before a blank; a path takes the rest of its
clause with it, and a relative one, whose first folder may hold blanks too, all of it. A path in
quotes takes what is between them."""

import contextlib
import getpass
import os
import platform
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path

Redactor = Callable[[str], str]
_LONGEST = 20_000  # characters of a text that is kept
_CLAUSES = re.compile(r"(\n|; |: )")
# A quote inside a word is an apostrophe.
_QUOTED = re.compile(r"(?<!\w)(['\"`])((?:(?!\1)[^\n]|(?<=\w)\1(?=\w))+)\1(?!\w)")
_PATH = re.compile(r"[/\\]|%2[Ff]|%5[Cc]|(?<!\w)~\w")
# What may stand before the first slash of a path whose beginning is known.
_BEGINNING = re.compile(
    r"(?:^|(?<=[\s=(\[{<,|'\"`]))(?:~[\w.-]*|\.{1,2}|[A-Za-z]:|[A-Za-z][\w+.-]*:(?=$))?$"
)
# No paths: a public thread such as vllm-project/vllm#45798, and a fraction.
_KEPT = re.compile(
    r"(?<![^\s(])(?:(?:vllm-project|ROCm|pytorch|triton-lang)/[\w.-]+#\d+|\d+/\d+)(?![^\s),;.:])"
)
# Names with dots that are code: modules, parts of a model, shared libraries.
_CODE = (
    r"(?:torch|vllm|triton|mla_fusion|aiter|aten|prims|transformers|flashinfer|numpy|pydantic|model"
    r"|self|lib\w+)\."
)
_ADDRESSES = re.compile(
    r"(?<![^\s@])[^\s@]+@[^\s@]+"  # user@host
    r"|(?<!\w)[0-9A-Fa-f]{0,4}:(?:[0-9A-Fa-f]{0,4}:){1,8}[0-9A-Fa-f.]*(?:%[\w.-]+)?(?!\w)"  # IPv6
    r"|(?<![\d.])\d+(?:\.\d+){3}(?:[:/]\d+)?(?![\d.]*\d)"  # IPv4
    r"|(?<![\w.-])(?!(?:cuda|cpu|hip|meta):)(?=[\w.-]*[^\W\d])\w[\w.-]*:\d{1,5}(?!\w)"  # host:port
    rf"|(?<![\w.-])(?!{_CODE})[\w-]+(?:\.[\w-]+)*\.[^\W\d_]{{2,}}(?![\w-])"  # with a domain
)
# A name with a number, such as node17 or gpu-node-3, is a host unless it is a type, a GPU, a
# version, a dimension or an operand. One with an underscore is a name in Python.
_NUMBERED = re.compile(r"(?<![\w.-])[^\W\d_][^\W_]*(?:-[^\W_]+)*(?![\w-])")
_NO_HOST = re.compile(
    r"(?:bf|fp|float|int|uint|tf|mxfp|nvfp|ue\dm|e\dm|sm|gfx|cu|cuda|cudnn|rocm|hip|py|python|cp|abi"
    r"|rc|post|dev|fa|mi|rtx|gtx|gb|gh|hbm|sxm|x|sha|utf|arm|amd|c|cdna|xcd|[abdhklmpqrtvw])"
    r"\d+(?:fn|fnuz|x|s|g|d|u)?|\d+[a-z]{1,2}",
    re.IGNORECASE,
)
_CAMEL = re.compile(r"[a-z][A-Z]")  # a class


def redactor() -> Redactor:
    """A function that leaves "<path>", "<host>" and "<user>" in a text instead of what they name,
    for the folders, the hosts and the user of this process and for what looks like one."""
    environment = os.environ.items()
    folders = {str(Path.home()), str(Path.cwd()), sys.prefix, sys.base_prefix}
    folders |= {each for _, value in environment for each in (value, *value.split(os.pathsep))}
    rooted = {each.rstrip("/") for each in folders if each.startswith("/")} - {""}
    hosts = {socket.gethostname(), platform.node()}
    hosts |= {value for name, value in environment if name.endswith(("HOST", "HOSTNAME", "ADDR"))}
    hosts |= {name.partition(".")[0] for name in hosts}
    hosts = {name for name in hosts if not name.isnumeric()} - {"localhost"}
    users = {os.environ.get(name, "") for name in ("LOGNAME", "USER", "USERNAME", "SUDO_USER")}
    with contextlib.suppress(KeyError, OSError):  # a container's user may have no name
        users.add(getpass.getuser())
    known_folders = re.compile(_any_of(rooted))
    # An underscore ends a name too, as in "models_of_jdoe".
    alone = r"(?<![^\W_]){}(?![^\W_])".format
    known_hosts = re.compile(alone(_any_of(hosts)), re.IGNORECASE)
    known_users = re.compile(alone(_any_of(users - {"root"})))

    def redact(text: str) -> str:
        if len(text) > _LONGEST:
            return f"<{len(text)} characters>"
        text = known_folders.sub("/", text)  # which may hold quotes and colons
        text = _without_paths(text)
        text = _ADDRESSES.sub("<host>", text)
        text = _NUMBERED.sub(_numbered, text)
        return known_users.sub("<user>", known_hosts.sub("<host>", text))

    return redact


def _any_of(texts: set[str]) -> str:
    """A pattern of any of them that is not empty, the longest first; else of nothing."""
    escaped = map(re.escape, sorted(texts - {""}, key=len, reverse=True))
    return f"(?:{'|'.join(escaped) or '(?!)'})"


def _path(text: str) -> re.Match[str] | None:
    return _PATH.search(_KEPT.sub(lambda found: "." * len(found[0]), text))


def _without_paths(text: str) -> str:
    return "".join(map(_clause, _CLAUSES.split(_QUOTED.sub(_quoted, text))))


def _quoted(found: re.Match[str]) -> str:
    """A path in quotes goes whole. A sentence in quotes may have quotes of its own."""
    quote, body = found[1], found[2]
    is_path = _path(body) and not _QUOTED.search(body)
    return quote + ("<path>" if is_path else _without_paths(body)) + quote


def _clause(text: str) -> str:
    if not (found := _path(text)):
        return text
    beginning = _BEGINNING.search(text[: found.start()])
    return text[: beginning.start() if beginning else 0] + "<path>"


def _numbered(found: re.Match[str]) -> str:
    parts = [part for part in found[0].split("-") if not part.isalpha()]
    is_known = all(map(_NO_HOST.fullmatch, parts)) or _CAMEL.search(found[0])
    return found[0] if is_known else "<host>"
