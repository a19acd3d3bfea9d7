// Tokens that leave join their head's centroids, on a CPU: `fastkv.reference.Centroids.add`, in place.
//
// An operator of torch costs more than what it does to few tokens, and many tokens join in dozens of rounds. A head is
// one row after another of means, keys and then values, each in whole vectors; sums depend on neither threads nor batch.

extern "C" {

// count, spread [places, num]; keys [places, num, key_dim] and values, fp32 or, where `halves`, bf16; fresh_keys [batch,
// heads, ..., key_dim] and values, fp32, of which index [places, fresh] lists those that join where it is inside
// [places, fresh]; strides of all but their last axis. The rest: constants of the reference.
struct Joining {
    float *count, *spread;
    void *keys, *values;
    const float *fresh_keys, *fresh_values;
    const int64_t* index;
    const uint8_t* inside;
    int64_t key_strides[3], value_strides[3];
    int64_t batch, heads, num, fresh, key_dim, value_dim, halves, threads;
    int64_t block, group, roomy, fine, medium, settled, step, turn;
};
}

namespace {

inline int64_t whole(int64_t dim) { return (dim + WIDE - 1) / WIDE * WIDE; }

class Parts {
    const Joining& all;
    int64_t place, keys, width, used;  // keys: numbers before the values of a row
    // partners: the points of those that others may join, SIDE of them together (as in most_attended.cpp); inverse: 1 / count.
    std::vector<float> count, spread, means, points, partners, squares, inverse, tokens, moved, before;

    float* mean(int64_t part) { return &means[part * width]; }
    const float* mean(int64_t part) const { return &means[part * width]; }

    // Of columns [from, to): what is away from the mean of all tokens, in units of their deviation.
    void standardise(int64_t from, int64_t to, float total) {
        std::vector<float> middle(to - from);
        for (int64_t part = 0; part < used; ++part)
            for (int64_t i = from; i < to; i += WIDE)
                store(&middle[i - from], floats(&middle[i - from]) + count[part] * floats(mean(part) + i));
        for (int64_t i = from; i < to; i += WIDE) store(&middle[i - from], floats(&middle[i - from]) / total);
        float variance = 0;
        for (int64_t part = 0; part < used; ++part) {
            Floats sum = {};
            for (int64_t i = from; i < to; i += WIDE) {
                Floats away = floats(mean(part) + i) - floats(&middle[i - from]);
                store(&points[part * width + i], away);
                sum += away * away;
            }
            variance += count[part] * total_of(sum);
        }
        float unit = __builtin_sqrtf(1 / std::max(variance / total, __FLT_MIN__));
        for (int64_t part = 0; part < used; ++part)
            for (int64_t i = from; i < to; i += WIDE)
                store(&points[part * width + i], floats(&points[part * width + i]) * unit);
    }

    struct Pair {
        float cost;
        int64_t mover, partner;
    };

    // The points of every second part from `first` on as `partners`, in whole vectors, with their squares and 1 / count.
    // Columns without a part are infinitely far away.
    int64_t line_up(int64_t first) {
        int64_t number = (used - first + 1) / 2, columns = (number + SIDE - 1) / SIDE * SIDE;
        std::fill(partners.begin(), partners.begin() + width * columns, 0.0f);
        std::fill(squares.begin(), squares.begin() + columns, __builtin_inff());
        std::fill(inverse.begin(), inverse.begin() + columns, 1.0f);
        for (int64_t column = 0; column < number; ++column) {
            int64_t part = first + 2 * column;
            float* own = &partners[column / SIDE * SIDE * width + column % SIDE];
            for (int64_t i = 0; i < width; ++i) own[i * SIDE] = points[part * width + i];
            squares[column] = square(part);
            inverse[column] = 1 / count[part];
        }
        return columns;
    }

    float square(int64_t part) {
        Floats sum = {};
        for (int64_t i = 0; i < width; i += WIDE)
            sum += floats(&points[part * width + i]) * floats(&points[part * width + i]);
        return total_of(sum);
    }

    // The cheapest partner of STACK movers, `mover`, `mover + 2`, ...: partner c is part `first + 2 c`.
    void cheapest(int64_t mover, int64_t first, int64_t columns, Pair* best) {
        const float* rows[STACK];
        float own[STACK], shares[STACK];
        Native least[STACK];
        NativeInts which[STACK] = {};
        for (int64_t one = 0; one < STACK; ++one) {
            int64_t part = std::min(mover + 2 * one, used - 1);  // the last tile may be cut short
            rows[one] = &points[part * width];
            own[one] = square(part);
            shares[one] = 1 / count[part];
            least[one] = Native{} + __builtin_inff();
        }
        for (int64_t column = 0; column < columns; column += SIDE) {
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
            best[one] = {__builtin_inff(), mover + 2 * one, first};  // where no cost is finite, no token may be lost
            for (int64_t lane = 0; lane < NATIVE; ++lane) {
                int64_t partner = first + 2 * (which[one][lane] + lane);
                bool earlier = least[one][lane] == best[one].cost && partner < best[one].partner;
                if (least[one][lane] < best[one].cost || earlier)
                    best[one] = {least[one][lane], best[one].mover, partner};
            }
        }
    }

