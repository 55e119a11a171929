"""The warps of `sparse_specialized.py` that get listed entries into shared memory, as bf16.

Entries are copied as they are stored, e4m3 values to the first half of where their bf16 values will
be. Behind the copies of a unit threads load them, dequantize them and store them in place. Loads
into registers would share one scoreboard, so that each waits for all that started behind it.
"""

from collections import namedtuple
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc

from mla_fusion.attention.hopper import common
from mla_fusion.attention.hopper.common import TILE, async_load, items_of, read_item, tiles_of
from mla_fusion.attention.hopper.warp_specialized_common import copy_query, turn_of

UNIT = gl.constexpr(32)  # entries
PARTS = gl.constexpr(TILE.value // UNIT.value)  # units of a tile


def layout_of(registers: tuple[int, ...], threads: tuple[int, ...], columns: int) -> Any:
    """The layout of a unit [entries, columns]: eight threads have an entry. Four have half of 128
    bytes, and the next four half of the entry 4 behind it, which lies in other banks.

    registers, threads: powers of two whose sums are the columns that a thread has, and these eight.
    """
    of_register = [[0, column] for column in registers]
    first, second, third = [[0, column] for column in threads]
    lanes = [first, second, [4, 0], third, [2, 0]]
    return gl.constexpr(gl.DistributedLinearLayout(
        [*of_register, [16, 0]], lanes, [[1, 0], [8, 0]], [], [UNIT.value, columns]
    ))  # fmt: skip


# Of integers of four bytes, 16 bytes a thread: codes as copied, bf16 values, and those of all.
COPIED = layout_of((1, 2, 32, 64), (4, 8, 16), 128)
WIDE = layout_of((1, 2), (4, 8, 16), 32)
VALUES = layout_of((1, 2, 32, 64, 128), (4, 8, 16), 256)
# Of codes to dequantize: eight of 64 values, which are 16 bytes as bf16.
CODES = layout_of((1, 16, 32, 64), (2, 4, 8), 128)
# Of scales: each thread has all of its entries, four fp32 or two integers of four exponents.
SCALES, EXPONENTS = layout_of((1, 2), (0, 0, 0), 4), layout_of((1,), (0, 0, 0), 2)
# PTX that multiplies four e4m3 of an integer by a scale, fp32 in another: two integers of two bf16.
# HALF: two of them, from either half of the codes.
HALF = """
    cvt.rn.f16x2.e4m3x2 two, {codes};
    mov.b32 {{first, second}}, two;
    cvt.f32.f16 a, first;
    cvt.f32.f16 b, second;
    mul.f32 a, a, scale;
    mul.f32 b, b, scale;
    cvt.rn.bf16x2.f32 {result}, b, a;"""
DEQUANTIZE = gl.constexpr(f"""{{
    .reg .b16 low, high, first, second;
    .reg .b32 two;
    .reg .f32 scale, a, b;
    mov.b32 {{low, high}}, $2;
    mov.b32 scale, $3;
    {HALF.format(codes="low", result="$0")}
    {HALF.format(codes="high", result="$1")}
}}""")

# Two caches, or one twice, as integers of four bytes. units, extra_units: of 16 bytes, from one
# block to the next. lens: how many of the first scope's columns count, of each sequence.
Scopes = namedtuple("Scopes", "cache units extra_cache extra_units lens")

# Where entries are: addresses of codes, bf16 values and scales; and their slots.
Entries = namedtuple("Entries", "codes wide scales slots")


@gluon.jit
def load_slots(tile, item, scopes, first_end, form: gl.constexpr):
    """The slots [entries] of each unit of a tile; -1 where nothing is listed."""
    found = ()
    for part in gl.static_range(PARTS):
        at = tile * TILE + part * UNIT + gl.arange(0, UNIT, gl.SliceLayout(1, COPIED))
        wanted = at < item.end
        if form.FIRST == 0 or tile * TILE < form.FIRST:
            slots = gl.load(item.table + at, mask=wanted & (at < first_end), other=-1)
        else:
            slots = gl.load(item.extra_table + (at - form.FIRST), mask=wanted, other=-1)
        found += (slots,)  # type: ignore[assignment]
    return found


@gluon.jit
def addresses(cache, units, slots, PAGE: gl.constexpr, form: gl.constexpr):
    """The `Entries` of `slots` of one cache."""
    at = slots.to(gl.uint32)
    block = (at // PAGE).to(gl.int64) * units.to(gl.int64)
    codes = cache + (block + (at % PAGE * (form.ENTRY // 16)).to(gl.int64)) * 4
    wide = codes + form.layout.quantized // 4
    if form.layout.behind:
        # Eight bytes for each entry, behind all data of the page.
        scales = cache + block * 4 + (PAGE * form.ENTRY // 4 + at % PAGE * 2).to(gl.int64)
    else:
        scales = wide
        wide += form.layout.quantized // form.layout.group
    return Entries(codes, wide, scales, slots)


@gluon.jit
def locate(tile, slots, scopes, form: gl.constexpr):
    """The `Entries` of `slots`, of a tile of a sequence."""
    if form.FIRST == 0 or tile * TILE < form.FIRST:
        found = addresses(scopes.cache, scopes.units, slots, form.PAGE, form)
    else:
        found = addresses(scopes.extra_cache, scopes.extra_units, slots, form.EXTRA_PAGE, form)
    return found


@gluon.jit
def copy_part(target, pointer, slots, COUNT: gl.constexpr, layout: gl.constexpr):
    """Start to copy COUNT integers of every entry of a unit, behind `pointer`; zeros for slot -1,
    and where `target` is wider.
    """
    row: gl.constexpr = gl.SliceLayout(1, layout)
    col = gl.arange(0, target.shape[1], gl.SliceLayout(0, layout))[None, :]
    wanted = (gl.convert_layout(slots, row) >= 0)[:, None]
    if target.shape[1] > COUNT:
        wanted &= col < COUNT
    async_load(target, gl.convert_layout(pointer, row)[:, None] + col, mask=wanted)


@gluon.jit
def start(tiles, scales, buffer, entries, U: gl.constexpr, form: gl.constexpr):
    """Start to copy unit U of a tile."""
    COUNT: gl.constexpr = form.layout.quantized // 4
    layout: gl.constexpr = EXPONENTS if form.layout.behind else SCALES
    rows = common.pairs_of(tiles.keys.index(buffer)).slice(UNIT * U, UNIT)
    copy_part(rows.slice(0, 128, dim=1), entries.codes, entries.slots, COUNT, COPIED)
    # As they are: a tile of their own, or the end of the keys.
    wide = rows.slice(224, 32, dim=1)
    if form.R > 0:
        wide = common.pairs_of(tiles.ropes.index(buffer)).slice(UNIT * U, UNIT)
    copy_part(wide, entries.wide, entries.slots, 32, WIDE)
    copy_part(scales.slice(UNIT * U, UNIT), entries.scales, entries.slots, 4, layout)
    tiles.slots.index(buffer).slice(UNIT * U, UNIT).store(entries.slots)
    async_copy.commit_group()


@gluon.jit
def put(tiles, scales, buffer, U: gl.constexpr, form: gl.constexpr):
    """Dequantize unit U of a tile in place."""
    rows = common.pairs_of(tiles.keys.index(buffer)).slice(UNIT * U, UNIT)
    words = scales.slice(UNIT * U, UNIT).load(EXPONENTS if form.layout.behind else SCALES)
    codes = rows.slice(0, 128, dim=1).load(CODES).reshape([UNIT, 8, 16])
    if form.layout.behind:
        pairs = gl.join(words, words >> 16)
        scale = (gl.join(pairs, pairs >> 8).reshape([UNIT, 8]) & 0xFF) << 23
    else:
        scale = gl.join(words, words).reshape([UNIT, 8])
    scale = gl.convert_layout(scale, gl.SliceLayout(2, codes.type.layout))[:, :, None]
    low, high = gl.inline_asm_elementwise(
        DEQUANTIZE, "=&r,=&r,r,r", [codes, scale], (gl.int32, gl.int32), True, 1
    )
    values = gl.convert_layout(gl.join(low, high).reshape([UNIT, 256]), VALUES)
    if form.R == 0:
        col = gl.arange(0, 256, gl.SliceLayout(0, VALUES))[None, :]
        values = gl.where(col < 224, values, rows.load(VALUES))
    rows.store(values)


@gluon.jit
def gather(work, query, tiles, scales, scopes, form: gl.constexpr):
    """The gathering warps: the query and all tiles of all items, in order."""
    BUFFERS: gl.constexpr = tiles.keys.shape[0]
    items, done = 0, 0
    begin, end = items_of(work)
    is_short = 2 * gl.load(work.indptr + gl.num_programs(0)) <= gl.num_programs(0)
    for number in range(begin, end):
        item = read_item(work, number, form)
        first, count = tiles_of(work, item, form)
        if number == begin:
            # Once: the kernel in front has ended then.
            gdc.gdc_wait()
        if count > 0:
            copy_query(query, items, work, item, form.R, form.HEADS)
            items += 1
        first_end = item.end
        if form.FIRST > 0:
            first_end = gl.load(scopes.lens + item.sequence)
        slots = load_slots(first, item, scopes, first_end, form)
        for tile in range(first, first + count):
            buffer, phase = turn_of(done, BUFFERS)
            mbarrier.wait(tiles.free.index(buffer), phase ^ 1)
            for part in gl.static_range(PARTS):
                entries = locate(tile, slots[part], scopes, form)
                start(tiles, scales, buffer, entries, part, form)
            # Behind the last tile nothing is listed, and nothing loaded.
            slots = load_slots(tile + 1, item, scopes, first_end, form)
            for part in gl.static_range(PARTS):
                async_copy.wait_group(PARTS - 1 - part)
                put(tiles, scales, buffer, part, form)
            fence_async_shared()
            common.barrier()
            mbarrier.arrive(tiles.full.index(buffer), count=1)
            done += 1
    # The reduction may be launched, and waits: see `warp_specialized_common.copy`.
    if is_short & (begin < end):
        gdc.gdc_launch_dependents()
