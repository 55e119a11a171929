/* Instructions that no formula of one lane describes: memory, lanes, matrices, control.

   Of a memory instruction `NAME` the function `NAME` issues it and `NAME_action` carries it out. */

/* ---- scalar memory */

static void load_scalars(Machine *m, Wave *w, const Instruction *i)
{
    if (w->scalar_count == SCALAR_QUEUE) complete_scalars(w);
    PendingScalars *p = &w->scalar_queue[w->scalar_count++];
    u64 address = pair(w, i->source[0].index) + i->offset[0];
    address += (i64)(i32)scalar_operand(w, &i->source[1], 1);
    p->instruction = i;
    for (u32 k = 0; k < words_of(i); k++) p->data[k] = w->s[i->result.index + k] = rubbish(m);
    if (region_of(m, w, i, address, i->size, 0)) memcpy(p->data, (u8 *)address, i->size);
    touch(m, w, i, &i->result, MEMORY);
    fly(w, &i->result, MEMORY, 1);
}

/* ---- global memory */

/* Source 0: 64-bit address, or 32-bit offset if source 1 is a scalar base. */
static void global_addresses(Wave *w, const Instruction *i, Pending *p)
{
    u64 wide[LANES];
    u32 narrow[LANES];
    int based = i->source[1].kind == SCALAR;
    if (based) read_word(w, &i->source[0], 0, narrow);
    else read64(w, i, 0, wide);
    for (int l = 0; l < LANES; l++)
        p->address[l] = (based ? pair(w, i->source[1].index) + narrow[l] : wide[l]) + i->offset[0];
}

/* Source 0: offset of a lane, or "off"; 1: four scalars (base, stride 0, bytes); 2: an offset that
   the bounds check does not see. A lane outside reads 0 and writes nothing: Triton's masks. */
static void buffer_addresses(Machine *m, Wave *w, const Instruction *i, Pending *p)
{
    u32 offset[LANES] = {0};
    int r = i->source[1].index;
    u64 base = (u64)(w->s[r + 1] & 0xffff) << 32 | w->s[r];
    if (w->s[r + 1] >> 16) fault(m, w, i, UNSUPPORTED, w->s[r + 1], 0); /* strided or swizzled */
    if (i->source[0].kind == VECTOR) read_word(w, &i->source[0], 0, offset);
    for (int l = 0; l < LANES; l++) {
        u64 at = (u64)offset[l] + i->offset[0];
        p->address[l] = base + at + scalar_operand(w, &i->source[2], 1);
        p->second[l] = at + i->size <= w->s[r + 2];
    }
}

static void take_data(Wave *w, const Operand *o, const Instruction *i, Pending *p, u32 first)
{
    for (u32 k = 0; k < words_of(i); k++) {
        read_word(w, o, k, p->data[first + k]);
        if (i->format == HIGH_HALF)
            for (int l = 0; l < LANES; l++) p->data[first + k][l] >>= 16;
    }
}

static void load_vector(Machine *m, Wave *w, Pending *p, int checked)
{
    const Instruction *i = p->instruction;
    for (int l = 0; l < LANES; l++) {
        u32 x[4] = {0};
        if (!on(p->active, l)) continue;
        if (!checked || p->second[l]) read_global(m, w, i, p->address[l], i->size, x);
        arrive(w, i, l, x);
    }
}

static void store_vector(Machine *m, Wave *w, Pending *p, int checked)
{
    const Instruction *i = p->instruction;
    for (int l = 0; l < LANES; l++) {
        u32 x[4] = {p->data[0][l], p->data[1][l], p->data[2][l], p->data[3][l]};
        if (!on(p->active, l) || (checked && !p->second[l])) continue;
        if (!region_of(m, w, i, p->address[l], i->size, 1)) continue;
        memcpy((u8 *)p->address[l], x, i->size);
    }
}

static void global_load(Machine *m, Wave *w, const Instruction *i)
{
    Pending *p = issue_vector(m, w, i);
    global_addresses(w, i, p);
    scramble(m, w, i->result.index, words_of(i), p->active);
}

static void global_load_action(Machine *m, Wave *w, Pending *p) { load_vector(m, w, p, 0); }

static void global_store(Machine *m, Wave *w, const Instruction *i)
{
    Pending *p = issue_vector(m, w, i);
    global_addresses(w, i, p);
    take_data(w, &i->source[2], i, p, 0);
}

static void global_store_action(Machine *m, Wave *w, Pending *p) { store_vector(m, w, p, 0); }

