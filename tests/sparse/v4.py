"""Layers of DeepSeek-V4 and V4.1 on a CPU, by vLLM's classes, over pages of random entries.

A layer's pages lie among those of other layers: `STRIDE` bytes from one block to the next.
"""

import importlib
import importlib.util
import itertools
import types

import torch

from mla_fusion.attention.plan.layouts import FP8_DS_MLA_V4, read_keys
from mla_fusion.config import models
from mla_fusion.runtime import deepseek_v4
from tests.attention.decodes import SCALE, attention

PADDED, WIDTH, PAGE, TOPK, BLOCK = 64, 512, 64, 512, 256
STRIDE = 1_002_240  # bytes, of DeepSeek-V4-Flash
BLOCKS = 12
NAMES = {"deepseek_v4": "DeepseekV4ForCausalLM", "deepseek_v41": "DeepseekV41ForCausalLM"}
KINDS = {package: models.facts(name).kinds for package, name in NAMES.items()}
# (package, compression) of each kind of layer
LAYERS = [
    (package, ratio)
    for package, kinds in KINDS.items()
    for ratio, _ in kinds
    if importlib.util.find_spec(f"vllm.models.{package}")
]
BF16 = torch.bfloat16


def pages(page, generator, offset=576):
    """uint8 [BLOCKS, page, 584] of random entries, as vLLM lays them out."""
    memory = torch.full((BLOCKS, STRIDE), 0xFF, dtype=torch.uint8)
    block = memory[:, offset : offset + 584 * page]
    data, scales = block.split([576 * page, 8 * page], 1)
    data, scales = data.unflatten(1, (page, 576)), scales.unflatten(1, (page, 8))
    values = torch.randn(BLOCKS, page, 448, generator=generator) * 40
    data[..., :448] = values.to(torch.float8_e4m3fn).view(torch.uint8)
    rotated = torch.randn(BLOCKS, page, 64, generator=generator).to(BF16)
    data[..., 448:] = rotated.view(torch.uint8)
    scales[..., :7] = torch.randint(119, 124, (BLOCKS, page, 7), generator=generator).byte()
    return memory.as_strided((BLOCKS, page, 584), (STRIDE, 584, 1), offset)


