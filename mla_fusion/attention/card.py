"""The card of a kernel: what is known of it without Triton or Gluon."""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from mla_fusion.attention.plan.heads import layout as head_layout
from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.attention.plan.layouts import CacheLayout
from mla_fusion.gpu import Gpu
from mla_fusion.report.reasons import Decline

# Of a plan: tokens of a block, every kernel's tile or a multiple of it, and the fixed cost of a
# work item in blocks.
BLOCKS = {"kv_granularity": 64, "overhead": 4}
NEWEST_TRITON = 3, 8  # with which the kernels have run on a GPU


@functools.lru_cache(maxsize=64)
def refused(why: str) -> Decline:
    """The decline of a kernel that does not take a decode. Kept, because every launch asks."""
    return Decline("portable-attention", why)


class Decodes(NamedTuple):
    """The decodes of a plan. width: L + R. scopes, layout: of a sparse plan; else 0 and None."""

    heads: int
    max_query_len: int
    kv_dtype: torch.dtype
    width: int
    scopes: int = 0
    layout: CacheLayout | None = None

    @property
    def rows(self) -> int:
        """The most query rows of a work item."""
        return head_layout(self.heads, self.max_query_len).per_work * self.max_query_len


@dataclasses.dataclass(frozen=True)
class Shape:
    """A case of selftest: what a kernel is compiled for, and how its inputs lie in memory."""

    heads: int
    queries: int
    page: int
    latent: int = 512
    rope: int = 64
    q: torch.dtype = torch.bfloat16
    kv: torch.dtype = torch.bfloat16
    gap: int = 0  # elements between entries, blocks and rows
    huge: bool = False  # a cache of more than 2^32 bytes
    values: int = 0  # columns of W_UV for a head
    quantization: str = "none"
    batch: int = 0  # sequences; 0: as many as there are hostile lengths

    @property
    def width(self) -> int:
        return self.latent + self.rope

    @property
    def name(self) -> str:
        words = [f"{self.heads} heads x {self.queries} rows, pages of {self.page}"]
        words += [f"{self.latent} + {self.rope}", str(self.kv)[6:]]
        words += ["strided"] if self.gap else []
        words += ["2^32 bytes"] if self.huge else []
        words += [f"W_UV {self.quantization}, {self.batch} sequences"] if self.values else []
        return ", ".join(words)


# Cases of every decode kernel that takes few query rows.
FEW = (Shape(16, 1, 64), Shape(8, 4, 16, huge=True), Shape(128, 1, 16), Shape(16, 2, 128, gap=64))


@dataclasses.dataclass(frozen=True)
class Card:
    """The facts of a decode kernel, or of a product behind decodes. A GPU launches the first of its
    cards that takes the inputs.

    name: its module below `mla_fusion.attention`, which has `launch_of(given) -> Launch`.
    archs: the architectures for which it compiles; empty for every one.
    why_not: why it does not take these inputs; None if it does.
    plans: whether a decode is planned for this kernel, unless an earlier card plans it.
    settings: the arguments of `PersistentDecodePlan.allocate` for such a decode.
    shapes, thorough: the cases of `mla-fusion selftest`, and those of `--thorough` beside them.
    kinds: types of query and cache of its cases.
    widens: it also takes a bf16 query over a cache in fp8, a case of selftest more.
    page: the kernel needs pages of a multiple of this number of tokens; 0: it takes any page.
    newest_triton: under a newer Triton `attention=auto` leaves decodes of this kernel to vLLM,
    until `mla-fusion calibrate` has run; None: it never does.
    rounds: it rounds each key of a byte cache to bf16; other kernels scale what they summed.
    variant: of a product with W_UV, what is compiled for tiles of the plan, tokens, heads, and
    columns of a head.
    merges: whether this product also merges the splits, so that no reduction runs.
    """

    name: str
    archs: tuple[str, ...]
    why_not: Callable[[Inputs], Decline | None]
    plans: Callable[[Decodes], bool] = lambda of: False
    settings: Callable[[Gpu, Decodes], dict[str, int]] = lambda here, of: {}
    shapes: tuple[Shape, ...] = ()
    thorough: tuple[Shape, ...] = ()
    kinds: tuple[str, ...] = ("bf16", "fp8")
    widens: bool = False
    page: int = 0
    newest_triton: tuple[int, int] | None = None
    rounds: bool = True
    variant: Callable[[int, int, int, int], Hashable] = lambda *of: None
    merges: Callable[[Inputs], bool] = lambda given: False

    def runs_on(self, here: Gpu) -> bool:
        """Whether it compiles for a GPU."""
        return not self.archs or here.arch in self.archs

    def why_not_on(self, here: Gpu) -> Decline | None:
        """Why it does not run on a GPU; None if it does."""
        if self.runs_on(here):
            return None
        return Decline("provider-unavailable", f"it needs {' or '.join(self.archs)}")

    def takes(self, here: Gpu, given: Inputs) -> bool:
        """Whether it runs on a GPU, and with these inputs."""
        return self.runs_on(here) and self.why_not(given) is None

    @property
    def module(self) -> Any:
        """The module that launches it; Gluon's take a while to import."""
        return importlib.import_module(f"mla_fusion.attention.{self.name}")
