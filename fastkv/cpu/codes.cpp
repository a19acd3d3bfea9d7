// Slots on a CPU (`fastkv.cpu.codes`): rows to codes, codes to rows, attention of a decode step to slots.
//
// Threads share a head's slots, a stretch at a time, so that the longest head does not decide. A stretch is read a tile
// at a time: a number becomes fp32 in the nearest cache, once for all queries of the head. int4: queries are turned
// instead of keys, sums instead of values. Sums depend on neither threads nor batch.

namespace {

constexpr int TILE = 16;    // slots read at a time
constexpr int STRETCH = 128;  // slots that a thread takes at a time
constexpr int AT_ONCE = 4;  // queries for which a decoded vector is used while it is in a register
constexpr int GROUP = 32;   // numbers of a row of int4 that share a scale
constexpr int LONGEST = 512;           // numbers of a row
constexpr float FAR = 1 << 20;         // codes so far from any are all clamped

// Rows times the Hadamard matrix of the longest power of two that divides dim, in the type of their numbers.
struct Single {
    typedef float Number;
    typedef Floats Lanes;
};
struct Double {
    typedef double Number;
    typedef Doubles Lanes;
};

template <typename Type>
struct Hadamard {
    typedef typename Type::Number Number;
    typedef typename Type::Lanes Lanes;
    static constexpr int SIZE = sizeof(Lanes) / sizeof(Number);
    Number signs[SIZE][SIZE];  // of the matrix for one vector

    Hadamard() {
        for (int i = 0; i < SIZE; ++i)
            for (int j = 0; j < SIZE; ++j) signs[i][j] = __builtin_parity(i & j) ? -1 : 1;
    }

    void turn(Number* row, int64_t dim, Number factor) const {
        auto lanes = [](Number* at) -> Lanes& { return *reinterpret_cast<Lanes*>(at); };
        for (int64_t i = 0; i < dim; i += SIZE) {
            Lanes sum = {};
            for (int j = 0; j < SIZE; ++j) sum += row[i + j] * *reinterpret_cast<const Lanes*>(signs[j]);
            lanes(row + i) = sum;
        }
        for (int64_t half = SIZE; half < (dim & -dim); half *= 2)
            for (int64_t first = 0; first < dim; first += 2 * half)
                for (int64_t i = first; i < first + half; i += SIZE) {
                    Lanes left = lanes(row + i), right = lanes(row + i + half);
                    lanes(row + i) = left + right;
                    lanes(row + i + half) = left - right;
                }
        for (int64_t i = 0; i < dim; i += SIZE) lanes(row + i) = lanes(row + i) * factor;
    }
};

const Hadamard<Single> SINGLE;
const Hadamard<Double> EXACT;

// The formats of `fastkv.reference.slots`: how they write and read a row of dim numbers, a multiple of 16.

inline float largest(const float* row, int64_t dim) {
    Floats most = {};
    for (int64_t i = 0; i < dim; i += WIDE) {
        Floats size = (Floats)((Ints)floats(row + i) & 0x7FFFFFFF);
        most = size > most ? size : most;
    }
    float top = 0;
    for (int i = 0; i < WIDE; ++i) top = most[i] > top ? most[i] : top;
    return top;
}

inline Floats clamped(Floats x, float low, float high) {
    x = x < low ? Floats{} + low : x;
    return x > high ? Floats{} + high : x;
}

inline Floats rounded(Floats x) { return (x + ROUNDING) - ROUNDING; }  // of |x| < 2^22

// A code of 8 bits for each number, fp32 step = max |x| / LARGEST; all 0 where that is no normal number.
template <typename Code>
struct Scaled {
    static constexpr bool TURNED = false;

    static void write(const float* row, uint8_t* codes, uint8_t* scales, int64_t dim, double) {
        float step = largest(row, dim) / Code::LARGEST;
        bool small = step < __FLT_MIN__;
        float by = small ? __builtin_inff() : step;
        for (int64_t i = 0; i < dim; i += WIDE)
            Code::write(clamped(floats(row + i) / by, -Code::LARGEST, Code::LARGEST), codes + i);
        *reinterpret_cast<float*>(scales) = small ? 0 : step;
    }

