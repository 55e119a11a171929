"""The tables of docs/coverage.md from the stored results.

A table is between `<!-- table NAME -->` and `<!-- end -->`.
"""

import json
import re
from pathlib import Path
from typing import Any

from tests.coverage import unreachable
from tests.coverage.neighbours import NEIGHBOURS
from tests.coverage.outputs import OUTPUTS
from tests.coverage.spellings import SPELLINGS, VARIANTS, source

RESULTS = Path(__file__).with_name("results")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "coverage.md"
NEW, OLD, SOURCES = RELEASES = "0.32.0", "0.29.0", "0.26.0"  # the columns
TRANSFORMERS = "transformers.base:Base"
_MODELS = "vllm.model_executor.models."
_NO_SEQUENCE_PARALLELISM = f"vLLM {NEW} has no such pass (`enable_sp` is gone); not run before it"


def stored(name):
    """The results kept under a name, if any."""
    path = RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def text(page):
    """The page with its tables as the results have them."""
    tables = {
        "models": models_table,
        "unreachable": unreachable_table,
        "spellings": spellings_table,
        "outputs": outputs_table,
        "neighbours": neighbours_table,
    }
    for name, table in tables.items():
        made = f"<!-- table {name} -->\n{table()}\n<!-- end -->"
        place = rf"<!-- table {name} -->.*?<!-- end -->"
        page, found = re.subn(place, lambda _, made=made: made, page, flags=re.S)
        if found != 1:
            raise SystemExit(f"{PAGE.name} has {found} places for the table {name!r}, not one")
    return page


def _rows(header, rows):
    names = header.split("|")
    lines = [names, ["---"] * len(names), *rows]
    assert all(len(row) == len(names) and all(cell.strip() for cell in row) for row in rows)
    return "\n".join("| " + " | ".join(cell.strip() for cell in line) + " |" for line in lines)


def why_unreached(version, architecture):
    """The reason why no pass reaches it in a release; empty if engines show its classes."""
    release = stored(version)
    row = unreachable.OF_ARCHITECTURE.get(architecture)
    if row and row.sparse:
        return f"`{unreachable.SPARSE}`"
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
    """Compiled class -> (engines that had it, its counts in all of them together)."""
    out: dict[str, tuple[list[str], dict[str, Any]]] = {}
    for engine, result in stored(version)["engines"].items():
        for name, counts in result.get("classes", {}).items():
            if name.startswith("transformers."):
                name = _MODELS + TRANSFORMERS
            empty: dict[str, Any] = {"layers": 0, "fused": 0, "declined": {}}
            engines, total = out.setdefault(name.removeprefix(_MODELS), ([], empty))
            engines.append(engine)
            total["layers"] += counts["layers"]
            total["fused"] += counts["fused"]
            for code, layers in counts["declined"].items():
                total["declined"][code] = total["declined"].get(code, 0) + layers
    return out


def models_table():
    """One row per compiled class."""
    rows = []
    found = {version: (compiled(version), shown(version)) for version in (OLD, NEW)}
    for name, architectures in sorted((found[OLD][0] | found[NEW][0]).items()):
        there = {v: seen[name] for v, (classes, seen) in found.items() if name in classes}
        counts = [_counts(there[v][1]) if v in there else "not compiled there" for v in (NEW, OLD)]
        engines, _ = there.get(NEW) or there[OLD]
        reach = "any, with `model_impl=transformers`" if name == TRANSFORMERS else ""
        rows.append(
            [
                f"`{name.replace(':', '.')}`",
                reach or ", ".join(f"`{a}`" for a in architectures),
                ", ".join(engines),
                *counts,
                "yes" if name in compiled(SOURCES) else "no",
            ]
        )
    header = f"class|architectures|engines|fused in vLLM {NEW}|in {OLD}"
    return _rows(f"{header}|in the sources of {SOURCES}", rows)


def _counts(counts):
    """Of the layers, how many fused; the reasons of the others."""
    return _fused(f"{counts['fused']} of {counts['layers']}", counts["declined"])


def _fused(counts, codes):
    """How many layers fused, and the reasons of the others."""
    return ", ".join([counts, *(f"`{code}`" for code in codes)])


