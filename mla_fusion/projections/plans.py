"""Launch plans of the kernels, and which of them fit a product."""

from __future__ import annotations

import dataclasses

GROUP = 128  # rows and columns of a weight, and elements of x, with one scale in block fp8
MAX_TOKENS = 16  # rows of x that a kernel takes: the larger of the two tiles of `matrix`


@dataclasses.dataclass(frozen=True)
class Plan:
    """One configuration of a kernel of `kernel.py`.

    kernel: "vector", for one token or fp32 weights, "matrix", or "block", for up to 8 tokens and
    block fp8. block_n: rows of a weight of a CTA. num_warps: its warps, among which `vector` splits
    the rows, the others K."""

    kernel: str
    block_n: int
    num_warps: int

    def registers(self, k: int, rows: int) -> int:
        """Registers of a thread that hold its part of `rows` rows of K elements of 16 bits."""
        return rows * k // (64 * self.num_warps)

    def fits(self, k: int, tokens: int, bits: int) -> bool:
        """True if the plan serves `tokens`, and its registers suffice. A thread has 255: for its
        part of the weights, of `bits` an element, and for up to 64 of x, of which it loads a larger
        part in pieces."""
        weights = self.registers(k, self.block_n) * bits // 16
        if self.kernel == "block" or bits == 8:
            return self.kernel == "block" and bits == 8 and tokens <= 8 and weights <= 115
        if self.kernel == "vector" or bits == 32:
            return self.kernel == "vector" and (bits == 32 or tokens == 1) and weights <= 130
        return tokens <= MAX_TOKENS and weights + min(64, self.registers(k, tile_of(tokens))) <= 227

    def ahead(self, k: int, tokens: int, chunks: int) -> int:
        """Number of the `chunks` of the weights that are loaded before the wait for the launch in
        front. It is half of them where x needs most registers: at K = 7168 and 16 tokens 12.3 us
        instead of 15.6. Else it is all."""
        return -(-chunks // 2) if self.registers(k, tile_of(tokens)) > 200 else chunks


def tile_of(tokens: int) -> int:
    """Rows of x of a matrix instruction's tile that holds `tokens` rows."""
    return 8 if tokens <= 8 else MAX_TOKENS


# On an H200 the best of these is within 7 % of the fastest configuration that was tried, and within
# 3 % of it in 53 of 60 rows.
PLANS = (
    Plan("vector", 4, 4), Plan("vector", 8, 4), Plan("vector", 8, 8),
    Plan("matrix", 8, 4), Plan("matrix", 16, 4), Plan("matrix", 32, 4),
    Plan("matrix", 8, 8), Plan("matrix", 16, 8), Plan("matrix", 32, 8),
    Plan("block", 16, 4), Plan("block", 16, 8),
)  # fmt: skip
