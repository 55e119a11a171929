"""Runs a Gluon kernel on a CPU whose warps go in step, in torch: what it computes, not how.

Asynchronous copies land as late as they may, in the `wait_group` that waits for them; until then
their target is poison. Source addresses that are not at their vector's alignment are an error.
Races between warps are not seen, but for the one that `gluon_program.py` refuses.
"""

import re
import types

import torch
from triton.experimental.gluon import language as gl

from tests.attention.gluon_program import Program
from tests.attention.gluon_values import Tensor, poison, raw


def assemble(code, values):
    """Run the PTX of `hopper_packed.widen` on int16 `values`, two in each 32-bit register."""
    packed = values.reshape(-1, 2).contiguous().view(torch.uint8)
    outputs, names = {}, {"$2": packed}
    for line in code.strip("{} \n").split(";"):
        match = re.match(r"\s*(\S+)\s+(.*)", line)
        if match is None or match[1] == ".reg":
            continue
        if match[1] == "mov.b32":
            low, high, source = re.findall(r"\w+", match[2])
            names[low], names[high] = names[source][:, :2], names[source][:, 2:]
            continue
        target, *given = match[2].replace(" ", "").split(",")
        if match[1] == "prmt.b32":
            order = [int(digit, 16) for digit in reversed(given[2][2:])]
            names[target] = names[given[0]][:, order]
        else:
            assert match[1] == "cvt.rn.f16x2.e4m3x2"
            codes = names[given[0]].contiguous().view(torch.float8_e4m3fn)
            outputs[target] = codes.to(torch.float16).reshape(values.shape)
    return outputs["$0"], outputs["$1"]


class Machine(Program):
    """A program: its copies in flight."""

    own = (*Program.own, "async_copy", "async_load")

    def __init__(self):
        super().__init__()
        self.groups, self.open = [], []
        self.async_copy = types.SimpleNamespace(
            commit_group=self.commit_group, wait_group=self.wait_group
        )

    def ended(self):
        """A program has ended, and has waited for its copies."""
        assert not self.open and not any(self.groups), "a copy that nothing waited for"
        self.groups.clear()
        super().ended()

    # Asynchronous copies

    def async_load(self, target, pointer, mask=None):
        """A copy that lands later; zeros where the mask says no."""
        shape = torch.broadcast_shapes(pointer.offset.shape, raw(mask).shape)
        vector = 16 // pointer.storage.dtype.itemsize
        if len(shape) == 2 and shape[1] >= vector:
            first = pointer.offset.expand(shape)[raw(mask).expand(shape)][::vector]
            assert not (first % vector).any(), "a copy that is not aligned"
        value = pointer.read(mask, 0)
        assert list(value.shape) == target.shape
        poison(target.data)
        self.open.append((target.data, value))

    def commit_group(self):
        """End a group of copies."""
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, outstanding):
        """Land all groups but the last ones."""
        while len(self.groups) > outstanding:
            for target, value in self.groups.pop(0):
                target.copy_(value)
                self.stored(target)

    # Products

    def warpgroup_mma(self, a, b, acc, use_acc=True, is_async=False):
        """A matrix product, at once."""
        self.check_operands(a, b)
        product = a.data.float() @ b.data.float()
        return Tensor(acc.data + product if use_acc else product, acc.layout)

    def warpgroup_mma_wait(self, outstanding, deps):
        """Products are done already."""
        return deps[0] if len(deps) == 1 else tuple(deps)

    # Functions of Gluon

    def gl_inline_asm_elementwise(self, code, constraints, given, dtype, is_pure, pack):
        assert (constraints, dtype, pack) == ("=r,=r,r", (gl.float16, gl.float16), 2)
        return tuple(Tensor(each, given[0].layout) for each in assemble(code, given[0].data))
