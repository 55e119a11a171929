"""The table of docs/coverage.md from the stored results.

It is between `<!-- table -->` and `<!-- end -->`. What has the same result is one row.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from tests.coverage import tables
from tests.coverage.jobs import NEIGHBOURS
from tests.coverage.vllm_passes import ON_GRAPHS, SPECS

RESULTS = Path(__file__).with_name("results")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "coverage.md"
NEW, OLD, SOURCES = RELEASES = "0.32.0", "0.29.0", "0.26.0"  # the columns
TRANSFORMERS = "transformers.base:Base"
_MODELS = "vllm.model_executor.models."


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
    grouped: dict[tuple[str, str], list[str]] = {}
    for kind, name, cell in _all_but_models():
        grouped.setdefault((kind, cell), []).append(name)
    others = [[kind, _listed(names), cell, "-", "-"] for (kind, cell), names in grouped.items()]
    lines, above = [header, ["---"] * len(header)], ""
    for kind, *cells in (*_models(), *others):
        assert all(cells)
        lines.append([kind * (kind != above), *cells])
        above = kind
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


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
    if code := tables.UNREACHABLE.get(architecture):
        return f"`{code}`"
    if architecture in release["breakable"]:
        return f"`{tables.BREAKABLE}`"
    if not release["architectures"][architecture]:
        return f"`{tables.NO_GRAPH}`"
    return tables.NOT_SHOWN.get((version, architecture), "")


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
    """The compiled classes of all architectures without a reason against them."""
    return {
        name
        for architecture, classes in stored(version)["architectures"].items()
        for name in classes
        if not why_unreached(version, architecture)
    }


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


def _models():
    """One row for all architectures of which the same became in each release."""
    found = {version: shown(version) for version in (OLD, NEW)}
    grouped: dict[tuple[str, ...], tuple[list[str], set[str]]] = {}
    every = {version: stored(version)["architectures"] for version in (NEW, OLD, SOURCES)}
    for architecture in sorted(set().union(*every.values())):
        classes = {name for of in every.values() for name in of.get(architecture, ())}
        states = tuple(
            _state(version, architecture, of.get(architecture), found.get(version))
            for version, of in every.items()
        )
        names, all_classes = grouped.setdefault(states, ([], set()))
        any_model = "any, with `model_impl=transformers`"
        names.append(any_model if TRANSFORMERS in classes else f"`{architecture}`")
        all_classes |= classes
    rows = []
    for states, (names, classes) in grouped.items():
        cells = [
            state or _total(found[version][name] for name in classes & found[version].keys())
            for version, state in zip(every, states, strict=True)
        ]
        rows.append(["models", ", ".join(names), *cells])
    return sorted(rows, key=lambda row: " of " not in row[2])


def _state(version, architecture, classes, found):
    """What became of an architecture in a release: its cell, empty if every layer fused."""
    if classes is None:
        return "not there"
    if code := why_unreached(version, architecture):
        return code
    if version == SOURCES:
        return "compiled"
    counts = [found[name] for name in classes]
    return "" if all(count["layers"] == count["fused"] for count in counts) else _total(counts)


def _total(counts):
    """Of all layers, how many fused; the reasons of the others."""
    total = sum(counts, Counter())
    fused, layers = (total.pop(key, 0) for key in ("fused", "layers"))
    return _fused(f"{fused} of {layers}", total)


def _all_or_none(count, reason):
    """All of so many fused, or none for a reason."""
    return _fused(f"{0 if reason else count} of {count}", [reason] * bool(reason))


def _fused(counts, codes):
    """How many layers fused, and the reasons of the others."""
    return ", ".join([counts, *(f"`{code}`" for code in codes)])


def _all_but_models():
    """(kind, name, cell): whether all variants fuse, or why not, and what is equal."""
    for name, (_, where, reason) in tables.OUTPUTS.items():
        cell = _all_or_none(len(tables.OUTPUT_VARIANTS), reason)
        yield "quantizations", f"{name} ({where})", cell
    for name in tables.SPELLINGS:
        yield "spellings", name, _all_or_none(len(tables.VARIANTS), "")
    for neighbour in NEIGHBOURS:
        yield "neighbours", neighbour.name, neighbour_cell(neighbour, stored("neighbours"))
    for name, (_, reason) in ON_GRAPHS.items():
        same = "graph unchanged" if reason else "outputs of the graphs equal"
        yield "neighbours", name, f"{_all_or_none(len(SPECS), reason)}; {same}"
    yield "neighbours", "sequence parallelism", "not run: `enable_sp` is gone"


def neighbour_cell(neighbour, results):
    """What became of a neighbour: the layers that fused on each rank, the reasons of the others,
    and whether both engines gave the same tokens, and the same entries to a connector."""
    off, on = (results[f"{neighbour.name} ({flag})"] for flag in ("off", "on"))
    if error := off.get("error") or on.get("error"):
        if neighbour.refused and neighbour.refused in error:
            return f"vLLM refuses it on a CPU: {neighbour.refused}"
        return f"FAILED: {error}"
    layers = " + ".join(f"{made['fused']} of {made['layers']}" for made in on["reports"])
    codes = sorted({code for made in on["reports"] for code in made["declined"]})
    if switched_off := re.search(r"switched off.*?\[([a-z-]+)\]", "\n".join(on["log"])):
        layers, codes = "none", [switched_off[1]]
    count = sum(map(len, on["tokens"]))
    same = "DIFFERENT"
    if count and on["tokens"] == off["tokens"] and on["kv"] == off["kv"]:
        same = f"equal ({count})" + "; entries equal to the bit" * bool(on["kv"]["saved"])
    return f"{_fused(layers or '0 of 0', codes)}; tokens {same}"
