"""The card of the kernel for CDNA 3 and 4: which decodes it takes, and how it is compiled."""

import torch

from mla_fusion import gpu
from mla_fusion.attention.card import BLOCKS, FEW, Card, Decodes, Shape, refused
from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.gpu import triton_version
from mla_fusion.report.reasons import Decline

WIDTHS = ((512, 64), (256, 64))  # latent and rotated part: compiled and executed
TILE = 64  # tokens


def decode(given: Inputs) -> Decline | None:
    """Why the kernel does not take these inputs."""
    q, kv_cache = given.q, given.kv_cache
    if given.sparse is not None or given.layout is not None or given.widths not in WIDTHS:
        why = f"it takes pages of entries of {WIDTHS} values of one type, got {given.widths}"
        return refused(why)
    if torch.float16 in (q.dtype, kv_cache.dtype):
        return refused(f"it multiplies bf16 or fp8, got {q.dtype} over {kv_cache.dtype}")
    strides = [n * x.itemsize for x in (q, kv_cache) for n in x.stride()[:2]]
    if any(n % 16 for n in strides) or any(x.data_ptr() % 16 for x in (q, kv_cache)):
        return refused(f"it reads 16 aligned bytes at once, got rows {strides} bytes apart")
    return None


def rows_and_waves(
    arch: str, rows: int, q_dtype: torch.dtype, kv_dtype: torch.dtype, page: int
) -> tuple[int, int]:
    """(query rows of a CTA, waves of a SIMD) to compile the kernel for, if work items have `rows`
    query rows. The waves are the most that fit without spills; they hide each other's latency.
    page: tokens of a block of the cache."""
    few, fp8 = rows <= 16, kv_dtype.itemsize == 1
    if arch == "gfx950" and fp8 and triton_version() < (3, 7):
        # It converts e4m3fn by code of its own, which takes registers.
        waves = 1
    elif few:
        aligned = page % TILE == 0 or page in (16, 32)
        waves = 3 if q_dtype.itemsize == 1 and aligned else 2
    else:
        waves = 2 if fp8 else 1
    return 16 if few else 32, waves


def _settings(here: gpu.Gpu, of: Decodes) -> dict[str, int]:
    """As many CTAs as fit the compute units, where the row blocks of an item run at once."""
    tile, waves = rows_and_waves(here.arch, of.rows, of.kv_dtype, of.kv_dtype, TILE)
    return {"ctas": max(1, waves * here.sms // -(-of.rows // tile)), **BLOCKS}


CARDS = (
    Card(
        "cdna.decode", gpu.CDNA, decode, lambda of: not of.scopes, _settings,
        (*FEW, Shape(16, 8, 128), Shape(32, 1, 64, 256, 64)), (Shape(64, 2, 32), Shape(8, 8, 16)),
    ),
)  # fmt: skip
