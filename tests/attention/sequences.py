"""Steps of sequences that each have their own query and keys, whatever stands beside them."""

import dataclasses

import torch

from tests.attention.decodes import SCALE, plan_for, refresh
from tests.attention.decodes import random as values


@dataclasses.dataclass(frozen=True)
class Sequence:
    """`rows` query rows at the end of `length` tokens; drafts: `hidden` more follow the last."""

    seed: int
    rows: int
    length: int
    hidden: int = 0

    def fewer(self, hidden):
        """The same sequence without its last `hidden` drafts."""
        return Sequence(self.seed, self.rows - hidden, self.length - hidden, hidden)


def step_of(sequences, dtype, heads, *, latent, rope, page, longest, **options):
    """Arguments of a decode whose plan has chunks, and is refreshed on the CPU."""
    sizes = {"max_batch": 64, "max_query_len": 3, "max_kv_len": longest, "batch_invariant": True}
    of_layer = {"q_dtype": dtype, "kv_dtype": dtype, "v_head_dim": latent, "num_heads": heads}
    plan = plan_for(**sizes | of_layer | {"overhead": 1} | options)
    pages, q, cache, table = -(-longest // page), [], [], []
    for number, each in enumerate(sequences):
        g = torch.Generator().manual_seed(each.seed)
        keys = values(g, pages * page, latent + rope, dtype=dtype)
        keys[each.length :] = torch.randn(()).to(dtype)  # nobody's, of the last page too
        rows = values(g, each.rows + each.hidden, heads, latent + rope, dtype=dtype)
        q.append(rows[: each.rows])
        cache.append(keys.view(pages, page, latent + rope))
        table.append(torch.arange(pages, dtype=torch.int32) + number * pages)
    refresh(plan, [len(rows) for rows in q], [each.length for each in sequences])
    return {
        "q": torch.cat(q), "kv_cache": torch.cat(cache), "block_table": torch.stack(table),
        "plan": plan, "softmax_scale": SCALE, "q_scale": torch.tensor([0.2]),
        "kv_scale": torch.tensor([0.3]),
    }  # fmt: skip


def bits_of(sequences, out, lse):
    """The bits of output and LSE, [rows, ...] of each sequence."""
    parts = out.view(torch.int16).flatten(1), lse.view(torch.int32)
    return torch.cat(parts, 1).split([each.rows for each in sequences])
