"""The Triton provider: the fused region in one launch, by the plan of `dispatch.choose`.

The kernel, `triton_kernels.py`, is imported on first use: this module can be where Triton is not.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from mla_fusion import gpu
from mla_fusion.kernels import dispatch
from mla_fusion.kernels.arithmetic import FP8_DTYPES, next_power_of_two
from mla_fusion.kernels.card import TRITON, Widths, triton_widths
from mla_fusion.kernels.dispatch import Plan
from mla_fusion.kernels.inputs import Inputs
from mla_fusion.kernels.launches import Launch


def require() -> None:
    """Raise `ProviderUnavailable` unless Triton kernels can run in this process."""
    from mla_fusion.kernels import ProviderUnavailable

    try:
        import triton
    except ImportError as error:
        raise ProviderUnavailable(
            "provider 'triton' needs the triton package (pip install triton; GPU builds of "
            "PyTorch bring it), or choose provider 'reference'"
        ) from error
    compiles = bool(gpu.of("meta").vendor)  # and launches nothing: `kernels.ahead`
    if not (torch.cuda.is_available() or compiles or triton.knobs.runtime.interpret):
        raise ProviderUnavailable(
            "provider 'triton' needs a GPU that torch.cuda can see; without one choose provider "
            "'reference', or set TRITON_INTERPRET=1 before Python starts to run Triton's "
            "interpreter (for tests: it is slow, and it rounds bf16 and fp8 wrongly)"
        )


def _limit(dtype: torch.dtype, here: gpu.Gpu) -> float:
    """Largest finite value of an fp8 type, 0 for every other type. Negative on NVIDIA, whose
    conversion saturates (cvt.rn.satfinite): a clamp costs large batches 4 % of their time."""
    if dtype not in FP8_DTYPES:
        return 0.0
    limit = torch.finfo(dtype).max
    return -limit if here.vendor == "NVIDIA" else limit


def refuse_fp8(device: torch.device, **dtypes: torch.dtype) -> None:
    """Raise ValueError if one of these types, by tensor, is an fp8 that a device does not have."""
    here = gpu.of(device)
    for name, dtype in dtypes.items():
        if dtype in FP8_DTYPES and (why := here.no_fp8()):
            raise ValueError(f"provider 'triton': {name} is {dtype}, but {why}; use bf16")
        if dtype == torch.float8_e4m3fnuz and here.vendor == "NVIDIA":
            raise ValueError(f"{name} is float8_e4m3fnuz, a type of AMD GPUs; use float8_e4m3fn")


def early_launch(device: torch.device) -> dict[str, Any]:
    """Options of a launch; with PDL (programmatic dependent launch) before the one ahead ends."""
    early = gpu.of(device).capability >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if early else {"PDL": False}


def _direct(plan: Plan, w_uk_t: torch.Tensor, query: torch.dtype, here: gpu.Gpu) -> bool:
    """True if product tiles are stored straight from registers (see `triton_kernels.py`): of the
    types that were measured. A warp has 16 tokens of a tile, and must have a multiple of 64
    latents; Triton compiles it only for a W_UK of which it can load 16 aligned elements at once."""
    sides, rest = divmod(16 * plan.num_warps, plan.block_m)
    head, row, column = w_uk_t.stride()
    return (
        here.arch in TRITON.direct
        and w_uk_t.dtype == torch.bfloat16
        and query in FP8_DTYPES
        and plan.block_m >= 64
        and sides > 0
        and rest == 0
        and plan.block_n % (64 * sides) == 0
        and column == 1
        and all(n % 16 == 0 for n in (head, row, w_uk_t.shape[2], w_uk_t.data_ptr()))
    )


def _pad(size: int) -> int:
    """The next power of two, at least 16 (the smallest side of a matrix instruction)."""
    return max(16, next_power_of_two(size))


@dataclasses.dataclass(frozen=True)
class Form:
    """Compile-time constants of `mla_prep`.

    Q_LIMIT, K_LIMIT: `_limit` of query and cache. ALIGN: the row strides of q, kv_c and k_pe come
    divided by it. ALL_ROWS: a row with a slot below 0 is no padding and has a query. ONE_TOKEN: the
    rotated rows of a program are of one token. DIRECT: see `triton_kernels.py`. EPSILON: of the
    norm of kv_c. P_PAD, R_PAD, L_PAD: ranges of Triton's, powers of two."""

    P: int
    R: int
    L: int
    P_PAD: int
    R_PAD: int
    L_PAD: int
    Q_LIMIT: float
    K_LIMIT: float
    BLOCK_SIZE: int
    ROPE: bool
    NEOX: bool
    ALIGN: int
    ALL_ROWS: bool
    ONE_TOKEN: bool
    DIRECT: bool
    EPSILON: float
    plan: Plan


def widths_of(inputs: Inputs) -> Widths:
    """P, R and L of a call."""
    _, nope, latent = inputs.w_uk_t.shape
    return Widths(nope, inputs.k_pe.shape[1], latent)


def _check(inputs: Inputs, widths: Widths) -> None:
    """Raise ValueError for valid inputs that this provider does not take."""
    if why := triton_widths(widths):
        raise ValueError(f"{why.detail}; use provider 'reference'")
    for name in ("q", "kv_c", "k_pe", "cos_sin_cache", "kv_cache", "w_uk_t", "q_out"):
        if (tensor := getattr(inputs, name)) is None:
            continue
        shape, stride = tensor.shape, tensor.stride()
        if stride[-1] != 1 and shape[-1] > 1 and name != "w_uk_t":
            raise ValueError(f"{name} must have a dense last dimension, got {stride}")
        span = sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        if span >= 2**31 and name != "kv_cache":
            raise ValueError(f"{name} spans {span} elements; the Triton provider allows 2^31 - 1")
    refuse_fp8(inputs.q.device, kv_cache=inputs.kv_cache.dtype, q_out=inputs.q_out.dtype)