def to_slots(chosen, owners, tables, page, valid):
    """vLLM's kernel, as its docstring has it, and the lengths: 0 for padding."""
    blocks = tables[owners.long()[:, None], (chosen // page).clamp(min=0).long()]
    slots = torch.where(chosen >= 0, blocks * page + chosen % page, -1).int()
    return slots, torch.where(valid, (chosen >= 0).sum(1), 0).int()


def module(package="deepseek_v4"):
    return importlib.import_module(f"vllm.models.{package}.nvidia.flashmla")


def layer(ratio, heads=8, seed=0, package="deepseek_v4", **changes):
    """A layer, whose query is padded to 64 heads."""
    generator = torch.Generator().manual_seed(seed)
    kinds = KINDS[package]
    made = deepseek_v4.decoded_here(module(package).DeepseekV4FlashMLAAttention, kinds, to_slots)
    self = made.__new__(made)
    torch.nn.Module.__init__(self)
    sink = torch.full((PADDED,), -torch.inf)
    sink[:heads] = torch.randn(heads, generator=generator)
    window = types.SimpleNamespace(kv_cache=pages(PAGE, generator), prefix=f"{seed}.swa")
    two = dict(kinds)[ratio] != "swaonly"
    entries = pages(BLOCK // ratio, generator, 37440) if two else torch.zeros(0)
    fields = {
        "compress_ratio": ratio, "n_local_heads": heads, "head_dim": WIDTH, "rope_head_dim": 64,
        "window_size": 128, "scale": SCALE, "kv_cache_dtype": "fp8_ds_mla",
        "prefix": f"{seed}.attn", "swa_cache_layer": window, "kv_cache": entries,
        "attn_sink": torch.nn.Parameter(sink, requires_grad=False),
        "topk_indices_buffer": torch.full((256, TOPK), -1, dtype=torch.int32),
        "compressed_cache_prefix": f"{seed}.attn", "_compressed_kv_cache": lambda: entries,
        "use_pcp": False,
    }  # fmt: skip
    for name, value in {**fields, **changes}.items():
        setattr(self, name, value)
    return self


class Step:
    """The metadata of a step, its query, and what each layer is to write.

    positions: of the tokens, each of a request; `padding` rows of a graph follow, whose slots are
    real and whose lengths are 0. columns: of the table of ratio 128, in rows of 512.
    """

    def __init__(self, positions, padding=0, heads=8, columns=128, seed=0):
        from vllm.models.deepseek_v4.sparse_mla import DeepseekV4FlashMLAMetadata
        from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadata

        generator = torch.Generator().manual_seed(seed)
        rows = len(positions) + padding
        at = torch.tensor([*positions, *[max(positions)] * padding])
        owners = (torch.arange(rows) % len(positions)).int()
        valid = torch.arange(rows) < len(positions)
        blocks = torch.stack([torch.randperm(BLOCKS, generator=generator) for _ in positions])
        tables = blocks.repeat(1, 6)[:, :64].int()
        self.heads, self.tables, self.owners, self.valid, self.at = heads, tables, owners, valid, at
        begin = (at - 127).clamp(min=0)
        seen = begin[:, None] + torch.arange(128)
        seen = torch.where(seen <= at[:, None], seen, -1)
        window, _ = to_slots(seen, owners, tables, PAGE, valid)
        listed = torch.randint(0, 2 * BLOCKS, (rows, 512), generator=generator).int()
        every = torch.arange(columns).expand(rows, -1)
        listed[:, :columns], _ = to_slots(every.clamp(max=127), owners, tables, 2, valid)
        self.chosen = torch.full((rows, TOPK), -1, dtype=torch.int32)
        for row in range(rows):
            before = torch.randperm((int(at[row]) + 1) // 4, generator=generator)[:TOPK]
            self.chosen[row, : len(before)] = before.int()
        lens = torch.where(valid, at - begin + 1, 0).int()
        self.window = DeepseekSparseSWAMetadata(
            block_table=tables, slot_mapping=torch.zeros(rows, dtype=torch.int64), block_size=PAGE,
            is_valid_token=valid, token_to_req_indices=owners,
            decode_swa_indices=window[:, None], decode_swa_lens=lens,
            num_decodes=len(positions), num_decode_tokens=rows,
        )  # fmt: skip
        for _, kind in itertools.chain(*KINDS.values()):
            setattr(self.window, f"tile_sched_{kind}", object())
        self.entries = DeepseekV4FlashMLAMetadata(
            num_reqs=len(positions), max_query_len=1, max_seq_len=max(positions) + 1,
            num_actual_tokens=rows, query_start_loc=torch.arange(rows + 1),
            slot_mapping=torch.zeros(rows), block_table=tables, req_id_per_token=owners,
            block_size=BLOCK, topk_tokens=TOPK,
            c128a_global_decode_topk_indices=listed[:, None, :columns],
            c128a_decode_topk_lens=torch.where(valid, (at + 1) // 128, 0).int(),
        )  # fmt: skip
        self.q = torch.full((rows, PADDED, WIDTH), torch.nan, dtype=BF16)
        self.q[:, :heads] = torch.randn(rows, heads, WIDTH, generator=generator).to(BF16)

    def slots(self, layer):
        """[(cache, slots, lengths)] of the scopes of a layer."""
        listed, window = self.entries.c128a_global_decode_topk_indices[:, 0], self.window
        found = [(layer.swa_cache_layer.kv_cache, window.decode_swa_indices[:, 0],
                  window.decode_swa_lens)]  # fmt: skip
        if layer.compress_ratio == 128:
            found.append((layer.kv_cache, listed, self.entries.c128a_decode_topk_lens))
        elif len(layer.kv_cache):
            page = BLOCK // layer.compress_ratio
            chosen = to_slots(self.chosen, self.owners, self.tables, page, self.valid)
            found.append((layer.kv_cache, *chosen))
        return found

    def expected(self, layer):
        out = torch.zeros(len(self.q), self.heads, WIDTH, dtype=torch.double)
        for row, query in enumerate(self.q[:, : self.heads].double()):
            every = torch.cat([
                read_keys(cache, slots[row, : lens[row]], FP8_DS_MLA_V4, torch.float8_e4m3fn)
                for cache, slots, lens in self.slots(layer)
            ]).double()  # fmt: skip
            out[row], _ = attention(query, every, WIDTH, layer.attn_sink[: self.heads])
        return out

    def context(self, *layers):
        """vLLM's context of a forward pass, with this step as the metadata of these layers."""
        from vllm.forward_context import ForwardContext, override_forward_context

        found = {}
        for each in layers:
            each.topk_indices_buffer[: len(self.q)] = self.chosen
            found[each.swa_cache_layer.prefix] = self.window
            found[each.prefix] = self.entries if len(each.kv_cache) else None
        made = ForwardContext(no_compile_layers={}, attn_metadata=found, slot_mapping={})
        return override_forward_context(made)

    def run(self, layer):
        """What vLLM's `forward_mqa` leaves in an output of NaN, in the context of a pass."""
        out = torch.full_like(self.q, torch.nan)
        layer.forward_mqa(self.q, None, self.at, out)
        return out
