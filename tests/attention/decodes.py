"""Plans, decodes over random values, and what they should give: plain softmax attention."""

import torch

from mla_fusion.attention import PersistentDecodePlan

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
SCALE = 0.1


def plan_for(**changes):
    """A plan of 8 CTAs on the CPU for 4 sequences of one row of 20 heads, and `changes`."""
    planner = changes.get("planner", "portable")
    fields = {
        "max_batch": 4, "max_query_len": 1, "num_heads": 20, "q_dtype": BF16, "kv_dtype": BF16,
        "device": "cpu", "ctas": 8 if planner == "portable" else None,
    }  # fmt: skip
    return PersistentDecodePlan.allocate(**fields | changes)


def refresh(plan, query_lens, seq_lens, num_tokens=None):
    """Plan sequences of so many query rows and KV tokens; `num_tokens` counts padding too."""
    plan.refresh(
        qo_indptr=torch.tensor([0, *query_lens]).cumsum(0).int(),
        seq_lens=torch.as_tensor(seq_lens, dtype=torch.int32),
        num_tokens=sum(query_lens) if num_tokens is None else num_tokens,
        max_query_len=max(1, *query_lens),
    )


def addresses(plan):
    tensors = {name: x for name, x in vars(plan).items() if isinstance(x, torch.Tensor)}
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def random(generator, *shape, dtype):
    """Random values of `dtype`, larger where a scale shrinks them."""
    spread = 4 if dtype.itemsize == 1 else 1
    return (spread * torch.randn(*shape, generator=generator)).to(dtype)


def arguments(query_lens, seq_lens, page=16, v_head_dim=64, rope=16, **options):
    """A decode with a refreshed plan of `options`, which is larger than the batch.

    Cache entries that no sequence owns are NaN, and so are the partial results of an earlier step;
    the entries of the block table after the end of a sequence name no block.
    """
    g = torch.Generator().manual_seed(len(query_lens) + page)
    batch, width = len(seq_lens), v_head_dim + rope
    fields = {"max_batch": batch + 1, "max_query_len": max(1, *query_lens)}
    plan = plan_for(v_head_dim=v_head_dim, **fields | options)
    refresh(plan, query_lens, seq_lens)
    for partial in (plan.partial_output, plan.partial_lse):
        partial.fill_(torch.nan)
    settings = plan.settings
    pages = [-(-length // page) for length in seq_lens]
    order = torch.randperm(sum(pages) + 2, generator=g).int()
    table = torch.full((batch, max(pages) + 1), 2**30, dtype=torch.int32)
    cache = torch.full((len(order), page, width), torch.nan).to(settings.kv_dtype)
    for b, (length, count) in enumerate(zip(seq_lens, pages, strict=True)):
        table[b, :count] = order[sum(pages[:b]) :][:count]
        at = torch.arange(length)
        rows = random(g, length, width, dtype=settings.kv_dtype)
        cache[table[b, at // page].long(), at % page] = rows
    tokens = sum(query_lens)
    q = random(g, tokens, settings.num_heads, width, dtype=settings.q_dtype)
    return {
        "q": q, "kv_cache": cache, "plan": plan, "block_table": table, "softmax_scale": SCALE,
        "q_scale": torch.tensor([0.2]), "kv_scale": torch.tensor([0.3]),
    }  # fmt: skip


def exact(x, scale):
    """The dequantized values of `x`, float64."""
    return x.double() * (scale.double() if x.dtype.itemsize == 1 else 1)


def attention(q, keys, latent, sink=None, scale=SCALE):
    """One row of queries [H, D] over keys [N, D], float64: output [H, latent] and LSE [H].

    Without keys: zeros, and -inf.
    """
    scores = scale * q @ keys.T
    lse = scores.logsumexp(-1)
    total = lse if sink is None else torch.logaddexp(lse, sink.double())
    return (scores - total[:, None]).exp() @ keys[:, :latent], lse


def definition(given, query_lens, seq_lens, latent=None):
    """(out [T, H, latent], lse [T, H]) of a decode in float64, one query row at a time.

    given: arguments of `persistent_mla_decode`. latent: the plan's, unless another is given.
    """
    latent = latent or given["plan"].settings.v_head_dim
    queries = iter(exact(given["q"], given.get("q_scale")))
    cache = exact(given["kv_cache"], given.get("kv_scale"))
    page, results = cache.shape[1], []
    for blocks, rows, length in zip(given["block_table"], query_lens, seq_lens, strict=True):
        at = torch.arange(length)
        keys = cache[blocks[at // page].long(), at % page]
        for hidden in range(rows - 1, -1, -1):
            seen = keys[: max(0, length - hidden)]
            results.append(attention(next(queries), seen, latent, scale=given["softmax_scale"]))
    out, lse = zip(*results, strict=True)
    return torch.stack(out), torch.stack(lse)


def lists(kind, width, tokens, generator):
    """Index rows of slots 0 ... 39."""
    rows = torch.randint(0, 40, (tokens, width), generator=generator).int()
    if kind == "holes":
        rows[torch.rand(tokens, width, generator=generator) < 0.5] = -1
    if kind == "none":
        rows.fill_(-1)
    if kind == "mixed":
        rows[::2] = -1
    if kind == "same":
        rows.fill_(7)
    return rows


def same_lse(got, want):
    """Log-sum-exps within 1e-3, and -inf where the other is."""
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-3)


class Launches:
    """Stands in for a kernel, and keeps the grid and the arguments, by name, of every launch."""

    def __init__(self, arg_names=()):
        self.arg_names, self.grids, self.arguments = arg_names, [], []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *given, **_: self.arguments.append(
            dict(zip(self.arg_names, given, strict=True))
        )
