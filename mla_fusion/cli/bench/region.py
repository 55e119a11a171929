"""`mla-fusion bench region`: the fused region against what else can compute it."""

import argparse
import dataclasses

import torch

from mla_fusion.cli.bench import kit, region_cases, region_peers
from mla_fusion.cli.bench.kit import TIMES, Ceilings, Row, interleave, pick, quantiles, rows_file
from mla_fusion.cli.bench.region_cases import Region
from mla_fusion.kernels.dispatch import Widths

EQUAL, STEPS = 0.995, 1  # least share of equal elements, and most steps, of a result that counts
# "query" is the type of query and cache, "equal" the share of elements that equal the reference
# ("" for a part of the work), "own_rounding" the share that equals what the candidate's own
# roundings give, if they are known.
SHAPE = ["query", *Widths._fields, "tokens", "heads", "candidate"]
COLUMNS = [*SHAPE, *TIMES, "floor_us", "gbps", "equal", "worst_step", "own_rounding", "plan"]
DEFAULTS = {
    "tokens": (1, 8, 32, 64, 128, 256, 512),
    "heads": (8, 16, 32, 64, 128),
    **region_cases.DEEPSEEK._asdict(),
    "layers": 61,
    "rounds": 15,
    "bf16": False,
}


def counts(row: Row) -> bool:
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
    names = pick(settings.peers, region_peers.PEERS)
    widths = Widths(*(getattr(settings, name) for name in Widths._fields))
    right, missing = True, set[str]()
    with rows_file(settings.csv, facts, COLUMNS) as add:
        for heads in settings.heads:
            weights = region_cases.make_weights(heads, settings.layers, widths)
            for tokens in settings.tokens:
                case = region_cases.timed(tokens, heads, not settings.bf16, widths)
                region = region_cases.make_region(case, weights)
                rows = measure(region, names, missing, settings.rounds, ceilings)
                add(rows)
                times = " | ".join(
                    f"{r['candidate']} {r['p50_us']:.2f}{'' if counts(r) else '!'}" for r in rows
                )
                floor = ceilings.floor_us(case)
                print(f"T={tokens:4d} H={heads:4d} floor {floor:6.2f} |", times)
                right &= all(counts(r) for r in rows if r["candidate"].endswith("triton"))
                del region
                torch.cuda.empty_cache()
    print(f"microseconds per layer; ! marks a failed check. Rows: {settings.csv}")
    return right


def measure(
    region: Region, names: list[str], missing: set[str], rounds: int, ceilings: Ceilings
) -> list[Row]:
    """The rows of one shape. missing: the candidates that are not here, each named once."""
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
        except kit.UNAVAILABLE as error:
            print(f"{name} left out: {type(error).__name__} {str(error)[:300]}")
            missing.add(name)
    case, rows = region.case, []
    plan = str(dataclasses.asdict(region_peers.chosen_plan(region)))
    shape = {"query": "fp8" if case.fp8 else "bf16", **case.widths._asdict()}
    shape |= {"tokens": case.tokens, "heads": case.heads}
    for name, samples in interleave(graphs, len(region.calls), rounds).items():
        times = {quantile: round(us, 3) for quantile, us in quantiles(samples).items()}
        equal, worst = checks.get(name, ("", ""))
        row = {**shape, "candidate": name, **times, "floor_us": round(ceilings.floor_us(case), 3)}
        row |= {"gbps": round(case.bytes() / times["p50_us"] / 1e3), "equal": equal}
        row |= {"worst_step": worst, "own_rounding": own.get(name, "")}
        rows.append(row | {"plan": plan if name == "triton" else ""})
    return rows
