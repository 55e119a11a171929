"""Both planners on random ragged batches; run with TRITON_INTERPRET=1 by test_planner_triton.py.

Every buffer must be the same, element by element, after two refreshes of different sizes. The
plan itself is checked too, and every store of the kernel for bounds and races.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
import interpreter

from mla_fusion.attention import PersistentDecodePlan, planner_triton
from mla_fusion.attention.plan import PLANNED

PLANS = 40


def main() -> None:
    """Compare, and print how many plans were equal."""
    interpreter.install(bounds=True, races=True)
    rng = random.Random(0)
    for number in range(PLANS // 2):
        longest = rng.choice((1, 1, 2, 4))
        fields = {
            "max_batch": rng.randint(1, 9),
            "max_query_len": longest,
            "num_heads": rng.choice((8, 16, 32, 128)),
            "q_dtype": torch.bfloat16,
            "kv_dtype": torch.bfloat16,
            "device": "cpu",
            "workers": rng.randint(1, 12),
            "heads_per_work": rng.choice((None, 16)),
            "max_split_per_batch": rng.choice((-1, -1, 1, 4)),
            "kv_granularity": rng.choice((1, 16, 64)),
            "overhead": rng.choice((1, 2, 16)),
            "v_head_dim": 8,
        }
        want, got = (PersistentDecodePlan.allocate(**fields) for _ in range(2))
        for _ in range(2):
            batch = rng.randint(1, fields["max_batch"])
            rows = [rng.choice((longest, 0, rng.randint(0, longest))) for _ in range(batch)]
            lengths = [rng.choice((0, 1, rng.randint(0, 40), rng.randint(0, 3000))) for _ in rows]
            qo_indptr = torch.tensor([0, *rows]).cumsum(0).int()
            seq_lens = torch.tensor(lengths, dtype=torch.int32)
            want.refresh(
                qo_indptr=qo_indptr, seq_lens=seq_lens, num_tokens=sum(rows), max_query_len=longest
            )
            planner_triton.fill(got, qo_indptr, seq_lens, longest)
            for name in PLANNED:
                a, b = getattr(want, name), getattr(got, name)
                assert torch.equal(a, b), (number, name, fields, rows, lengths, a, b)
    print(f"{PLANS} plans equal")


if __name__ == "__main__":
    main()
