"""The ROCm provider: the absorb product, then AITER's `fused_qk_rope_concat_and_cache_mla`.

AITER's kernel takes an absorbed query: the region is two launches and a memset. It takes no factor:
a scaled query is scaled before, in a third launch, and rotated after. So its rotated part differs
from vLLM's in the order of two roundings. Its contract was read from AITER's sources, v0.1.8 to
v0.1.20 (docs/aiter.md). It is tested against a mock of the module, not on AMD hardware.

From v0.1.14 on a failed check in AITER aborts the process, and some types and strides it does not
check. `validate` checks all in Python first. Four pitfalls are avoided instead:

* 14 positional arguments in the order every release takes, k_scale before q_scale;
* a dense absorbed query: before v0.1.17 its head stride was ignored;
* q_out zeroed before the call: a row with slot < 0 is left as it was;
* position 0 and one row of cosines without RoPE: not every kernel clamps positions.
"""

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mla_fusion.kernels import ProviderUnavailable
from mla_fusion.kernels.arithmetic import FP8_DTYPES, absorb, scale
from mla_fusion.kernels.capture import refuse_during_capture
from mla_fusion.kernels.card import Widths, aiter_widths
from mla_fusion.kernels.inputs import Inputs
from mla_fusion.kernels.inputs import validate as validate_shapes

_OP = "fused_qk_rope_concat_and_cache_mla"
_DENSE = ("q", "kv_c", "k_pe", "slot_mapping", "positions")
# kind of a packed weight -> AITER's product, in the module of the same name
_PRODUCTS = {
    "fp4": "batched_gemm_a16wfp4",
    "fp8": "batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant",
}


@dataclass(frozen=True)
class PackedWeight:
    """W_UK as vLLM keeps it for AITER's Triton products, whose activations are bf16. kind: "fp4"
    (weight [H, L, P / 2], a scale for each group of 32) or "fp8" ([H, L, P], one for all)."""

    kind: str
    weight: torch.Tensor
    scale: torch.Tensor
    dtype = torch.bfloat16  # of the activations

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, P, L), as that of a plain W_UK."""
        heads, latent, packed = self.weight.shape
        return heads, 2 * packed if self.kind == "fp4" else packed, latent

    @property
    def device(self) -> torch.device:
        return self.weight.device


def require() -> None:
    """Raise ProviderUnavailable unless AMD's AITER is here, whole, and has the op."""
    spec = find_spec("aiter")
    if spec is None:
        raise ProviderUnavailable("the module aiter is missing: install ROCm's AITER")
    # find_spec("aiter.jit") would run the package, whoever wrote it.
    folders = [*(spec.submodule_search_locations or ())]
    if "aiter.jit" not in sys.modules and not any(
        Path(folder, "jit", "__init__.py").is_file() for folder in folders
    ):
        raise ProviderUnavailable(
            f"the module aiter found at {spec.origin or folders} is not AMD's (another project on "
            "PyPI has the same name): uninstall it and install ROCm's AITER"
        )
    try:
        import aiter
    except Exception as error:
        raise ProviderUnavailable(
            f"importing aiter fails ({type(error).__name__}: {error}): reinstall AITER"
        ) from error
    if not hasattr(aiter, _OP):
        raise ProviderUnavailable(f"this AITER has no {_OP}: install v0.1.8 or newer")
    fp8 = getattr(getattr(aiter, "dtypes", None), "fp8", None)
    if fp8 not in FP8_DTYPES:
        raise ProviderUnavailable(
            f"AITER knows no fp8 type for this GPU (aiter.dtypes.fp8 is {fp8}): it takes gfx942 "
            "and gfx950; if this is one of them, reinstall AITER"
        )


