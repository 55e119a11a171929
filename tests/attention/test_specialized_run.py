"""The specialized decode kernel for Hopper executed on a CPU: results, masks and waits."""

import pytest
import torch

pytest.importorskip("triton")

from mla_fusion.attention import hopper_specialized, triton_choice
from mla_fusion.attention import triton as provider
from mla_fusion.attention.validate import Inputs
from mla_fusion.cli.compare import distance
from tests.attention.decodes import BF16, FN, arguments, definition, same_lse
from tests.attention.gluon_warps import Machine

TOLERANCE = 3.5e-3


def merged(given, query_lens):
    """Output and LSE, float64, with the pieces of split sequences merged."""
    plan, out, lse = given.plan, given.out.double(), given.lse.double()
    heads, per_work = out.shape[1], plan.heads_per_work
    partial, partial_lse = plan.partial_output.flatten(0, -2), plan.partial_lse.flatten()
    starts = [0, *torch.tensor(query_lens).cumsum(0).tolist()]
    for tile in range(len(query_lens) * plan.fold):
        sequence, block = divmod(tile, plan.fold)
        begin, end = plan.reduce_indptr[tile : tile + 2].tolist()
        if begin == end:
            continue
        first, count = block * per_work, query_lens[sequence]
        at = slice(starts[sequence], starts[sequence + 1]), slice(first, first + per_work)
        rows = plan.reduce_partial_map[begin:end, None] * per_work + torch.arange(count * per_work)
        shape = end - begin, count, per_work
        real = slice(0, min(per_work, heads - first))
        pieces = partial[rows].double().view(*shape, -1)[:, :, real]
        lses = partial_lse[rows].double().view(shape)[..., real]
        lse[at] = lses.logsumexp(0)
        weights = (lses - lse[at]).exp().nan_to_num(0.0)
        out[at] = (weights[..., None] * pieces).sum(0)
    return out, lse


# heads, query rows, KV tokens, and the plan.
CASES = {
    "64 heads": (64, [1, 1, 1], [130, 64, 1], {}),
    "pairs": (128, [1, 1], [300, 65], {"heads_per_work": 128}),
    "padded heads": (40, [1, 1], [100, 400], {}),
    "more tiles than buffers": (64, [1], [1300], {"workers": 2}),
    "drafts": (16, [4, 3, 1], [200, 70, 3], {}),
    "rows that see nothing": (16, [4, 2], [0, 129], {}),
    "padded drafts of 24 heads": (24, [2, 1], [130, 5], {}),
    "folded drafts": (32, [8, 2], [300, 70], {}),
    "a block of 8 heads": (8, [8, 2, 5], [300, 70, 4], {"workers": 3}),
    "half a block of 8 heads": (8, [4, 1], [200, 3], {}),
    "blocks of 4 padded heads": (4, [9, 2], [130, 70], {}),
    "drafts of 128 heads": (128, [2, 1], [300, 1], {}),
    "pieces that begin and end within tiles": (64, [1, 1], [333, 90], {"kv_granularity": 16}),
}


@pytest.mark.parametrize("dtype", [BF16, FN])
@pytest.mark.parametrize("name", CASES)
def test_results(name, dtype):
    check(dtype, *CASES[name])


@pytest.mark.parametrize("dtype", [BF16, FN])
def test_maxima_that_rise_by_all_amounts(dtype):
    """Up to 60 in base 2 from tile to tile, and by less than raises a peak: scores of each head are
    larger than those of the one before.
    """
    check(dtype, 64, [1, 1], [600, 450], {}, torch.linspace(0, 16, 64))


@pytest.mark.parametrize("name", ["q_scale", "kv_scale"])
def test_scales_of_zero(name):
    """All tokens that a row sees have one weight, and those that it does not see none."""
    check(FN, 16, [4, 2], [200, 70], {}, **{name: torch.zeros(1)})


def check(dtype, heads, rows, lens, options, loudness=None, **scales):
    """Run the kernel. loudness: what the queries of each head are multiplied by."""
    fields = arguments(
        rows, lens, 64, 512, 64, num_heads=heads, q_dtype=dtype, kv_dtype=dtype, overhead=1,
        **{"kv_granularity": 64, **options},
    )  # fmt: skip
    fields |= scales
    if loudness is not None:
        fields["q"] = (fields["q"].float() * loudness[:, None]).to(dtype)
    tokens = len(fields["q"])
    out = torch.full((tokens, heads, 512), torch.nan, dtype=BF16)
    given = Inputs(**fields, out=out, lse=torch.full((tokens, heads), torch.nan))
    plan = given.plan
    blocks = -(-plan.heads_per_work * plan.settings.max_query_len // triton_choice.SPECIALIZED.rows)
    decode = provider.decode_arguments(triton_choice.SPECIALIZED, given)
    machine = Machine(seed=tokens)
    machine.launch(hopper_specialized.decode_kernel, (plan.rules.workers, blocks), *decode)
    want, want_lse = definition(fields, rows, lens)
    got, got_lse = merged(given, rows)
    assert distance(got, want) <= TOLERANCE
    same_lse(got_lse, want_lse)
