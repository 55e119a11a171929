"""Runs a Gluon kernel on a CPU whose warps go in step, in torch: what it computes, not how.

Races between warps are not seen, but for the one that `gluon_program.py` refuses.
"""

from tests.attention.gluon_program import Program
from tests.attention.gluon_values import Tensor


class Machine(Program):
    """A program, whose products end at once."""

    # Products

    def warpgroup_mma(self, a, b, acc, use_acc=True, is_async=False):
        self.check_operands(a, b)
        product = a.data.float() @ b.data.float()
        return Tensor(acc.data + product if use_acc else product, acc.layout)

    def warpgroup_mma_wait(self, outstanding, deps):
        return deps[0] if len(deps) == 1 else tuple(deps)
