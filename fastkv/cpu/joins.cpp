// Tokens that leave join their head's centroids, on a CPU: `fastkv.reference.Centroids.add`, in place.
//
// An operator of torch costs more than what it does to few tokens, and many tokens join in dozens of rounds. A head is
// one row after another of means, keys and then values, each in whole vectors; sums depend on neither threads nor batch.

extern "C" {

// count, spread [places, num]; keys [places, num, key_dim] and values, fp32 or, where `halves`, bf16; fresh_keys [batch,
// heads, fresh, key_dim] and values, fp32, with strides of all but their last axis, of which those join that are valid
// and not kept, in the order of their positions [places, fresh]. The rest: constants of the reference.
struct Joining {
    float *count, *spread;
    void *keys, *values;
    const float *fresh_keys, *fresh_values;
    const int32_t* positions;
    const uint8_t *valid, *kept;
    int64_t key_strides[3], value_strides[3];
    int64_t batch, heads, num, fresh, key_dim, value_dim, halves, threads;
    int64_t block, seeds, roomy, choices, fine, medium, settled, step, turn;
};
}

namespace {

inline int64_t whole(int64_t dim) { return (dim + WIDE - 1) / WIDE * WIDE; }

class Parts {
    const Joining& all;
    int64_t place, keys, width, used;  // keys: numbers before the values of a row
    // partners: the points of those that others may join, SIDE of them together (as in most_attended.cpp); inverse: 1 / count.
    std::vector<float> count, spread, means, middle, points, partners, squares, inverse, tokens, moved, before;
    float key_unit, value_unit;
    std::vector<int64_t> seeds, listed, nearest;  // rows of seeds, of other tokens, and the part that each of these joins

    struct Pair {
        float cost;
        int64_t mover, partner;
    };

    float* mean(int64_t part) { return &means[part * width]; }
    const float* mean(int64_t part) const { return &means[part * width]; }

    // Of columns [from, to): what is away from the mean of all tokens, in units of their deviation, which it returns.
    float standardise(int64_t from, int64_t to, float total) {
        for (int64_t i = from; i < to; i += WIDE) {
            Floats sum = {};
            for (int64_t part = 0; part < used; ++part) sum += count[part] * floats(mean(part) + i);
            store(&middle[i], sum / total);
        }
        float variance = 0;
        for (int64_t part = 0; part < used; ++part) {
            Floats sum = {};
            for (int64_t i = from; i < to; i += WIDE) {
                Floats away = floats(mean(part) + i) - floats(&middle[i]);
                store(&points[part * width + i], away);
                sum += away * away;
            }
            variance += count[part] * total_of(sum);
        }
        float unit = __builtin_sqrtf(1 / std::max(variance / total, __FLT_MIN__));
        for (int64_t part = 0; part < used; ++part)
            for (int64_t i = from; i < to; i += WIDE)
                store(&points[part * width + i], floats(&points[part * width + i]) * unit);
        return unit;
    }

    void standardise() {
        points.resize(used * width);
        middle.resize(width);
        float total = 0;
        for (int64_t part = 0; part < used; ++part) total += count[part];
        key_unit = standardise(0, keys, total);
        value_unit = standardise(keys, width, total);
    }

    // The points of `number` parts, part_of(column), as `partners`, in whole vectors, with their squares and 1 / count.
    // Columns without a part are infinitely far away.
    template <typename Column>
    void line_up(int64_t number, const Column& part_of) {
        const int64_t columns = (number + SIDE - 1) / SIDE * SIDE;
        partners.assign(width * columns, 0.0f);
        squares.assign(columns, __builtin_inff());
        inverse.assign(columns, 1.0f);
        for (int64_t column = 0; column < number; ++column) {
            int64_t part = part_of(column);
            float* own = &partners[column / SIDE * SIDE * width + column % SIDE];
            for (int64_t i = 0; i < width; ++i) own[i * SIDE] = points[part * width + i];
            squares[column] = square(&points[part * width]);
            inverse[column] = 1 / count[part];
        }
    }

    // Of all parts, each counted once.
    void line_up() {
        std::fill_n(count.begin(), used, 1.0f);
        line_up(used, [](int64_t column) { return column; });
    }

    // A row in units of the deviations, away from the mean of all.
    void place_at(const float* row, float* point) const {
        for (int64_t i = 0; i < width; i += WIDE)
            store(point + i, (floats(row + i) - floats(&middle[i])) * (i < keys ? key_unit : value_unit));
    }

    float square(const float* point) const {
        Floats sum = {};
        for (int64_t i = 0; i < width; i += WIDE) sum += floats(point + i) * floats(point + i);
        return total_of(sum);
    }