def unreachable_table():
    """One row per architecture of `unreachable`."""
    rows = []
    for name, row in unreachable.OF_ARCHITECTURE.items():
        cells = [
            why_unreached(version, name) or "see above"
            if name in stored(version)["architectures"]
            else "not there"
            for version in (NEW, OLD, SOURCES)
        ]
        rows.append([f"`{name}`", row.which, *cells])
    return _rows(f"architecture|which|{NEW}|{OLD}|in the sources of {SOURCES}", rows)


def spellings_table():
    """One row per spelling: how many variants fuse, and what becomes of the others."""
    rows = []
    for name in SPELLINGS:
        outcomes = {str(variant): stored("spellings")[name][str(variant)] for variant in VARIANTS}
        others = [f"{which}: {became}" for which, became in outcomes.items() if became != "fused"]
        fused = f"{len(VARIANTS) - len(others)} of {len(VARIANTS)}"
        rows.append([name, source(name), ", ".join([fused, *others])])
    return _rows("spelling|graph|fused", rows)


def outputs_table():
    """One row per quantization in front of o_proj: in how many variants it is taken in, or why
    not."""
    rows = []
    for name, output in OUTPUTS.items():
        outcomes = list(stored("outputs")[name].values())
        codes = sorted(set(outcomes) - {"fused"})
        counts = f"{outcomes.count('fused')} of {len(outcomes)}"
        rows.append([name, output.where, _fused(counts, codes)])
    return _rows("quantization|linear layers of vLLM|fused", rows)


def neighbours_table():
    """One row per neighbour."""
    rows = [neighbour_row(n, stored("neighbours")) for n in NEIGHBOURS]
    for name, outcome in stored("graphs").items():
        declined = outcome["declined"]
        same = "graph unchanged" if declined else "outputs of the graphs equal"
        same = same if outcome["equal"] else "DIFFERENT"
        rows.append([name, _counts(outcome), "graphs only", "-", same])
    rows.append(["sequence parallelism", *["-"] * 3, _NO_SEQUENCE_PARALLELISM])
    header = "neighbour|layers fused|passes fused|what the feature did"
    return _rows(f"{header}|tokens with the flag off and on", rows)


def _switched_off(result):
    """The code for which the flag was switched off, if it was."""
    found = re.search(r"\[([a-z-]+)\]", "".join(result["warnings"]))
    return found[1] if found else ""


def neighbour_row(neighbour, results):
    """The cells of one neighbour, from the results of its engines."""
    on = results.get(f"{neighbour.name} (on)")
    if on is None:
        return [neighbour.name, *["not run"] * 4]
    if "error" in on and neighbour.refused in on["error"] and neighbour.refused:
        return [neighbour.name, *["-"] * 3, f"vLLM refuses it on a CPU: {neighbour.refused}"]
    if neighbour.reason:
        declined = _switched_off(on) == neighbour.reason
        layers = _fused("none", [neighbour.reason]) if declined else "NOT DECLINED"
        return [neighbour.name, layers, "-", "-", "nothing is changed"]
    off = results[f"{neighbour.name} (off)"]
    errors = [result["error"] for result in (off, on) if "error" in result]
    if errors:
        return [neighbour.name, *["-"] * 3, f"FAILED: {errors[0]}"]
    did = "; ".join(sign.words.format(sign.number(on)) for sign in neighbour.signs)
    return [neighbour.name, _layers(on), _passes(on), did or "-", _sameness(off, on)]


def _layers(on):
    """Of each rank: how many MLA layers fused, of all; the reasons of the others."""
    if code := _switched_off(on):
        return _fused("none", [code])
    counts = [f"{made['fused']} of {made['layers']}" for made in on["reports"]]
    codes = sorted({code for made in on["reports"] for code in made["declined"]})
    return _fused(" + ".join(counts) or "0 of 0", codes)


def _passes(on):
    """Fused and all forward passes of each rank."""
    of_ranks = [f"{p['fused']} of {p['fused'] + p['unfused']}" for p in on["passes"]]
    return " + ".join(of_ranks) or "-"


def _sameness(off, on):
    """Whether both engines gave the same tokens, and the same entries to a connector."""
    count = sum(map(len, on["tokens"]))
    if not count or on["tokens"] != off["tokens"] or on["kv"] != off["kv"]:
        return "DIFFERENT"
    return f"equal ({count})" + ("; entries equal to the bit" if on["kv"]["saved"] else "")
