"""Runs a Gluon kernel on a CPU whose warps go in step, in torch: what it computes, not how.

Asynchronous copies land as late as they may, in the `wait_group` that waits for them; until then
their target is poison. Source addresses that are not at their vector's alignment are an error.
Races between warps are not seen, but for the one that `gluon_program.py` refuses.
"""

import types

import torch

from tests.attention.gluon_program import Program
from tests.attention.gluon_values import Tensor, poison, raw


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
        self.behind("a copy is started")
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
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, outstanding):
        while len(self.groups) > outstanding:
            for target, value in self.groups.pop(0):
                target.copy_(value)
                self.stored(target)

    # Products

    def warpgroup_mma(self, a, b, acc, use_acc=True, is_async=False):
        self.check_operands(a, b)
        product = a.data.float() @ b.data.float()
        return Tensor(acc.data + product if use_acc else product, acc.layout)

    def warpgroup_mma_wait(self, outstanding, deps):
        return deps[0] if len(deps) == 1 else tuple(deps)