    // The cheapest partner of STACK movers, by their points and 1 / count: its column.
    void cheapest(const float* const* rows, const float* shares, Pair* best) const {
        float own[STACK];
        Native least[STACK];
        NativeInts which[STACK] = {};
        for (int64_t one = 0; one < STACK; ++one) {
            own[one] = square(rows[one]);
            least[one] = Native{} + __builtin_inff();
        }
        for (int64_t column = 0; column < int64_t(squares.size()); column += SIDE) {
            Products products = {};
            multiply(rows, &partners[column * width], width, products);
#pragma GCC unroll 12
            for (int64_t one = 0; one < STACK; ++one)
                for (int64_t part = 0; part < SIDE; part += NATIVE) {
                    int64_t at = column + part;
                    Native distance = own[one] + native(&squares[at]) - 2 * products[one][part / NATIVE];
                    distance = distance < 0 ? Native{} : distance;
                    Native cost = distance / (shares[one] + native(&inverse[at]));
                    NativeInts better = cost < least[one];  // not where it is no number
                    least[one] = better ? cost : least[one];
                    which[one] = better ? NativeInts{} + int32_t(at) : which[one];
                }
        }
        for (int64_t one = 0; one < STACK; ++one) {
            best[one].cost = __builtin_inff();
            best[one].partner = 0;  // where no cost is finite, no token may be lost
            for (int64_t lane = 0; lane < NATIVE; ++lane) {
                int64_t partner = which[one][lane] + lane;
                bool earlier = least[one][lane] == best[one].cost && partner < best[one].partner;
                if (!(least[one][lane] < best[one].cost) && !earlier) continue;
                best[one].cost = least[one][lane];
                best[one].partner = partner;
            }
        }
    }

    void copy(int64_t token, float* to) const {
        auto row = [&](const float* rows, const int64_t* by) {
            return rows + place / all.heads * by[0] + place % all.heads * by[1] + token * by[2];
        };
        std::copy_n(row(all.fresh_keys, all.key_strides), all.key_dim, to);
        std::copy_n(row(all.fresh_values, all.value_strides), all.value_dim, to + keys);
    }

    void merge(const std::vector<Pair>& pairs) {
        tokens = count, moved = spread;
        before.assign(mean(0), mean(used));
        for (const auto& pair : pairs) tokens[pair.partner] += count[pair.mover];
        auto share = [&](int64_t part, int64_t of) { return count[part] / tokens[of]; };
        std::vector<uint8_t> grown(used), gone(used);
        for (const auto& pair : pairs) {
            if (!grown[pair.partner])
                for (int64_t i = 0; i < width; ++i) mean(pair.partner)[i] *= share(pair.partner, pair.partner);
            grown[pair.partner] = gone[pair.mover] = true;
            for (int64_t i = 0; i < width; ++i)
                mean(pair.partner)[i] += share(pair.mover, pair.partner) * before[pair.mover * width + i];
        }
        auto distance = [&](int64_t part, int64_t to) {  // of keys, squared, mean over coordinates
            Floats sum = {};
            for (int64_t i = 0; i < keys; i += WIDE) {
                Floats away = floats(&before[part * width + i]) - floats(mean(to) + i);
                sum += away * away;
            }
            return total_of(sum) / all.key_dim;
        };
        for (int64_t part = 0; part < used; ++part)
            if (grown[part]) moved[part] += count[part] * distance(part, part);
        for (const auto& pair : pairs)
            moved[pair.partner] += spread[pair.mover] + count[pair.mover] * distance(pair.mover, pair.partner);
        int64_t left = 0;
        for (int64_t part = 0; part < used; ++part) {
            if (gone[part]) continue;
            count[left] = tokens[part];
            spread[left] = moved[part];
            if (left != part) std::copy(mean(part), mean(part) + width, mean(left));
            ++left;
        }
        used = left;
    }

    uint16_t half_of(float number, int64_t part, int64_t i) const {
        uint32_t threshold = uint32_t(int64_t(count[part]) * all.step + i * all.turn) >> 16;
        return (uint32_t(bits_of(number)) + threshold) >> 16;
    }

    void put(void* to, int64_t from, int64_t dim) {
        for (int64_t part = 0; part < all.num; ++part)
            for (int64_t i = 0; i < dim; ++i) {
                float number = part < used ? mean(part)[from + i] : 0;
                int64_t at = (place * all.num + part) * dim + i;
                if (all.halves)
                    static_cast<uint16_t*>(to)[at] = part < used ? half_of(number, part, i) : 0;
                else
                    static_cast<float*>(to)[at] = number;
            }
    }

