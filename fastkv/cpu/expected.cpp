// What queries to come are like, and what they are expected to give each key, on a CPU: `queries_ahead` and
// `expected_attention` of the reference. A head of the queries is one thread's work, so sums depend on neither threads
// nor batch.

extern "C" {

// queries [batch, heads, number, dim] fp32, strides of all but the last axis; cos, sin [P, dim / 2] of what turns them to
// a position, without a factor, or none: then nothing is turned; positions, valid [batch, number]; mean [batch, heads,
// dim], covariance [batch, heads, dim, dim], count [batch].
struct Queries {
    const float *queries, *cos, *sin;
    const int32_t* positions;
    const uint8_t* valid;
    float *mean, *covariance;
    int64_t *count, batch, heads, number, dim, threads, strides[3], horizon, sinks;
    float factor;
};

// keys [batch, heads, number, dim] and values, fp32, strides as above; mean [batch, heads, groups, dim], covariance
// [batch, heads, groups, dim, dim], count [batch]; memory, valid, out [batch, heads, number].
struct Expected {
    const float *keys, *values, *mean, *covariance;
    const int64_t* count;
    const float* memory;
    const uint8_t* valid;
    float* out;
    int64_t batch, heads, groups, number, dim, value_dim, threads, key_strides[3], value_strides[3];
    float scale, epsilon;
};
}

namespace {

constexpr int64_t TOGETHER = 128;  // queries whose products are summed before they are added to the others'

// Mean and covariance of a head's queries, each less one of them: what is far away from all but itself has no digits left.
class Spread {
    const Queries& all;
    const int64_t batch, place, half;
    std::vector<float> origin, tile, some, products, turn;  // tile [dim / SIDE, TOGETHER, SIDE]; turn: cos, then sin
    std::vector<double> sum;

    // Query n as it was before its rotation, which had a factor.
    void read(int64_t n, float* to) const {
        const int64_t* by = all.strides;
        const float* row = all.queries + batch * by[0] + place % all.heads * by[1] + n * by[2];
        const int64_t turn = all.cos ? all.positions[batch * all.number + n] * half : 0;
        for (int64_t i = 0; i < half; i += WIDE) {
            Floats one = floats(row + i), other = floats(row + half + i);
            if (all.cos) {
                Floats cos = floats(all.cos + turn + i) / all.factor, sin = floats(all.sin + turn + i) / all.factor;
                Floats first = one;
                one = first * cos + other * sin;
                other = other * cos - first * sin;
            }
            store(to + i, one);
            store(to + half + i, other);
        }
    }

    void put(const float* row, int64_t at) {
        for (int64_t i = 0; i < all.dim; i += WIDE) {
            Floats away = floats(row + i) - floats(&origin[i]);
            store(&tile[(i / SIDE * TOGETHER + at) * SIDE + i % SIDE], away);
            store(&some[i], floats(&some[i]) + away);
        }
    }

    const float* column(int64_t i) const { return &tile[i / SIDE * TOGETHER * SIDE + i % SIDE]; }

    // The first `number` of the tile join the sums; of the covariance, tiles that have something right of the diagonal.
    void add(int64_t number) {
        for (int64_t i = 0; i < all.dim; ++i) sum[i] += some[i], some[i] = 0;
        for (int64_t first = 0; first < all.dim; first += STACK) {
            const float* rows[STACK];
            for (int64_t one = 0; one < STACK; ++one) rows[one] = column(std::min(first + one, all.dim - 1));
            for (int64_t side = first / SIDE * SIDE; side < all.dim; side += SIDE) {
                Products sums = {};
                multiply<SIDE>(rows, column(side), number, sums);
                for (int64_t one = 0; one < std::min(STACK, all.dim - first); ++one)
                    for (int64_t part = 0; part < ABREAST; ++part) {
                        float* to = &products[(first + one) * all.dim + side + part * NATIVE];
                        store_native(to, native(to) + sums[one][part]);
                    }
            }
        }
    }

  public:
    Spread(const Queries& all, int64_t place)
        : all(all), batch(place / all.heads), place(place), half(all.dim / 2), origin(all.dim),
          tile(all.dim * TOGETHER), some(all.dim), products(all.dim * all.dim), sum(all.dim) {}

    // The mean turn of the positions behind the newest, with its factor.
    void look_ahead(int64_t newest) {
        std::vector<double> total(all.dim);
        turn.resize(all.dim);
        for (int64_t at = newest + 1; at <= newest + all.horizon; ++at)
            for (int64_t i = 0; i < half; ++i) {
                total[i] += all.cos[at * half + i];
                total[half + i] += all.sin[at * half + i];
            }
        for (int64_t i = 0; i < all.dim; ++i) turn[i] = float(total[i] / all.horizon * all.factor);
    }

    void turned(float* row) const {
        for (int64_t i = 0; i < half; ++i) {
            const float first = row[i], second = row[half + i];
            row[i] = first * turn[i] - second * turn[half + i];
            row[half + i] = second * turn[i] + first * turn[half + i];
        }
    }

    static void transpose(float* matrix, int64_t dim) {
        for (int64_t i = 0; i < dim; ++i)
            for (int64_t j = 0; j < i; ++j) std::swap(matrix[i * dim + j], matrix[j * dim + i]);
    }

