"""The work items of a plan, as decode kernels for Hopper (sm_90) read them, in Gluon."""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_fusion.attention.hopper import fits

TILE = gl.constexpr(fits.TILE)


# What all warps read: the plan, the table of each scope, and the query rows of this CTA.
Work = namedtuple(
    "Work",
    "indptr info qo_indptr kv_indptr table table_stride extra_table extra_table_stride first_row",
)

# A work item: KV tokens `begin` to `end` of a sequence, `after` more follow; `partial` row. Its
# query is the heads from `first_head` on, of the `count` rows from `token` on; the tables are the
# rows of the sequence.
Item = namedtuple(
    "Item", "sequence first_head partial count token begin end after table extra_table"
)


@gluon.jit
def items_of(work):
    """The first work item of this CTA, and the one behind its last."""
    begin = gl.load(work.indptr + gl.program_id(0))
    return begin, gl.load(work.indptr + gl.program_id(0) + 1)


@gluon.jit
def read_item(work, number, form: gl.constexpr):
    """Work item `number` of the plan: a row of work_info_set."""
    info = work.info + 8 * number
    tile_index = gl.load(info)
    partial = gl.load(info + 1)
    count = gl.load(info + 3) - gl.load(info + 2)
    kv_start = gl.load(info + 4)
    kv_end = gl.load(info + 5)
    after = gl.load(info + 6)
    sequence = tile_index // form.FOLD
    first_head = tile_index % form.FOLD * form.HEADS
    token = gl.load(work.qo_indptr + sequence).to(gl.int64)
    kv_base = gl.load(work.kv_indptr + sequence)
    table = work.table + sequence.to(gl.int64) * work.table_stride
    extra_table = work.extra_table + sequence.to(gl.int64) * work.extra_table_stride
    begin, end = kv_start - kv_base, kv_end - kv_base
    return Item(sequence, first_head, partial, count, token, begin, end, after, table, extra_table)


@gluon.jit
def tiles_of(work, item, form: gl.constexpr):
    """First tile of an item, and how many it has: none if the CTA has no rows in it."""
    first = item.begin // TILE
    count = (item.end + TILE - 1) // TILE - first
    return first, gl.where(work.first_row < form.HEADS * item.count, count, 0)