def fused_mla_decode_prep(inputs: Inputs) -> torch.Tensor:
    """See `mla_fusion.kernels.fused_mla_decode_prep`; `w_uk_t` may be packed."""
    import aiter

    if inputs.cos_sin_cache is None:
        inputs = inputs._replace(positions=torch.zeros_like(inputs.slot_mapping))
    q, w_uk_t, q_out = inputs.q, inputs.w_uk_t, inputs.q_out
    if isinstance(w_uk_t, PackedWeight) and q.dtype != w_uk_t.dtype:
        raise ValueError(f"AITER's {w_uk_t.kind} product is one of bf16: q is {q.dtype}")
    if inputs.context_parallel:
        raise ValueError("AITER leaves out a query whose slot is -1: use the triton provider")
    if inputs.kv_norm_weight is not None:
        raise ValueError("AITER normalizes no latents: normalize kv_c first")
    validate(inputs, aiter.dtypes.fp8)
    if inputs.q_factor is not None:
        q = scale(q, inputs.q_factor)
    table = halves(inputs)
    q_out.zero_()
    if q.shape[0] == 0:
        return q_out
    getattr(aiter, _OP)(
        _absorb(q, inputs), q[..., w_uk_t.shape[1] :], inputs.kv_c, inputs.k_pe, inputs.kv_cache,
        q_out, inputs.slot_mapping, inputs.k_scale, inputs.q_scale, inputs.positions,
        table.cos, table.sin, inputs.is_neox,
        True,  # is_nope_first: rows are [latent | rope]
    )  # fmt: skip
    return q_out


def validate(inputs: Inputs, arch_fp8: torch.dtype) -> None:
    """Raise ValueError for whatever AITER's op does not take; `arch_fp8` is the GPU's fp8 type."""
    validate_shapes(inputs)
    q, kv_c, k_pe, kv_cache = inputs.q, inputs.kv_c, inputs.k_pe, inputs.kv_cache
    act, (tokens, heads, _), (_, nope, latent) = q.dtype, q.shape, inputs.w_uk_t.shape
    if why := aiter_widths(Widths(nope, rope := k_pe.shape[1], latent)):
        raise ValueError(why.detail)
    general = not (rope == 64 and latent == 512 and latent * heads >= 2048)
    for name, ok, want in (
        ("q", act in (torch.float32, torch.float16, torch.bfloat16), "fp32, fp16 or bf16"),
        *((name, x.stride(-1) == 1 or x.shape[-1] < 2, "dense in its last dimension")
          for name, x in inputs._asdict().items() if name in _DENSE),
        ("kv_cache", kv_cache.dtype in (act, arch_fp8), f"{act} or {arch_fp8} (view uint8 first)"),
        # The kernel for blocks of one token rotates with threads that such a latent leaves out.
        ("kv_cache", kv_cache.shape[1] != 1 or latent == 128 or latent >= 256,
         "of blocks larger than 1 for this latent"),
        ("q", not general or tokens * q.stride(0) < 2**31, "small enough for 32-bit offsets"),
        ("q, kv_c, k_pe, kv_cache and q_out",
         all(map(_aligned, (q[..., nope:], kv_c, k_pe, kv_cache, inputs.q_out))),
         "aligned to 4 bytes"),
    ):  # fmt: skip
        if not ok:
            raise ValueError(f"AITER's {_OP}: {name} must be {want}")


def _aligned(x: torch.Tensor) -> bool:
    """True if every row begins at a multiple of 4 bytes."""
    steps = [step for size, step in zip(x.shape[:-1], x.stride(), strict=False) if size > 1]
    return x.data_ptr() % 4 == 0 and all(step * x.element_size() % 4 == 0 for step in steps)


