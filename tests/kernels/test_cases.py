"""The comparisons of `cases` bite: errors of known size, planted."""

import cases
import torch

from mla_fusion.cli.bench.kit import POISON, poisoned


def test_a_byte_that_differs_is_counted():
    want = torch.randn(40).bfloat16()
    got = want.clone()
    got.view(torch.int16)[7] += 3
    assert cases.different_bytes(got, want) >= 1 and cases.different_bytes(want, want) == 0


def test_a_query_is_held_to_its_steps():
    """A rotated element may not differ; absorbed ones in fp8 by a step, and in a thousandth."""
    call = cases.build(cases.Case(padded=()))
    want, _ = cases.run(cases.reference, call)
    for column, changed, wrong in ((-1, 1, 1), (0, 1, 0), (0, 3, 3)):
        got = want.clone()
        got.view(torch.uint8)[0, :changed, column] ^= 1
        assert cases.judge(call.inputs, got, want)[0] == wrong


def test_a_stray_write_is_counted():
    storage = poisoned(torch.empty(100, dtype=torch.uint8))
    cache = storage.as_strided((3, 4, 5), (30, 6, 1))
    slots = torch.tensor([0, 5, -1])
    cache[0, 0], cache[1, 1] = 1, 2
    assert cases.stray_bytes(storage, cache, slots) == 0
    cache[2, 3, 4] = 3  # the entry that slot -1 would be
    storage[5] = 4  # the gap after an entry
    assert cases.stray_bytes(storage, cache, slots) == 2
    assert poisoned(torch.ones(3).bfloat16()).view(torch.uint8).eq(POISON).all()
