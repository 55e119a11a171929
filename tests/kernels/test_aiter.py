"""The AITER provider against a stand-in for AITER's module: what is sent, and what is refused.

The stand-in computes the op with the arguments in AITER's documented order, writes nothing for a
row with slot < 0, and lets the test look at what it was given. No AMD hardware is involved.
"""

import importlib.machinery
import sys
import types

import pytest
import torch

from mla_fusion.kernels import ProviderUnavailable, aiter, reference

T, H, P, R, L = 5, 8, 128, 64, 512
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


def stand_in(fp8=FN, calls=None):
    """A module `aiter` with the op, for the architecture whose fp8 type is `fp8`."""

    def fused_qk_rope_concat_and_cache_mla(
        q_nope, q_pe, kv_c, k_pe, kv_cache, q_out, slot_mapping, k_scale, q_scale, positions,
        cos_cache, sin_cache, is_neox, is_nope_first,
    ):  # fmt: skip
        assert is_nope_first and cos_cache.is_contiguous() and sin_cache.is_contiguous()
        assert cos_cache.dtype == sin_cache.dtype == kv_c.dtype
        assert q_nope.is_contiguous() and q_nope.shape == (*q_pe.shape[:2], L)
        if calls is not None:
            calls.append((positions, cos_cache))
        table = torch.cat((cos_cache, sin_cache), dim=-1)
        for t, slot in enumerate(slot_mapping.tolist()):
            if slot < 0:
                continue
            at = positions[t : t + 1]
            q_rot = reference.rotate(q_pe[t : t + 1], at, table, is_neox)[0]
            k_rot = reference.rotate(k_pe[t : t + 1], at, table, is_neox)[0]
            row = torch.cat((q_nope[t].float(), q_rot), dim=-1)
            q_out[t] = reference.cast(row.to(q_out.dtype) if q_out.dtype == q_nope.dtype else row,
                                      q_out.dtype, q_scale)  # fmt: skip
            key = torch.cat((kv_c[t].float(), k_rot), dim=-1)
            entry = kv_cache[slot // kv_cache.shape[1], slot % kv_cache.shape[1]]
            entry.copy_(reference.cast(key, kv_cache.dtype, k_scale))

    module = types.ModuleType("aiter")
    module.fused_qk_rope_concat_and_cache_mla = fused_qk_rope_concat_and_cache_mla
    module.dtypes = types.SimpleNamespace(fp8=fp8)
    module.__spec__ = importlib.machinery.ModuleSpec("aiter", None, is_package=True)
    module.__path__ = []
    return module


def install(monkeypatch, module, amd=True):
    monkeypatch.setitem(sys.modules, "aiter", module)
    if amd:
        jit = types.ModuleType("aiter.jit")
        jit.__spec__ = importlib.machinery.ModuleSpec("aiter.jit", None)
        monkeypatch.setitem(sys.modules, "aiter.jit", jit)


def arguments(cache_dtype=torch.bfloat16, query_dtype=torch.bfloat16, seed=0):
    g = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=g).bfloat16()

    return {
        "q": random(T, H, P + R),
        "w_uk_t": random(H, P, L) / 11,
        "kv_c": random(T, 2 * L)[:, :L],
        "k_pe": random(T, 2 * R)[:, :R],
        "kv_cache": torch.full((3, 16, L + R), 0.5).to(cache_dtype),
        "slot_mapping": torch.tensor([3, 17, -1, 40, 0]),
        "positions": torch.tensor([3, 1, 99, 4, 0]),
        "cos_sin_cache": random(100, R).float(),
        "k_scale": torch.tensor([0.02]),
        "q_scale": torch.tensor([0.03]),
        "q_out": torch.full((T, H, L + R), 7.0).to(query_dtype),
    }


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize(
    "cache, query, arch",
    [
        (torch.bfloat16, torch.bfloat16, FN),
        (FN, FN, FN),
        (FN, torch.bfloat16, FN),
        (FNUZ, FNUZ, FNUZ),
    ],
)
def test_equal_to_the_reference(monkeypatch, neox, cache, query, arch):
    install(monkeypatch, stand_in(arch))
    ours, theirs = arguments(cache, query), arguments(cache, query)
    # AITER takes cosines in the activation type.
    theirs["cos_sin_cache"] = theirs["cos_sin_cache"].bfloat16()
    aiter.fused_mla_decode_prep(**ours, is_neox=neox)
    reference.fused_mla_decode_prep(**theirs, is_neox=neox)
    for name in ("q_out", "kv_cache"):
        assert torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8)), name
    assert ours["q_out"][2].float().abs().max() == 0  # the padded row


