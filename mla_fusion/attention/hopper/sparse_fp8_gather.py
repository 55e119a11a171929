"""How the Hopper kernel over byte caches gets listed entries into shared memory, in Gluon.

An entry of `plan.layouts.FP8_DS_MLA` is 656 bytes in a row: e4m3 values, fp32 scales, bf16 rotated
values. All threads copy, 16 bytes each at a time. Slots are loaded a tile before they are needed,
so that no copy waits for the slot that it follows.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from mla_fusion.attention.hopper.copy import async_load, load_layout

GROUPS = gl.constexpr(4)  # of latents with a scale of their own


# A cache, three times over, and the slots of a sequence: `end` of them count. codes, ropes,
# scales: the address of the cache as e4m3, bf16 and fp32. block_units: 16 bytes each, from one
# block to the next.
Entries = namedtuple("Entries", "codes ropes scales block_units table end")

# Tiles in shared memory: STAGES of entries, and more of slots. keys: [STAGES, tokens, L]. ropes:
# [STAGES, tokens, R]. scales: [STAGES, tokens, GROUPS]. slots: [more than STAGES, tokens].
Ring = namedtuple("Ring", "keys ropes scales slots")


@gluon.jit
def load_slots(entries, tile, TOKENS: gl.constexpr):
    """The slots of tile `tile` [tokens]; -1 from the end on."""
    at = tile * TOKENS + gl.arange(0, TOKENS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return gl.load(entries.table + at, mask=at < entries.end, other=-1)


@gluon.jit
def copy_part(target, pointer, slots, block_stride, ENTRY: gl.constexpr, PAGE: gl.constexpr):
    """Start the copy of some columns, at `pointer` in the first entry, of the entries of a tile.

    Strides are in elements. Entries of slot -1 become zeros.
    """
    layout: gl.constexpr = load_layout(
        target.shape[1], target.dtype.primitive_bitwidth, gl.num_warps(), target.shape[0]
    )
    col = gl.arange(0, target.shape[1], gl.SliceLayout(0, layout))
    slot = slots.load(gl.SliceLayout(1, layout))
    wanted = slot >= 0
    slot = slot.to(gl.uint32)
    offset = (slot // PAGE).to(gl.int64) * block_stride + (slot % PAGE * ENTRY).to(gl.int64)
    async_load(target, pointer + offset[:, None] + col[None, :], mask=wanted[:, None])


@gluon.jit
def copy_entries(ring, entries, tile, ENTRY: gl.constexpr, PAGE: gl.constexpr):
    """Start the copy of tile `tile`, whose slots are there."""
    L: gl.constexpr = ring.keys.shape[2]
    buffer = tile % ring.keys.shape[0]
    slots = ring.slots.index(tile % ring.slots.shape[0])
    units = entries.block_units.to(gl.int64)
    copy_part(ring.keys.index(buffer), entries.codes, slots, units * 16, ENTRY, PAGE)
    scales = entries.scales + L // 4
    copy_part(ring.scales.index(buffer), scales, slots, units * 4, ENTRY // 4, PAGE)
    ropes = entries.ropes + (L + 4 * GROUPS) // 2
    copy_part(ring.ropes.index(buffer), ropes, slots, units * 8, ENTRY // 2, PAGE)
    async_copy.commit_group()