    float stored(const void* from, int64_t at) const {
        return all.halves ? of_bits(int32_t(uint32_t(static_cast<const uint16_t*>(from)[at]) << 16))
                          : static_cast<const float*>(from)[at];
    }

  public:
    // Room for so many.
    Parts(const Joining& all, int64_t place, int64_t room)
        : all(all), place(place), keys(whole(all.key_dim)), width(keys + whole(all.value_dim)), used(0), count(room),
          spread(room), means(room * width) {}

    void take(const Parts& others) {
        std::copy_n(others.mean(0), others.used * width, mean(used));
        std::copy_n(others.count.begin(), others.used, count.begin() + used);
        std::copy_n(others.spread.begin(), others.used, spread.begin() + used);
        used += others.used;
    }

    // These tokens, or as many seeds as there is room for, lined up for the others.
    void take_tokens(const int64_t* first, const int64_t* end) {
        const int64_t fresh = end - first, most = std::min<int64_t>(fresh, count.size());
        for (int64_t token = 0; token < fresh; ++token) {
            const bool seed = used < most && token == used * fresh / most;
            (seed ? seeds : listed).push_back(first[token]);
            if (!seed) continue;
            copy(first[token], mean(used));
            count[used] = 1;
            spread[used++] = 0;
        }
        if (listed.empty()) return;
        nearest.resize(listed.size() + STACK);
        standardise();
        line_up();
    }

    void take_centroids() {
        for (int64_t part = place * all.num; part < (place + 1) * all.num; ++part) {
            if (!(all.count[part] > 0)) continue;
            for (int64_t i = 0; i < all.key_dim; ++i) mean(used)[i] = stored(all.keys, part * all.key_dim + i);
            for (int64_t i = 0; i < all.value_dim; ++i) mean(used)[keys + i] = stored(all.values, part * all.value_dim + i);
            count[used] = all.count[part];
            spread[used++] = all.spread[part];
        }
    }

    int64_t number() const { return used; }
    int64_t waiting() const { return listed.size(); }  // for their nearest seed

    // STACK tokens from this one on find it.
    void choose(int64_t token) {
        std::vector<float> buffer(STACK * width);
        const float* rows[STACK];
        float shares[STACK];
        Pair best[STACK];
        for (int64_t one = 0; one < STACK; ++one) {
            float* point = &buffer[one * width];
            rows[one] = point;
            shares[one] = 1;
            copy(listed[std::min<int64_t>(token + one, listed.size() - 1)], point);
            place_at(point, point);
        }
        cheapest(rows, shares, best);
        for (int64_t one = 0; one < STACK; ++one) nearest[token + one] = best[one].partner;
    }

    // For tokens that choose anew, now among the means.
    void meet() {
        for (int64_t part = 0; part < used; ++part) place_at(mean(part), &points[part * width]);
        line_up();
    }

    // Seeds [first, end) become the mean of themselves and the tokens that chose them; their spread counts in the end.
    void gather(int64_t first, int64_t end, bool last) {
        std::vector<float> row(width);
        auto each = [&](const auto& what) {
            auto one = [&](int64_t token, int64_t part) {
                copy(token, row.data());
                what(part, mean(part));
            };
            for (int64_t part = first; part < end; ++part) one(seeds[part], part);
            for (size_t token = 0; token < listed.size(); ++token)
                if (nearest[token] >= first && nearest[token] < end) one(listed[token], nearest[token]);
        };
        std::fill(mean(first), mean(end), 0.0f);
        std::fill(count.begin() + first, count.begin() + end, 0.0f);
        each([&](int64_t part, float* sum) {
            ++count[part];
            for (int64_t i = 0; i < width; i += WIDE) store(sum + i, floats(sum + i) + floats(&row[i]));
        });
        for (int64_t part = first; part < end; ++part)
            for (int64_t i = 0; i < width; i += WIDE) store(mean(part) + i, floats(mean(part) + i) / count[part]);
        if (!last) return;
        each([&](int64_t part, const float* middle) {
            Floats sum = {};
            for (int64_t i = 0; i < keys; i += WIDE) {
                Floats away = floats(&row[i]) - floats(middle + i);
                sum += away * away;
            }
            spread[part] += total_of(sum) / all.key_dim;
        });
    }