    static void read(const uint8_t* codes, const uint8_t* scales, float* row, int64_t dim) {
        float step = *reinterpret_cast<const float*>(scales);
        for (int64_t i = 0; i < dim; i += WIDE) store(row + i, Code::read(bytes(codes + i)) * step);
    }
};

inline void narrowed(Ints codes, uint8_t* to) { *reinterpret_cast<Bytes*>(to) = __builtin_convertvector(codes, Bytes); }

struct Int8 {
    static constexpr float LARGEST = 127;
    static void write(Floats x, uint8_t* codes) { narrowed(__builtin_convertvector(rounded(x), Ints), codes); }
    static Floats read(Bytes codes) { return numbers(codes ^ 0x80) - 128.0f; }
};

struct E4m3 {
    static constexpr float LARGEST = 448;

    static void write(Floats x, uint8_t* codes) {
        Ints bits = (Ints)x, size = bits & 0x7FFFFFFF;
        Ints normal = ((size + 0x7FFFF + (size >> 20 & 1)) >> 20) - (120 << 3);  // half to even; exponents less 120
        Ints below = __builtin_convertvector(rounded((Floats)size * 512.0f), Ints);  // of numbers below 2^-6
        narrowed((size < (121 << 23) ? below : normal) | (bits >> 24 & 0x80), codes);
    }

    static Floats read(Bytes codes) {
        Ints bits = widened(codes ^ 0x80) - 128;  // the sign in all upper bits
        return (Floats)((bits << 20) & int32_t(0x87F00000)) * 0x1p120f;
    }
};

// Rows as they are, of fp32 or bfloat16.
struct Float32 {
    static constexpr bool TURNED = false;
    typedef float Plain;

    static void read(const uint8_t* codes, const uint8_t*, float* row, int64_t dim) {
        std::memcpy(row, codes, dim * sizeof(float));
    }
};

struct Bfloat16 {
    static constexpr bool TURNED = false;
    typedef uint16_t Plain;

    static void read(const uint8_t* codes, const uint8_t*, float* row, int64_t dim) {
        for (int64_t i = 0; i < dim; i += WIDE) {
            Shorts halves = *reinterpret_cast<const Shorts*>(codes + 2 * i);
            store(row + i, (Floats)(__builtin_convertvector(halves, Ints) << 16));
        }
    }
};

// 4 bits for each number of the turned row, a step and a zero point for each 32 of them.
struct Int4 {
    static constexpr bool TURNED = true;

    static float step_of(int8_t exponent) { return of_bits((exponent + 1016) * (1 << 20)); }

    static void write(const float* row, uint8_t* codes, uint8_t* scales, int64_t dim, double root) {
        double exact[LONGEST];
        float turned[LONGEST];
        for (int64_t i = 0; i < dim; ++i) exact[i] = row[i];
        EXACT.turn(exact, dim, root);
        for (int64_t i = 0; i < dim; ++i) turned[i] = float(exact[i]);
        for (int64_t group = 0; group < dim / GROUP; ++group) {
            float *mine = turned + group * GROUP, low = mine[0], high = mine[0];
            for (int i = 1; i < GROUP; ++i) {
                low = mine[i] < low ? mine[i] : low;
                high = mine[i] > high ? mine[i] : high;
            }
            float need = std::max((high - low) / 15, std::max(high, -low) / 127);
            int32_t exponent = std::clamp(((bits_of(need) + 0xFFFFF) >> 20) - 1016, -128, 127);
            float step = step_of(int8_t(exponent));
            Floats zero = rounded(clamped(Floats{} - low / step, -128, 127));
            for (int i = 0; i < GROUP; i += WIDE) {
                Floats whole = rounded(clamped(floats(mine + i) / step, -FAR, FAR));
                store(mine + i, clamped(whole + zero, 0, 15));
            }
            scales[2 * group] = uint8_t(exponent);
            scales[2 * group + 1] = uint8_t(int8_t(zero[0]));
        }
        for (int64_t i = 0; i < dim / 2; i += WIDE) {
            Ints first = __builtin_convertvector(floats(turned + i), Ints);
            Ints second = __builtin_convertvector(floats(turned + dim / 2 + i), Ints);
            narrowed(first | second << 4, codes + i);
        }
    }

