// The largest share of what a query attends to that any query gives each key: `most_attended` of the reference.
//
// A thread takes STACK queries at a time: their logits with SIDE keys of a head, less the logarithm of all that each
// attends to, are compared with the largest so far. A maximum is the same in any order, so results depend on neither
// threads nor batch.

extern "C" {

// queries [batch, heads, groups, queries, dim], keys [batch, heads, keys, dim], lse [batch, heads, groups, queries], fp32;
// out [batch, heads, keys]. softcap: 0 for none.
struct MostAttended {
    const float *queries, *keys, *lse;
    float* out;
    int64_t batch, heads, groups, number, length, dim, threads;
    float scale, softcap;
};
}

namespace {

// The keys of a head. SIDE keys lie together: numbers a power of two apart would fall on the same lines of a cache.
class Columns {
    const MostAttended& all;
    int64_t width;
    std::vector<float> columns;

    Native bent(Native logit) const {
        Native size = (Native)((NativeInts)logit & 0x7FFFFFFF), small = exponential(size * (-2 / all.softcap));
        Native turned = all.softcap * (1 - small) / (1 + small);
        return logit < 0 ? -turned : turned;
    }

  public:
    Columns(const MostAttended& all, int64_t place)
        : all(all), width((all.length + SIDE - 1) / SIDE * SIDE), columns(all.dim * width) {
        for (int64_t key = 0; key < all.length; ++key)
            for (int64_t i = 0; i < all.dim; ++i)
                columns[(key / SIDE * all.dim + i) * SIDE + key % SIDE] = all.keys[(place * all.length + key) * all.dim + i];
    }

    int64_t size() const { return width; }

    // most [width]: becomes the larger of it and the log of each query's share; queries [number, dim], lse [number].
    void look(const float* queries, const float* lse, int64_t number, float* most) const {
        const float* rows[STACK];
        for (int64_t one = 0; one < STACK; ++one) rows[one] = queries + std::min(one, number - 1) * all.dim;
        for (int64_t column = 0; column < width; column += SIDE) {
            Products sums = {};
            multiply(rows, &columns[column * all.dim], all.dim, sums);
            for (int64_t one = 0; one < number; ++one)
                for (int64_t part = 0; part < SIDE; part += NATIVE) {
                    Native logit = sums[one][part / NATIVE] * all.scale;
                    float* best = most + column + part;
                    store_native(best, larger((all.softcap ? bent(logit) : logit) - lse[one], native(best)));
                }
        }
    }
};

}  // namespace

extern "C" void most_attended(const MostAttended* all) {
    const int64_t queries = all->groups * all->number;
    for (int64_t place = 0; place < all->batch * all->heads; ++place) {
        const Columns columns(*all, place);
        const int64_t width = columns.size();
        std::vector<float> most(width, -__builtin_inff());
#pragma omp parallel num_threads(all->threads)
        {
            std::vector<float> own(width, -__builtin_inff());
#pragma omp for nowait
            for (int64_t first = 0; first < queries; first += STACK) {
                const int64_t at = place * queries + first, number = std::min<int64_t>(STACK, queries - first);
                columns.look(all->queries + at * all->dim, all->lse + at, number, own.data());
            }
#pragma omp critical
            for (int64_t key = 0; key < width; ++key) most[key] = std::max(most[key], own[key]);
        }
        for (int64_t key = 0; key < all->length; ++key) all->out[place * all->length + key] = __builtin_expf(most[key]);
    }
}
