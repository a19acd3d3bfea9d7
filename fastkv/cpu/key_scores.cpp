// Keys unlike the others, on a CPU: `fastkv.reference.keydiff_scores` by cosine, also of keys as they were before their
// rotary embedding, of which no copy is made. Sums depend on neither threads nor batch.

extern "C" {

// keys [batch, heads, number, dim], fp32, strides of all but the last axis; cos, sin [P, dim / 2] of what turns keys to a
// position, or none; positions, valid, out [batch, heads, number]. unit: whether the anchor is the mean of keys of length
// one.
struct Unlike {
    const float *keys, *cos, *sin;
    const int32_t* positions;
    const uint8_t* valid;
    float* out;
    int64_t batch, heads, number, dim, strides[3], unit, threads;
    float least;
};
}

namespace {

constexpr int64_t TOGETHER = 256;  // keys whose sum is taken in fp32

// One key, and what turns it back. A turn leaves lengths and angles as they are, so a factor of it has no effect.
struct Key {
    const float *row, *cos, *sin;
    int64_t half;

    Key(const Unlike& all, int64_t place, int64_t n) : cos(nullptr), sin(nullptr), half(all.dim / 2) {
        const int64_t* by = all.strides;
        row = all.keys + place / all.heads * by[0] + place % all.heads * by[1] + n * by[2];
        if (!all.cos) return;
        const int64_t at = all.positions[place * all.number + n] * half;
        cos = all.cos + at, sin = all.sin + at;
    }

    // Numbers [i, i + WIDE) of either half.
    void read(int64_t i, Floats& first, Floats& second) const {
        Floats one = floats(row + i), other = floats(row + half + i);
        first = cos ? one * floats(cos + i) + other * floats(sin + i) : one;
        second = cos ? other * floats(cos + i) - one * floats(sin + i) : other;
    }

    float length(float least) const {
        Floats sum = {};
        for (int64_t i = 0; i < 2 * half; i += WIDE) sum += floats(row + i) * floats(row + i);
        return std::max(__builtin_sqrtf(total_of(sum)), least);
    }
};

void score(const Unlike& all, int64_t place) {
    const int64_t half = all.dim / 2, first = place * all.number;
    std::vector<float> some(all.dim), lengths(all.number);
    std::vector<double> sum(all.dim);
    for (int64_t n = 0; n < all.number; ++n) {
        if (all.valid[first + n]) {
            const Key key(all, place, n);
            lengths[n] = key.length(all.least);
            const float weight = all.unit ? 1 / lengths[n] : 1;
            for (int64_t i = 0; i < half; i += WIDE) {
                Floats one, other;
                key.read(i, one, other);
                store(&some[i], floats(&some[i]) + weight * one);
                store(&some[half + i], floats(&some[half + i]) + weight * other);
            }
        }
        if ((n + 1) % TOGETHER == 0 || n + 1 == all.number)
            for (int64_t i = 0; i < all.dim; ++i) sum[i] += some[i], some[i] = 0;
    }
    double size = 0;
    for (double one : sum) size += one * one;
    size = size > 0 ? 1 / __builtin_sqrt(size) : 0;
    for (int64_t i = 0; i < all.dim; ++i) some[i] = float(sum[i] * size);
    for (int64_t n = 0; n < all.number; ++n) {
        if (!all.valid[first + n]) {
            all.out[first + n] = 0;
            continue;
        }
        Floats dot = {};
        for (int64_t i = 0; i < half; i += WIDE) {
            Floats one, other;
            Key(all, place, n).read(i, one, other);
            dot += one * floats(&some[i]) + other * floats(&some[half + i]);
        }
        all.out[first + n] = -total_of(dot) / lengths[n];
    }
}

}  // namespace

extern "C" void unlike(const Unlike* all) {
#pragma omp parallel for num_threads(all->threads) schedule(dynamic)
    for (int64_t place = 0; place < all->batch * all->heads; ++place) score(*all, place);
}
