// The largest weight that any query gives each key on a CPU: `peak_attention` and `most_attended` of the reference.
//
// A thread takes STACK queries at a time: their logits with all keys of a head stay in its cache, where the sum of their
// exponentials is taken, and what they less its logarithm are is compared with the largest so far. A maximum is the same
// in any order, so results depend on neither threads nor batch.

extern "C" {

// queries [batch, heads, groups, queries, dim] and keys [batch, heads, keys, dim], fp32; valid [batch, heads, keys];
// asked [batch, queries]; sinks [heads, groups] or null; lse [batch, heads, groups, queries]: of all that a query attends
// to, null where that is these keys and the sink; out [batch, heads, keys]. softcap: 0 for none.
struct Peaks {
    const float *queries, *keys;
    const uint8_t *valid, *asked;
    const float *sinks, *lse;
    float* out;
    int64_t batch, heads, groups, number, length, dim, threads;
    float scale, softcap;
};
}

namespace {

struct Query {
    int64_t place;  // of its numbers: [heads, groups, queries] of a sequence
    float sink;
};

// The keys of a head and what is added to their logits. SIDE keys lie together: numbers a power of two apart would
// fall on the same lines of a cache.
class Columns {
    const Peaks& all;
    int64_t width;
    std::vector<float> columns, hidden;

    Native bent(Native logit) const {
        Native size = (Native)((NativeInts)logit & 0x7FFFFFFF), small = exponential(size * (-2 / all.softcap));
        Native turned = all.softcap * (1 - small) / (1 + small);
        return logit < 0 ? -turned : turned;
    }

  public:
    Columns(const Peaks& all, int64_t place)
        : all(all), width((all.length + SIDE - 1) / SIDE * SIDE), columns(all.dim * width), hidden(width) {
        for (int64_t key = 0; key < width; ++key) {
            bool real = key < all.length && all.valid[place * all.length + key];
            hidden[key] = real ? 0 : -__builtin_inff();
            float* own = &columns[key / SIDE * SIDE * all.dim + key % SIDE];
            for (int64_t i = 0; real && i < all.dim; ++i)
                own[i * SIDE] = all.keys[(place * all.length + key) * all.dim + i];
        }
    }

    int64_t size() const { return width; }

    // most [width]: becomes the larger of it and log softmax of each query; logits: room [STACK, width].
    void look(const Query* queries, int64_t number, const float* numbers, float* logits, float* most) const {
        const float* rows[STACK];
        for (int64_t one = 0; one < STACK; ++one) rows[one] = numbers + queries[std::min(one, number - 1)].place * all.dim;
        for (int64_t column = 0; column < width; column += SIDE) {
            Products sums = {};
            multiply(rows, &columns[column * all.dim], all.dim, sums);
#pragma GCC unroll 12
            for (int64_t one = 0; one < STACK; ++one)
                for (int64_t part = 0; part < SIDE; part += NATIVE) {
                    Native logit = sums[one][part / NATIVE] * all.scale;
                    logit = (all.softcap ? bent(logit) : logit) + native(&hidden[column + part]);
                    store_native(logits + one * width + column + part, logit);
                }
        }
        for (int64_t one = 0; one < number; ++one) {
            const float* own = logits + one * width;
            float whole = all.lse ? all.lse[queries[one].place] : mass(own, queries[one].sink);
            if (whole == -__builtin_inff()) continue;  // it sees nothing
            for (int64_t column = 0; column < width; column += NATIVE)
                store_native(most + column, larger(native(own + column) - whole, native(most + column)));
        }
    }

  private:
    // Log of the sum of e^logit of a row and its sink.
    float mass(const float* logits, float sink) const {
        const float top = largest_of(logits, width, sink);
        if (top == -__builtin_inff()) return top;
        Native sums[PIECES] = {};
        for (int64_t column = 0; column < width; column += WIDE)
            for (int p = 0; p < PIECES; ++p) sums[p] += exponential(native(logits + column + p * NATIVE) - top);
        return top + __builtin_logf(total(sums) + __builtin_expf(sink - top));
    }
};

}  // namespace

extern "C" void peak_attention(const Peaks* all) {
    for (int64_t place = 0; place < all->batch * all->heads; ++place) {
        const Columns columns(*all, place);
        const int64_t sequence = place / all->heads, head = place % all->heads, width = columns.size();
        std::vector<Query> queries;
        for (int64_t group = 0; group < all->groups; ++group)
            for (int64_t query = 0; query < all->number; ++query)
                if (all->asked[sequence * all->number + query])
                    queries.push_back({(place * all->groups + group) * all->number + query,
                                       all->sinks ? all->sinks[head * all->groups + group] : -__builtin_inff()});
        std::vector<float> most(width, -__builtin_inff());
#pragma omp parallel num_threads(all->threads)
        {
            std::vector<float> own(width, -__builtin_inff()), logits(STACK * width);
#pragma omp for nowait
            for (int64_t first = 0; first < int64_t(queries.size()); first += STACK) {
                int64_t number = std::min<int64_t>(STACK, queries.size() - first);
                columns.look(&queries[first], number, all->queries, logits.data(), own.data());
            }
#pragma omp critical
            for (int64_t key = 0; key < width; ++key) most[key] = std::max(most[key], own[key]);
        }
        for (int64_t key = 0; key < all->length; ++key) all->out[place * all->length + key] = __builtin_expf(most[key]);
    }
}
