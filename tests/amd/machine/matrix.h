/* Matrix instructions: D = A * B + C on M x M, depth K, spread over the registers of 64 lanes.

   The maps of lanes and registers to rows and columns are those of the ISA documents ("Dense
   matrix arithmetic instructions"): lane l has row (A) or column (B) l % M, and K / (64 / M)
   consecutive elements from (l / M) times as many on. Of D it has column l % M; register r is row
   4 * (l / 16) + r for M = 16 and 8 * (r / 4) + 4 * (l / 32) + r % 4 for M = 32.
   EXEC does not matter. Sums are exact to double precision and rounded once: the order of the
   hardware's sums is not documented. */

enum { ELEMENT_BF16, ELEMENT_F16, ELEMENT_F32, ELEMENT_FP8 };

static double element(const Machine *m, const Wave *w, const Operand *o, int kind, int lane, int j)
{
    if (kind == ELEMENT_F32) return as_f32(w->v[o->index + j][lane]);
    if (kind == ELEMENT_FP8)
        return from_fp8(w->v[o->index + j / 4][lane] >> 8 * (j & 3) & 255, m->fnuz);
    u32 bits = w->v[o->index + j / 2][lane] >> 16 * (j & 1) & 0xffff;
    return kind == ELEMENT_BF16 ? from_bf16(bits) : from_f16(bits);
}

/* size: M; immediate: K; format: the type of the elements. */
static void matrix(Machine *m, Wave *w, const Instruction *i)
{
    static double a[32][128], b[128][32], sum[32][32];
    int side = i->size, depth = (int)i->immediate, each = depth * side / LANES;
    int registers = side * side / LANES;
    u32 c[16][LANES];
    for (int l = 0; l < LANES; l++)
        for (int j = 0; j < each; j++) {
            int k = each * (l / side) + j;
            a[l % side][k] = element(m, w, &i->source[0], i->format, l, j);
            b[k][l % side] = element(m, w, &i->source[1], i->format, l, j);
        }
    for (int row = 0; row < side; row++) {
        for (int column = 0; column < side; column++) sum[row][column] = 0;
        for (int k = 0; k < depth; k++)
            for (int column = 0; column < side; column++)
                sum[row][column] += a[row][k] * b[k][column];
    }
    /* D may have some of C's registers: all of C is read first. */
    for (int r = 0; r < registers; r++)
        read_word(w, &i->source[2], i->source[2].kind == VECTOR ? r : 0, c[r]);
    for (int r = 0; r < registers; r++)
        for (int l = 0; l < LANES; l++) {
            int row = side == 16 ? 4 * (l / 16) + r : 8 * (r / 4) + 4 * (l / 32) + r % 4;
            double x = sum[row][l % side] + (double)as_f32(c[r][l]);
            w->v[i->result.index + r][l] = as_u32((f32)x);
        }
}