    // Every second part, from `half` on, may join the part of the others that costs least; the cheapest `joins` do.
    void round(int64_t joins, int64_t half) {
        standardise();
        line_up((used + half) / 2, [&](int64_t column) { return 1 - half + 2 * column; });
        const int64_t movers = (used - half + 1) / 2;
        std::vector<Pair> pairs(movers + STACK);
        for (int64_t first = 0; first < movers; first += STACK) {
            const float* rows[STACK];
            float shares[STACK];
            for (int64_t one = 0; one < STACK; ++one) {
                const int64_t part = std::min(half + 2 * (first + one), used - 1);  // the last tile may be cut short
                pairs[first + one].mover = part;
                rows[one] = &points[part * width];
                shares[one] = 1 / count[part];
            }
            cheapest(rows, shares, &pairs[first]);
        }
        for (Pair& pair : pairs) pair.partner = 1 - half + 2 * pair.partner;
        pairs.resize(movers);
        std::stable_sort(pairs.begin(), pairs.end(), [](const Pair& a, const Pair& b) { return a.cost < b.cost; });
        pairs.resize(joins);
        merge(pairs);
    }

    void join() {
        for (int64_t half = 0; used > all.num; half = 1 - half) {
            const int64_t share = used <= all.settled ? all.fine : all.medium;
            round(std::min(used - all.num, std::max<int64_t>(used / share, 1)), half);
        }
        put(all.keys, 0, all.key_dim);
        put(all.values, keys, all.value_dim);
        for (int64_t part = 0; part < all.num; ++part) {
            all.count[place * all.num + part] = part < used ? count[part] : 0;
            all.spread[place * all.num + part] = part < used ? spread[part] : 0;
        }
    }
};

// `Centroids.thinned` of every head's tokens, shared by all threads: heads are too few.
void thin(std::vector<Parts>& heads, const Joining& all) {
    const int64_t share = 16;  // of seeds
    std::vector<std::pair<Parts*, int64_t>> choices, seeds;
    for (Parts& head : heads)
        if (head.waiting()) {
            for (int64_t token = 0; token < head.waiting(); token += STACK) choices.push_back({&head, token});
            for (int64_t seed = 0; seed < head.number(); seed += share) seeds.push_back({&head, seed});
        }
    if (choices.empty()) return;
#pragma omp parallel num_threads(all.threads)
    for (int64_t choice = 0; choice < all.choices; ++choice) {
#pragma omp for
        for (size_t head = 0; head < heads.size(); ++head)
            if (choice && heads[head].waiting()) heads[head].meet();
#pragma omp for
        for (size_t i = 0; i < choices.size(); ++i) choices[i].first->choose(choices[i].second);
#pragma omp for
        for (size_t i = 0; i < seeds.size(); ++i) {
            auto [head, seed] = seeds[i];
            head->gather(seed, std::min(seed + share, head->number()), choice + 1 == all.choices);
        }
    }
}

// The tokens of a head that leave, oldest first.
std::vector<int64_t> leaving(const Joining& all, int64_t place) {
    const int64_t first = place * all.fresh;
    std::vector<int64_t> gone;
    for (int64_t token = 0; token < all.fresh; ++token)
        if (all.valid[first + token] && !all.kept[first + token]) gone.push_back(token);
    const int32_t* positions = all.positions + first;
    std::stable_sort(gone.begin(), gone.end(), [&](int64_t a, int64_t b) { return positions[a] < positions[b]; });
    return gone;
}

}  // namespace

extern "C" void join_centroids(const Joining* all) {
    const int64_t places = all->batch * all->heads, most = std::max(all->seeds, all->roomy * all->num);
    std::vector<std::vector<int64_t>> gone(places);
    int64_t longest = 0;
#pragma omp parallel for num_threads(all->fresh > all->block ? all->threads : 1)
    for (int64_t place = 0; place < places; ++place) gone[place] = leaving(*all, place);
    for (const auto& list : gone) longest = std::max<int64_t>(longest, list.size());
    for (int64_t from = 0; from < longest; from += all->block) {
        const int64_t number = std::min(all->block, longest - from);
        std::vector<Parts> fresh;
        for (int64_t place = 0; place < places; ++place) fresh.emplace_back(*all, place, std::min(number, most));
#pragma omp parallel for num_threads(number > most ? all->threads : 1)
        for (int64_t place = 0; place < places; ++place) {
            const int64_t length = gone[place].size(), *list = gone[place].data();
            fresh[place].take_tokens(list + std::min(from, length), list + std::min(from + number, length));
        }
        thin(fresh, *all);
#pragma omp parallel for num_threads(all->threads) schedule(dynamic)
        for (int64_t place = 0; place < places; ++place) {
            if (!fresh[place].number()) continue;
            Parts total(*all, place, all->num + fresh[place].number());
            total.take_centroids();
            total.take(fresh[place]);
            total.join();
        }
    }
}
