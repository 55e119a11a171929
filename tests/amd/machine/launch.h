/* A launch: its workgroups, and the waves of each in turn from barrier to barrier. */

static void run_wave(Machine *m, Wave *w, const Instruction *program)
{
    for (w->status = RUNNING; w->status == RUNNING;) {
        const Instruction *i = &program[w->pc++];
        m->counts[i - m->program]++;
        for (int k = 0; k < 4; k++) touch(m, w, i, &i->source[k], MEMORY | LDS);
        if (!ACTIONS[i->operation]) touch(m, w, i, &i->result, MEMORY | LDS);
        touch(m, w, i, &i->second, MEMORY | LDS);
        FUNCTIONS[i->operation](m, w, i);
        if (++w->executed > m->limit) {
            fault(m, w, i, RUNAWAY, w->executed, 0);
            w->status = FAILED;
        }
    }
}

/* How a wave starts: `user` scalar registers, then the numbers of its workgroup that the kernel
   asks for; v0 is the number of its thread; all else is rubbish. */
typedef struct {
    const u32 *user;
    u32 user_count, dimensions[3], vectors, accumulators, mode, pc;
} Start;

static void start_wave(Machine *m, Wave *w, const Start *s, u32 number, const u32 group[3])
{
    for (u32 r = 0; r < s->vectors; r++) scramble(m, w, r, 1, ~0ull);
    for (u32 r = 0; r < s->accumulators; r++) scramble(m, w, ACCUMULATORS + r, 1, ~0ull);
    for (u32 r = 0; r < VCC; r++) w->s[r] = rubbish(m);
    u32 next = s->user_count;
    memcpy(w->s, s->user, 4 * next);
    for (int axis = 0; axis < 3; axis++)
        if (s->dimensions[axis]) w->s[next++] = group[axis];
    set_pair(w, VCC, (u64)rubbish(m) << 32 | rubbish(m));
    set_pair(w, EXEC, ~0ull);
    w->s[SCC] = rubbish(m) & 1;
    for (int l = 0; l < LANES; l++) w->v[0][l] = number * LANES + l;
    w->mode = s->mode;
    w->pc = s->pc;
    w->number = number;
    w->executed = 0;
    w->vector_count = w->lds_count = w->scalar_count = 0;
    memset(w->flying, 0, sizeof w->flying);
}

/* Its waves in turn from barrier to barrier; whether all of them ended. */
static int run_group(Machine *m, const Instruction *program, Wave *waves, u32 count, u32 backwards)
{
    for (m->epoch = 1;; m->epoch++) {
        u32 ended = 0;
        for (u32 turn = 0; turn < count; turn++) {
            Wave *w = &waves[backwards ? count - 1 - turn : turn];
            run_wave(m, w, program);
            if (w->status == FAILED) return 0;
            ended += w->status == ENDED;
        }
        if (ended == count) {
            complete(m, waves, count);
            return 1;
        }
        if (ended) {
            fault(m, &waves[0], &program[waves[0].pc - 1], BARRIER, count - ended, 0);
            return 0;
        }
    }
}

/* Run the workgroups one after the other in the memory of one; stop after one that failed.
   Backwards: the last workgroup first, and in each the last wave. `waves` has `count`. */
void run_launch(Machine *m, const Instruction *program, const Start *start, const u32 grid[3],
                Wave *waves, u32 count, u32 backwards)
{
    u64 number = (u64)grid[0] * grid[1] * grid[2];
    m->program = program;
    for (u64 n = 0, going = 1; n < number && going; n++) {
        u64 at = backwards ? number - 1 - n : n;
        u32 place[3] = {at % grid[0], at / grid[0] % grid[1], at / grid[0] / grid[1]};
        for (u32 k = 0; k < m->lds_size; k++) m->lds[k] = rubbish(m);
        memset(m->tags, 0, m->lds_size * sizeof(Tag));
        for (u32 k = 0; k < count; k++) start_wave(m, &waves[k], start, k, place);
        going = run_group(m, program, waves, count, backwards);
    }
}

u64 size_of_wave(void) { return sizeof(Wave); }
u64 size_of_tag(void) { return sizeof(Tag); }
u64 size_of_instruction(void) { return sizeof(Instruction); }
u64 size_of_machine(void) { return sizeof(Machine); }