def test_tables_are_split_and_cast_once(monkeypatch):
    calls = []
    install(monkeypatch, stand_in(calls=calls))
    given = arguments()
    for _ in range(2):
        aiter.fused_mla_decode_prep(**given, is_neox=False)
    assert calls[0][1].data_ptr() == calls[1][1].data_ptr()


def test_nope_needs_no_clamp_of_positions(monkeypatch):
    calls = []
    install(monkeypatch, stand_in(calls=calls))
    given = {**arguments(), "cos_sin_cache": None}
    expected = {**arguments(), "cos_sin_cache": None}
    aiter.fused_mla_decode_prep(**given, is_neox=True)
    reference.fused_mla_decode_prep(**expected, is_neox=True)
    [(positions, cos)] = calls
    assert cos.shape[0] == 1 and positions.eq(0).all()
    assert torch.equal(given["q_out"], expected["q_out"])
    assert torch.equal(given["kv_cache"], expected["kv_cache"])


BAD = {
    "uint8 cache": {"kv_cache": torch.zeros(3, 16, L + R, dtype=torch.uint8)},
    "the other fp8": {"kv_cache": torch.zeros(3, 16, L + R).to(FNUZ)},
    "fp16 cache": {"kv_cache": torch.zeros(3, 16, L + R, dtype=torch.float16)},
    "narrow cache": {"kv_cache": torch.zeros(3, 16, L, dtype=torch.bfloat16)},
    "fp8 query, bf16 cache": {"q_out": torch.zeros(T, H, L + R).to(FN)},
    "padded query heads": {"q_out": torch.zeros(T, H, 640, dtype=torch.bfloat16)[..., : L + R]},
    "int32 slots": {"slot_mapping": torch.zeros(T, dtype=torch.int32)},
    "int32 positions": {"positions": torch.zeros(T, dtype=torch.int32)},
    "few positions": {"positions": torch.zeros(T - 1, dtype=torch.int64)},
    "fp64 scale": {"k_scale": torch.ones(1, dtype=torch.float64)},
    "no scale": {"q_scale": torch.ones(0)},
    "fp16 latent": {"kv_c": torch.zeros(T, L, dtype=torch.float16)},
    "3-D key": {"k_pe": torch.zeros(T, 1, R, dtype=torch.bfloat16)},
}


@pytest.mark.parametrize("case", BAD)
def test_what_would_abort_or_be_misread_is_refused_before_the_call(monkeypatch, case):
    calls = []
    install(monkeypatch, stand_in(calls=calls))
    with pytest.raises(ValueError, match="must be"):
        aiter.fused_mla_decode_prep(**{**arguments(), **BAD[case]}, is_neox=False)
    assert not calls


class TestRequire:
    def test_missing(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "aiter", None)
        with pytest.raises(ProviderUnavailable, match=r"missing|not AMD's"):
            aiter.require()

    def test_another_project_of_that_name(self, monkeypatch):
        install(monkeypatch, stand_in(), amd=False)
        with pytest.raises(ProviderUnavailable, match="not AMD's"):
            aiter.require()

    def test_too_old(self, monkeypatch):
        module = stand_in()
        del module.fused_qk_rope_concat_and_cache_mla
        install(monkeypatch, module)
        with pytest.raises(ProviderUnavailable, match=r"v0\.1\.8"):
            aiter.require()

    def test_present(self, monkeypatch):
        install(monkeypatch, stand_in())
        aiter.require()