    template <typename Pairs>
    void merge(const Pairs& pairs) {
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

    void take(const Parts& others, int64_t from, int64_t end) {
        std::copy_n(others.mean(from), (end - from) * width, mean(used));
        for (int64_t part = from; part < end; ++part, ++used) {
            count[used] = others.count[part];
            spread[used] = others.spread[part];
        }
    }

    // Of so many listed tokens those that leave.
    void take_tokens(int64_t from, int64_t number) {
        for (int64_t at = place * all.fresh + from; number--; ++at) {
            if (!all.inside[at]) continue;
            auto row = [&](const float* rows, const int64_t* by) {
                return rows + place / all.heads * by[0] + place % all.heads * by[1] + all.index[at] * by[2];
            };
            std::copy_n(row(all.fresh_keys, all.key_strides), all.key_dim, mean(used));
            std::copy_n(row(all.fresh_values, all.value_strides), all.value_dim, mean(used) + keys);
            count[used] = 1;
            spread[used++] = 0;
        }
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
    void clear() { used = 0; }

    void place_at(int64_t first, const Parts& others) {
        std::copy_n(others.mean(0), others.used * width, mean(first));
        std::copy_n(others.count.begin(), others.used, count.begin() + first);
        std::copy_n(others.spread.begin(), others.used, spread.begin() + first);
    }

    void become(Parts& others, int64_t number) {
        count.swap(others.count);
        spread.swap(others.spread);
        means.swap(others.means);
        used = number;
    }

    // Every second part, from `half` on, may join the part of the others that costs least; the cheapest `joins` do.
    void round(int64_t joins, int64_t half) {
        points.resize(used * width);
        partners.resize((used / 2 + 1 + SIDE) * width);
        squares.resize(partners.size() / width);
        inverse.resize(squares.size());
        float total = 0;
        for (int64_t part = 0; part < used; ++part) total += count[part];
        standardise(0, keys, total);
        standardise(keys, width, total);
        int64_t columns = line_up(1 - half), movers = (used - half + 1) / 2;
        std::vector<Pair> pairs(movers + STACK);
        for (int64_t one = 0; one < movers; one += STACK) cheapest(half + 2 * one, 1 - half, columns, &pairs[one]);
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

int64_t few_enough(const Joining& all) { return std::max(all.group, all.roomy * all.num); }

// `Centroids.thinned` of every head's tokens: groups are shared among the threads, of which heads are too few.
void thin(std::vector<Parts>& heads, const Joining& all) {
    struct Group {
        int64_t head, from, end;
    };
    for (std::vector<Parts> halves;;) {
        std::vector<Group> groups;
        for (int64_t head = 0; head < int64_t(heads.size()); ++head)
            if (const int64_t end = heads[head].number(); end > few_enough(all))
                for (int64_t from = 0; from < end; from += all.group)
                    groups.push_back({head, from, std::min(from + all.group, end)});
        if (groups.empty()) return;
        for (size_t head = 0; head < heads.size(); ++head)
            if (halves.size() <= head) halves.emplace_back(all, head, (heads[head].number() + 1) / 2);
#pragma omp parallel num_threads(all.threads)
        {
            Parts some(all, 0, all.group);
#pragma omp for schedule(dynamic)
            for (size_t i = 0; i < groups.size(); ++i) {
                const Group& one = groups[i];
                some.clear();
                some.take(heads[one.head], one.from, one.end);
                some.round(some.number() / 2, 1);
                halves[one.head].place_at(one.from / 2, some);
            }
        }
        for (const Group& one : groups)
            if (!one.from) heads[one.head].become(halves[one.head], (heads[one.head].number() + 1) / 2);
    }
}

}  // namespace

extern "C" void join_centroids(const Joining* all) {
    const int64_t places = all->batch * all->heads;
    for (int64_t from = 0; from < all->fresh; from += all->block) {
        const int64_t number = std::min(all->block, all->fresh - from);
        std::vector<Parts> fresh;
        for (int64_t place = 0; place < places; ++place) fresh.emplace_back(*all, place, number);
#pragma omp parallel for num_threads(number > few_enough(*all) ? all->threads : 1)
        for (int64_t place = 0; place < places; ++place) fresh[place].take_tokens(from, number);
        thin(fresh, *all);
#pragma omp parallel for num_threads(all->threads) schedule(dynamic)
        for (int64_t place = 0; place < places; ++place) {
            Parts total(*all, place, all->num + fresh[place].number());
            total.take_centroids();
            total.take(fresh[place], 0, fresh[place].number());
            total.join();
        }
    }
}
