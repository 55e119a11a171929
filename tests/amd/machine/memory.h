/* Memory: each access is checked, and happens only when a wait covers it.

   An instruction is issued: its addresses and the data of a store are taken, the registers of a load
   get rubbish. It is carried out when `s_waitcnt` says that at most so many younger ones are on
   their way, when the counter is full, or when the workgroup ends: as late as the hardware may.
   Vector memory and LDS keep the order of a wave; scalar loads do not, so only a count of 0 covers
   them. A barrier orders the vector memory of its workgroup without a wait: its waves share a cache,
   which takes their operations in turn ("Memory model GFX942" of LLVM's AMDGPU guide, workgroup
   scope without threadgroup split mode). Registers wait for s_waitcnt all the same.

   Workgroups run one after the other, as no kernel has an atomic or waits for another workgroup. */

/* The region that holds these bytes and allows the access; NULL, and a fault, if there is none. */
static const Region *region_of(Machine *m, Wave *w, const Instruction *i, u64 address, u32 size,
                               int writes)
{
    static const Region *last;
    if (last >= m->regions && last < m->regions + m->region_count && address >= last->begin &&
        address + size <= last->end && (writes ? last->writable : last->readable))
        return last;
    for (const Region *r = m->regions; r < m->regions + m->region_count; r++)
        if (address >= r->begin && address + size <= r->end && (writes ? r->writable : r->readable))
            return last = r;
    fault(m, w, i, writes ? WRITE : READ, address, size);
    return 0;
}

static void read_global(Machine *m, Wave *w, const Instruction *i, u64 address, u32 size, u32 *x)
{
    if (region_of(m, w, i, address, size, 0)) memcpy(x, (u8 *)address, size);
    else x[0] = x[1] = x[2] = x[3] = rubbish(m);
}

static int in_lds(Machine *m, Wave *w, const Instruction *i, u64 address, u32 size)
{
    if (address + size <= m->lds_size) return 1;
    fault(m, w, i, LDS_BOUNDS, address, size);
    return 0;
}

/* A race: a byte that one wave writes and another touches before the next barrier. That two waves
   write the same value is harmless, and Triton does it. */
static void read_lds(Machine *m, Wave *w, const Instruction *i, u64 address, u32 size, void *x)
{
    if (!in_lds(m, w, i, address, size)) {
        memset(x, 0xEE, size);
        return;
    }
    for (u32 k = 0; k < size; k++) {
        Tag *tag = &m->tags[address + k];
        if (tag->write_epoch == m->epoch && tag->writer != w->number)
            fault(m, w, i, LDS_RACE, address + k, 1);
        if (tag->read_epoch != m->epoch) tag->read_epoch = m->epoch, tag->readers = 0;
        tag->readers |= 1 << w->number;
    }
    memcpy(x, m->lds + address, size);
}

static void write_lds(Machine *m, Wave *w, const Instruction *i, u64 address, u32 size,
                      const void *x)
{
    if (!in_lds(m, w, i, address, size)) return;
    for (u32 k = 0; k < size; k++) {
        Tag *tag = &m->tags[address + k];
        int written = tag->write_epoch == m->epoch && tag->writer != w->number;
        int read = tag->read_epoch == m->epoch && tag->readers & ~(1 << w->number);
        if (read || (written && m->lds[address + k] != ((const u8 *)x)[k]))
            fault(m, w, i, LDS_RACE, address + k, 1);
        tag->write_epoch = m->epoch;
        tag->writer = w->number;
    }
    memcpy(m->lds + address, x, size);
}

static u32 words_of(const Instruction *i) { return (i->size + 3) / 4; }

/* Put what a load has read into lane `l` of its registers. */
static void arrive(Wave *w, const Instruction *i, int l, const u32 x[4])
{
    u32 *d = &w->v[i->result.index][l], value = x[0];
    if (i->size < 4 && i->format != HIGH_HALF) value &= (1u << 8 * i->size) - 1;
    if (i->format == SIGNED) *d = i->size == 1 ? (u32)(i32)(int8_t)value : (u32)(i32)(i16)value;
    else if (i->format == LOW_HALF) *d = (*d & 0xffff0000u) | value;
    else if (i->format == HIGH_HALF) *d = (*d & 0xffffu) | (value << 16);
    else {
        *d = value;
        for (u32 k = 1; k < words_of(i); k++) w->v[i->result.index + k][l] = x[k];
    }
}

