"""Byte caches: the specification against pages written byte by byte, and what is refused."""

import dataclasses

import pytest
import torch

from mla_fusion.attention import reference
from mla_fusion.attention import triton as provider
from mla_fusion.attention.sparse import Scope, sparse_mla_decode, sparse_scratch
from tests.attention import decodes
from tests.attention.decodes import BF16, FN, FNUZ, FP16
from tests.attention.packed_cases import Inputs, random_case
from tests.attention.pages import V4, V32, Cache

LAYOUTS = pytest.mark.parametrize("layout", [V32, V4], ids=["v3.2", "v4"])


@pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(40, 2040), marks=pytest.mark.nightly)], ids=len
)
def test_the_reference_on_random_cases(seeds):
    """Lengths of 0, holes, repeated slots, empty scopes and large sinks; other rows are NaN."""
    for seed in seeds:
        case = random_case(seed)
        inputs = Inputs(case)
        got = reference.sparse_mla_decode(
            inputs.q, inputs.scopes, inputs.lengths, latent=512, softmax_scale=decodes.SCALE,
            kv_dtype=case.kv_dtype, sink=inputs.sink,
        )  # fmt: skip
        for value, want in zip(got, inputs.expected(), strict=True):
            torch.testing.assert_close(
                value.double(), want, rtol=1e-4, atol=1e-5, msg=lambda m, c=case: f"{c}: {m}"
            )


@pytest.fixture
def scratch(monkeypatch):
    """Makes scratches for two tokens of four columns; no kernel is launched."""
    monkeypatch.setattr(provider, "require", lambda: None)
    monkeypatch.setattr(provider, "launch", lambda *_: None)

    def make(**changes):
        fields = {"q_dtype": BF16, "kv_dtype": FN, "v_head_dim": 512, "widths": (4,)}
        fields |= {"num_heads": 8, "device": "cpu", **changes}
        made = sparse_scratch(max_tokens=2, ctas=3, **fields)
        made.refresh(2, [None] * len(fields["widths"]))
        return made

    return make


def decode(scratch, *scopes, width=576, **options):
    q = torch.zeros(2, 8, width, dtype=scratch.plan.settings.q_dtype)
    scopes = [Scope(*scope) for scope in scopes]
    return sparse_mla_decode(q, scopes, scratch, softmax_scale=1.0, **options)


def refused(message, *given, **options):
    with pytest.raises(ValueError, match=message):
        decode(*given, **options)


TABLE = torch.zeros(2, 4, dtype=torch.int32)


@LAYOUTS
def test_what_does_not_fit_is_refused(scratch, layout):
    cache, size, width = Cache(layout, 5, 4).tensor(), layout.bytes, layout.width
    given = cache, TABLE, layout
    decode(scratch(), given, width=width)
    decode(scratch(kv_dtype=FNUZ), given, width=width)
    for message, changed in (
        ("kv_cache must be torch.uint8, the bytes of its layout", cache.view(FN)),
        (rf"kv_cache must be \[blocks, page_size, {size}\]", cache[..., 1:]),
    ):
        refused(message, scratch(), (changed, TABLE, layout), width=width)
    both = "the width of q and the latent width of the scratch must be"
    refused(both, scratch(), given, width=640)
    refused(both, scratch(v_head_dim=256), given, width=width)
    for types in ({"q_dtype": FP16}, {"kv_dtype": BF16}):
        refused("for a bf16 query over the fp8", scratch(**types), given, width=width)
    refused("kv_scale must be None", scratch(), given, width=width, kv_scale=torch.ones(1))
    for offset, gap in ((0, 8), (8, 0)):
        odd = torch.zeros(9000, dtype=torch.uint8)[offset:]
        odd = odd.as_strided((2, 4, size), (4 * size + gap, size, 1), offset)
        refused("multiples of 16 bytes", scratch(), (odd, TABLE, layout), width=width)
    plain = cache, TABLE, dataclasses.replace(layout, group=layout.group // 2)
    refused("both scopes must be of one layout", scratch(widths=(4, 4)), given, plain, width=width)


def test_pages_of_v4_are_whole(scratch):
    """Their scales are found by the size of the page, so a part of it is another page."""
    apart = torch.zeros(2, 4, 672, dtype=torch.uint8)
    message = "entries must be 584 bytes apart: .*, got 672"
    refused(message, scratch(), (apart[..., :584], TABLE, V4), width=512)
    decode(scratch(), (apart[..., :656], TABLE, V32))


def test_tables_lengths_and_sinks_that_do_not_fit_are_refused(scratch):
    cache, made = torch.zeros(4, 16, 576, dtype=BF16), scratch(kv_dtype=BF16)
    for scopes in ([], Scope(cache, TABLE), [(cache, TABLE)], [Scope(cache, TABLE)] * 2):
        with pytest.raises(ValueError, match="scopes must be a list of 1 Scope, as of the scratch"):
            sparse_mla_decode(torch.zeros(1), scopes, made, softmax_scale=1.0)
    with pytest.raises(ValueError, match="scratch must be a SparseScratch, got 'Persistent"):
        sparse_mla_decode(torch.zeros(1), [], made.plan, softmax_scale=1.0)
    refused("the layouts of scopes must be CacheLayouts or None", made, (cache, TABLE, "v4"))
    refused("scope 0: block_table must be int32", made, (cache, TABLE.long()))
    none = "scope 0: the table must be 4 columns wide, as no lengths were given, got 3"
    refused(none, made, (cache, TABLE[:, 1:]))
    for sink in (torch.zeros(16), 1.0):
        refused(r"sink must be dense fp32 \[8\] on cpu", made, (cache, TABLE), sink=sink)
    for message, tokens, lengths in (
        ("num_tokens must be 1 to 2", 3, [None]), ("num_tokens must be a whole", "2", [None]),
        ("lengths of scope 0", 2, [torch.zeros(2).long()]), ("lengths of scope 0", 2, [3]),
        ("lengths must be a list of 1", 2, None),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            made.refresh(tokens, lengths)
    for name, value in {"widths": 4, "layout": "v4", "num_heads": None, "device": "gpu"}.items():
        with pytest.raises(ValueError, match=f"{name} must be "):
            scratch(**{name: value})
    made.refresh(1, [None])
    refused("refresh", made, (cache, TABLE))
    made.refresh(2, [torch.tensor([3, 2]).int()])
    refused("4 columns wide at most, got 5", made, (cache, torch.zeros(2, 5).int()))
    decode(made, (cache, TABLE[:, 1:]))
