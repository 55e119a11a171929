"""`mla-fusion bench region`: the fused region against what else can compute it."""

from __future__ import annotations

import csv
import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from mla_fusion.cli.arguments import pick
from mla_fusion.cli.bench import region_cases
from mla_fusion.cli.bench.kit import interleave, quantiles
from mla_fusion.kernels.dispatch import Widths

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from mla_fusion.cli.bench.kit import Ceilings

EQUAL, STEPS = 0.995, 1  # least share of equal elements, and most steps, of a result that counts
DEFAULTS = {
    "tokens": (1, 8, 32, 64, 128, 256, 512),
    "heads": (8, 16, 32, 64, 128),
    **region_cases.DEEPSEEK._asdict(),
    "layers": 61,
    "rounds": 15,
    "bf16": False,
}


def counts(row: dict[str, Any]) -> bool:
    """Whether the correctness check of a row allows its time to count.

    Equal to the specification in nearly all elements, and no element more than a step off. A peer
    that rounds the rotated half twice is many steps off where the sum cancels; it counts if every
    element is what its own roundings give.
    """
    if row["equal"] == "":
        return True
    near = row["worst_step"] <= STEPS or row["own_rounding"] == 1.0
    return bool(row["equal"] >= EQUAL and near)


def run(settings: argparse.Namespace, facts: dict[str, str], ceilings: Ceilings) -> bool:
    """Measure the region."""
    from mla_fusion.cli.bench import region_peers

    names = pick(settings.peers, region_peers.PEERS)
    settings.csv.parent.mkdir(parents=True, exist_ok=True)
    right = True
    with settings.csv.open("w", newline="") as file:
        writer = None
        for rows in _shapes(settings, names, facts, ceilings):
            first = rows[0]
            if writer is None:
                writer = csv.DictWriter(file, first)
                writer.writeheader()
            writer.writerows(rows)
            file.flush()
            times = " | ".join(
                f"{r['candidate']} {r['p50_us']:.2f}{'' if counts(r) else '!'}" for r in rows
            )
            print("T={tokens:4d} H={heads:4d} floor {floor_us:6.2f} |".format(**first), times)
            right &= all(counts(r) for r in rows if r["candidate"].endswith("triton"))
    print(f"microseconds per layer; ! marks a failed check. Rows: {settings.csv}")
    return right


def _shapes(
    settings: argparse.Namespace,
    names: list[str],
    facts: dict[str, str],
    ceilings: Ceilings,
) -> Iterator[list[dict[str, Any]]]:
    """The rows of one shape after the other: a candidate, and what it was measured with.

    "query" is the type of query and cache, "equal" the share of elements that equal the reference
    ("" for a part of the work), "own_rounding" the share that equals what the candidate's own
    roundings give, if they are known.
    """
    from mla_fusion.cli.bench import region_peers

    missing: set[str] = set()
    widths = Widths(*(getattr(settings, name) for name in Widths._fields))
    for heads in settings.heads:
        weights = region_cases.make_weights(heads, settings.layers, widths)
        for tokens in settings.tokens:
            case = region_cases.Case(tokens, heads, not settings.bf16, widths)
            region = region_cases.make_region(case, weights)
            # A captured graph does not keep its candidate's workspaces alive: `layers` does.
            layers, graphs, checks, own = {}, {}, {}, {}
            for name in names:
                if name in missing:
                    continue
                try:
                    layer = layers[name] = region_peers.PEERS[name](region)
                    if name not in region_peers.NOT_A_RESULT:
                        checks[name] = region_cases.agreement(region, layer)
                    if name in region_peers.OWN_ROUNDING:
                        expected = region_peers.OWN_ROUNDING[name](region)
                        own[name] = region_cases.agreement(region, layer, expected)[0]
                    graphs[name] = region_cases.capture(region, layer)
                    graphs[name].replay()
                    torch.cuda.synchronize()
                except (ImportError, RuntimeError, AttributeError, ValueError) as error:
                    print(f"{name} left out: {type(error).__name__} {str(error)[:300]}")
                    missing.add(name)
            times = interleave(graphs, settings.layers, settings.rounds)
            plan = dataclasses.asdict(region_peers.chosen_plan(region))
            rows = []
            for name, samples in times.items():
                p20, p50, p80 = (round(x, 3) for x in quantiles(samples))
                equal, worst = checks.get(name, ("", ""))
                row = {
                    **facts,
                    "query": "bf16" if settings.bf16 else "fp8",
                    **widths._asdict(),
                    "tokens": tokens,
                    "heads": heads,
                    "candidate": name,
                    "p20_us": p20,
                    "p50_us": p50,
                    "p80_us": p80,
                    "floor_us": round(ceilings.floor_us(case), 3),
                    "gbps": round(case.bytes() / p50 / 1e3),
                    "equal": equal,
                    "worst_step": worst,
                    "own_rounding": own.get(name, ""),
                    "plan": str(plan) if name == "triton" else "",
                }
                rows.append(row)
            yield rows
            del layers, graphs, region
            torch.cuda.empty_cache()
