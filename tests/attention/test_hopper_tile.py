"""Arithmetic that kernels for Hopper share: e4m3 widened to fp16, all 256 values."""

import pytest
import torch

pytest.importorskip("triton")

from mla_fusion.attention.hopper import tile as hopper_tile
from tests.attention.decodes import FN
from tests.attention.gluon_double import Machine
from tests.attention.gluon_values import Tensor

CODES = torch.arange(256, dtype=torch.uint8)
PAIRS = Tensor(torch.stack([CODES, CODES.flip(0)], 1).view(torch.int16))
WANTED = [each.view(FN).to(torch.float16)[:, None] for each in (CODES, CODES.flip(0))]


def test_both_bytes_are_converted():
    """NaN stays NaN."""
    found = Machine().python(hopper_tile.widen_pairs)(PAIRS)
    for each, want in zip(found, WANTED, strict=True):
        torch.testing.assert_close(each.data, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("at", [0, 1])
def test_a_byte_is_moved(at):
    """2^-8 of its value, and a NaN becomes 480."""
    moves = (hopper_tile.LOW, hopper_tile.HIGH)[at].value
    found = Machine().python(hopper_tile.widen)(PAIRS, moves).data * 256
    signs = torch.where((CODES if at == 0 else CODES.flip(0)) < 128, 480.0, -480.0)[:, None]
    want = torch.where(WANTED[at].isnan(), signs.to(torch.float16), WANTED[at])
    torch.testing.assert_close(found, want, rtol=0, atol=0)