static void scramble(Machine *m, Wave *w, int index, int count, u64 active)
{
    for (int k = 0; k < count; k++)
        for (int l = 0; l < LANES; l++)
            if (on(active, l)) w->v[index + k][l] = rubbish(m);
}

/* What an operation does when it is carried out; instructions.h has one for each kind. */
typedef void Action(Machine *, Wave *, Pending *);
static Action *const ACTIONS[];

static void complete_vector(Machine *m, Wave *w, u32 left)
{
    for (; w->vector_count > left; w->vector_count--, w->vector_first++) {
        Pending *p = &w->vector_queue[w->vector_first % VECTOR_QUEUE];
        fly(w, &p->instruction->result, MEMORY, -1);
        if (!p->done) ACTIONS[p->instruction->operation](m, w, p);
    }
}

/* What a barrier orders is carried out; the registers of loads stay untouchable until a wait. */
static void carry_out_vector(Machine *m, Wave *w)
{
    for (u32 k = 0; k < w->vector_count; k++) {
        Pending *p = &w->vector_queue[(w->vector_first + k) % VECTOR_QUEUE];
        if (!p->done) ACTIONS[p->instruction->operation](m, w, p);
        p->done = 1;
    }
}

static void complete_lds(Machine *m, Wave *w, u32 left)
{
    for (; w->lds_count > left; w->lds_count--, w->lds_first++) {
        Pending *p = &w->lds_queue[w->lds_first % LDS_QUEUE];
        fly(w, &p->instruction->result, LDS, -1);
        ACTIONS[p->instruction->operation](m, w, p);
    }
}

static void complete_scalars(Wave *w)
{
    for (u32 k = 0; k < w->scalar_count; k++) {
        PendingScalars *p = &w->scalar_queue[k];
        memcpy(&w->s[p->instruction->result.index], p->data, p->instruction->size);
        fly(w, &p->instruction->result, MEMORY, -1);
    }
    w->scalar_count = 0;
}

static Pending *issue_vector(Machine *m, Wave *w, const Instruction *i)
{
    complete_vector(m, w, VECTOR_QUEUE - 1);
    Pending *p = &w->vector_queue[(w->vector_first + w->vector_count++) % VECTOR_QUEUE];
    p->instruction = i;
    p->active = pair(w, EXEC);
    p->done = 0;
    /* Loads of one queue arrive in order: a later one may have the same registers. */
    touch(m, w, i, &i->result, LDS);
    fly(w, &i->result, MEMORY, 1);
    return p;
}

static Pending *issue_lds(Machine *m, Wave *w, const Instruction *i)
{
    complete_lds(m, w, LDS_QUEUE - 1);
    Pending *p = &w->lds_queue[(w->lds_first + w->lds_count++) % LDS_QUEUE];
    p->instruction = i;
    p->active = pair(w, EXEC);
    touch(m, w, i, &i->result, MEMORY);
    fly(w, &i->result, LDS, 1);
    return p;
}

/* What ended waves have left on its way. */
static void complete(Machine *m, Wave *waves, u32 count)
{
    for (u32 k = 0; k < count; k++) {
        complete_vector(m, &waves[k], 0);
        complete_lds(m, &waves[k], 0);
    }
}

/* s_waitcnt: vmcnt in bits 0 to 7 of `immediate`, lgkmcnt in bits 8 to 15. */
static void wait(Machine *m, Wave *w, const Instruction *i)
{
    u32 scalar_or_lds = i->immediate >> 8 & 255;
    complete_vector(m, w, i->immediate & 255);
    complete_lds(m, w, scalar_or_lds);
    if (scalar_or_lds == 0) complete_scalars(w);
}