def _absorb(q: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """The absorbed query [T, H, L], dense. Packed products are called as vLLM calls them: with an
    fp8 cache the fp4 product gets the scale of the query as `y_scale`."""
    w_uk_t = inputs.w_uk_t
    q_nope = q[..., : w_uk_t.shape[1]]
    if isinstance(w_uk_t, torch.Tensor):
        return absorb(q_nope, w_uk_t)
    name = _PRODUCTS[w_uk_t.kind]
    product = getattr(importlib.import_module(f"aiter.ops.triton.{name}"), name)
    options: dict[str, Any] = {"group_size": 128}
    if w_uk_t.kind == "fp4":
        wide = inputs.kv_cache.dtype == q.dtype
        options = {"prequant": True, "y_scale": None if wide else inputs.q_scale}
    given = q_nope.transpose(0, 1), w_uk_t.weight, w_uk_t.scale
    out: torch.Tensor = product(*given, transpose_bm=True, **options)
    return out.contiguous()


class Halves(NamedTuple):
    """Cosines and sines [max_position, R / 2], dense, in the type of the query. source: what they
    were made of, kept so that no other table gets its address; None without RoPE."""

    source: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor

    def refresh(self) -> None:
        """Convert them again, in place."""
        if self.source is not None:
            for half, new in zip(self[1:], self.source.chunk(2, dim=-1), strict=True):
                half.copy_(new)


def halves(inputs: Inputs) -> Halves:
    """The halves of the cosines and sines of a call; an engine's are made once."""
    source, q, rope = inputs.cos_sin_cache, inputs.q, inputs.k_pe.shape[-1]
    address = None if source is None else (source.data_ptr(), len(source))
    key = Halves, address, rope, q.dtype, q.device
    kept: dict[Any, Halves] = {} if inputs.derived is None else inputs.derived
    if key not in kept:
        if inputs.derived is not None:
            refuse_during_capture("the cosines and the sines in the form AITER takes")
        both: Any = q.new_ones((1, rope // 2)), q.new_zeros((1, rope // 2))
        if source is not None:
            both = (half.to(q.dtype).contiguous() for half in source.chunk(2, dim=-1))
        kept[key] = Halves(source, *both)
    return kept[key]


def warmup(
    batch: Callable[[int], Inputs], max_tokens: int, progress: Callable[[str], None]
) -> None:
    """Call AITER as batches of 1 to `max_tokens` tokens do, with padded rows: the first call of an
    op builds its module, in minutes, and Triton compiles packed products for some sizes. AITER may
    end the process: the last line of `progress` then names the call."""
    for tokens in sorted({min(2**n, max_tokens) for n in range(max_tokens.bit_length() + 1)}):
        inputs = batch(tokens)
        q, w_uk_t, cache = inputs.q, inputs.w_uk_t, inputs.kv_cache.dtype
        of = f"for {tokens} tokens ({q.shape[1]} heads, {q.dtype}, cache {cache})"
        if isinstance(w_uk_t, PackedWeight):
            progress(f"mla-fusion: calling AITER's {_PRODUCTS[w_uk_t.kind]} {of}")
            _absorb(q, inputs)
        progress(f"mla-fusion: calling AITER's {_OP} {of}; a first call builds it")
        fused_mla_decode_prep(inputs)
    if q.device.type == "cuda":
        torch.cuda.synchronize(q.device)


def capabilities() -> dict[str, bool]:
    """Whether this AITER has what `require` does not ask for; what cannot be read is missing."""
    import aiter

    arguments: tuple[str, ...] = ()
    with contextlib.suppress(ProviderUnavailable):
        arguments = parameters(getattr(aiter, _OP), _OP)
    return {
        "compute_all_q_rope": "compute_all_q_rope" in arguments,
        "get_mla_metadata_v1": hasattr(aiter, "get_mla_metadata_v1"),
    }


def parameters(function: Callable[..., Any], name: str) -> tuple[str, ...]:
    """Names of the arguments of `aiter.name`, from its schema if a compiled op hides them."""
    if (found := tuple(inspect.signature(function).parameters)) != ("args", "kwargs"):
        return found
    if (op := getattr(torch.ops.aiter, name, None)) is None:
        why = f"the arguments of AITER's {name} cannot be read: reinstall AITER"
        raise ProviderUnavailable(why)
    return tuple(argument.name for argument in op.default._schema.arguments)
