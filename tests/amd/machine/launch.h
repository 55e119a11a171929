/* A launch: its workgroups, and the waves of each in turn from barrier to barrier. */

static void run_wave(Machine *m, Wave *w, const Instruction *program)
{
    for (w->status = RUNNING; w->status == RUNNING;) {
        const Instruction *i = &program[w->pc++];
        if (FUNCTIONS[i->operation] != global_store && FUNCTIONS[i->operation] != buffer_store)
            count(m, i);
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

/* A workgroup between the turns in which it runs. */
typedef struct {
    u8 *lds, *view, *states;
    Tag *tags;
    Wave *waves;
    u32 epoch, turn, ended; /* turn: how many waves have reached the next barrier; ended: the end */
    int status;
} Group;

static void start_group(Machine *m, Group *g, const Start *start, const u32 at[3], u32 count)
{
    for (u32 k = 0; k < m->lds_size; k++) g->lds[k] = rubbish(m);
    memset(g->tags, 0, m->lds_size * sizeof(Tag));
    g->epoch = 1;
    g->turn = g->ended = 0;
    for (u32 k = 0; k < count; k++) start_wave(m, &g->waves[k], start, k, at);
}

static void enter(Machine *m, const Group *g)
{
    m->lds = g->lds, m->tags = g->tags, m->view = g->view, m->states = g->states;
}

/* Its waves in turn, until they pause or end. */
static void run_group(Machine *m, const Instruction *program, Group *g, u32 count, u32 backwards)
{
    enter(m, g);
    for (g->status = RUNNING; g->status == RUNNING;) {
        Wave *w = &g->waves[backwards ? count - 1 - g->turn : g->turn];
        m->epoch = g->epoch;
        run_wave(m, w, program);
        if (w->status == PAUSED || w->status == FAILED) {
            g->status = w->status;
            continue;
        }
        g->ended += w->status == ENDED;
        if (++g->turn < count) continue;
        if (g->ended) g->status = g->ended == count ? ENDED : FAILED;
        if (g->status == ENDED) complete(m, g->waves, count);
        if (g->status == FAILED)
            fault(m, w, &program[g->waves[0].pc - 1], BARRIER, count - g->ended, 0);
        g->turn = 0;
        g->epoch++;
    }
}

/* Returns the number of instructions that were executed; stops after a workgroup that failed.
   Backwards: the last workgroup first, and in each the last wave.

   Workgroups that share memory run at once, and there are as many of `groups`: each runs until it
   pauses, then each to its end, the last one first. Others run one after the other, all in the one
   of `groups`. */
u64 run_launch(Machine *m, const Instruction *program, const Start *start, const u32 grid[3],
               Group *groups, u32 count, u32 backwards)
{
    u64 executed = 0, number = (u64)grid[0] * grid[1] * grid[2];
    m->program = program;
    int failed = 0, at_once = m->shared_size > 0;
    for (u64 n = 0; at_once && n < number; n++) {
        enter(m, &groups[n]);
        invalidate(m);
    }
    for (u64 n = 0; n < number && !failed; n++) {
        u64 at = backwards ? number - 1 - n : n;
        u32 place[3] = {at % grid[0], at / grid[0] % grid[1], at / grid[0] / grid[1]};
        Group *g = &groups[at_once ? n : 0];
        start_group(m, g, start, place, count);
        run_group(m, program, g, count, backwards);
        failed = g->status == FAILED;
        for (u32 k = 0; !at_once && k < count; k++) executed += g->waves[k].executed;
    }
    if (!at_once) return executed;
    for (u64 n = number; n-- > 0 && !failed;)
        while (groups[n].status == PAUSED) run_group(m, program, &groups[n], count, backwards);
    for (u64 n = 0; n < number && !failed; n++) {
        Wave *w = groups[n].waves;
        enter(m, &groups[n]);
        write_back(m, w, &program[w->pc - 1]);
        for (u32 k = 0; k < count; k++) executed += groups[n].waves[k].executed;
    }
    return executed;
}

u64 size_of_wave(void) { return sizeof(Wave); }
u64 size_of_group(void) { return sizeof(Group); }
u64 size_of_tag(void) { return sizeof(Tag); }
u64 size_of_instruction(void) { return sizeof(Instruction); }
u64 size_of_machine(void) { return sizeof(Machine); }
