"""`mla-fusion bench region`: the fused region against what else can compute it. A peer takes a
`Region` and returns a layer, which may rotate q and k_pe in place, or raises ImportError."""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping

import torch

from mla_fusion import gpu
from mla_fusion.cli.bench import pick
from mla_fusion.kernels import dispatch, get_provider
from mla_fusion.kernels import triton as provider
from mla_fusion.kernels.dispatch import Plan, Widths
from mla_fusion.kernels.inputs import Inputs
from mla_fusion.measure import records, region_cases, timing
from mla_fusion.measure.records import Row
from mla_fusion.measure.region_cases import ACTIVATION_SETS, BLOCK, SCALE, Layer, Region
from mla_fusion.measure.timing import TIMES, Call, Ceilings

EQUAL, STEPS = 0.995, 1  # least share of equal elements, and most steps, of a result that counts
# "query" is the type of query and cache, "equal" the share of elements that equal the reference
# ("" for a part of the work), "own_rounding" the share that equals what the candidate's own
# roundings give, if they are known.
SHAPE = ["query", *Widths._fields, "tokens", "heads", "candidate"]
CHECK = ["equal", "worst_step", "own_rounding"]
COLUMNS = ["flashinfer", *SHAPE, *TIMES, "floor_us", "gbps", *CHECK, "plan"]
DEFAULTS = {
    "tokens": (1, 8, 32, 64, 128, 256, 512), "heads": (8, 16, 32, 64, 128),
    **region_cases.DEEPSEEK._asdict(), "layers": 61, "rounds": 15, "bf16": False, "peers": (),
}  # fmt: skip


def product(given: Inputs, latent: torch.Tensor) -> None:
    """q_nope @ W_UK into `latent` [T, H, L] with cuBLAS."""
    nope = given.w_uk_t.shape[1]
    torch.bmm(given.q[..., :nope].transpose(0, 1), given.w_uk_t, out=latent.transpose(0, 1))


def workspace(region: Region) -> torch.Tensor:
    """Room for the product of one layer, [T, H, L] bf16."""
    q = region.calls[0].q
    return q.new_empty(*q.shape[:2], region.case.latent)


def chosen_plan(region: Region) -> Plan:
    """The launch plan of the dispatch table for this case."""
    case, here = region.case, gpu.of(region.calls[0].q.device)
    return dispatch.choose(case.tokens, case.heads, case.fp8, case.widths, here)


def bmm_and_one_kernel(region: Region) -> Layer:
    """cuBLAS and one Triton kernel for the rest: AITER's division of work."""
    from mla_fusion.cli.bench import two_launches

    return two_launches.fused_mla_decode_prep


def plain(given: Inputs) -> None:
    """A small kernel without programmatic launch, as an engine has one before the region."""
    given.positions.add_(0)


def plain_and_ours(given: Inputs) -> None:
    """A small kernel, then ours: the gain that a programmatic launch keeps in an engine."""
    plain(given)
    provider.fused_mla_decode_prep(given)


def vllm_unfused(region: Region) -> Layer:
    """vLLM: rotary_embedding, concat_and_cache_mla, bmm, cat, static fp8 quantization."""
    from vllm import _custom_ops as ops

    latent, angles = workspace(region), region.angles.bfloat16()
    nope, rope, _ = region.case.widths

    def layer(given: Inputs) -> None:
        q_pe, cache, out = given.q[..., nope:], given.kv_cache.view(torch.uint8), given.q_out
        ops.rotary_embedding(given.positions, q_pe, given.k_pe.unsqueeze(1), rope, angles, False)
        ops.concat_and_cache_mla(
            given.kv_c, given.k_pe, cache, given.slot_mapping, "fp8", given.k_scale
        )
        product(given, latent)
        query = torch.cat((latent, q_pe), dim=-1)
        ops.scaled_fp8_quant(query.flatten(1), given.q_scale, output=out.flatten(1))

    return layer


def _cat_quant() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """vLLM's own compiled cat and quantization, as its MLA layer makes it."""
    from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.attention.mla_attention import _DecodeConcatQuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    compiled = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, custom_ops=["none"])
    options = {"static": True, "group_shape": GroupShape.PER_TENSOR, "compile_native": True}
    with set_current_vllm_config(VllmConfig(compilation_config=compiled)):
        return _DecodeConcatQuantFP8(**options)


def vllm_40392(region: Region) -> Layer:
    """vLLM's #40392: concat_and_cache_mla_rope_fused, bmm, one compiled cat and quantization."""
    from vllm import _custom_ops as ops

    # Every shape of the grid is a compilation of its own; beyond the limit they would run eagerly.
    torch._dynamo.config.recompile_limit = 256
    latent, angles = workspace(region), region.angles.bfloat16()
    nope, cat_quant = region.case.widths.nope, _cat_quant()

    def layer(given: Inputs) -> torch.Tensor:
        q_pe, cache = given.q[..., nope:], given.kv_cache.view(torch.uint8)
        ops.concat_and_cache_mla_rope_fused(
            given.positions, q_pe, given.k_pe, given.kv_c, angles, False, given.slot_mapping,
            cache, "fp8", given.k_scale,
        )  # fmt: skip
        product(given, latent)
        return cat_quant(latent, q_pe, given.q_scale)

    return layer