static void buffer_load(Machine *m, Wave *w, const Instruction *i)
{
    Pending *p = issue_vector(m, w, i);
    buffer_addresses(m, w, i, p);
    scramble(m, w, i->result.index, words_of(i), p->active);
}

static void buffer_load_action(Machine *m, Wave *w, Pending *p) { load_vector(m, w, p, 1); }

static void buffer_store(Machine *m, Wave *w, const Instruction *i)
{
    Pending *p = issue_vector(m, w, i);
    buffer_addresses(m, w, i, p);
    take_data(w, &i->source[3], i, p, 0);
}

static void buffer_store_action(Machine *m, Wave *w, Pending *p) { store_vector(m, w, p, 1); }

/* ---- LDS */

static void lds_addresses(Wave *w, const Instruction *i, Pending *p)
{
    u32 base[LANES];
    read_word(w, &i->source[0], 0, base);
    for (int l = 0; l < LANES; l++) {
        p->address[l] = (u64)base[l] + i->offset[0];
        p->second[l] = (u64)base[l] + i->offset[1];
    }
}

static void lds_read(Machine *m, Wave *w, const Instruction *i)
{
    Pending *p = issue_lds(m, w, i);
    lds_addresses(w, i, p);
    scramble(m, w, i->result.index, words_of(i), p->active);
}

static void lds_read_action(Machine *m, Wave *w, Pending *p)
{
    for (int l = 0; l < LANES; l++) {
        u32 x[4] = {0};
        if (!on(p->active, l)) continue;
        read_lds(m, w, p->instruction, p->address[l], p->instruction->size, x);
        arrive(w, p->instruction, l, x);
    }
}

static void lds_read2(Machine *m, Wave *w, const Instruction *i)
{
    Pending *p = issue_lds(m, w, i);
    lds_addresses(w, i, p);
    scramble(m, w, i->result.index, 2 * words_of(i), p->active);
}

static void lds_read2_action(Machine *m, Wave *w, Pending *p)
{
    const Instruction *i = p->instruction;
    u32 count = words_of(i), x[4];
    for (int l = 0; l < LANES; l++) {
        if (!on(p->active, l)) continue;
        read_lds(m, w, i, p->address[l], i->size, x);
        read_lds(m, w, i, p->second[l], i->size, x + count);
        for (u32 k = 0; k < 2 * count; k++) w->v[i->result.index + k][l] = x[k];
    }
}

static void lds_write(Machine *m, Wave *w, const Instruction *i)
{
    Pending *p = issue_lds(m, w, i);
    lds_addresses(w, i, p);
    take_data(w, &i->source[1], i, p, 0);
}

static void lds_write_action(Machine *m, Wave *w, Pending *p)
{
    for (int l = 0; l < LANES; l++) {
        u32 x[4] = {p->data[0][l], p->data[1][l], p->data[2][l], p->data[3][l]};
        if (on(p->active, l))
            write_lds(m, w, p->instruction, p->address[l], p->instruction->size, x);
    }
}

static void lds_write2(Machine *m, Wave *w, const Instruction *i)
{
    Pending *p = issue_lds(m, w, i);
    lds_addresses(w, i, p);
    take_data(w, &i->source[1], i, p, 0);
    take_data(w, &i->source[2], i, p, 2);
}

static void lds_write2_action(Machine *m, Wave *w, Pending *p)
{
    const Instruction *i = p->instruction;
    for (int l = 0; l < LANES; l++) {
        u32 x[4] = {p->data[0][l], p->data[1][l], p->data[2][l], p->data[3][l]};
        if (!on(p->active, l)) continue;
        write_lds(m, w, i, p->address[l], i->size, x);
        write_lds(m, w, i, p->second[l], i->size, x + 2);
    }
}

/* The transposing reads of gfx950: 16 lanes read 8 bytes each, a block of rows; lane i gets
   column i of it. `format` is the bytes of an element. */
static void lds_read_transposed(Machine *m, Wave *w, const Instruction *i)
{
    if (pair(w, EXEC) != ~0ull) fault(m, w, i, UNSUPPORTED, pair(w, EXEC), 0);
    lds_read(m, w, i);
}

