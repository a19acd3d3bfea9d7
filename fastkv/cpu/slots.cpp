// Slots on a CPU (`fastkv.cpu.slots`): rows to codes, codes to rows, a decode step over slots, and which of them stay.
//
// Threads share a head's slots, a stretch at a time, so that the longest head does not decide. A stretch is read a tile
// at a time: a number becomes fp32 in the nearest cache, once for all queries of the head. int4: queries are turned
// instead of keys, sums instead of values. What stands for the evicted tokens joins as one more stretch. Sums depend on
// neither threads nor batch.

namespace {

constexpr int TILE = 16;    // slots read at a time
constexpr int STRETCH = 128;  // slots that a thread takes at a time
constexpr int AT_ONCE = 4;  // queries for which a decoded vector is used while it is in a register

constexpr int64_t ALONE = 1 << 18;  // products of a step, below which waking a thread takes longer than they do
constexpr int GROUP = 32;   // numbers of a row of int4 that share a scale
constexpr int LONGEST = 512;           // numbers of a row
constexpr float FAR = 1 << 20;         // codes so far from any are all clamped

// Rows times the Hadamard matrix of the longest power of two that divides dim, in the type of their numbers.
template <typename Number>
struct Hadamard {
    typedef Number Lanes __attribute__((vector_size(64), aligned(1), may_alias));
    static constexpr int SIZE = sizeof(Lanes) / sizeof(Number);
    Number signs[SIZE][SIZE];  // of the matrix for one vector

    Hadamard() {
        for (int i = 0; i < SIZE; ++i)
            for (int j = 0; j < SIZE; ++j) signs[i][j] = __builtin_parity(i & j) ? -1 : 1;
    }

