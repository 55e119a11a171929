"""The warps of `sparse_specialized.py` that get listed entries into shared memory, as bf16.

Threads load entries into registers, dequantize and store them. A unit is 16 whole entries, eight
threads an entry, and `AHEAD` units are on their way while one is dequantized. Four threads have 64
latents of an entry, the next four those of another one, so that their stores meet in no bank.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc

from mla_fusion.attention.hopper import common
from mla_fusion.attention.hopper.common import TILE, items_of, read_item, tiles_of
from mla_fusion.attention.hopper.warp_specialized_common import copy_query, turn_of

UNIT = gl.constexpr(16)  # entries
QUARTER = gl.constexpr(128)  # latents
# Of the codes of a quarter [entries, integers], and of its values as bf16.
CODES = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 1], [0, 2]], [[0, 4], [0, 8], [1, 0], [0, 16], [2, 0]], [[4, 0], [8, 0]], [], [16, 32]
))  # fmt: skip
VALUES = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 1], [0, 2], [0, 4]], [[0, 8], [0, 16], [1, 0], [0, 32], [2, 0]], [[4, 0], [8, 0]], [],
    [16, 64],
))  # fmt: skip
ROTATED = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
ENTRY = gl.constexpr(gl.SliceLayout(1, CODES))
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

# Entries in registers: their slots, codes of each quarter, scales, and bf16 values.
Unit = namedtuple("Unit", "slots codes scales wide")


@gluon.jit
def load_slots(number, item, scopes, first_end, form: gl.constexpr):
    """The slots [entries] of unit `number` of a sequence; -1 where nothing is listed."""
    at = number * UNIT + gl.arange(0, UNIT, ENTRY)
    wanted = at < item.end
    if form.FIRST == 0 or number * UNIT < form.FIRST:
        slots = gl.load(item.table + at, mask=wanted & (at < first_end), other=-1)
    else:
        slots = gl.load(item.extra_table + (at - form.FIRST), mask=wanted, other=-1)
    return slots


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
def locate(number, slots, scopes, form: gl.constexpr):
    """The `Entries` of `slots`, of unit `number` of a sequence."""
    if form.FIRST == 0 or number * UNIT < form.FIRST:
        found = addresses(scopes.cache, scopes.units, slots, form.PAGE, form)
    else:
        found = addresses(scopes.extra_cache, scopes.extra_units, slots, form.EXTRA_PAGE, form)
    return found


@gluon.jit
def load_quarter(entries, NUMBER: gl.constexpr, form: gl.constexpr):
    """Codes of a quarter; zeros where nothing is listed, or no code is left."""
    col = NUMBER * QUARTER // 4 + gl.arange(0, QUARTER // 4, gl.SliceLayout(0, CODES))[None, :]
    wanted = (entries.slots >= 0)[:, None]
    if form.layout.quantized < (NUMBER + 1) * QUARTER:
        wanted &= col < form.layout.quantized // 4
    return gl.load(entries.codes[:, None] + col, mask=wanted, other=0)


@gluon.jit
def load_scales(entries, form: gl.constexpr):
    """Load the scales of each quarter: fp32, or an integer of four exponents."""
    scales = ()
    for i in gl.static_range(2 if form.layout.behind else 4):
        scale = gl.load(entries.scales + i, mask=entries.slots >= 0, other=0)
        scales += (scale, scale) if form.layout.behind else (scale,)
    return scales


@gluon.jit
def load_wide(entries, form: gl.constexpr):
    """The bf16 values: for a tile of their own, or as the end of the last quarter."""
    layout: gl.constexpr = ROTATED if form.R > 0 else VALUES
    BEFORE: gl.constexpr = 0 if form.R > 0 else 32
    row: gl.constexpr = gl.SliceLayout(1, layout)
    col = gl.arange(0, BEFORE + 32, gl.SliceLayout(0, layout))[None, :]
    wanted = gl.convert_layout(entries.slots, row)[:, None] >= 0
    pointers = gl.convert_layout(entries.wide, row)[:, None] + (col - BEFORE)
    return gl.load(pointers, mask=wanted & (col >= BEFORE), other=0)


@gluon.jit
def load_unit(entries, form: gl.constexpr):
    """All of the `Unit` of some entries."""
    quarters = ()
    for i in gl.static_range(4):
        quarters += (load_quarter(entries, i, form),)  # type: ignore[assignment]
    return Unit(entries.slots, quarters, load_scales(entries, form), load_wide(entries, form))


@gluon.jit
def put_quarter(target, unit, NUMBER: gl.constexpr, U: gl.constexpr, form: gl.constexpr):
    """Store a quarter of unit U of a tile in `target` [tokens, latents], as bf16."""
    if form.layout.behind:
        # A quarter has two exponents.
        second = gl.arange(0, QUARTER // 4, gl.SliceLayout(0, CODES))[None, :] // 16
        exponents = unit.scales[NUMBER][:, None] >> (8 * (second + 2 * NUMBER % 4))
        scale = (exponents & 0xFF) << 23
    else:
        scale = unit.scales[NUMBER][:, None]
    low, high = gl.inline_asm_elementwise(
        DEQUANTIZE, "=&r,=&r,r,r", [unit.codes[NUMBER], scale], (gl.int32, gl.int32), True, 1
    )
    values = gl.convert_layout(gl.join(low, high).reshape([UNIT, QUARTER // 2]), VALUES)
    if NUMBER == 3 and form.R == 0:
        col = gl.arange(0, QUARTER // 2, gl.SliceLayout(0, VALUES))[None, :]
        values = gl.where(col < 32, values, unit.wide)
    part = common.pairs_of(target).slice(UNIT * U, UNIT)
    part.slice(QUARTER // 2 * NUMBER, QUARTER // 2, dim=1).store(values)


@gluon.jit
def put(tiles, buffer, unit, entries, U: gl.constexpr, form: gl.constexpr):
    """Store unit U of a tile, and load another one, a quarter in place of each that is stored."""
    quarters = ()
    for i in gl.static_range(4):
        put_quarter(tiles.keys.index(buffer), unit, i, U, form)
        quarters += (load_quarter(entries, i, form),)  # type: ignore[assignment]
    if form.R > 0:
        common.pairs_of(tiles.ropes.index(buffer)).slice(UNIT * U, UNIT).store(unit.wide)
    tiles.slots.index(buffer).slice(UNIT * U, UNIT).store(unit.slots)
    return Unit(entries.slots, quarters, load_scales(entries, form), load_wide(entries, form))


@gluon.jit
def gather(work, query, tiles, scopes, form: gl.constexpr):
    """The gathering warps: the query and all tiles of all items, in order."""
    BUFFERS: gl.constexpr = tiles.keys.shape[0]
    PARTS: gl.constexpr = TILE // UNIT
    AHEAD: gl.constexpr = 2 if form.layout.behind else 3
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
        number = first * PARTS
        slots = load_slots(number, item, scopes, first_end, form)
        now = load_unit(locate(number, slots, scopes, form), form)
        slots = load_slots(number + 1, item, scopes, first_end, form)
        soon = load_unit(locate(number + 1, slots, scopes, form), form)
        slots = load_slots(number + 2, item, scopes, first_end, form)
        if AHEAD == 3:
            then = load_unit(locate(number + 2, slots, scopes, form), form)
            slots = load_slots(number + 3, item, scopes, first_end, form)
        for _ in range(count):
            buffer, phase = turn_of(done, BUFFERS)
            mbarrier.wait(tiles.free.index(buffer), phase ^ 1)
            for part in gl.static_range(PARTS):
                # Behind the last unit nothing is listed, and nothing loaded.
                entries = locate(number + part + AHEAD, slots, scopes, form)
                slots = load_slots(number + part + AHEAD + 1, item, scopes, first_end, form)
                if AHEAD == 3:
                    now, soon, then = soon, then, put(tiles, buffer, now, entries, part, form)
                else:
                    now, soon = soon, put(tiles, buffer, now, entries, part, form)
            fence_async_shared()
            common.barrier()
            mbarrier.arrive(tiles.full.index(buffer), count=1)
            number += PARTS
            done += 1
    # The reduction may be launched, and waits: see `warp_specialized_common.copy`.
    if is_short & (begin < end):
        gdc.gdc_launch_dependents()