static void lds_read_transposed_action(Machine *m, Wave *w, Pending *p)
{
    u8 rows[LANES][8];
    int size = p->instruction->format, count = 8 / size, index = p->instruction->result.index;
    for (int l = 0; l < LANES; l++) read_lds(m, w, p->instruction, p->address[l], 8, rows[l]);
    for (int l = 0; l < LANES; l++) {
        u8 column[8];
        u32 x[2];
        int group = l & ~15, at = l & 15;
        for (int k = 0; k < count; k++)
            memcpy(column + k * size, rows[group + 16 / count * k + at / count] + at % count * size,
                   size);
        memcpy(x, column, 8);
        w->v[index][l] = x[0];
        w->v[index + 1][l] = x[1];
    }
}

/* Through LDS without touching it: a lane takes the value of another; 0 from an inactive one. */
static void take_from(Machine *m, Wave *w, const Instruction *i, const u32 lane[LANES],
                      const u32 x[LANES])
{
    Pending *p = issue_lds(m, w, i);
    for (int l = 0; l < LANES; l++) p->data[0][l] = on(p->active, lane[l] & 63) ? x[lane[l] & 63] : 0;
    scramble(m, w, i->result.index, 1, p->active);
}

static void lds_permute(Machine *m, Wave *w, const Instruction *i)
{
    u32 lane[LANES], x[LANES];
    read_word(w, &i->source[0], 0, lane);
    read_word(w, &i->source[1], 0, x);
    for (int l = 0; l < LANES; l++) lane[l] = (lane[l] + i->offset[0]) / 4;
    take_from(m, w, i, lane, x);
}

static void lds_permute_action(Machine *m, Wave *w, Pending *p)
{
    write_word(w, p->instruction->result.index, p->data[0], p->active);
}

/* ds_swizzle with swizzle(SWAP, n): lane l takes from l ^ n. */
static void lds_swap(Machine *m, Wave *w, const Instruction *i)
{
    u32 lane[LANES], x[LANES];
    read_word(w, &i->source[0], 0, x);
    for (int l = 0; l < LANES; l++) lane[l] = l ^ i->immediate;
    take_from(m, w, i, lane, x);
}

static void lds_swap_action(Machine *m, Wave *w, Pending *p) { lds_permute_action(m, w, p); }

/* ---- between lanes and scalars */

static void read_first_lane(Machine *m, Wave *w, const Instruction *i)
{
    u64 exec = pair(w, EXEC);
    w->s[i->result.index] = w->v[i->source[0].index][exec ? __builtin_ctzll(exec) : 0];
}

static void read_lane(Machine *m, Wave *w, const Instruction *i)
{
    w->s[i->result.index] = w->v[i->source[0].index][scalar_operand(w, &i->source[1], 1) & 63];
}

static void write_lane(Machine *m, Wave *w, const Instruction *i)
{
    u32 lane = (u32)scalar_operand(w, &i->source[1], 1) & 63;
    w->v[i->result.index][lane] = (u32)scalar_operand(w, &i->source[0], 1);
}

/* Rows of `width` lanes: odd rows of the first register change places with even ones of the second;
   `size` is the width. Both are written. */
static void swap_rows(Machine *m, Wave *w, const Instruction *i)
{
    u32 *a = w->v[i->result.index], *b = w->v[i->source[0].index];
    if (pair(w, EXEC) != ~0ull) fault(m, w, i, UNSUPPORTED, pair(w, EXEC), 0);
    for (int l = 0; l < LANES; l++) {
        u32 x = a[l];
        if (!(l & i->size)) continue;
        a[l] = b[l - i->size];
        b[l - i->size] = x;
    }
}

/* v_pk_mov_b32: each half takes a word of its own source. */
static void move_pair(Machine *m, Wave *w, const Instruction *i)
{
    u32 low[LANES], high[LANES];
    read_word(w, &i->source[0], i->op_sel & 1, low);
    read_word(w, &i->source[1], i->op_sel >> 1 & 1, high);
    write_word(w, i->result.index, low, pair(w, EXEC));
    write_word(w, i->result.index + 1, high, pair(w, EXEC));
}

/* ---- control */

/* MODE: `offset` bits are set from the immediate. */
static void set_mode(Machine *m, Wave *w, const Instruction *i)
{
    u32 mask = ((1u << i->offset[1]) - 1) << i->offset[0];
    w->mode = (w->mode & ~mask) | (i->immediate << i->offset[0] & mask);
}

static void nothing(Machine *m, Wave *w, const Instruction *i) {}

static void barrier(Machine *m, Wave *w, const Instruction *i)
{
    carry_out_vector(m, w);
    w->status = AT_BARRIER;
}

static void end(Machine *m, Wave *w, const Instruction *i) { w->status = ENDED; }