    void turn(Number* row, int64_t dim) const {
        const Number factor = __builtin_sqrt(1.0 / (dim & -dim));
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

const Hadamard<float> SINGLE;
const Hadamard<double> EXACT;

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
    static constexpr int64_t PLAIN = 0;

    static void write(const float* row, uint8_t* codes, uint8_t* scales, int64_t dim) {
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

// Rows as they are, of fp32, bfloat16 or fp16: PLAIN bytes a number, 0 where there are codes instead.
struct Float32 {
    static constexpr bool TURNED = false;
    static constexpr int64_t PLAIN = sizeof(float);

    static void read(const uint8_t* codes, const uint8_t*, float* row, int64_t dim) {
        std::memcpy(row, codes, dim * sizeof(float));
    }
};

struct Bfloat16 {
    static constexpr bool TURNED = false;
    static constexpr int64_t PLAIN = sizeof(uint16_t);

    static void read(const uint8_t* codes, const uint8_t*, float* row, int64_t dim) {
        for (int64_t i = 0; i < dim; i += WIDE) {
            Shorts halves = *reinterpret_cast<const Shorts*>(codes + 2 * i);
            store(row + i, (Floats)(__builtin_convertvector(halves, Ints) << 16));
        }
    }
};

struct Float16 {
    static constexpr bool TURNED = false;
    static constexpr int64_t PLAIN = sizeof(uint16_t);

    static void read(const uint8_t* codes, const uint8_t*, float* row, int64_t dim) {
        for (int64_t i = 0; i < dim; i += NATIVE) {
            NativeInts bits = __builtin_convertvector(*reinterpret_cast<const NativeShorts*>(codes + 2 * i), NativeInts);
            NativeInts size = bits & 0x7FFF, sign = (bits & 0x8000) << 16;
            Native number = (Native)(size << 13) * 0x1p112f;  // exponents less 112; exact below normal numbers, too
            NativeInts beyond = (size << 13) | 0x7F800000;    // infinities and what is no number
            store_native(row + i, (Native)((size < 0x7C00 ? (NativeInts)number : beyond) | sign));
        }
    }
};

// 4 bits for each number of the turned row, a step and a zero point for each 32 of them.
struct Int4 {
    static constexpr bool TURNED = true;
    static constexpr int64_t PLAIN = 0;

    static float step_of(int8_t exponent) { return of_bits((exponent + 1016) * (1 << 20)); }

    static void write(const float* row, uint8_t* codes, uint8_t* scales, int64_t dim) {
        double exact[LONGEST];
        float turned[LONGEST];
        for (int64_t i = 0; i < dim; ++i) exact[i] = row[i];
        EXACT.turn(exact, dim);
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

// A tensor with a row of so many bytes for every token; strides in bytes, of batch rows, heads and slots.
struct Moving {
    uint8_t* rows;
    int64_t strides[3], size;

    uint8_t* at(int64_t batch, int64_t head, int64_t slot) const {
        return rows + batch * strides[0] + head * strides[1] + slot * strides[2];
    }
};

// Codes and scales of a tensor of the cache, plain rows without scales.
struct Coded {
    Moving codes, scales;
};

// The slots of a layer, and what has a row for each of them, or is null. lengths [batch, heads]: how many a head uses;
// starts [batch, heads + 1]: where those of heads that share a row of them begin, or null; strides in elements, of batch
// rows. room: slots of a head of equal heads; dim, value_dim: numbers of a key and a value.
struct Slots {
    Coded keys, values;
    Moving positions, bias, memory;
    int32_t* lengths;
    const int32_t* starts;
    int64_t batch, heads, room, dim, value_dim, length_stride, start_stride;

    int32_t& length_of(int64_t batch, int64_t head) const { return lengths[batch * length_stride + head]; }
    int32_t& length_of(int64_t place) const { return length_of(place / heads, place % heads); }
    // The first slot of a head in its row, and the one behind its last.
    int64_t first_of(int64_t batch, int64_t head) const { return starts ? starts[batch * start_stride + head] : 0; }
    int64_t end_of(int64_t batch, int64_t head) const { return starts ? starts[batch * start_stride + head + 1] : room; }
};

// rows [batch, heads, slots, dim] of fp32, or halves of bfloat16, and their codes.
struct Rows {
    Coded coded;
    float* rows;
    uint16_t* halves;
    int64_t batch, heads, slots, dim, threads;
};

// Where the first `number` slots of every head are read to, or null: [batch, heads, number, dim] fp32 and
// [batch, heads, number].
struct Reading {
    Slots slots;
    float *to_keys, *to_values, *to_memory;
    int32_t* to_positions;
    int64_t number, threads;
};

// A block: new keys and values of every token, of plain slots as these are stored, else fp32, positions and, or none,
// what is known of each; which are kept, [batch, heads, number]. behind: whether they come behind the tokens in use, or
// these are gone.
struct Keeping {
    Slots slots;
    Moving new_keys, new_values, new_positions, known;
    const uint8_t* kept;
    int64_t number, behind, threads;
};

// A token for every head, or none: rows [batch, heads, dim] of keys and values, of plain slots as they are stored, else
// fp32. seen [batch]: its position; stride in elements.
struct Token {
    const void *keys, *values;
    int64_t *seen, seen_stride;
};

// What stands for the evicted tokens of every head, or nothing: centroids [batch, heads, number, dim] with count and
// spread [batch, heads, number], means in fp32 or bfloat16 (`halves`); or moments (`cross`: [batch, heads, dim, dim], or
// none), whose number is 0, with `whole`, their count. Everything of a head lies side by side; strides in bytes, of
// batch rows, in the order of the pointers.
enum { KEYS, VALUES, COUNT, SPREAD, WHOLE, CROSS };

struct Evicted {
    const uint8_t *keys, *values, *count, *spread, *whole, *cross;
    int64_t strides[6], number, halves;
};

// queries, out [batch, heads, rows, dim]; or none: lse and mass (of the evicted) [batch, heads, rows], bias [batch, heads,
// number] of logits of the first slots, sinks [heads, rows], received: what slots have received, whose strides are in
// elements, of batch rows and heads; cos, sin: as in `Rotating`, of queries and the token's fp32 keys before RoPE;
// chosen [batch]: the row of the state that each batch row lives in, 0 for none; without it the same one.
struct Attention {
    Slots slots;
    Token token;
    Evicted evicted;
    const int64_t* chosen;
    int64_t batch;
    const float *queries, *bias, *sinks, *cos, *sin;
    float *out, *lse, *mass, *received;
    int64_t received_strides[2], turn_stride;
    int64_t rows, number, threads;
    float scale;

    int64_t state_row(int64_t row) const { return chosen ? chosen[row] : row; }
    bool is_nobody(int64_t row) const { return chosen && !chosen[row]; }
};

// valid, kept [batch, heads, number]: which are tokens, and which stay; known likewise: a number of each, for the memory,
// or none; count [batch, heads]: grows by how many leave, or none.
struct Leaving {
    Slots slots;
    const uint8_t *valid, *kept;
    const float* known;
    int64_t *count, number;
};

// Of `places` heads, each with `number` centroids: products of their keys with rows of queries [places, rows, dim], which
// become their shares, logits [places, rows, number]; count and spread [places, number]; mass [places, rows]: its log.
struct Weighing {
    float* logits;
    const float *queries, *count, *spread;
    float* mass;
    int64_t places, rows, number, dim, threads;
    float scale;
};

// What attention over two sets gives, [batch, heads, rows, dim], with strides of the first three; the first becomes that
// of both. lse and other_lse [batch, heads, rows].
struct Mixing {
    float *out, *lse;
    const float *other, *other_lse;
    int64_t strides[3], other_strides[3], batch, heads, rows, dim, threads;
};

// queries [batch, heads, dim] and keys [batch, key_heads, dim], and what they are turned by cos and sin [batch, dim] to;
// stride in elements, of batch rows: 0 where all turn alike.
struct Rotating {
    const float *queries, *keys;
    float *to_queries, *to_keys;
    const float *cos, *sin;
    int64_t batch, heads, key_heads, dim, stride;
};
}

namespace {

// Some slots of a head, and where what they add up to begins.
struct Part {
    int64_t place, first, last;
};

// Products of N queries with `number` rows of dim numbers, a multiple of FOUR, to out[n * width + row].
template <int N>
void multiply(const float* rows, int64_t number, int64_t dim, const float* query, float* out, int64_t width) {
    constexpr int ABREAST = std::min(FOUR, std::max(1, SUMS / (N * PIECES) & ~1));  // rows at a time
    for (int64_t first = 0; first < number; first += ABREAST) {
        Native sums[N][ABREAST][PIECES] = {};
        for (int64_t i = 0; i < dim; i += WIDE)
            for (int p = 0; p < PIECES; ++p) {
                Native theirs[ABREAST];
                for (int j = 0; j < ABREAST; ++j) theirs[j] = native(rows + (first + j) * dim + i + p * NATIVE);
                for (int n = 0; n < N; ++n) {
                    Native numbers = native(query + n * dim + i + p * NATIVE);
                    for (int j = 0; j < ABREAST; ++j) sums[n][j][p] += numbers * theirs[j];
                }
            }
        for (int n = 0; n < N; ++n) totals(sums[n], out + n * width + first);
    }
}

// Adds to out [N, dim] `number` rows of dim numbers, times weights[n * width + row].
template <int N>
void add(const float* rows, int64_t number, int64_t dim, const float* weights, int64_t width, float* out) {
    for (int64_t i = 0; i < dim; i += WIDE) {
        Native sums[N][PIECES];
        for (int n = 0; n < N; ++n)
            for (int p = 0; p < PIECES; ++p) sums[n][p] = native(out + n * dim + i + p * NATIVE);
        for (int64_t j = 0; j < number; ++j)
            for (int p = 0; p < PIECES; ++p) {
                Native row = native(rows + j * dim + i + p * NATIVE);
                for (int n = 0; n < N; ++n) sums[n][p] += weights[n * width + j] * row;
            }
        for (int n = 0; n < N; ++n)
            for (int p = 0; p < PIECES; ++p) store_native(out + n * dim + i + p * NATIVE, sums[n][p]);
    }
}

// Calls some(row, N) for the first of N queries, of all of them: N is AT_ONCE, then how many are left.
template <typename Some>
void grouped(int64_t rows, Some some) {
    int64_t row = 0;
    for (; row + AT_ONCE <= rows; row += AT_ONCE) some(row, std::integral_constant<int, AT_ONCE>());
    switch (rows - row) {
        case 3: return some(row, std::integral_constant<int, 3>());
        case 2: return some(row, std::integral_constant<int, 2>());
        case 1: return some(row, std::integral_constant<int, 1>());
    }
}

template <typename Keys, typename Values>
class Stretch {
    const Attention& all;
    int64_t batch, head, place, first_slot, begin, length, width;  // width: length in whole tiles
    std::vector<float>&room, &queries;
    float* weights;

    // The next slots, at most TILE, decoded, or where they lie; zeros after the last.
    template <typename Format>
    const float* read(const Coded& from, int64_t first) {
        int64_t count = std::min<int64_t>(length - first, TILE);
        if (std::is_same<Format, Float32>::value && count == TILE && from.codes.strides[2] == all.slots.dim * 4)
            return reinterpret_cast<const float*>(from.codes.at(batch, head, first_slot + first));
        float* tile = room.data();
        for (int64_t i = 0, slot = first_slot + first; i < count; ++i, ++slot)
            Format::read(from.codes.at(batch, head, slot), from.scales.at(batch, head, slot), tile + i * all.slots.dim,
                         all.slots.dim);
        for (int64_t i = count * all.slots.dim; i < TILE * all.slots.dim; i += WIDE) store(tile + i, Floats{});
        return tile;
    }

    // The weights become e^(weight - the largest), 0 where that is -inf; returns the largest and sets their sum.
    float exponentials(float* row, float* sum) {
        const float top = largest_of(row, width, -__builtin_inff());
        if (top == -__builtin_inff()) {
            std::fill_n(row, width, 0.0f);
            return *sum = 0, top;
        }
        Native whole[PIECES] = {};
        for (int64_t i = 0; i < width; i += WIDE)
            for (int p = 0; p < PIECES; ++p) {
                Native some = exponential(native(row + i + p * NATIVE) - top);
                store_native(row + i + p * NATIVE, some);
                whole[p] += some;
            }
        *sum = total(whole);
        return top;
    }

  public:
    typedef std::vector<float> Room[2];  // of a thread, used again from stretch to stretch

    // weights: room for [rows, STRETCH] numbers.
    Stretch(const Attention& all, const Part& part, Room& rooms, float* weights)
        : all(all), batch(all.state_row(part.place / all.slots.heads)), head(part.place % all.slots.heads), place(part.place),
          first_slot(all.slots.first_of(batch, head) + part.first), begin(part.first),
          length(part.last - part.first), width((length + TILE - 1) / TILE * TILE), room(rooms[0]), queries(rooms[1]),
          weights(weights) {
        room.resize(TILE * all.slots.dim);
        queries.assign(all.queries + place * all.rows * all.slots.dim, all.queries + (place + 1) * all.rows * all.slots.dim);
    }

    // out [rows, dim]: the sum of values, each times e^(logit - top); tops and sums [rows]: of these weights.
    void attend(float* out, float* tops, float* sums) {
        const int64_t rows = all.rows, dim = all.slots.dim;
        for (int64_t row = 0; row < rows; ++row) {
            float* query = &queries[row * dim];
            if (Keys::TURNED) SINGLE.turn(query, dim);
            for (int64_t i = 0; i < dim; i += WIDE) store(query + i, floats(query + i) * all.scale);
        }
        for (int64_t first = 0; first < length; first += TILE) {
            const float* tile = read<Keys>(all.slots.keys, first);
            grouped(rows, [&](int64_t row, auto some) {
                multiply<decltype(some)::value>(tile, TILE, dim, &queries[row * dim], weights + row * width + first, width);
            });
        }
        for (int64_t row = 0; row < rows; ++row) {
            float* mine = weights + row * width;
            const float* bias = all.bias ? all.bias + place * all.number + begin : nullptr;
            for (int64_t i = 0; bias && i < length; ++i) mine[i] += bias[i];
            for (int64_t i = length; i < width; ++i) mine[i] = -__builtin_inff();
            tops[row] = exponentials(mine, sums + row);
        }
        for (int64_t first = 0; first < length; first += TILE) {
            const float* tile = read<Values>(all.slots.values, first);
            grouped(rows, [&](int64_t row, auto some) {
                add<decltype(some)::value>(tile, TILE, dim, weights + row * width + first, width, out + row * dim);
            });
        }
    }
};

// Adds to a row of dim numbers another one, times a weight.
inline void add(float* row, int64_t dim, const float* other, float weight) {
    for (int64_t i = 0; i < dim; i += NATIVE) store_native(row + i, native(row + i) + weight * native(other + i));
}

inline void scale(float* row, int64_t dim, float by) {
    for (int64_t i = 0; i < dim; i += NATIVE) store_native(row + i, native(row + i) * by);
}

inline float product(const float* one, const float* other, int64_t dim) {
    Native sums[PIECES] = {};
    for (int64_t i = 0; i < dim; i += WIDE)
        for (int p = 0; p < PIECES; ++p) sums[p] += native(one + i + p * NATIVE) * native(other + i + p * NATIVE);
    return total(sums);
}

// The centroids of a head, as `reference.centroid_estimate` weighs them.
struct Weights {
    int64_t number, padded;
    std::vector<float> biases, widths;

    Weights(const float* counts, const float* spread, int64_t number, float scale)
        : number(number), padded((number + WIDE - 1) / WIDE * WIDE), biases(padded, -__builtin_inff()),
          widths(padded, 0.0f) {
        for (int64_t i = 0; i < number; ++i) {
            biases[i] = __builtin_logf(counts[i] / 2);  // -inf for an unused centroid
            widths[i] = __builtin_sqrtf(spread[i] / std::max(counts[i], 1.0f)) * __builtin_fabsf(scale);
        }
    }

    // logits [padded]: scale times products with a query of that length; they become shares of the mass. Returns: its
    // log.
    float share(float size, float* logits) const {
        for (int64_t i = 0; i < padded; i += NATIVE) {  // log cosh x + log 2 = x + log(1 + e^-2x), x >= 0
            Native deviation = size * native(&widths[i]), folded = log_of_one_plus(exponential(-2 * deviation));
            store_native(logits + i, native(logits + i) + native(&biases[i]) + deviation + folded);
        }
        const float top = largest_of(logits, padded, -__builtin_inff());
        if (top == -__builtin_inff()) return std::fill_n(logits, padded, 0.0f), top;
        Native sums[PIECES] = {};
        for (int64_t i = 0; i < padded; i += NATIVE) {
            store_native(logits + i, exponential(native(logits + i) - top));
            sums[i / NATIVE % PIECES] += native(logits + i);
        }
        const float sum = total(sums);
        for (int64_t i = 0; i < padded; i += NATIVE) store_native(logits + i, native(logits + i) / sum);
        return top + __builtin_logf(sum);
    }
};

// What attention over the evicted tokens of a head would give: `reference.centroid_estimate`, `moment_estimate`. Adds to
// values [rows, dim], of zeros; masses [rows]: logs, -inf where nothing is added.
void estimate(const Attention& all, int64_t place, float* values, float* masses) {
    const Evicted& from = all.evicted;
    const int64_t rows = all.rows, dim = all.slots.dim, heads = all.slots.heads;
    const float* queries = all.queries + place * rows * dim;
    auto at = [&](const uint8_t* part, int which, int64_t bytes) {
        return part + all.state_row(place / heads) * from.strides[which] + place % heads * bytes;
    };
    auto floats_at = [&](const uint8_t* part, int which, int64_t numbers) {
        return reinterpret_cast<const float*>(at(part, which, numbers * sizeof(float)));
    };
    if (!from.number) {
        const float *key_mean = floats_at(from.keys, KEYS, dim), *value_mean = floats_at(from.values, VALUES, dim);
        const float* cross = from.cross ? floats_at(from.cross, CROSS, dim * dim) : nullptr;
        const float count = float(*reinterpret_cast<const int64_t*>(at(from.whole, WHOLE, sizeof(int64_t))));
        std::fill_n(masses, rows, -__builtin_inff());
        for (int64_t row = 0; row < rows && count > 0; ++row, queries += dim, values += dim) {
            std::copy_n(value_mean, dim, values);
            for (int64_t i = 0; cross && i < dim; ++i) add(values, dim, cross + i * dim, queries[i] * all.scale / count);
            masses[row] = __builtin_logf(count) + all.scale * product(queries, key_mean, dim);
        }
        return;
    }
    const Weights weights(floats_at(from.count, COUNT, from.number), floats_at(from.spread, SPREAD, from.number),
                          from.number, all.scale);
    std::vector<float> means(weights.padded * dim), shares(rows * weights.padded);
    auto read = [&](const uint8_t* part, int which) {
        const int64_t size = dim * (from.halves ? sizeof(uint16_t) : sizeof(float));
        const uint8_t* row = at(part, which, from.number * size);
        for (int64_t i = 0; i < from.number; ++i, row += size)
            (from.halves ? Bfloat16::read : Float32::read)(row, nullptr, &means[i * dim], dim);
    };
    read(from.keys, KEYS);
    grouped(rows, [&](int64_t row, auto some) {
        multiply<decltype(some)::value>(&means[0], weights.padded, dim, queries + row * dim, &shares[row * weights.padded],
                                        weights.padded);
    });
    for (int64_t row = 0; row < rows; ++row) {
        float* mine = &shares[row * weights.padded];
        scale(mine, weights.padded, all.scale);
        masses[row] = weights.share(__builtin_sqrtf(product(queries + row * dim, queries + row * dim, dim)), mine);
    }
    read(from.values, VALUES);
    grouped(rows, [&](int64_t row, auto some) {
        add<decltype(some)::value>(&means[0], from.number, dim, &shares[row * weights.padded], weights.padded,
                                   values + row * dim);
    });
}

// log(e^one + e^other), where -inf stands for nothing.
inline float together(float one, float other) {
    float top = std::max(one, other);
    return top == -__builtin_inff() ? top : top + __builtin_logf(__builtin_expf(one - top) + __builtin_expf(other - top));
}

inline float share_of(float part, float total) { return total == -__builtin_inff() ? 0 : __builtin_expf(part - total); }

void weigh(const Weighing& all) {
    constexpr int64_t SOME = 64;  // rows of a head at a time
    const int64_t parts = (all.rows + SOME - 1) / SOME;
#pragma omp parallel for collapse(2) num_threads(all.threads)
    for (int64_t place = 0; place < all.places; ++place)
        for (int64_t part = 0; part < parts; ++part) {
            const Weights weights(all.count + place * all.number, all.spread + place * all.number, all.number, all.scale);
            std::vector<float> own(weights.padded);
            for (int64_t row = part * SOME; row < std::min(all.rows, (part + 1) * SOME); ++row) {
                const int64_t at = place * all.rows + row;
                const float* query = all.queries + at * all.dim;
                float* logits = all.logits + at * all.number;
                for (int64_t i = 0; i < all.number; ++i) own[i] = all.scale * logits[i];
                all.mass[at] = weights.share(__builtin_sqrtf(product(query, query, all.dim)), own.data());
                std::copy_n(own.begin(), all.number, logits);
            }
        }
}

void mix(const Mixing& all) {
#pragma omp parallel for collapse(3) num_threads(all.threads)
    for (int64_t batch = 0; batch < all.batch; ++batch)
        for (int64_t head = 0; head < all.heads; ++head)
            for (int64_t row = 0; row < all.rows; ++row) {
                const int64_t at = (batch * all.heads + head) * all.rows + row, *one = all.strides, *two = all.other_strides;
                float* out = all.out + batch * one[0] + head * one[1] + row * one[2];
                const float* other = all.other + batch * two[0] + head * two[1] + row * two[2];
                const float whole = together(all.lse[at], all.other_lse[at]);
                scale(out, all.dim, share_of(all.lse[at], whole));
                add(out, all.dim, other, share_of(all.other_lse[at], whole));
                all.lse[at] = whole;
            }
}

// Not inlined, so that products are rounded before they are added, as torch does it.
__attribute__((noinline)) void multiply_each(const float* row, const float* by, float* to, int64_t number) {
    for (int64_t i = 0; i < number; ++i) to[i] = row[i] * by[i];
}

void rotate(const Rotating& all) {
    const int64_t half = all.dim / 2;
    auto turn = [&](const float* row, float* to, int64_t heads) {
        float across[LONGEST];
        for (int64_t place = 0; place < all.batch * heads; ++place, row += all.dim, to += all.dim) {
            const float *cos = all.cos + place / heads * all.stride, *sin = all.sin + place / heads * all.stride;
            multiply_each(row, cos, to, all.dim);
            multiply_each(row + half, sin, across, half);
            multiply_each(row, sin + half, across + half, half);
            for (int64_t i = 0; i < half; ++i) to[i] -= across[i];
            for (int64_t i = half; i < all.dim; ++i) to[i] += across[i];
        }
    };
    turn(all.queries, all.to_queries, all.heads);
    turn(all.keys, all.to_keys, all.key_heads);
}

// What the stretches of a head add up to, with what stands for the evicted and a sink: `number` of them, of which outs,
// tops, sums and weights lie one behind another.
template <typename Values>
void join(const Attention& all, int64_t place, const Part* parts, int64_t number, const float* outs, const float* tops,
          const float* sums, const float* weights) {
    const int64_t rows = all.rows, dim = all.slots.dim, heads = all.slots.heads, head = place % heads;
    const int64_t batch = all.state_row(place / heads);
    const bool evicted = all.evicted.keys && !all.is_nobody(place / heads);
    std::vector<float> shares(number), mine(dim), values(evicted ? rows * dim : 0), masses(rows, -__builtin_inff());
    if (evicted) estimate(all, place, values.data(), masses.data());
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t at = place * rows + row;
        float top = -__builtin_inff(), sum = 0;
        for (int64_t part = 0; part < number; ++part) top = std::max(top, tops[part * rows + row]);
        for (int64_t part = 0; part < number; ++part) {
            shares[part] = share_of(tops[part * rows + row], top);
            sum += shares[part] * sums[part * rows + row];
        }
        const float lse = sum > 0 ? top + __builtin_logf(sum) : -__builtin_inff();
        std::fill(mine.begin(), mine.end(), 0.0f);
        for (int64_t part = 0; part < number; ++part) {
            shares[part] = sum > 0 ? shares[part] / sum : 0;
            add(&mine[0], dim, outs + (part * rows + row) * dim, shares[part]);
        }
        if (Values::TURNED) SINGLE.turn(&mine[0], dim);
        float total = lse, kept = 1;
        if (evicted) {
            total = together(lse, masses[row]);
            kept = share_of(lse, total);
            scale(&mine[0], dim, kept);
            add(&mine[0], dim, &values[row * dim], share_of(masses[row], total));
        }
        if (all.sinks) {
            const float sunk = share_of(total, together(total, all.sinks[head * rows + row]));
            scale(&mine[0], dim, sunk);
            kept *= sunk;
        }
        if (all.lse) all.lse[at] = lse;
        if (all.mass) all.mass[at] = masses[row];
        std::copy(mine.begin(), mine.end(), all.out + at * dim);
        if (!all.received || !number) continue;
        float* received = all.received + batch * all.received_strides[0] +
                          (all.slots.starts ? all.slots.first_of(batch, head) : head * all.received_strides[1]);
        for (int64_t part = 0; part < number; ++part) {
            const int64_t length = parts[part].last - parts[part].first, width = (length + TILE - 1) / TILE * TILE;
            const float* given = weights + part * rows * STRETCH + row * width;
            const float share = shares[part] * kept / rows;
            for (int64_t i = 0; i < length; ++i) received[parts[part].first + i] += given[i] * share;
        }
    }
}

// A row, plain or fp32, becomes the slot's.
template <typename Format>
void put(const void* row, int64_t dim, const Coded& to, int64_t batch, int64_t head, int64_t slot) {
    uint8_t* codes = to.codes.at(batch, head, slot);
    if constexpr (Format::PLAIN != 0)
        std::memcpy(codes, row, dim * Format::PLAIN);
    else
        Format::write(static_cast<const float*>(row), codes, to.scales.at(batch, head, slot), dim);
}

// The row of a head of the token.
template <typename Format>
const void* row_of(const void* rows, int64_t place, int64_t dim) {
    return static_cast<const char*>(rows) + place * dim * (Format::PLAIN ? Format::PLAIN : sizeof(float));
}

// Stores the token in the first free slot of every head that has one.
template <typename Keys, typename Values>
void append(const Attention& all) {
    const Slots& slots = all.slots;
    const Token& token = all.token;
    for (int64_t row = 0; row < all.batch; ++row) {
        if (all.is_nobody(row)) continue;
        const int64_t batch = all.state_row(row);
        int64_t& seen = token.seen[batch * token.seen_stride];
        for (int64_t head = 0; head < slots.heads; ++head) {
            const int64_t place = row * slots.heads + head;
            const int64_t slot = slots.first_of(batch, head) + slots.length_of(batch, head);
            if (slot >= slots.end_of(batch, head)) continue;
            put<Keys>(row_of<Keys>(token.keys, place, slots.dim), slots.dim, slots.keys, batch, head, slot);
            put<Values>(row_of<Values>(token.values, place, slots.dim), slots.dim, slots.values, batch, head, slot);
            *reinterpret_cast<int32_t*>(slots.positions.at(batch, head, slot)) = seen;
            ++slots.length_of(batch, head);
        }
        ++seen;
    }
}

template <typename Keys, typename Values>
void attend(Attention all) {
    const Slots& slots = all.slots;
    const int64_t places = all.batch * slots.heads, rows = all.rows;
    std::vector<float> turned;
    if (all.cos) {
        turned.resize(places * (rows + 1) * slots.dim);
        float *queries = turned.data(), *keys = queries + places * rows * slots.dim;
        rotate({all.queries, static_cast<const float*>(all.token.keys), queries, keys, all.cos, all.sin, all.batch,
                slots.heads * rows, slots.heads, slots.dim, all.turn_stride});
        all.queries = queries;
        all.token.keys = keys;
    }
    if (all.token.keys) append<Keys, Values>(all);
    std::vector<Part> parts;
    std::vector<int64_t> begins;  // of each place, among the parts
    for (int64_t place = 0; place < places; ++place) {
        begins.push_back(parts.size());
        const int64_t row = place / slots.heads, used = slots.length_of(all.state_row(row), place % slots.heads);
        const int64_t length = all.is_nobody(row) ? 0 : std::min(used, all.number);
        for (int64_t first = 0; first < length; first += STRETCH)
            parts.push_back({place, first, std::min(first + STRETCH, length)});
    }
    begins.push_back(parts.size());
    int64_t products = 0;
    for (const Part& part : parts) products += (part.last - part.first) * rows * slots.dim;
    std::vector<float> outs(parts.size() * rows * slots.dim), tops(parts.size() * rows), sums(parts.size() * rows);
    std::vector<float> weights(all.received ? parts.size() * rows * STRETCH : 0);
#pragma omp parallel num_threads(products < ALONE ? 1 : all.threads)
    {
        typename Stretch<Keys, Values>::Room room;
        std::vector<float> own(all.received ? 0 : rows * STRETCH);
#pragma omp for schedule(dynamic)
        for (size_t part = 0; part < parts.size(); ++part) {
            float* mine = all.received ? &weights[part * rows * STRETCH] : own.data();
            Stretch<Keys, Values>(all, parts[part], room, mine)
                .attend(&outs[part * rows * slots.dim], &tops[part * rows], &sums[part * rows]);
        }
#pragma omp for
        for (int64_t place = 0; place < places; ++place) {
            const int64_t first = begins[place];
            join<Values>(all, place, parts.data() + first, begins[place + 1] - first, outs.data() + first * rows * slots.dim,
                         tops.data() + first * rows, sums.data() + first * rows,
                         weights.data() + first * rows * STRETCH);
        }
    }
}

// The last tokens that stay move into the slots of the first that leave.
bool leave(const Leaving& all) {
    const Slots& slots = all.slots;
    const int64_t places = slots.batch * slots.heads;
    for (int64_t place = 0; place < places; ++place)
        for (int64_t slot = 0; slot < all.number; ++slot)
            if (bool(all.valid[place * all.number + slot]) != (slot < slots.length_of(place))) return false;
    for (int64_t place = 0; place < places; ++place) {
        const int64_t batch = place / slots.heads, head = place % slots.heads, first = slots.first_of(batch, head);
        int32_t& length = slots.length_of(place);
        const uint8_t* kept = all.kept + place * all.number;
        const float* known = all.known ? all.known + place * all.number : nullptr;
        auto remember = [&](int64_t slot, float number) {
            if (known) *reinterpret_cast<float*>(slots.memory.at(batch, head, first + slot)) = number;
        };
        int64_t hole = 0, last = length;
        for (int64_t slot = 0; known && slot < std::min(slots.end_of(batch, head) - first, all.number); ++slot)
            remember(slot, slot < length && kept[slot] ? known[slot] : 0);
        while (true) {
            while (hole < last && kept[hole]) ++hole;
            while (hole < last && !kept[last - 1]) --last;
            if (hole >= last) break;
            --last;
            for (const Moving* part : {&slots.keys.codes, &slots.values.codes, &slots.keys.scales, &slots.values.scales,
                                       &slots.positions, &slots.bias})
                if (part->rows) {
                    const uint8_t* from = part->at(batch, head, first + last);
                    std::memcpy(part->at(batch, head, first + hole), from, part->size);
                }
            remember(hole++, known ? known[last] : 0);
            remember(last, 0);
        }
        if (all.count) all.count[place] += length - last;
        length = int32_t(last);
    }
    return true;
}

// The tokens of every head, decoded, equally many for all; zeros behind those in use.
template <typename Keys, typename Values>
void read(const Reading& all) {
    const Slots& slots = all.slots;
#pragma omp parallel for collapse(2) num_threads(all.threads)
    for (int64_t place = 0; place < slots.batch * slots.heads; ++place)
        for (int64_t slot = 0; slot < all.number; ++slot) {
            const int64_t batch = place / slots.heads, head = place % slots.heads, at = place * all.number + slot;
            const bool used = slot < slots.length_of(place);
            const int64_t from = slots.first_of(batch, head) + slot;
            auto row = [&](auto format, const Coded& coded, float* to, int64_t dim) {
                using Format = decltype(format);
                if (!to) return;
                to += at * dim;
                if (!used) {
                    std::fill_n(to, dim, 0.0f);
                    return;
                }
                const uint8_t* scales = Format::PLAIN ? nullptr : coded.scales.at(batch, head, from);
                Format::read(coded.codes.at(batch, head, from), scales, to, dim);
                if (Format::TURNED) SINGLE.turn(to, dim);
            };
            row(Keys(), slots.keys, all.to_keys, slots.dim);
            row(Values(), slots.values, all.to_values, slots.value_dim);
            auto number = [&](const Moving& numbers, void* to) {
                if (!to) return;
                char* place_of = static_cast<char*>(to) + at * sizeof(float);
                if (used)
                    std::memcpy(place_of, numbers.at(batch, head, from), sizeof(float));
                else
                    std::memset(place_of, 0, sizeof(float));
            };
            number(slots.positions, all.to_positions);
            number(slots.memory, all.to_memory);
        }
}

template <typename Keys, typename Values>
void keep(const Keeping& all) {
    const Slots& slots = all.slots;
    const bool known = all.known.rows && slots.memory.rows;
#pragma omp parallel for num_threads(all.threads)
    for (int64_t place = 0; place < slots.batch * slots.heads; ++place) {
        const int64_t batch = place / slots.heads, head = place % slots.heads;
        const int64_t first = slots.first_of(batch, head), end = slots.end_of(batch, head);
        const uint8_t* kept = all.kept + place * all.number;
        int32_t& length = slots.length_of(place);
        int64_t slot = first + (all.behind ? length : 0);
        auto copy = [&](const Moving& from, int64_t n, const Moving& to) {
            std::memcpy(to.at(batch, head, slot), from.at(batch, head, n), to.size);
        };
        for (int64_t n = 0; n < all.number; ++n) {
            if (!kept[n] || slot == end) continue;
            put<Keys>(all.new_keys.at(batch, head, n), slots.dim, slots.keys, batch, head, slot);
            put<Values>(all.new_values.at(batch, head, n), slots.value_dim, slots.values, batch, head, slot);
            copy(all.new_positions, n, slots.positions);
            if (known) copy(all.known, n, slots.memory);
            ++slot;
        }
        length = int32_t(slot - first);
        for (; known && slot < end; ++slot) std::memset(slots.memory.at(batch, head, slot), 0, slots.memory.size);
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
            uint8_t *codes = coded.codes.at(batch, head, slot), *scales = coded.scales.at(batch, head, slot);
            if (encode) {
                Format::write(row, codes, scales, all.dim);
                continue;
            }
            Format::read(codes, scales, row, all.dim);
            if (Format::TURNED) SINGLE.turn(row, all.dim);
            for (int64_t i = 0; all.halves && i < all.dim; i += WIDE) {
                Ints bits = (Ints)floats(row + i);
                bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;  // half to even
                *reinterpret_cast<Shorts*>(all.halves + at + i) = __builtin_convertvector(bits, Shorts);
            }
        }
}

}  // namespace

#define READ(name, Keys, Values) \
    void attend_##name(const Attention* all) { attend<Keys, Values>(*all); } \
    void keep_##name(const Keeping* all) { keep<Keys, Values>(*all); } \
    void read_##name(const Reading* all) { read<Keys, Values>(*all); }
#define FORMAT(name, Format)                                              \
    READ(name, Format, Format)                                            \
    void encode_##name(const Rows* all) { each<Format>(*all, true); }      \
    void decode_##name(const Rows* all) { each<Format>(*all, false); }

extern "C" {
int leave_slots(const Leaving* all) { return leave(*all); }
void weigh_centroids(const Weighing* all) { weigh(*all); }
void mix_partials(const Mixing* all) { mix(*all); }
void rotate_heads(const Rotating* all) { rotate(*all); }
READ(float32, Float32, Float32)
READ(bfloat16, Bfloat16, Bfloat16)
READ(float16, Float16, Float16)
READ(k8v4, Scaled<Int8>, Int4)
FORMAT(int8, Scaled<Int8>)
FORMAT(fp8, Scaled<E4m3>)
FORMAT(int4, Int4)
}
