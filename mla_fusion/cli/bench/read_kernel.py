"""A plain kernel that reads a cache and adds up its words: the lower bound of a decode's time."""

import torch
import triton
import triton.language as tl

from mla_fusion.measure.timing import Call

WORDS = 8192  # of a CTA: 32 kB, so that several CTAs share an SM


@triton.jit
def read_words(words, sums, count, WORDS: tl.constexpr):
    """Write the sum of each WORDS of `words` [count] int32, modulo 2^32, to `sums`."""
    at = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    values = tl.load(words + at, mask=at < count, other=0)
    tl.store(sums + tl.program_id(0), tl.sum(values, 0))


def read_call(caches: list[torch.Tensor]) -> tuple[Call, torch.Tensor]:
    """The call that reads cache i, dense and a multiple of 16 bytes; and what it writes: sums."""
    words = [cache.view(torch.int32).view(-1) for cache in caches]
    count = len(words[0])
    sums = words[0].new_empty(-(-count // WORDS))

    def call(i: int) -> None:
        read_words[sums.shape](words[i], sums, count, WORDS, num_warps=8)

    return call, sums
