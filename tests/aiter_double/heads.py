"""Which decode kernels exist, as AITER's kernel manifests name them, and how heads are folded.

The manifests were read at v0.1.20; what an older release lacks is in `versions.SINCE`. They name no
query lengths for 64 and 128 heads in fp8: those that vLLM asks for are taken.
"""

from dataclasses import dataclass, replace

import torch

from tests.aiter_double.faults import check
from tests.aiter_double.versions import Place

# (architecture, types) -> {heads: query lengths} of the kernels that follow a plan; bf16 on gfx950
# has two kernels for any number of heads, see `Shape.check_persistent`.
PERSISTENT = {
    ("gfx942", "bf16"): {8: (2,), 16: (1, 2, 3, 4)},
    ("gfx942", "mixed"): {16: (1, 2, 3, 4)},
    ("gfx942", "fp8"): {16: (1, 2, 4), 64: (1,), 128: (1, 2, 4)},
    ("gfx950", "mixed"): {},
    ("gfx950", "fp8"): {8: (4,), 16: (1, 2, 4), 32: (1, 4), 64: (1, 2, 4), 128: (1, 2, 4)},
}
# The same for kernels that also write the log-sum-exp.
LSE = {("gfx942", "fp8"): {64: (1,)}, ("gfx950", "fp8"): {8: (4,), 16: (1, 4), 32: (1, 4)}}
# Kernels without a plan.
PLAIN = {
    ("gfx942", "bf16"): {8: (1,), 16: (1, 4, 8), 32: (1,), 64: (1,), 128: (1,)},
    ("gfx950", "bf16"): {8: (1, 2), 16: (1, 4, 8), 32: (1,), 64: (1,), 128: (1,)},
    **{(arch, "fp8"): {8: (1,), 16: (1, 2, 4), 128: (1,)} for arch in ("gfx942", "gfx950")},
}
# heads x query length for which the number of splits of an fp8 decode without a plan is known
SPLITS = (8, 16, 24, 32, 48, 64, 128, 256, 384, 512)


def kinds(q, kv):
    """The types of query and cache as the manifests name them: "bf16", "fp8" or "mixed"."""
    if q == torch.bfloat16 and kv == torch.bfloat16:
        return "bf16"
    return "fp8" if q == kv else "mixed"


@dataclass(frozen=True)
class Shape:
    """A decode of `heads` query heads and `qlen` query tokens, in types as `kinds` names them."""

    at: Place
    heads: int
    qlen: int
    kind: str

    @property
    def _key(self):
        return self.at.arch.name, self.kind

    @property
    def native(self):
        """Whether the planner and the decode run so many heads as they are."""
        if self.heads == 16 or self._key == ("gfx950", "bf16"):
            return True
        one_token = (64,) if self.qlen == 1 and self.at.has("native_64") else ()
        of_fp8 = (32, 64, 128) if self.at.arch.name == "gfx950" else (128, *one_token)
        return self.kind == "fp8" and self.heads in of_fp8

    @property
    def folded(self):
        """The heads the kernel runs at: other multiples of 16 become 16 heads of more batches."""
        return self.heads if self.native or self.heads % 16 else 16

    def check_supported(self):
        """Fail for a head count that the Python side of the decode refuses."""
        ok = self.native or self.heads == 8 or self.heads in range(16, 129, 16)
        assert ok, f"nhead={self.heads} not supported"

    def check_planned(self):
        """Fail for a shape that the planner does not know once heads are folded."""
        run = replace(self, heads=self.folded)
        eight = (*self._key, self.qlen) in (("gfx942", "bf16", 2), ("gfx950", "fp8", 4))
        ok = run.native or (run.heads == 8 and eight)
        what = f"{self.kind} of {self.heads} heads, {self.qlen} query tokens"
        check(self.at, ok, f"the planner knows no {what}")

    def check_persistent(self, lse):
        """Fail where the manifest has no persistent kernel."""
        run, qlen = self.folded, self.qlen
        if self._key == ("gfx950", "bf16"):
            # A kernel of 32 x 4 rows, and one of 64 that can do more.
            wide = run * qlen >= 128 or run > 64
            exists, writes_lse = wide or run * qlen >= 64 or run >= 16, not wide
        else:
            tables = (table.get(self._key, {}) for table in (PERSISTENT, LSE))
            exists, writes_lse = (qlen in table.get(run, ()) for table in tables)
        what = f"persistent {self.kind} kernel for {self.heads} heads, {qlen} query tokens"
        check(self.at, exists, f"no {what}")
        writes_lse = writes_lse and self.at.has("lse_kernels")
        check(self.at, not lse or writes_lse, f"no LSE from the {what}")

    def check_plain(self, splits):
        """Fail where no kernel does without a plan, or its number of splits is unknown."""
        rows = self.heads * self.qlen
        if self.kind == "fp8" and splits is None and rows not in SPLITS:
            raise KeyError(f"no splits are known for {rows} rows")
        ok = self.qlen in PLAIN.get(self._key, {}).get(self.heads, ())
        what = f"{self.kind} kernel for {self.heads} heads, {self.qlen} tokens"
        check(self.at, ok, f"no plain {what}")

    def skips_plan(self, batch):
        """Whether the decode silently ignores a plan."""
        small = (*self._key, self.heads, self.qlen) == ("gfx950", "bf16", 16, 1)
        return self.at.has("planner_wrapper") and small and batch >= 32
