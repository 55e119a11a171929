"""The comparison bites: it sees machine code of which one instruction was removed or changed."""

import functools

import pytest
import torch

pytest.importorskip("triton")

from mla_fusion.attention.triton import epilogue as epilogues
from mla_fusion.kernels.dispatch import Plan
from tests import tally
from tests.amd import mutants

pytestmark = pytest.mark.nightly
# What is seen of a subject's mutants. The others were read: they change nothing here.
SHARE = 0.92
# A third of its LDS accesses write repeated rows; a quarter of its waits count too few loads.
SHARE_OF = {"epilogue of whole rows or slices, gfx942": 0.89}
# Kinds of which all have to be seen, of every instruction, in the region kernel.
CERTAIN = ("barrier removed", "matrix product removed", "wait for one fewer", "wait removed")
# And of what one slice of an epilogue does to be seen by the last one.
ORDERS = ("barrier removed", "wait removed", "store removed", "comparison negated",
          *mutants.REMOVED.values())  # fmt: skip

ROWS_IN_SLICES = epilogues.choose(8, 8, 512, 128, "group")


def but(tokens, padded):
    """All rows but one."""
    return [row for row in range(tokens) if row != padded]


# Each has every row padded that a reduction over lanes could lose, rows in plenty and few, and
# head counts that do not fill a tile.
SUBJECTS = {
    "region, gfx942, fp8": functools.partial(
        mutants.region_runs, "gfx942", "fp8", "gptj",
        [(3, 12, (0, 2)), (16, 20, range(16)), (13, 1, but(13, 1)), (11, 1, but(11, 2)),
         (7, 1, but(7, 4)), (15, 1, but(15, 8)), (5, 3, ())],
    ),
    "region, gfx950, fp8": functools.partial(
        mutants.region_runs, "gfx950", "fp8", "neox",
        [(17, 8, range(0, 17, 2)), (32, 9, range(32)), (29, 1, but(29, 1)), (30, 1, but(30, 2)),
         (28, 1, but(28, 4)), (27, 1, but(27, 8)), (31, 3, (30,))],
    ),
    "region, gfx942, bf16": functools.partial(
        mutants.region_runs, "gfx942", "bf16", "neox",
        [(33, 4, range(0, 33, 2)), (64, 9, range(64)), (64, 1, but(64, 1)), (63, 1, but(63, 2)),
         (62, 1, but(62, 4)), (61, 1, but(61, 8))],
        factor=torch.float32,
    ),
    # The code for one token, run with more: of one, most index arithmetic gives 0.
    "region of one token, gfx950": functools.partial(
        mutants.region_runs, "gfx950", "cache", "neox",
        [(3, 9, (0, 2)), (6, 20, range(6)), (5, 7, (4,))],
        plan=Plan(block_m=1, block_n=32, num_warps=2),
    ),
    "decode, gfx950, fp8": functools.partial(
        mutants.decode_runs, "gfx950", "padded heads", "three tiles"
    ),
    "decode, gfx942, bf16": functools.partial(
        mutants.decode_runs, "gfx942", "two CTAs", "three tiles of drafts"
    ),
    "portable decode, gfx950, fp8": functools.partial(
        mutants.decode_runs, "gfx950", "padded heads", portable=True
    ),
    "reduction, gfx942": functools.partial(mutants.reduce_runs, "gfx942", "many splits"),
    "epilogue of whole rows or slices, gfx942": functools.partial(
        mutants.epilogue_runs, "gfx942", epilogues.choose(1, 16, 512, 128), "tokens", "drafts"
    ),
    "epilogue, gfx950": functools.partial(
        mutants.epilogue_runs, "gfx950", ROWS_IN_SLICES, "drafts"
    ),
    "planner, gfx950": functools.partial(mutants.planner_runs, "gfx950", "MI355X"),
}  # fmt: skip


def unseen(runs, chosen):
    return [mutant for mutant in chosen if not mutants.seen(runs, mutant)]


def test_every_missing_wait_and_barrier_of_a_region_is_seen():
    runs = SUBJECTS["region, gfx942, fp8"]()
    found = mutants.candidates(runs)
    assert set(CERTAIN) <= set(found)
    left = unseen(runs, [mutant for kind in CERTAIN for mutant in found[kind]])
    assert not left, "\n".join(map(str, left))


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_all_that_orders_the_slices_of_an_epilogue_is_seen(target):
    """Of every instruction from the wait for the sums' stores to the store of the count."""
    runs = mutants.epilogue_runs(target, ROWS_IN_SLICES, "drafts")
    names = [each.name for each in runs[0].launches[0].kernel.program.instructions]
    count = names.index("global_atomic_add")
    first = max(at for at in range(count) if "store" in names[at]) + 1
    last = next(at for at in range(count, len(names)) if "store" in names[at])
    found = mutants.candidates(runs)
    chosen = [m for kind in ORDERS for m in found[kind] if first <= m.index <= last]
    assert {mutant.kind for mutant in chosen} == set(ORDERS)
    left = unseen(runs, chosen)
    tally.add("mutants of AMD machine code", seen=len(chosen) - len(left), not_seen=len(left))
    assert not left, "\n".join(map(str, left))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SUBJECTS)
def test_many_mutants_are_seen(name):
    runs = SUBJECTS[name]()
    chosen = mutants.choose(runs, 15, seed=2)
    left = unseen(runs, chosen)
    tally.add("mutants of AMD machine code", seen=len(chosen) - len(left), not_seen=len(left))
    share = SHARE_OF.get(name, SHARE)
    assert len(left) <= (1 - share) * len(chosen), "\n".join(map(str, left))