    static void read(const uint8_t* codes, const uint8_t* scales, float* row, int64_t dim) {
        float steps[LONGEST / GROUP], zeros[LONGEST / GROUP];
        for (int64_t group = 0; group < dim / GROUP; ++group) {
            steps[group] = step_of(int8_t(scales[2 * group]));
            zeros[group] = -steps[group] * int8_t(scales[2 * group + 1]);
        }
        for (int64_t i = 0, j = dim / 2; j < dim; i += WIDE, j += WIDE) {  // products and their sums are exact
            Bytes both = bytes(codes + i);
            store(row + i, numbers(both & 15) * steps[i / GROUP] + zeros[i / GROUP]);
            store(row + j, numbers(both >> 4) * steps[j / GROUP] + zeros[j / GROUP]);
        }
    }
};

}  // namespace

extern "C" {

// Codes and scales of a tensor of the cache, plain rows without scales; strides in bytes, of batch rows, heads and
// slots.
struct Coded {
    uint8_t *codes, *scales;
    int64_t code_strides[3], scale_strides[3];

    uint8_t* codes_at(int64_t batch, int64_t head, int64_t slot) const {
        return codes + batch * code_strides[0] + head * code_strides[1] + slot * code_strides[2];
    }
    uint8_t* scales_at(int64_t batch, int64_t head, int64_t slot) const {
        return scales + batch * scale_strides[0] + head * scale_strides[1] + slot * scale_strides[2];
    }
};

// rows [batch, heads, slots, dim] of fp32, or halves of bfloat16, and their codes. root: 1 / sqrt of the size of their
// Hadamard matrix.
struct Rows {
    Coded coded;
    float* rows;
    uint16_t* halves;
    int64_t batch, heads, slots, dim, threads;
    double root;
};

// A token for every head, or none: rows [batch, heads, dim] of keys and values, of plain slots as they are stored, else
// fp32. seen [batch]: its position; room: slots of a head of equal heads; strides in elements, of batch rows and heads.
struct Token {
    const void *keys, *values;
    int32_t* positions;
    int64_t* seen;
    int64_t position_strides[2], seen_stride, room;
    double root;
};

// queries, out [batch, heads, rows, dim], lse [batch, heads, rows], lengths [batch, heads], whose heads lie side by
// side; or none: weights [batch, heads, rows, slots], bias [batch, heads, slots] of logits, starts [batch, heads + 1] of
// heads that own stretches of one row.
struct Attention {
    Coded keys, values;
    Token token;
    int32_t* lengths;
    const int32_t* starts;
    const float *queries, *bias;
    float *out, *lse, *weights;
    int64_t batch, heads, rows, dim, slots, threads, length_stride;
    float scale, root;
};
}

namespace {

// Some slots of a head, and where what they add up to begins.
struct Part {
    int64_t place, first, last;
};

template <typename Keys, typename Values>
class Stretch {
    const Attention& all;
    int64_t batch, head, place, first_slot, begin, length, width;  // width: length in whole tiles
    std::vector<float>&tile, &queries, &parts, &weights;

    // The next slots, at most TILE, decoded; zeros after the last.
    template <typename Format>
    void read(const Coded& from, int64_t first) {
        int64_t count = std::min<int64_t>(length - first, TILE);
        for (int64_t i = 0, slot = first_slot + first; i < count; ++i, ++slot)
            Format::read(from.codes_at(batch, head, slot), from.scales_at(batch, head, slot), &tile[i * all.dim],
                         all.dim);
        for (int64_t i = count * all.dim; i < TILE * all.dim; i += WIDE) store(&tile[i], Floats{});
    }

