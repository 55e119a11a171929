"""Decode context parallelism: each rank keeps a part of the cache and needs the query of every row.

Two ranks of the fake engine, one after the other; what goes between them is handed over here.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from mla_fusion.config import vllm_compat
from tests.passes.fake_engine import Batch, Engine
from tests.passes.graphs import HEADS, LATENT
from tests.passes.test_runtime import NAME, SPEC, attend, prepare, step

ROWS = 5
OTHERS = ((1, 3), (0, 2, 4))  # rows whose token the other rank keeps


def prepared_by(engine, holes):
    """(the prepared query, the forward context) of a decode step with slot -1 in `holes`."""
    context = engine.context(Batch(rows=ROWS, actual=ROWS, decode=ROWS, holes=holes))
    return prepare(context, step(ROWS)), context


def ranks():
    """Two engines of two ranks."""
    engines = Engine(SPEC), Engine(SPEC)
    for engine in engines:
        engine.layers[NAME].impl.dcp_world_size = 2
    return engines


def test_every_rank_prepares_all_queries_and_writes_its_own_slots():
    alone, whole = Engine(SPEC), ranks()
    expected, _ = prepared_by(alone, ())
    poison = Engine(SPEC).layers[NAME].kv_cache
    caches = []
    for engine, holes in zip(whole, OTHERS, strict=True):
        prepared, _ = prepared_by(engine, holes)
        assert torch.equal(prepared, expected)
        caches.append(engine.layers[NAME].kv_cache)
    written = [~(cache == poison).all(-1) for cache in caches]
    assert [int(rows.sum()) for rows in written] == [3, 2] and not (written[0] & written[1]).any()
    union = torch.where(written[0][..., None], caches[0], caches[1])
    assert torch.equal(union, alone.layers[NAME].kv_cache)


@pytest.mark.parametrize("release", ["manager", "functions", "all to all"])
def test_the_attention_gathers_heads_and_combines_parts(monkeypatch, release):
    first, second = ranks()
    (mine, context), (theirs, _) = (
        prepared_by(engine, holes) for engine, holes in zip((first, second), OTHERS, strict=True)
    )
    layer, lse = first.layers[NAME], torch.zeros(ROWS, 2 * HEADS)
    metadata = context.attn_metadata[NAME]
    metadata.num_decodes, metadata.query_start_loc = ROWS, torch.arange(ROWS + 3)
    metadata.decode = SimpleNamespace(seq_lens=torch.ones(ROWS))
    given = []

    def gather(q, dim=1):
        assert torch.equal(q, mine) and dim == 1
        return torch.cat((q, theirs), dim=1)

    def forward_mqa(q, kv_cache, metadata, layer):
        given.append(q)
        return q[..., :LATENT] * 2, lse

    def combine(attended, lse_, *group, **rest):
        assert lse_ is lse
        given.append((group, rest))
        return attended[:, :HEADS] * 4

    monkeypatch.setattr(layer.impl, "forward_mqa", forward_mqa)
    group = SimpleNamespace(all_gather=gather, world_size=2)
    if release == "manager":
        layer.dcp_manager = SimpleNamespace(query_gather=gather, combine=combine)
    else:  # vLLM 0.26
        import vllm.distributed.parallel_state as state
        import vllm.v1.attention.ops.common as common

        layer.dcp_a2a, layer.impl.lse_base_on_e = release == "all to all", False
        layer.impl.dcp_world_size = -1
        used, unused = ("dcp_a2a_lse_reduce", "cp_lse_ag_out_rs")[:: 1 if layer.dcp_a2a else -1]
        all_to_all = ModuleType("dcp_alltoall")
        monkeypatch.setitem(sys.modules, "vllm.v1.attention.ops.dcp_alltoall", all_to_all)
        for name in (used, unused):
            module = all_to_all if "a2a" in name else common
            monkeypatch.setattr(module, name, combine if name == used else None, raising=False)
        monkeypatch.setattr(state, "get_dcp_group", lambda: group)
    output = attend(context, step(ROWS), mine)
    query, (of_group, rest) = given
    assert torch.equal(query, torch.cat((mine, theirs), dim=1))
    if release == "manager":
        assert torch.equal(rest["query_start_loc"], torch.arange(ROWS + 1)) and not of_group
        assert rest["seq_lens"] is metadata.decode.seq_lens
    else:
        assert of_group == (group,) and rest == {"is_lse_base_on_e": False}
    expected = torch.empty_like(output)
    layer._v_up_proj(mine[..., :LATENT] * 8, expected)
    assert torch.equal(output, expected)


def test_a_layer_without_context_parallelism_gathers_nothing(monkeypatch):
    engine = Engine(SPEC)
    prepared, context = prepared_by(engine, (1,))
    assert prepared[1].eq(0).all() and prepared[0].ne(0).any()
    for name in ("gather_query_heads", "combine_context_parallel"):
        monkeypatch.setattr(vllm_compat, name, None)
    output = attend(context, step(ROWS), prepared)
    assert output.ne(0).any() and not output.isnan().any()
