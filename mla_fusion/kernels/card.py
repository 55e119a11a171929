"""The cards of the providers of the fused region: what is known without Triton or AITER."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from mla_fusion import gpu
from mla_fusion.kernels.arithmetic import FP8_DTYPES
from mla_fusion.report.reasons import Decline


class Widths(NamedTuple):
    """P, R and L of a layer."""

    nope: int
    rope: int
    latent: int


@dataclasses.dataclass(frozen=True)
class Card:
    """The facts of a provider.

    name: its module below `mla_fusion.kernels`, which has `require() -> None`, which raises
    `ProviderUnavailable` where it cannot run; `fused_mla_decode_prep(inputs: Inputs) -> Tensor`,
    which need not validate; and, if a first call compiles or builds something, `warmup` as
    `triton.warmup`.
    platforms: those of "cuda", "rocm" and "cpu" on which it serves.
    why_not: why it does not take a layer of these widths, with such a cache, on a GPU.
    batch_invariant: it takes the argument of this name.
    packed: it reads a W_UK that is an `aiter.PackedWeight`.
    ranks: why it does not serve under decode context parallelism; None if it does.
    direct: architectures on which it stores large tiles straight from registers.
    small_tiles: architecture -> most tokens of a batch whose product tiles have 64 latents.
    row: how rows of `mla-fusion selftest` name it.
    shapes, thorough: (tokens, heads) of calls of selftest, none without shapes, and those of
    `--thorough` beside them.
    """

    name: str
    platforms: tuple[str, ...]
    why_not: Callable[[Widths, torch.dtype, gpu.Gpu], Decline | None]
    batch_invariant: bool = False
    packed: bool = False
    ranks: Decline | None = None
    direct: tuple[str, ...] = ()
    small_tiles: Mapping[str, float] = dataclasses.field(default_factory=dict)
    row: str = ""
    shapes: tuple[tuple[int, int], ...] = ()
    thorough: tuple[tuple[int, int], ...] = ()


def _reference(widths: Widths, *_: Any) -> Decline | None:
    why = f"provider reference: it takes an even qk_rope_head_dim, not {widths.rope}"
    return Decline("shape", why) if widths.rope % 2 else None


def triton_widths(widths: Widths) -> Decline | None:
    """Why the Triton kernel does not take a layer of these widths, on any GPU."""
    nope, rope, latent = widths
    why = f"an even qk_rope_head_dim up to 128, not {rope}" if rope not in range(0, 129, 2) else ""
    for name, size, most in (("kv_lora_rank", latent, 1024), ("qk_nope_head_dim", nope, 256)):
        if not 1 <= size <= most:
            why = f"a {name} of 1 to {most}, not {size}"
    return Decline("shape", f"provider triton: the kernel takes {why}") if why else None


def _triton(widths: Widths, cache: torch.dtype, here: gpu.Gpu) -> Decline | None:
    if cache in FP8_DTYPES and (why := here.no_fp8()):
        return Decline("kv-cache-dtype", why)
    return triton_widths(widths)


def aiter_widths(widths: Widths, *_: Any) -> Decline | None:
    """Why AITER's op does not take a layer of these widths."""
    wanted = "an even qk_rope_head_dim and a kv_lora_rank that is a multiple of 8"
    why = f"provider aiter: AITER takes {wanted}, not {widths.rope} and {widths.latent}"
    return Decline("shape", why) if widths.rope % 2 or widths.latent % 8 else None


TRITON = Card(
    "triton", ("cuda", "rocm"), _triton, batch_invariant=True, direct=gpu.HOPPER,
    # By counts of instructions, not by measurement. 128 latents of 128 columns fill half of the LDS
    # of gfx942, and leave a SIMD two waves; one round of smaller tiles has a shorter tail too.
    # gfx950 has the LDS, and from 65 tokens enough tiles.
    small_tiles={"gfx942": float("inf"), "gfx950": 64}, row="region",
    shapes=((1, 16), (17, 16), (64, 128), (256, 8)),
    thorough=((1, 128), (3, 16), (16, 32), (33, 64), (128, 128), (512, 16), (1000, 16)),
)  # fmt: skip
# By name. Of those that serve on a platform the last is its default, but a CPU has none.
PROVIDERS: dict[str, Card] = {
    "reference": Card("reference", ("cpu",), _reference),
    "triton": TRITON,
    "aiter": Card(
        "aiter", ("rocm",), aiter_widths, packed=True,
        ranks=Decline("context-parallel", "AITER leaves out queries of other ranks' tokens"),
    ),
}  # fmt: skip


def serving(platform: str) -> list[str]:
    """The providers that serve on a platform, "cuda", "rocm" or "cpu", the default first."""
    return [card.name for card in reversed(PROVIDERS.values()) if platform in card.platforms]