    // Products of N queries with the tile's rows, to out[n * width + row].
    template <int N>
    void multiply(const float* query, float* out) {
        for (int first = 0; first < TILE; first += AT_ONCE) {
            Floats sums[N][AT_ONCE];
            for (int n = 0; n < N; ++n)
                for (int j = 0; j < AT_ONCE; ++j) sums[n][j] = Floats{};
            for (int64_t i = 0; i < all.dim; i += WIDE) {
                Floats rows[AT_ONCE];
                for (int j = 0; j < AT_ONCE; ++j) rows[j] = floats(&tile[(first + j) * all.dim + i]);
                for (int n = 0; n < N; ++n) {
                    Floats numbers = floats(query + n * all.dim + i);
                    for (int j = 0; j < AT_ONCE; ++j) sums[n][j] += numbers * rows[j];
                }
            }
            for (int n = 0; n < N; ++n)
                for (int j = 0; j < AT_ONCE; ++j) store(&parts[(n * TILE + first + j) * WIDE], sums[n][j]);
        }
        for (int n = 0; n < N; ++n)
            for (int j = 0; j < TILE; ++j) out[n * width + j] = total(&parts[(n * TILE + j) * WIDE]);
    }

    // Adds to out [N, dim] the tile's rows times weights[n * width + row], V vectors at a time from number i on.
    template <int N, int V>
    int64_t add(const float* weights, int64_t i, float* out) {
        for (; i + V * WIDE <= all.dim; i += V * WIDE) {
            Floats sums[N][V];
            for (int n = 0; n < N; ++n)
                for (int v = 0; v < V; ++v) sums[n][v] = floats(out + n * all.dim + i + v * WIDE);
            for (int j = 0; j < TILE; ++j) {
                Floats rows[V];
                for (int v = 0; v < V; ++v) rows[v] = floats(&tile[j * all.dim + i + v * WIDE]);
                for (int n = 0; n < N; ++n)
                    for (int v = 0; v < V; ++v) sums[n][v] += weights[n * width + j] * rows[v];
            }
            for (int n = 0; n < N; ++n)
                for (int v = 0; v < V; ++v) store(out + n * all.dim + i + v * WIDE, sums[n][v]);
        }
        return i;
    }

    template <int N>
    void add(const float* weights, float* out) {
        add<N, 1>(weights, add<N, 2>(weights, 0, out), out);
    }

    int64_t at_once(int64_t row) const { return all.rows - row < AT_ONCE ? 1 : AT_ONCE; }

    // The weights become e^(weight - the largest), 0 where that is -inf; returns the largest and sets their sum.
    float exponentials(float* row, float* sum) {
        float lanes[WIDE], top = -__builtin_inff();
        Floats tops = floats(row), whole = {};
        for (int64_t i = WIDE; i < width; i += WIDE) {
            Floats some = floats(row + i);
            tops = some > tops ? some : tops;
        }
        store(lanes, tops);
        for (float one : lanes) top = one > top ? one : top;
        if (top == -__builtin_inff()) {
            std::fill_n(row, width, 0.0f);
            return *sum = 0, top;
        }
        for (int64_t i = 0; i < width; i += WIDE) {
            Floats some = exponential(floats(row + i) - top);
            store(row + i, some);
            whole += some;
        }
        store(lanes, whole);
        *sum = total(lanes);
        return top;
    }

  public:
    typedef std::vector<float> Room[4];  // of a thread, used again from stretch to stretch

    Stretch(const Attention& all, const Part& part, Room& room)
        : all(all), batch(part.place / all.heads), head(part.place % all.heads), place(part.place),
          first_slot((all.starts ? all.starts[place + batch] : 0) + part.first), begin(part.first),
          length(part.last - part.first), width((length + TILE - 1) / TILE * TILE), tile(room[0]), queries(room[1]),
          parts(room[2]), weights(room[3]) {
        tile.resize(TILE * all.dim);
        queries.assign(all.queries + place * all.rows * all.dim, all.queries + (place + 1) * all.rows * all.dim);
        parts.resize(AT_ONCE * TILE * WIDE);
        weights.resize(all.rows * width);
    }