def flashinfer(region: Region) -> Layer:
    """bmm and FlashInfer's rope_quantize_fp8_append_paged_kv_cache."""
    from flashinfer.rope import rope_quantize_fp8_append_paged_kv_cache

    latent, tokens, (nope, _, width) = workspace(region), region.case.tokens, region.case.widths
    requests = torch.arange(tokens + 1, dtype=torch.int32, device="cuda")
    slots = [call.slot_mapping for call in region.calls[:ACTIVATION_SETS]]
    places = {id(each): ((each // BLOCK).int(), (each % BLOCK).int()) for each in slots}

    def layer(given: Inputs) -> None:
        product(given, latent)
        cache, out = given.kv_cache, given.q_out
        page, entry = places[id(given.slot_mapping)]
        rope_quantize_fp8_append_paged_kv_cache(
            given.q[..., nope:], given.k_pe, latent, given.kv_c, None, given.cos_sin_cache,
            given.positions, (cache[..., :width], cache[..., width:]), page, requests,
            requests[:tokens], entry, is_neox=False, quantize_dtype=torch.float8_e4m3fn,
            quant_scale_q=1 / SCALE, quant_scale_kv=1 / SCALE, page_size=BLOCK,
            q_rope_out=out[..., width:], q_nope_out=out[..., :width], enable_pdl=True,
        )  # fmt: skip

    return layer


def rotated_first(region: Region, *, every_operation: bool) -> Layer:
    """The reference with q_pe and k_pe rotated in bf16 before anything else: they round twice.
    every_operation: the products and their sum round to bf16 one by one, else the sum alone."""
    dtype = torch.bfloat16 if every_operation else torch.float32
    nope, angles = region.case.widths.nope, region.angles

    def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        of_heads = angles[positions].to(dtype).unflatten(0, (-1, *(1,) * (x.dim() - 2)))
        cos, sin = of_heads.chunk(2, dim=-1)
        first, second = x[..., ::2].to(dtype), x[..., 1::2].to(dtype)
        pair = first * cos - second * sin, second * cos + first * sin
        return torch.stack(pair, dim=-1).flatten(-2).bfloat16()

    def layer(given: Inputs) -> None:
        q = given.q.clone()
        q[..., nope:] = rotate(given.q[..., nope:], given.positions)
        k_pe = rotate(given.k_pe, given.positions)
        rotated = given._replace(q=q, k_pe=k_pe, cos_sin_cache=None)
        get_provider("reference").fused_mla_decode_prep(rotated)

    return layer


PEERS: dict[str, Callable[[Region], Layer]] = {
    "triton": lambda region: provider.fused_mla_decode_prep,
    "bmm+1": bmm_and_one_kernel,
    "flashinfer": flashinfer,
    "vllm-40392": vllm_40392,
    "vllm-unfused": vllm_unfused,
    # The product alone: a part of every two-launch form.
    "bmm": lambda region: functools.partial(product, latent=workspace(region)),
    "plain": lambda region: plain,
    "plain+triton": lambda region: plain_and_ours,
}
NOT_A_RESULT, OURS = ("bmm", "plain"), ("triton", "plain+triton")
# What vLLM's kernels compute, to the bit: the specification rounds the rotated half once.
OWN_ROUNDING: dict[str, Callable[[Region], Layer]] = {
    "vllm-40392": functools.partial(rotated_first, every_operation=True),
    "vllm-unfused": functools.partial(rotated_first, every_operation=False),
}


def counts(row: Row) -> bool:
    """True if the time of a row counts: nearly all elements equal the specification, and none is
    more than a step off. A peer that rounds the rotated half twice is many steps off where the sum
    cancels; it counts if every element is what its own roundings give."""
    if row["equal"] == "":
        return True
    near = row["worst_step"] <= STEPS or row["own_rounding"] == 1.0
    return bool(row["equal"] >= EQUAL and near)


def run(settings: argparse.Namespace, facts: Mapping[str, str], ceilings: Ceilings) -> bool:
    """Measure the region; whether ours passed every check."""
    names = pick(settings.peers, PEERS)
    widths = Widths(*(getattr(settings, name) for name in Widths._fields))

    def work() -> Iterator[Region]:
        for heads in settings.heads:
            weights = region_cases.make_weights(heads, settings.layers, widths)
            for tokens in settings.tokens:
                case = region_cases.timed(tokens, heads, not settings.bf16, widths)
                yield region_cases.make_region(case, weights)

    rows = functools.partial(measure, names=names, rounds=settings.rounds, ceilings=ceilings)
    found = records.table(settings.csv, facts, COLUMNS, work(), rows)
    print(f"microseconds per layer; ! marks a failed check. Rows: {settings.csv}")
    return all(counts(row) for row in found if row["candidate"] in OURS)


def measure(region: Region, names: list[str], rounds: int, ceilings: Ceilings) -> list[Row]:
    """The rows of one shape, and a line."""

    def build(name: str) -> tuple[Call, Row]:
        layer = PEERS[name](region)
        check: Row = dict.fromkeys(CHECK, "")
        if name not in NOT_A_RESULT:
            check["equal"], check["worst_step"] = region_cases.agreement(region, layer)
        if own := OWN_ROUNDING.get(name):
            check["own_rounding"] = region_cases.agreement(region, layer, own(region))[0]
        return lambda i: layer(region.calls[i]), check

    case, found = region.case, []
    work = case.bytes(), case.flops()
    floor = ceilings.floor_us(*work)
    plan = str(dataclasses.asdict(chosen_plan(region)))
    shape = {"query": "fp8" if case.fp8 else "bf16", **case.widths._asdict()}
    shape |= {"tokens": case.tokens, "heads": case.heads, "floor_us": floor}
    for name, check, times in timing.compare(names, build, len(region.calls), rounds):
        of_ours = {"plan": plan if name == "triton" else ""}
        found.append(shape | {"candidate": name} | timing.rates(*work, times) | check | of_ours)
    shown = (f"{r['candidate']} {r['p50_us']:.2f}{'' if counts(r) else '!'}" for r in found)
    print(f"T={case.tokens:4d} H={case.heads:4d} floor {floor:6.2f} |", " | ".join(shown))
    return found