    void find() {
        std::vector<float> row(all.dim);
        int64_t count = 0, newest = -1;
        for (int64_t n = 0; n < all.number; ++n) {
            if (!all.valid[batch * all.number + n]) continue;
            const int64_t position = all.positions[batch * all.number + n];
            newest = std::max(newest, position);
            if (position < all.sinks) continue;
            read(n, row.data());
            if (!count) origin = row;
            put(row.data(), count++ % TOGETHER);
            if (count % TOGETHER == 0) add(TOGETHER);
        }
        if (count % TOGETHER) add(count % TOGETHER);
        float *mean = all.mean + place * all.dim, *covariance = all.covariance + place * all.dim * all.dim;
        const double each = 1.0 / std::max<int64_t>(count, 1);
        for (int64_t i = 0; i < all.dim; ++i) mean[i] = float(origin[i] + (sum[i] *= each));
        for (int64_t i = 0; i < all.dim; ++i)
            for (int64_t j = i; j < all.dim; ++j)
                covariance[i * all.dim + j] = covariance[j * all.dim + i] =
                    float(products[i * all.dim + j] * each - sum[i] * sum[j]);
        all.count[batch] = count;  // of every head the same
        if (!all.cos) return;
        look_ahead(newest);
        turned(mean);
        for (int once = 0; once < 2; ++once) {  // C is symmetric, so R C R^T = (R (R C)^T)^T
            for (int64_t i = 0; i < all.dim; ++i) turned(covariance + i * all.dim);
            if (!once) transpose(covariance, all.dim);
        }
    }
};

// Of one head of the queries: the logarithm of what each key is expected to receive, times a factor of the head's;
// -inf of those that are not valid.
void expect(const Expected& all, int64_t head, float* logits) {
    const int64_t place = head / all.groups, dim = all.dim, *by = all.key_strides;
    const float *mean = all.mean + head * dim, *covariance = all.covariance + head * dim * dim;
    const float* keys = all.keys + place / all.heads * by[0] + place % all.heads * by[1];
    std::vector<float> columns(dim * dim);  // [dim / SIDE, dim, SIDE]
    for (int64_t i = 0; i < dim; ++i)
        for (int64_t j = 0; j < dim; ++j)
            columns[(j / SIDE * dim + i) * SIDE + j % SIDE] = covariance[i * dim + j] * (all.scale / 2);
    for (int64_t first = 0; first < all.number; first += STACK) {
        const float* rows[STACK];
        Native totals[STACK] = {};
        for (int64_t one = 0; one < STACK; ++one) rows[one] = keys + std::min(first + one, all.number - 1) * by[2];
        for (int64_t side = 0; side < dim; side += SIDE) {
            Products sums = {};
            multiply(rows, &columns[side * dim], dim, sums);
            for (int64_t one = 0; one < STACK; ++one)
                for (int64_t part = 0; part < ABREAST; ++part) {
                    const int64_t at = side + part * NATIVE;
                    totals[one] += (sums[one][part] + native(mean + at)) * native(rows[one] + at);
                }
        }
        for (int64_t one = 0; one < std::min(STACK, all.number - first); ++one) {
            float total = 0;
            for (int lane = 0; lane < NATIVE; ++lane) total += totals[one][lane];
            logits[first + one] = all.valid[place * all.number + first + one] ? all.scale * total : -__builtin_inff();
        }
    }
}

// attention += the softmax of logits [width], which are overwritten, / groups; nothing where no key is valid.
void share(float* logits, int64_t width, int64_t groups, float* attention) {
    const float top = largest_of(logits, width, -__builtin_inff());
    if (top == -__builtin_inff()) return;
    double total = 0;
    for (int64_t n = 0; n < width; n += NATIVE) {
        store_native(logits + n, exponential(native(logits + n) - top));
        for (int lane = 0; lane < NATIVE; ++lane) total += logits[n + lane];
    }
    for (int64_t n = 0; n < width; n += NATIVE)
        store_native(attention + n, native(attention + n) + native(logits + n) * float(1 / (total * groups)));
}

// The length of a value.
float length(const Expected& all, int64_t place, int64_t n) {
    const int64_t* by = all.value_strides;
    const float* row = all.values + place / all.heads * by[0] + place % all.heads * by[1] + n * by[2];
    Native sums = {};
    int64_t i = 0;
    for (; i + NATIVE <= all.value_dim; i += NATIVE) sums += native(row + i) * native(row + i);
    float sum = 0;
    for (int lane = 0; lane < NATIVE; ++lane) sum += sums[lane];
    for (; i < all.value_dim; ++i) sum += row[i] * row[i];
    return __builtin_sqrtf(sum);
}

}  // namespace

extern "C" void spread(const Queries* all) {
#pragma omp parallel for num_threads(all->threads) schedule(dynamic)
    for (int64_t place = 0; place < all->batch * all->heads; ++place) Spread(*all, place).find();
}

extern "C" void expected(const Expected* all) {
    const int64_t places = all->batch * all->heads, width = (all->number + NATIVE - 1) / NATIVE * NATIVE;
    std::vector<float> logits(places * all->groups * width, -__builtin_inff());
#pragma omp parallel for num_threads(all->threads) schedule(dynamic)
    for (int64_t head = 0; head < places * all->groups; ++head) expect(*all, head, &logits[head * width]);
#pragma omp parallel for num_threads(all->threads) schedule(dynamic)
    for (int64_t place = 0; place < places; ++place) {
        std::vector<float> attention(width);
        for (int64_t member = 0; member < all->groups; ++member)
            share(&logits[(place * all->groups + member) * width], width, all->groups, attention.data());
        for (int64_t n = 0, at = place * all->number; n < all->number; ++n, ++at) {
            const bool known = all->valid[at] && all->count[place / all->heads] > 0;
            const float told = known ? (attention[n] + all->epsilon) * length(*all, place, n) : 0;
            all->out[at] = known ? std::max(told, __FLT_MIN__) : all->memory[at];
        }
    }
}