    // out [rows, dim]: the sum of values, each times e^(logit - top); tops and sums [rows]: of these weights.
    void attend(float* out, float* tops, float* sums) {
        const int64_t rows = all.rows, dim = all.dim;
        for (int64_t row = 0; row < rows; ++row) {
            float* query = &queries[row * dim];
            if (Keys::TURNED) SINGLE.turn(query, dim, all.root);
            for (int64_t i = 0; i < dim; i += WIDE) store(query + i, floats(query + i) * all.scale);
        }
        for (int64_t first = 0; first < length; first += TILE) {
            read<Keys>(all.keys, first);
            for (int64_t row = 0, some; row < rows; row += some) {
                some = at_once(row);
                float *query = &queries[row * dim], *to = &weights[row * width + first];
                some == 1 ? multiply<1>(query, to) : multiply<AT_ONCE>(query, to);
            }
        }
        for (int64_t row = 0; row < rows; ++row) {
            float* mine = &weights[row * width];
            const float* bias = all.bias ? all.bias + place * all.slots + begin : nullptr;
            for (int64_t i = 0; bias && i < length; ++i) mine[i] += bias[i];
            for (int64_t i = length; i < width; ++i) mine[i] = -__builtin_inff();
            tops[row] = exponentials(mine, sums + row);
            if (all.weights) std::copy(mine, mine + length, all.weights + (place * rows + row) * all.slots + begin);
        }
        for (int64_t first = 0; first < length; first += TILE) {
            read<Values>(all.values, first);
            for (int64_t row = 0, some; row < rows; row += some) {
                some = at_once(row);
                const float* mine = &weights[row * width + first];
                some == 1 ? add<1>(mine, out + row * dim) : add<AT_ONCE>(mine, out + row * dim);
            }
        }
    }
};

// What the stretches of a head add up to: `number` of them, of which `outs`, `tops` and `sums` lie one behind another.
template <typename Values>
void join(const Attention& all, const Part* parts, int64_t number, const float* outs, const float* tops,
          const float* sums) {
    const int64_t rows = all.rows, dim = all.dim, place = parts->place;
    for (int64_t row = 0; row < rows; ++row) {
        float top = -__builtin_inff(), sum = 0;
        for (int64_t part = 0; part < number; ++part) top = std::max(top, tops[part * rows + row]);
        std::vector<float> shares(number), mine(dim);
        for (int64_t part = 0; part < number; ++part) {
            shares[part] = __builtin_expf(tops[part * rows + row] - top);
            sum += shares[part] * sums[part * rows + row];
        }
        all.lse[place * rows + row] = top + __builtin_logf(sum);
        for (int64_t part = 0; part < number; ++part) {
            float share = shares[part] / sum;
            const float* out = outs + (part * rows + row) * dim;
            for (int64_t i = 0; i < dim; i += WIDE) store(&mine[i], floats(&mine[i]) + floats(out + i) * share);
            float* weights = all.weights + (place * rows + row) * all.slots;
            for (int64_t i = parts[part].first; all.weights && i < parts[part].last; ++i) weights[i] *= share;
        }
        if (Values::TURNED) SINGLE.turn(&mine[0], dim, all.root);
        std::copy(mine.begin(), mine.end(), all.out + (place * rows + row) * dim);
    }
}

template <typename Format>
void put(const void* rows, int64_t place, const Coded& to, int64_t batch, int64_t head, int64_t slot,
         const Attention& all) {
    uint8_t* codes = to.codes_at(batch, head, slot);
    if constexpr (requires { typename Format::Plain; })
        std::memcpy(codes, static_cast<const typename Format::Plain*>(rows) + place * all.dim,
                    all.dim * sizeof(typename Format::Plain));
    else
        Format::write(static_cast<const float*>(rows) + place * all.dim, codes, to.scales_at(batch, head, slot),
                      all.dim, all.token.root);
}

// Stores the token in the first free slot of every head that has one.
template <typename Keys, typename Values>
void append(const Attention& all) {
    const Token& token = all.token;
    for (int64_t batch = 0; batch < all.batch; ++batch) {
        int64_t& seen = token.seen[batch * token.seen_stride];
        for (int64_t head = 0; head < all.heads; ++head) {
            int64_t place = batch * all.heads + head;
            const int32_t* owned = all.starts ? all.starts + place + batch : nullptr;
            int32_t& length = all.lengths[batch * all.length_stride + head];
            if (length >= (owned ? owned[1] - owned[0] : token.room)) continue;
            int64_t slot = (owned ? owned[0] : 0) + length++;
            put<Keys>(token.keys, place, all.keys, batch, head, slot, all);
            put<Values>(token.values, place, all.values, batch, head, slot, all);
            token.positions[batch * token.position_strides[0] + head * token.position_strides[1] + slot] = seen;
        }
        ++seen;
    }
}

template <typename Keys, typename Values>
void attend(const Attention& all) {
    if (all.token.keys) append<Keys, Values>(all);
    const int64_t places = all.batch * all.heads, rows = all.rows;
    std::vector<Part> parts;
    std::vector<int64_t> begins;  // of each place, among the parts
    for (int64_t place = 0; place < places; ++place) {
        begins.push_back(parts.size());
        int64_t held = all.lengths[place / all.heads * all.length_stride + place % all.heads];
        int64_t length = std::min(held, all.slots);
        for (int64_t first = 0; first < length; first += STRETCH)
            parts.push_back({place, first, std::min(first + STRETCH, length)});
    }
    begins.push_back(parts.size());
    std::vector<float> outs(parts.size() * rows * all.dim), tops(parts.size() * rows), sums(parts.size() * rows);
#pragma omp parallel num_threads(all.threads)
    {
        typename Stretch<Keys, Values>::Room room;
#pragma omp for schedule(dynamic)
        for (size_t part = 0; part < parts.size(); ++part)
            Stretch<Keys, Values>(all, parts[part], room)
                .attend(&outs[part * rows * all.dim], &tops[part * rows], &sums[part * rows]);
#pragma omp for
        for (int64_t place = 0; place < places; ++place) {
            int64_t first = begins[place], number = begins[place + 1] - first;
            if (all.weights) {  // of slots that are not in use: 0
                int64_t length = number ? parts[first + number - 1].last : 0;
                for (int64_t row = 0; row < rows; ++row)
                    std::fill(all.weights + (place * rows + row) * all.slots + length,
                              all.weights + (place * rows + row + 1) * all.slots, 0.0f);
            }
            if (number) {
                join<Values>(all, &parts[first], number, &outs[first * rows * all.dim], &tops[first * rows],
                             &sums[first * rows]);
                continue;
            }
            std::fill_n(all.out + place * rows * all.dim, rows * all.dim, 0.0f);
            std::fill_n(all.lse + place * rows, rows, -__builtin_inff());
        }
    }
}

template <typename Format>
void each(const Rows& all, bool encode) {
    const Coded& coded = all.coded;
#pragma omp parallel for collapse(2) num_threads(all.threads)
    for (int64_t place = 0; place < all.batch * all.heads; ++place)
        for (int64_t slot = 0; slot < all.slots; ++slot) {
            int64_t batch = place / all.heads, head = place % all.heads, at = (place * all.slots + slot) * all.dim;
            float room[LONGEST], *row = all.halves ? room : all.rows + at;
            uint8_t *codes = coded.codes_at(batch, head, slot), *scales = coded.scales_at(batch, head, slot);
            if (encode) {
                Format::write(row, codes, scales, all.dim, all.root);
                continue;
            }
            Format::read(codes, scales, row, all.dim);
            if (Format::TURNED) SINGLE.turn(row, all.dim, float(all.root));
            for (int64_t i = 0; all.halves && i < all.dim; i += WIDE) {
                Ints bits = (Ints)floats(row + i);
                bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;  // half to even
                *reinterpret_cast<Shorts*>(all.halves + at + i) = __builtin_convertvector(bits, Shorts);
            }
        }
}

}  // namespace

#define READ(name, Keys, Values) \
    void attend_##name(const Attention* all) { attend<Keys, Values>(*all); }
#define FORMAT(name, Format)                                              \
    READ(name, Format, Format)                                            \
    void encode_##name(const Rows* all) { each<Format>(*all, true); }      \
    void decode_##name(const Rows* all) { each<Format>(*all, false); }

extern "C" {
READ(float32, Float32, Float32)
READ(bfloat16, Bfloat16, Bfloat16)
READ(k8v4, Scaled<Int8>, Int4)
FORMAT(int8, Scaled<Int8>)
FORMAT(fp8, Scaled<E4m3>)
FORMAT(int4, Int4)
}
