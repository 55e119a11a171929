"""The table of docs/coverage.md from the stored results.

It is between `<!-- table -->` and `<!-- end -->`. What has the same result is one row.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from tests.coverage import tables, unreachable
from tests.coverage.neighbours import NEIGHBOURS
from tests.coverage.on_graphs import ON_GRAPHS, SPECS

RESULTS = Path(__file__).with_name("results")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "coverage.md"
NEW, OLD, SOURCES = RELEASES = "0.32.0", "0.29.0", "0.26.0"  # the columns
TRANSFORMERS = "transformers.base:Base"
_MODELS = "vllm.model_executor.models."
_NO_SEQUENCE_PARALLELISM = "not run: `enable_sp` is gone"


def stored(name):
    """The results kept under a name, if any."""
    path = RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def text(page):
    """The page with its table as the results have it."""
    made = f"<!-- table -->\n{table()}\n<!-- end -->"
    page, found = re.subn(r"<!-- table -->.*?<!-- end -->", lambda _: made, page, flags=re.S)
    if found != 1:
        raise SystemExit(f"{PAGE.name} has {found} places for the table, not one")
    return page


def table():
    """A row for all of a kind that have the same cells."""
    header = ["", "which", f"vLLM {NEW}", OLD, f"sources of {SOURCES}"]
    grouped: dict[tuple[str, ...], list[str]] = {}
    for kind, name, cells in (*quantizations(), *spelled(), *beside()):
        grouped.setdefault((kind, *cells), []).append(name)
    rows = [[kind, _listed(names), *cells] for (kind, *cells), names in grouped.items()]
    lines = [header, ["---"] * len(header), *models_rows(), *rows]
    assert all(len(line) == len(header) and all(line[1:]) for line in lines)
    kinds = [line[0] for line in lines]
    shown = [kind * (kind != above) for above, kind in zip(["-", *kinds], kinds, strict=False)]
    rows = [[kind, *line[1:]] for kind, line in zip(shown, lines, strict=True)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _listed(names):
    """The names; numbers of drafts as a range."""
    drafts = [name for name in names if re.search(r", \d draft tokens?$", name)]
    if len(drafts) > 1:
        what, last = drafts[-1].rsplit(", ", 1)
        whole = f"{what}, {drafts[0].rsplit(', ', 1)[1].split()[0]} to {last}"
        at = names.index(drafts[0])
        names = [*names[:at], whole, *(name for name in names[at:] if name not in drafts)]
    return "; ".join(names)


def why_unreached(version, architecture):
    """The reason why no pass reaches it in a release; empty if engines show its classes."""
    release = stored(version)
    row = unreachable.OF_ARCHITECTURE.get(architecture)
    if row and row.sparse:
        return f"`{row.sparse}`"
    if architecture in release["breakable"]:
        return f"`{unreachable.BREAKABLE}`"
    if not release["architectures"][architecture]:
        return f"`{unreachable.NO_GRAPH}`"
    return row.compiled.get(version, "") if row else ""


def of_its_own(found):
    """The architectures of a release that are as in none of the columns; `found` as stored."""
    columns = [stored(release) for release in RELEASES]
    return {
        name
        for name, classes in found["architectures"].items()
        if classes not in [column["architectures"].get(name) for column in columns]
        or (name in found["breakable"] and all(name not in c["breakable"] for c in columns))
    }


def compiled(version):
    """Compiled class -> the architectures that reach it, less those with a reason against it."""
    out: dict[str, list[str]] = {}
    for architecture, classes in stored(version)["architectures"].items():
        for name in classes:
            if not why_unreached(version, architecture):
                out.setdefault(name, []).append(architecture)
    return out


def shown(version):
    """Compiled class -> "layers", "fused" and the reasons of the others, counted in all engines."""
    out: dict[str, Counter[str]] = {}
    for result in stored(version)["engines"].values():
        for name, counts in result.get("classes", {}).items():
            if name.startswith("transformers."):
                name = _MODELS + TRANSFORMERS
            total = out.setdefault(name.removeprefix(_MODELS), Counter())
            total.update(counts["declined"], layers=counts["layers"], fused=counts["fused"])
    return out


def models_rows():
    """One row for all architectures of which the same became in each release."""
    found = {version: shown(version) for version in (OLD, NEW)}
    grouped: dict[tuple[Any, ...], tuple[list[str], set[str]]] = {}
    names = {name for version in RELEASES for name in stored(version)["architectures"]}
    for architecture in sorted(names):
        classes = {
            name
            for version in RELEASES
            for name in stored(version)["architectures"].get(architecture, ())
        }
        states = tuple(_state(version, architecture, found) for version in (NEW, OLD, SOURCES))
        of_state, all_classes = grouped.setdefault(states, ([], set()))
        any_model = "any, with `model_impl=transformers`"
        of_state.append(any_model if TRANSFORMERS in classes else f"`{architecture}`")
        all_classes |= classes
    rows = []
    for states, (of_state, classes) in grouped.items():
        cells = [
            _total([found[v][name] for name in classes if name in found[v]])
            if state is _ALL
            else state
            for v, state in zip((NEW, OLD, SOURCES), states, strict=True)
        ]
        rows.append(["models", ", ".join(of_state), *cells])
    return sorted(rows, key=lambda row: " of " not in row[2])


_ALL = object()  # what became of an architecture: every layer fused


def _state(version, architecture, found):
    """What became of an architecture in a release: `_ALL`, or a cell."""
    classes = stored(version)["architectures"].get(architecture)
    if classes is None:
        return "not there"
    if code := why_unreached(version, architecture):
        return code
    if version == SOURCES:
        return "compiled"
    counts = [found[version][name] for name in classes]
    return _ALL if all(count["layers"] == count["fused"] for count in counts) else _total(counts)


def _total(counts):
    """Of all layers, how many fused; the reasons of the others."""
    total = sum(counts, Counter())
    fused, layers = (total.pop(key, 0) for key in ("fused", "layers"))
    return _fused(f"{fused} of {layers}", total)


def _all_or_none(count, reason):
    """All of so many fused, or none for a reason."""
    return _fused(f"0 of {count}", [reason]) if reason else f"{count} of {count}"


def _fused(counts, codes):
    """How many layers fused, and the reasons of the others."""
    return ", ".join([counts, *(f"`{code}`" for code in codes)])


def spelled():
    """Each spelling: all variants fuse."""
    for name in tables.SPELLINGS:
        yield "spellings", name, (_all_or_none(len(tables.VARIANTS), ""), "-", "-")


def quantizations():
    """Each quantization in front of o_proj: it is taken in, in all variants, or why not."""
    for name, (_, where, reason) in tables.OUTPUTS.items():
        cell = _all_or_none(len(tables.OUTPUT_VARIANTS), reason)
        yield "quantizations", f"{name} ({where})", (cell, "-", "-")


def beside():
    """Each neighbour: the layers that fused, and the tokens with the flag off and on."""
    for neighbour in NEIGHBOURS:
        name, layers, tokens = neighbour_row(neighbour, stored("neighbours"))
        cell = tokens if layers == "-" else f"{layers}; tokens {tokens}"
        yield "neighbours", name, (cell, "-", "-")
    for name, (_, reason) in ON_GRAPHS.items():
        same = "graph unchanged" if reason else "outputs of the graphs equal"
        cell = f"{_all_or_none(len(SPECS), reason)}; {same}"
        yield "neighbours", name, (cell, "-", "-")
    yield "neighbours", "sequence parallelism", (_NO_SEQUENCE_PARALLELISM, "not run", "not run")


def _switched_off(result):
    """The code for which the flag was switched off, if it was."""
    found = re.search(r"\[([a-z-]+)\]", "".join(result["warnings"]))
    return found[1] if found else ""


def neighbour_row(neighbour, results):
    """The cells of one neighbour, from the results of its engines."""
    on = results.get(f"{neighbour.name} (on)")
    if on is None:
        return [neighbour.name, *["not run"] * 2]
    if "error" in on and neighbour.refused in on["error"] and neighbour.refused:
        return [neighbour.name, "-", f"vLLM refuses it on a CPU: {neighbour.refused}"]
    if neighbour.reason:
        declined = _switched_off(on) == neighbour.reason
        layers = _fused("none", [neighbour.reason]) if declined else "NOT DECLINED"
        return [neighbour.name, layers, "nothing is changed"]
    off = results[f"{neighbour.name} (off)"]
    errors = [result["error"] for result in (off, on) if "error" in result]
    if errors:
        return [neighbour.name, "-", f"FAILED: {errors[0]}"]
    return [neighbour.name, _layers(on), _sameness(off, on)]


def _layers(on):
    """Of each rank: how many MLA layers fused, of all; the reasons of the others."""
    if code := _switched_off(on):
        return _fused("none", [code])
    counts = [f"{made['fused']} of {made['layers']}" for made in on["reports"]]
    codes = sorted({code for made in on["reports"] for code in made["declined"]})
    return _fused(" + ".join(counts) or "0 of 0", codes)


def _sameness(off, on):
    """Whether both engines gave the same tokens, and the same entries to a connector."""
    count = sum(map(len, on["tokens"]))
    if not count or on["tokens"] != off["tokens"] or on["kv"] != off["kv"]:
        return "DIFFERENT"
    return f"equal ({count})" + ("; entries equal to the bit" if on["kv"]["saved"] else "")
