/* The state of a workgroup on one compute unit, and what an instruction is after parsing.

   Instruction and Operand are filled by encode.py and Machine by execute.py: build.py reads them here. */
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int16_t i16;
typedef int32_t i32;
typedef int64_t i64;
typedef float f32;

enum { LANES = 64, VCC = 106, M0 = 124, EXEC = 126, SCC = 128, SCALARS = 129 };
enum { ACCUMULATORS = 512, VECTORS = 768 };
enum { NOTHING, SCALAR, VECTOR, CONSTANT };
enum { WHOLE, SIGNED, LOW_HALF, HIGH_HALF };      /* how a narrow memory access uses a register */
enum { VECTOR_QUEUE = 64, LDS_QUEUE = 16, SCALAR_QUEUE = 64 }; /* the widths of the counters */
enum { RUNNING, AT_BARRIER, ENDED, FAILED };
enum { READ = 1, WRITE, LDS_BOUNDS, LDS_RACE, BARRIER, RUNAWAY, UNSUPPORTED, NO_WAIT, FAULTS };

/* count: of registers. select: 0, or 1 + byte 0..3, or 5 + half 0..1 of the register (SDWA); extend: with its sign. */
typedef struct {
    u8 kind, count, negate, absolute, select, extend;
    u16 index;
    u64 value;
} Operand;

typedef struct {
    u32 operation, line;
    Operand result, second, source[4];
    i32 offset[2];
    u32 immediate; /* a branch's target, a wait's counts, a truth table */
    u8 size, format;
    u8 op_sel, op_sel_hi, neg_lo, neg_hi;
    u8 result_select, result_keep;
    u8 dpp, dpp_argument, row_mask, bank_mask, bound;
} Instruction;

/* A memory operation that was issued and that no wait has covered yet. */
typedef struct {
    const Instruction *instruction;
    int done;
    u64 active; /* lanes */
    u64 address[LANES], second[LANES];
    u32 data[4][LANES];
} Pending;

typedef struct {
    const Instruction *instruction;
    u32 data[16];
} PendingScalars;

typedef struct {
    u32 s[SCALARS];
    u32 v[VECTORS][LANES];
    u32 mode, pc, status, number;
    u64 executed;
    u8 flying[2][SCALARS + VECTORS]; /* loads on their way into each register */
    u32 vector_first, vector_count, lds_first, lds_count, scalar_count;
    Pending vector_queue[VECTOR_QUEUE], lds_queue[LDS_QUEUE];
    PendingScalars scalar_queue[SCALAR_QUEUE];
} Wave;

typedef struct {
    u64 begin, end;
    u32 readable, writable;
} Region;

typedef struct {
    u32 write_epoch, read_epoch;
    u16 readers, writer;
} Tag; /* of a byte of LDS */

typedef struct {
    u8 *lds;
    Tag *tags;
    Region *regions;
    const Instruction *program;
    u64 *counts; /* how often each instruction was executed */
    u64 limit; /* instructions of a wave */
    u32 lds_size, region_count, epoch, seed;
    i32 rounding; /* of approximate instructions: 0 to nearest, 1 up, -1 down */
    u32 fnuz; /* whether fp8 is e4m3fnuz */
    u32 faults[FAULTS];
    u32 fault_kind, fault_line, fault_wave, fault_size;
    u64 fault_address;
} Machine;

static void fault(Machine *m, Wave *w, const Instruction *i, int kind, u64 address, u32 size)
{
    m->faults[kind]++;
    if (!m->fault_kind) {
        m->fault_kind = kind;
        m->fault_line = i->line;
        m->fault_wave = w->number;
        m->fault_address = address;
        m->fault_size = size;
    }
}

/* Which loads are on their way: of vector memory and scalars, or of LDS. */
enum { MEMORY = 1, LDS = 2 };

/* An operand is touched: a fault if one of its registers waits for a load, which may arrive before
   or after. `of`: the loads that matter. */
static inline void touch(Machine *m, Wave *w, const Instruction *i, const Operand *o, int of)
{
    int first = o->index + (o->kind == VECTOR ? SCALARS : 0);
    if (o->kind != SCALAR && o->kind != VECTOR) return;
    for (int k = 0; k < o->count; k++)
        if ((of & MEMORY && w->flying[0][first + k]) || (of & LDS && w->flying[1][first + k]))
            fault(m, w, i, NO_WAIT, first + k, 0);
}

static inline void fly(Wave *w, const Operand *o, int of, int by)
{
    int first = o->index + (o->kind == VECTOR ? SCALARS : 0);
    for (int k = 0; k < o->count; k++) w->flying[of - 1][first + k] += by;
}

/* Rubbish: in registers and LDS at the start, and where a load has not arrived. */
static u32 rubbish(Machine *m)
{
    m->seed = m->seed * 1664525u + 1013904223u;
    return m->seed ^ (m->seed >> 15);
}

static inline u64 pair(const Wave *w, int index) { return (u64)w->s[index + 1] << 32 | w->s[index]; }

static inline void set_pair(Wave *w, int index, u64 x)
{
    w->s[index] = (u32)x;
    w->s[index + 1] = (u32)(x >> 32);
}

static inline int on(u64 mask, int lane) { return mask >> lane & 1; }
