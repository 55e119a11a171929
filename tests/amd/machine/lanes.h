/* Operands of vector instructions: 64 lanes at a time, through SDWA and DPP, under EXEC. */

static inline u64 scalar_operand(const Wave *w, const Operand *o, int words)
{
    if (o->kind == CONSTANT) return words == 2 ? o->value : (u32)o->value;
    return words == 2 ? pair(w, o->index) : w->s[o->index];
}

static inline u32 selected(u32 x, const Operand *o)
{
    if (o->select >= 5) {
        x = x >> 16 * (o->select - 5) & 0xffff;
        return o->extend ? (u32)(i32)(i16)x : x;
    }
    x = x >> 8 * (o->select - 1) & 0xff;
    return o->extend ? (u32)(i32)(int8_t)x : x;
}

enum { QUAD_PERM = 1, ROW_SHL, ROW_SHR, ROW_ROR, MIRROR, HALF_MIRROR, BCAST15, BCAST31, NEWBCAST };

/* The lane from which DPP takes the value of `lane`; -1 if there is none. */
static int dpp_lane(int lane, int kind, int n)
{
    int row = lane & ~15, at = lane & 15;
    switch (kind) {
    case QUAD_PERM: return (lane & ~3) + (n >> 2 * (lane & 3) & 3);
    case ROW_SHL: return at + n <= 15 ? lane + n : -1;
    case ROW_SHR: return at - n >= 0 ? lane - n : -1;
    case ROW_ROR: return row + (at - n & 15);
    case MIRROR: return row + 15 - at;
    case HALF_MIRROR: return row + (at & 8) + (7 - (at & 7));
    case BCAST15: return lane >= 16 ? row - 1 : -1;
    case BCAST31: return lane >= 32 ? 31 : -1;
    default: return row + n;
    }
}

/* Values move between lanes; a lane without a source reads 0, or is not written. */
static void move_lanes(const Wave *w, const Instruction *i, u32 x[LANES], u64 *active)
{
    u32 from[LANES];
    u64 exec = pair(w, EXEC);
    memcpy(from, x, sizeof from);
    for (int l = 0; l < LANES; l++) {
        int source = dpp_lane(l, i->dpp, i->dpp_argument);
        int masked = !(i->row_mask >> l / 16 & 1) || !(i->bank_mask >> (l & 15) / 4 & 1);
        int found = source >= 0 && on(exec, source);
        x[l] = found ? from[source] : 0;
        if (masked || (!found && !i->bound)) *active &= ~(1ull << l);
    }
}

static inline void fill(u32 x[LANES], u32 value)
{
    for (int l = 0; l < LANES; l++) x[l] = value;
}

static inline void read_word(const Wave *w, const Operand *o, int word, u32 x[LANES])
{
    if (o->kind == VECTOR) memcpy(x, w->v[o->index + word], 4 * LANES);
    else fill(x, (u32)(scalar_operand(w, o, 2) >> 32 * word));
}

static void read32(const Wave *w, const Instruction *i, int k, u32 x[LANES], u64 *active)
{
    const Operand *o = &i->source[k];
    if (o->kind == VECTOR) memcpy(x, w->v[o->index], 4 * LANES);
    else fill(x, (u32)scalar_operand(w, o, 1));
    if (k == 0 && i->dpp) move_lanes(w, i, x, active);
    if (o->select) for (int l = 0; l < LANES; l++) x[l] = selected(x[l], o);
    if (o->absolute) for (int l = 0; l < LANES; l++) x[l] &= 0x7fffffffu;
    if (o->negate) for (int l = 0; l < LANES; l++) x[l] ^= 0x80000000u;
}

static void read64(const Wave *w, const Instruction *i, int k, u64 x[LANES])
{
    const Operand *o = &i->source[k];
    if (o->kind == VECTOR)
        for (int l = 0; l < LANES; l++) x[l] = (u64)w->v[o->index + 1][l] << 32 | w->v[o->index][l];
    else
        for (int l = 0; l < LANES; l++) x[l] = scalar_operand(w, o, 2);
}

/* Half `high` of a source of packed fp32 arithmetic. */
static void read_packed(const Wave *w, const Instruction *i, int k, int high, u32 x[LANES])
{
    const Operand *o = &i->source[k];
    int word = (high ? i->op_sel_hi : i->op_sel) >> k & 1;
    if (o->kind == CONSTANT) word = 0;
    read_word(w, o, word, x);
    if ((high ? i->neg_hi : i->neg_lo) >> k & 1)
        for (int l = 0; l < LANES; l++) x[l] ^= 0x80000000u;
}

static void write_word(Wave *w, int index, const u32 x[LANES], u64 active)
{
    u32 *d = w->v[index];
    if (active == ~0ull) memcpy(d, x, 4 * LANES);
    else
        for (int l = 0; l < LANES; l++) d[l] = on(active, l) ? x[l] : d[l];
}

static void write32(Wave *w, const Instruction *i, u32 x[LANES], u64 active)
{
    if (i->result_select) {
        int half = i->result_select >= 5;
        int shift = half ? 16 * (i->result_select - 5) : 8 * (i->result_select - 1);
        u32 mask = (half ? 0xffffu : 0xffu) << shift;
        for (int l = 0; l < LANES; l++)
            x[l] = (x[l] << shift & mask) | (i->result_keep ? w->v[i->result.index][l] & ~mask : 0);
    }
    write_word(w, i->result.index, x, active);
}

static void write64(Wave *w, const Instruction *i, const u64 x[LANES], u64 active)
{
    u32 low[LANES], high[LANES];
    for (int l = 0; l < LANES; l++) low[l] = (u32)x[l], high[l] = (u32)(x[l] >> 32);
    write_word(w, i->result.index, low, active);
    write_word(w, i->result.index + 1, high, active);
}

/* A mask of lanes: inactive ones are 0. */
static void write_mask(Wave *w, const Operand *o, const u32 x[LANES], u64 active)
{
    u64 bits = 0;
    for (int l = 0; l < LANES; l++) bits |= (u64)(x[l] != 0) << l;
    set_pair(w, o->index, bits & active);
}
