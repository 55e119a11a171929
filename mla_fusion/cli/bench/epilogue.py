"""`mla-fusion bench epilogue`: what follows a decode, in one launch and in separate ones.

Separate are the reduction, torch.bmm and, where the result is fp8, a quantization: vLLM's op, or
this library's where vLLM is missing. Calls have distinct W_UV, so that L2 does not hold what an
engine would have to fetch. "back": calls follow each other. "behind": each follows a decode, less
the same graph of the decode alone. A shape of the kernel is named rows x columns x slices x splits
x warps, and w with the splits of whole rows.
"""

import argparse
import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping

import torch

from mla_fusion.attention import PersistentDecodePlan, reference
from mla_fusion.attention import triton as provider
from mla_fusion.attention.plan.epilogue import GROUP, Epilogue
from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.attention.triton import epilogue as epilogues
from mla_fusion.attention.triton.epilogue import Shape
from mla_fusion.cli import version_of
from mla_fusion.cli.bench import kit
from mla_fusion.cli.bench.kit import TIMES, Row, capture_calls, interleave

Step = Callable[[Inputs], None]
KEY = ["tokens", "heads", "pieces", "values", "quantization", "place"]
RESULT = [*KEY, "candidate", "chosen", *TIMES, "worst_step"]
FP8, BF16, PAGE, LATENT, ROPE = torch.float8_e4m3fn, torch.bfloat16, 64, 512, 64
WEIGHTS = 2**27  # bytes of W_UV that a graph walks over, at most: more than the L2 cache
MOST_PIECES = 256  # of a step: about what two CTAs on each SM make
SEPARATE = "separate"
WRONG = 1 << 20  # steps of a result that is wrong as a whole
DEFAULTS = {
    "tokens": (1, 2, 4, 8, 32, 128), "heads": (8, 16, 32, 128), "splits": (1, 16, 128), "rounds": 9
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """T tokens of sequences of one token each, H heads, S splits of each sequence, V columns."""

    tokens: int
    heads: int
    pieces: int
    values: int
    quantization: str

    def chosen(self) -> Shape | None:
        """What the library launches for it."""
        return epilogues.choose(self.tokens, self.heads, LATENT, self.values, self.quantization)


def grid(
    sizes: Iterable[Iterable[int]], values: int, quantizations: Iterable[str] = ("none", "group")
) -> list[Case]:
    """Every case, in no more splits than a step has. sizes: tokens, heads and splits."""
    every = itertools.product(itertools.product(*sizes), quantizations)
    cases = (Case(t, h, min(s, MOST_PIECES // t), values, q) for (t, h, s), q in every)
    return list(dict.fromkeys(cases))


def run(settings: argparse.Namespace, facts: Mapping[str, str], _: kit.Ceilings) -> bool:
    """Measure what the library launches; whether every result passed its check."""
    torch.manual_seed(0)
    cases = grid((settings.tokens, settings.heads, settings.splits), GROUP)

    def rows(case: Case) -> list[Row]:
        return measure(case, candidates(case), settings.rounds)

    wrong = summary(kit.table(settings.csv, facts, RESULT, cases, rows))
    print(f"microseconds per call; ! marks a failed check. Rows: {settings.csv}")
    return not wrong


def make(case: Case, calls: int = 64) -> list[Inputs]:
    """Up to so many calls that differ in W_UV, behind one plan."""
    tokens, heads, fold = case.tokens, case.heads, -(-case.heads // 64)
    blocks = 2 * case.pieces
    # Planned on the host: every such plan would compile another planner. With half as many CTAs
    # again as splits, the planner gives each two blocks: one split.
    plan = PersistentDecodePlan.allocate(
        max_batch=tokens, max_query_len=1, num_heads=heads, q_dtype=FP8, kv_dtype=FP8,
        device="cpu", v_head_dim=LATENT, ctas=-(-3 * tokens * fold * case.pieces // 2),
        kv_granularity=PAGE, overhead=1,
    )  # fmt: skip
    lens, rows = torch.full((tokens,), PAGE * blocks).int(), torch.arange(tokens + 1).int()
    plan.refresh(qo_indptr=rows, seq_lens=lens, num_tokens=tokens, max_query_len=1)
    for name, tensor in plan.tensors().items():
        setattr(plan, name, tensor.cuda())
    device = "cuda"
    pages = torch.arange(tokens * blocks, device=device).int().view(tokens, blocks)
    cache = torch.randn(tokens * blocks, PAGE, LATENT + ROPE, device=device).to(FP8)
    q = torch.randn(tokens, heads, LATENT + ROPE, device=device).to(FP8)
    latents = torch.empty(tokens, heads, LATENT, device=device, dtype=BF16)
    scale = torch.full((1,), 0.5, device=device)
    every = q, cache, plan, pages, q.shape[2] ** -0.5, scale, scale, latents, None
    weights = heads * LATENT * case.values * BF16.itemsize
    count = min(calls, max(8, WEIGHTS // weights))
    w_uv = [kit.make_w_uv(heads, LATENT, case.values) for _ in range(count)]
    epilogue = kit.make_epilogue(w_uv[0], tokens, case.quantization)
    return [Inputs(*every, dataclasses.replace(epilogue, w_uv=each)) for each in w_uv]


def separate(given: Inputs) -> None:
    """Reduction, product and quantization."""
    epilogue = given.epilogue
    assert epilogue is not None
    provider.merge(given)
    if epilogue.scale is None or not version_of("vllm"):
        epilogues.multiply(given)
        return
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    product = torch.empty_like(epilogue.out, dtype=BF16)
    epilogues.multiply(dataclasses.replace(given, epilogue=Epilogue(epilogue.w_uv, product)))
    if epilogue.quantization == "tensor":
        ops.scaled_fp8_quant(product, epilogue.scale, output=epilogue.out)
        return
    options = {"column_major_scales": True, "out_q": epilogue.out, "use_ue8m0": False}
    _, scale = per_token_group_quant_fp8(product, GROUP, **options)
    if not torch.cuda.is_current_stream_capturing():  # where the result is checked
        epilogue.scale.copy_(scale)


def name_of(shape: Shape | None) -> str:
    """Of the candidate with this shape."""
    if shape is None:
        return SEPARATE
    *sizes, whole = dataclasses.astuple(shape)
    return "x".join(map(str, sizes)) + (f"w{whole}" if whole else "")


def candidates(case: Case, shapes: Iterable[Shape] = ()) -> dict[str, Step]:
    """Who computes what follows the decode: separate launches, what is chosen, and `shapes`."""
    known = [*shapes, *([chosen] if (chosen := case.chosen()) else [])]
    launches = {name_of(shape): functools.partial(epilogues.launch, shape=shape) for shape in known}
    return {SEPARATE: separate, **launches}


def worst_step(given: Inputs, step: Step) -> int:
    """Largest distance of the result from the reference's; the decode has run."""
    epilogue = given.epilogue
    assert epilogue is not None
    epilogue.out.view(torch.uint8).fill_(0x7F)
    step(given)
    got = epilogue.out.clone()
    step(given)
    if not torch.equal(got.view(torch.uint8), epilogue.out.view(torch.uint8)):
        print("WRONG: two launches differ")
        return WRONG
    scale = None if epilogue.scale is None else epilogue.scale.clone()
    provider.merge(given)
    reference.finish(given.out, epilogue)
    # A latent may round to its neighbour, so the last bits of results and scales may differ, and
    # more of a result where its sum cancels.
    if scale is not None and epilogue.scale is not None and epilogue.quantization == "group":
        ratio = float((scale / epilogue.scale).log2().abs().max())
        if not ratio < 0.02:
            print(f"WRONG: scales are off by a factor of {2**ratio}")
            return WRONG
    exact = epilogue.out.float()
    return int(kit.steps(got, epilogue.out)[exact.abs() > 0.5 * exact.std()].max())


def measure(case: Case, found: Mapping[str, Step], rounds: int) -> list[Row]:
    """Rows of one case, and lines; a shape that cannot run is named and left out.

    Raises:
        Exception: what is chosen cannot run, or separate launches cannot.
    """
    from triton.errors import TritonError

    calls, chosen = make(case), name_of(case.chosen())

    def captured(*every: Step) -> torch.cuda.CUDAGraph:
        return capture_calls(lambda i: [step(calls[i]) for step in every], len(calls))

    provider.decode(calls[0])
    calls[0].plan.fresh = False
    pieces = int(calls[0].plan.reduce_indptr.diff().max())
    graphs, errors = {"alone": captured(provider.decode)}, {}
    for name, step in found.items():
        try:
            errors[name] = worst_step(calls[0], step)
            graphs[f"back {name}"] = captured(step)
            graphs[f"behind {name}"] = captured(provider.decode, step)
        except (RuntimeError, TritonError) as problem:
            if name in (SEPARATE, chosen):
                raise
            print(f"{name} left out: {type(problem).__name__} {str(problem)[:200]}")
    times = interleave(graphs, len(calls), rounds)
    assert not calls[0].plan.epilogue_counts.any(), "a slice was counted and never collected"
    less, rows = {"back": 0.0, "behind": times.pop("alone")["p50_us"]}, []
    for key, us_of in times.items():
        place, name = key.split()
        row = dataclasses.asdict(case) | {"pieces": pieces, "place": place, "candidate": name}
        row |= {"chosen": int(name == chosen), "worst_step": errors[name]}
        rows.append(row | {quantile: us - less[place] for quantile, us in us_of.items()})
    show(rows)
    return rows


def show(rows: list[Row]) -> None:
    """The five fastest of a case, what is chosen with a star, wrong results with a mark."""
    for place in ("back", "behind"):
        here = sorted((r for r in rows if r["place"] == place), key=lambda r: r["p50_us"])
        found = [
            f"{r['candidate']}{'*' * r['chosen']} {r['p50_us']:.2f} ({r['p20_us']:.2f}-"
            f"{r['p80_us']:.2f}){'!' * (r['worst_step'] > 1)}"
            for r in here[:5]
        ]
        case = "T={tokens} H={heads} S={pieces} {quantization}".format(**rows[0])
        print(f"{case} {place}: {' | '.join(found)}", flush=True)


def summary(rows: list[Row]) -> list[Row]:
    """Print where what is chosen loses, and the mean against separate launches; wrong rows."""
    chosen = kit.medians((row for row in rows if row["chosen"]), KEY)
    gains = []
    for key, found in kit.medians(rows, KEY).items():
        [ours] = chosen[key].values()
        gains.append(found[SEPARATE] / ours)
        best = min(found, key=found.__getitem__)
        if found[best] < 0.97 * ours:
            print(f"{key}: chosen {ours:.2f}, {best} {found[best]:.2f}")
    mean = statistics.geometric_mean(gains)
    print(f"chosen against separate: geometric mean {mean:.2f}, least {min(gains):.2f}")
    wrong = [row for row in rows if row["worst_step"] > 1]
    print(f"wrong rows: {wrong}")
    return wrong