def fused_mla_decode_prep(inputs: Inputs, plan: Plan | None = None) -> torch.Tensor:
    """See `mla_fusion.kernels.fused_mla_decode_prep`. `plan` overrides the measured choice."""
    from mla_fusion.kernels import triton_kernels

    q, q_out = inputs.q, inputs.q_out
    tokens, heads, _ = q.shape
    if tokens == 0:
        return q_out
    widths, here = widths_of(inputs), gpu.of(q.device)
    _check(inputs, widths)
    measured = dispatch.BATCH_INVARIANT if inputs.batch_invariant else tokens
    plan = plan or dispatch.choose(measured, heads, q_out.dtype in FP8_DTYPES, widths, here)
    plan = dispatch.fit(plan, _pad(widths.nope), _pad(widths.rope), q.element_size())
    programs = -(-tokens // plan.cache_tokens) + -(-tokens * heads // plan.rope_rows)
    tiles = -(-widths.latent // plan.block_n) * -(-tokens // (plan.block_m * plan.m_tiles))
    kernel, given = triton_kernels.mla_prep, launch_arguments(plan, inputs)
    options = {name: value for name, value in given.items() if name not in kernel.arg_names}
    Launch(kernel, (programs + heads * tiles,), given, options).start(inputs.kept)
    return q_out


def launch_arguments(plan: Plan, inputs: Inputs) -> dict[str, Any]:
    """Arguments and options of a launch of `mla_prep` (also for compiling without a GPU)."""
    q, kv_c, k_pe, angles = inputs.q, inputs.kv_c, inputs.k_pe, inputs.cos_sin_cache
    tokens, heads, _ = q.shape
    w_uk_t, kv_cache, q_out = inputs.w_uk_t, inputs.kv_cache, inputs.q_out
    here = gpu.of(q.device)
    # Row strides of one token mean nothing: fixed, they select the variant of the warm-up.
    strides = [x.stride(0) if tokens > 1 else 0 for x in (q, kv_c, k_pe)]
    align = 16 // q.element_size()
    align = 1 if any(stride % align for stride in strides) else align
    q_row, kv_c_row, k_pe_row = (stride // align for stride in strides)
    w_head, w_row, w_col = w_uk_t.stride()
    cache_block, cache_entry, _ = kv_cache.stride()
    nope, rope, latent = widths_of(inputs)
    form = Form(
        P=nope, R=rope, L=latent, P_PAD=_pad(nope), R_PAD=_pad(rope), L_PAD=_pad(latent),
        Q_LIMIT=_limit(q_out.dtype, here), K_LIMIT=_limit(kv_cache.dtype, here),
        BLOCK_SIZE=kv_cache.shape[1], ROPE=angles is not None, NEOX=inputs.is_neox, ALIGN=align,
        ALL_ROWS=inputs.context_parallel, ONE_TOKEN=heads % plan.rope_rows == 0,
        DIRECT=_direct(plan, w_uk_t, q_out.dtype, here), EPSILON=inputs.kv_norm_epsilon, plan=plan,
    )  # fmt: skip
    return {
        "q_ptr": q, "w_ptr": w_uk_t, "kv_c_ptr": kv_c, "k_pe_ptr": k_pe, "cache_ptr": kv_cache,
        "slot_ptr": inputs.slot_mapping, "position_ptr": inputs.positions,
        "cos_sin_ptr": inputs.positions if angles is None else angles,
        "k_scale_ptr": inputs.k_scale, "q_scale_ptr": inputs.q_scale,
        "factor_ptr": inputs.q_factor, "norm_ptr": inputs.kv_norm_weight, "out_ptr": q_out,
        "tokens": tokens, "heads": heads, "q_row": q_row, "q_head": q.stride(1),
        "w_head": w_head, "w_row": w_row, "w_col": w_col,
        "kv_c_row": kv_c_row, "k_pe_row": k_pe_row, "cache_block": cache_block,
        "cache_entry": cache_entry, "cos_sin_row": 0 if angles is None else angles.stride(0),
        "FORM": form, "num_warps": plan.num_warps, "num_stages": 2,
        # Contraction would leave one product of x * cos - y * sin unrounded: near zero the result
        # would be many units in the last place off the reference's.
        "enable_fp_fusion": False, **early_launch(q.device),
    }  # fmt: skip


def warmup(
    batch: Callable[[int], Inputs], max_tokens: int, progress: Callable[[str], None]
) -> None:
    """Compile every configuration that batches of 1 to `max_tokens` tokens can use: once per layer
    shape, before the first request and before graph capture. A padded batch is dense: where the
    rows of a real one do not begin at multiples of 16 bytes (k_pe cut out of a projection of odd
    width, say), the first such batch compiles a variant of its own. Run one before capture.

    batch: `kernels.inputs.padded_batch` for a layer. progress: called with a line each."""
    one = batch(1)
    heads, device = one.q.shape[1], one.q.device
    layer = heads, one.q_out.dtype in FP8_DTYPES, widths_of(one), gpu.of(device)
    plans: dict[Plan, int] = {}  # and the fewest tokens that use it
    for tokens in range(1, max_tokens + 1):
        plans.setdefault(dispatch.choose(tokens, *layer), tokens)
    progress(f"mla-fusion: compiling {len(plans)} Triton configurations ({heads} heads)")
    for plan, tokens in plans.items():
        fused_mla_decode_prep(batch(tokens), plan)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
