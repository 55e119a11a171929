"""Writes pages of the byte caches, entry by entry, from numbers: nothing here reads one.

Offsets and sizes are spelled out again, and so are the number formats, so that a mistake of
`mla_fusion/attention/plan/layouts.py` is not made twice.
"""

import dataclasses
import struct

import numpy as np
import torch

from mla_fusion.attention.plan.layouts import FP8_DS_MLA, FP8_DS_MLA_V4

V32, V4 = FP8_DS_MLA, FP8_DS_MLA_V4
WIDTH = {V32: 576, V4: 512}


def e4m3(code, fnuz):
    """The value of an e4m3 code, 0 ... 255; NaN for NaN."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if code == 0x80 if fnuz else code & 0x7F == 0x7F:
        return float("nan")
    bias = 8 if fnuz else 7
    if exponent == 0:
        value = mantissa / 8 * 2.0 ** (1 - bias)
    else:
        value = (1 + mantissa / 8) * 2.0 ** (exponent - bias)
    return -value if sign else value


VALUES = {fnuz: np.array([e4m3(code, fnuz) for code in range(256)]) for fnuz in (False, True)}


def quantize(numbers, scale, fnuz):
    """(codes as bytes, what they stand for): the nearest of the 255 values times `scale`."""
    table = VALUES[fnuz] * scale
    codes = np.nanargmin(np.abs(table[None, :] - np.asarray(numbers)[:, None]), 1)
    return codes.astype(np.uint8).tobytes(), table[codes]


def truncate(numbers):
    """(bf16 bytes, what they stand for): the upper halves of fp32 numbers."""
    halves = [struct.pack("<f", number)[2:] for number in numbers]
    return b"".join(halves), [struct.unpack("<f", b"\0\0" + half)[0] for half in halves]


@dataclasses.dataclass
class Cache:
    """Blocks of `page` tokens with `gap` bytes or more behind each; what is not written is NaN."""

    layout: object
    blocks: int
    page: int
    fnuz: bool = False
    gap: int = 0

    def __post_init__(self):
        self.size = {V32: 656, V4: 584}[self.layout] * self.page
        self.step = -(-(self.size + self.gap) // 16) * 16
        self.memory = bytearray(b"\xff" * (self.blocks * self.step))
        self.keys = {}

    def put(self, at, data):
        self.memory[at : at + len(data)] = data

    def write(self, slot, numbers, rng):
        """Write a key into `slot`; `keys[slot]` is what was written, float64."""
        block, entry = divmod(slot, self.page)
        base = block * self.step
        most = 240 if self.fnuz else 448
        codes, values, scales = b"", [], b""
        if self.layout == V32:
            for part in np.split(numbers[:512], 4):
                stored = struct.pack("<f", np.abs(part).max() / most * rng.uniform(1, 3))
                data, each = quantize(part, struct.unpack("<f", stored)[0], self.fnuz)
                codes, scales, values = codes + data, scales + stored, [*values, *each]
            wide, rotated = truncate(numbers[512:])
            self.put(base + 656 * entry, codes + scales + wide)
        else:
            for part in np.split(numbers[:448], 7):
                exponent = int(np.ceil(np.log2(np.abs(part).max() / most))) + rng.integers(0, 2)
                data, each = quantize(part, 2.0**exponent, self.fnuz)
                codes, values = codes + data, [*values, *each]
                scales += bytes([127 + exponent])
            wide, rotated = truncate(numbers[448:])
            self.put(base + 576 * entry, codes + wide)
            self.put(base + 576 * self.page + 8 * entry, scales)
        self.keys[slot] = np.array([*values, *rotated])

    def tensor(self):
        """uint8 [blocks, page, bytes], strided by the gap."""
        flat = torch.from_numpy(np.frombuffer(self.memory, np.uint8).copy())
        size = self.size // self.page
        return flat.as_strided((self.blocks, self.page, size), (self.step, size, 1))
