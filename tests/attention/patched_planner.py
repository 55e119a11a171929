"""What has to hold with the patch plan_smallest_budget; test_patched_copies.py runs this. That the
kernel plans as the specification is in interpreted_planner.py."""

import numpy as np
import pytest

from mla_fusion.attention import planner
from mla_fusion.attention.buffers import Rules
from tests.attention.plan_checks import buffers, check_plan


def pieces(workers, lengths):
    """Blocks of 64 tokens of each item, of a plan that is checked."""
    rules = Rules(workers, 1, 64, 4, -1)
    plan = buffers(rules, len(lengths))
    rows = np.ones(len(lengths), np.int32)
    starts = np.arange(len(lengths) + 1, dtype=np.int32)
    planner.fill_arrays(plan, rules, starts, np.array(lengths, np.int32), 1)
    check_plan(plan, rules, rows, lengths, 1)
    items = plan.work_info_set[: plan.work_indptr[-1]]
    return -(-(items[:, planner.KV_END] - items[:, planner.KV_START]) // 64)


@pytest.mark.parametrize(
    "workers, lengths, most, is_level",
    [
        (132, [1024] * 64, 8, True),  # not 10 and 6
        (264, [1024] * 128, 8, True),
        (132, [1024] * 16, 2, True),  # not 3 and 1
        (132, [1024] * 8, 2, True),  # not 1: a piece costs more than a block saves
        (132, [8192] * 64, 64, True),
        (12, [2256, 2394, 741, 376], 9, False),  # the second budget that is tried
        (4, [108, 423, 1038, 638], 10, False),  # the third
    ],
)
def test_the_largest_piece_is_the_smallest_that_fits(workers, lengths, most, is_level):
    found = pieces(workers, lengths)
    assert found.max() == most and (found.min() == most) == is_level, found
