"""Compare the greedy tokens of several engines for the same prompts.

A sequence may first differ at a near tie, where two candidates are closer than the rounding of
vLLM's own paths: the largest move of the gap between the two best tokens from `default` to other
unfused arms (see engine.py) in one context. `fused` is wrong if a token differs that was no
candidate, if `BEYOND` sequences differ at wider gaps, or one at a gap `FAR` times as wide. Its
moves are also compared with those of the widest unfused arm: their ratio finds an error too small
to change a token.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

# Root mean square of the moves, fused / default over unfused / default.
MOVE_RATIO = 1.5
# Sequences whose gaps exceed the limit, the largest value of the unfused pair. If `fused` rounds as
# that pair does, swapping the two in one sequence changes no probability. So each of the n largest
# values is of `fused` with probability 1/2, and all are with 2^-n at most: 3 % for 5.
BEYOND = 5
FAR = 2.0  # times the limit: the gap of a sequence that is wrong by itself


@dataclasses.dataclass(frozen=True)
class Difference:
    """Two arms compared.

    equal, sequences: how many sequences are equal, and how many there are. gaps: the difference of
    log-probability between the two candidates where a sequence first differs. largest, typical: the
    move of the gap between the best two tokens, over all contexts that both arms met (maximum, root
    mean square).
    """

    equal: int
    sequences: int
    gaps: list[float]
    largest: float
    typical: float

    def __str__(self) -> str:
        gaps = f", gaps there {[round(g, 3) for g in self.gaps]}" if self.gaps else ""
        return (
            f"{self.equal} of {self.sequences} sequences equal{gaps}; "
            f"gap moves by {self.typical:.4f} (largest {self.largest:.3f})"
        )


def compare(a: dict[str, Any], b: dict[str, Any]) -> Difference:
    """Compare two results of `generate`: "tokens" and "top", [token, log-probability] pairs."""
    gaps, moves, equal = [], [], 0
    for x, y, tops_x, tops_y in zip(a["tokens"], b["tokens"], a["top"], b["top"], strict=True):
        first = next((i for i in range(len(x)) if x[i] != y[i]), None)
        equal += first is None
        contexts = len(x) if first is None else first + 1
        for at, (top_x, top_y) in enumerate(zip(tops_x[:contexts], tops_y, strict=False)):
            p, q = dict(top_x), dict(top_y)
            best, second = sorted(p, key=lambda token: -p[token])[:2]
            if at == first:
                gaps.append(abs(p[x[at]] - p[y[at]]) if y[at] in p else math.inf)
            if best in q and second in q:
                moves.append(abs((p[best] - p[second]) - (q[best] - q[second])))
    if not moves or any(map(math.isnan, moves)):
        return Difference(equal, len(a["tokens"]), gaps, math.nan, math.nan)
    typical = math.sqrt(sum(move * move for move in moves) / len(moves))
    return Difference(equal, len(a["tokens"]), gaps, max(moves), typical)


def verdict(fused: Difference, unfused: Difference) -> str:
    """The word "right", or what is wrong; `fused` and `unfused` are compared to default.

    Where the two unfused paths are equal in every bit, nothing measures their rounding: other
    tokens are wrong, and other log-probabilities are not judged.
    """
    limit = max([unfused.largest, *unfused.gaps])
    if math.isnan(fused.typical + unfused.typical):
        return "WRONG: NaN"
    beyond = [gap for gap in fused.gaps if gap > limit]
    count, most = len(beyond), max(beyond, default=0.0)
    if count >= BEYOND or most > FAR * limit:
        return f"WRONG: {count} tokens differ at gaps of up to {most:.3f}, limit {limit:.3f}"
    if unfused.largest == 0 < fused.largest:
        return "not judged: the unfused paths are equal in every bit"
    if fused.typical > MOVE_RATIO * unfused.typical:
        ratio = fused.typical / unfused.typical
        return f"WRONG: log-probabilities move {ratio:.1f} times as far as between unfused paths"
    return "right"


def judge(arm: str, others: tuple[str, ...], results: dict[str, dict[str, Any]]) -> str:
    """The verdict on an arm's tokens, by the rounding between `default` and `others`; prints all.

    "not judged": it is one of these, or `default` or all the others were not run.
    """
    unfused = rounding(others, results)
    if arm in ("default", *others) or not unfused:
        return "not judged"
    ours = compare(results[arm], results["default"])
    for name, difference in {arm: ours, **unfused}.items():
        print(f"   {name} / default: {difference}")
    return verdict(ours, widest(list(unfused.values())))


def rounding(others: tuple[str, ...], results: dict[str, dict[str, Any]]) -> dict[str, Difference]:
    """How far each of the unfused arms that were run is from `default`; none if that was not."""
    default = results.get("default")
    return {each: compare(results[each], default) for each in others if default and each in results}


def widest(differences: list[Difference]) -> Difference:
    """The rounding of several unfused paths: the widest, with the gaps and largest move of all."""
    wide = max(differences, key=lambda each: (math.isnan(each.typical), each.typical))
    gaps = [gap for each in differences for gap in each.gaps]
    return dataclasses.replace(wide, gaps=gaps, largest=max(each.largest for each in differences))


def layers_of(result: dict[str, Any]) -> tuple[int, int, int]:
    """MLA layers in the decode bucket's graphs, fused there, and fused in other graphs."""
    (_, _, layers, fused, _), *others = result["ranges"]
    return layers, fused, sum(other[3] for other in others)
