// Which tokens stay, on a CPU: `candidates`, `needed_scores` and `select_each`, as in the reference. An operator of torch
// costs more than what it does to few numbers, most of all the first time after a layer's matrices have filled the
// caches.

extern "C" {

// What slots hold, positions and memory (or none) [batch, heads, slots] and lengths [batch, heads]; then of a block valid
// [batch, block] and seen [batch] before it. Of both, [batch, heads, slots + block]: real, guard, and all_positions and
// all_memory, or none.
struct Candidates {
    const int32_t *positions, *lengths;
    const float* memory;
    const uint8_t* valid;
    const int64_t* seen;
    int32_t* all_positions;
    uint8_t *real, *guard;
    float* all_memory;
    int64_t batch, heads, slots, block, sinks, recent;
};

// All [places, number]: unlike, expected and read, the last two or none; valid; out.
struct Needed {
    const float *unlike, *expected, *read;
    const uint8_t* valid;
    float* out;
    int64_t places, number, threads;
};

// scores, positions, valid, guard, kept [places, number]; tokens, counts [places].
struct Choosing {
    const float* scores;
    const int32_t* positions;
    const uint8_t *valid, *guard;
    const int64_t* tokens;
    uint8_t* kept;
    int64_t *counts, places, number, threads;
};
}

namespace {

constexpr int64_t WORTH = 1 << 13;  // tokens from which on threads are started

// out += the z-scores of a head's numbers, or, of what is expected, of their logarithms. Where `known`, 0 is nothing
// known, and counts as the mean of the others.
void add_z_scores(const float* row, bool known, bool logs, const uint8_t* valid, int64_t number, float* out) {
    std::vector<double> scores(number);
    double sum = 0, squares = 0;
    int64_t count = 0, tokens = 0;
    for (int64_t n = 0; n < number; ++n) {
        tokens += valid[n];
        if (!valid[n] || (known && !(row[n] > 0))) continue;
        sum += scores[n] = logs ? __builtin_logf(row[n]) : row[n];
        ++count;
    }
    const double mean = sum / std::max<int64_t>(count, 1);
    for (int64_t n = 0; n < number; ++n) {
        scores[n] = valid[n] && !(known && !(row[n] > 0)) ? scores[n] - mean : 0;
        squares += scores[n] * scores[n];
    }
    const double deviation = __builtin_sqrt(squares / std::max<int64_t>(tokens, 1));
    if (deviation <= 1e-3 * __builtin_fabs(mean)) return;
    for (int64_t n = 0; n < number; ++n) out[n] += float(scores[n] / deviation);
}

struct Rank {
    int64_t rank, index;
    bool operator<(const Rank& other) const { return rank != other.rank ? rank < other.rank : index < other.index; }
};

// Ascends in the order in which tokens stay: protected ones, then those of higher score, then of lower position.
int64_t rank_of(float score, int32_t position, bool guarded) {
    score = score >= -__FLT_MAX__ ? std::min(score, __FLT_MAX__) + 0.0f : -__FLT_MAX__;  // NaN is the lowest
    const int64_t bits = bits_of(score), ascending = bits ^ (bits < 0 ? 0x7FFFFFFF : 0);
    return position - ascending * (int64_t(1) << 30) - (guarded ? int64_t(1) << 62 : 0);
}

void choose_of(const Choosing& all, int64_t place) {
    const int64_t start = place * all.number;
    std::vector<Rank> ranks;
    ranks.reserve(all.number);
    for (int64_t n = start; n < start + all.number; ++n)
        if (all.valid[n]) ranks.push_back({rank_of(all.scores[n], all.positions[n], all.guard[n]), n});
    const int64_t stay = std::clamp<int64_t>(all.tokens[place], 0, ranks.size());
    if (stay < int64_t(ranks.size())) std::nth_element(ranks.begin(), ranks.begin() + stay, ranks.end());
    std::fill_n(all.kept + start, all.number, 0);
    for (int64_t one = 0; one < stay; ++one) all.kept[ranks[one].index] = 1;
    all.counts[place] = stay;
}

}  // namespace

extern "C" void candidates(const Candidates* all) {
    const int64_t number = all->slots + all->block;
    for (int64_t place = 0; place < all->batch * all->heads; ++place) {
        const int64_t batch = place / all->heads, begin = place * all->slots, at = place * number;
        const uint8_t* valid = all->valid + batch * all->block;
        int64_t seen = all->seen[batch], end = seen;
        for (int64_t n = 0; n < all->block; ++n) end += valid[n] != 0;
        for (int64_t n = 0; n < number; ++n) {
            const bool old = n < all->slots, real = old ? n < all->lengths[place] : valid[n - all->slots];
            if (!old) seen += real;
            const int64_t position = old ? all->positions[begin + n] : seen - 1;
            all->real[at + n] = real;
            all->guard[at + n] = position < all->sinks || position >= end - all->recent;
            if (all->all_positions) all->all_positions[at + n] = int32_t(position);
            if (all->all_memory) all->all_memory[at + n] = old ? all->memory[begin + n] : 0;
        }
    }
}

extern "C" void needed(const Needed* all) {
#pragma omp parallel for num_threads(all->threads) if (all->places * all->number > WORTH)
    for (int64_t place = 0; place < all->places; ++place) {
        const int64_t start = place * all->number;
        std::fill_n(all->out + start, all->number, 0.0f);
        auto add = [&](const float* rows, bool known, bool logs) {
            if (rows) add_z_scores(rows + start, known, logs, all->valid + start, all->number, all->out + start);
        };
        add(all->unlike, false, false);
        add(all->expected, true, true);
        add(all->read, true, false);
    }
}

extern "C" void choose(const Choosing* all) {
#pragma omp parallel for num_threads(all->threads) if (all->places * all->number > WORTH)
    for (int64_t place = 0; place < all->places; ++place) choose_of(*all, place);
}
