// Vectors of the compiler, which lowers them to what a processor has. The other files are compiled behind this one.

#if defined(__AVX512F__)
#include <immintrin.h>
#endif
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace {

constexpr int WIDE = 16;  // numbers of a vector

// Of a vector of the processor's own: gcc keeps longer ones in memory where a loop has several.
#if defined(__AVX512F__)
constexpr int NATIVE = 16, SUMS = 24;  // and how many sums its registers hold beside what is added
#elif defined(__AVX__)
constexpr int NATIVE = 8, SUMS = 12;
#else
constexpr int NATIVE = 4, SUMS = 24;
#endif
constexpr int PIECES = WIDE / NATIVE;

// `multiply` takes STACK rows and SIDE columns: their sums fill the registers, so each number read is used most often.
constexpr int SIDE = std::max(WIDE, 2 * NATIVE), ABREAST = SIDE / NATIVE;
constexpr int64_t STACK = SUMS / ABREAST;

// Vectors in memory, wherever they begin.
#define LANES(type, name, count) \
    typedef type name __attribute__((vector_size(sizeof(type) * (count)), aligned(1), may_alias))
LANES(float, Floats, WIDE);
LANES(float, Native, NATIVE);
LANES(int32_t, NativeInts, NATIVE);
LANES(uint16_t, NativeShorts, NATIVE);
LANES(float, Half, WIDE / 2);
LANES(float, Quarter, WIDE / 4);
LANES(int32_t, Ints, WIDE);
LANES(uint16_t, Shorts, WIDE);
LANES(uint8_t, Bytes, WIDE);

inline Floats floats(const float* at) { return *reinterpret_cast<const Floats*>(at); }
inline Bytes bytes(const uint8_t* at) { return *reinterpret_cast<const Bytes*>(at); }
inline void store(float* at, Floats lanes) { *reinterpret_cast<Floats*>(at) = lanes; }
inline Native native(const float* at) { return *reinterpret_cast<const Native*>(at); }
inline void store_native(float* at, Native lanes) { *reinterpret_cast<Native*>(at) = lanes; }

// Of bytes that something was done to: gcc widens those that it has just read one after another.
inline Ints widened(Bytes codes) { return __builtin_convertvector(codes, Ints); }
inline Floats numbers(Bytes codes) { return __builtin_convertvector(widened(codes), Floats); }

inline float of_bits(int32_t bits) {
    float number;
    std::memcpy(&number, &bits, sizeof(number));
    return number;
}

inline int32_t bits_of(float number) {
    int32_t bits;
    std::memcpy(&bits, &number, sizeof(bits));
    return bits;
}

// The sum of 16 numbers in memory.
inline float total(const float* at) {
    float eight[WIDE / 2];
    *reinterpret_cast<Half*>(eight) = *reinterpret_cast<const Half*>(at) + *reinterpret_cast<const Half*>(at + 8);
    Quarter four = *reinterpret_cast<Quarter*>(eight) + *reinterpret_cast<Quarter*>(eight + 4);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

inline float total(const Native (&pieces)[PIECES]) {
    float parts[WIDE];
    for (int p = 0; p < PIECES; ++p) store_native(parts + p * NATIVE, pieces[p]);
    return total(parts);
}

constexpr int FOUR = 4;  // sums that are totalled together

// The totals of some sums, which are vectors of PIECES; the same bits as of each by itself.
template <int N>
inline void totals(const Native (&sums)[N][PIECES], float* to) {
#if defined(__AVX512F__)
    if constexpr (N == FOUR) {
        auto halves = [](__m512 one, __m512 other) {  // of both, added
            return _mm512_shuffle_f32x4(one, other, 0x44) + _mm512_shuffle_f32x4(one, other, 0xEE);
        };
        auto first = halves((__m512)sums[0][0], (__m512)sums[1][0]), second = halves((__m512)sums[2][0], (__m512)sums[3][0]);
        auto four = _mm512_shuffle_f32x4(first, second, 0x88) + _mm512_shuffle_f32x4(first, second, 0xDD);
        auto two = four + _mm512_permute_ps(four, 0xEE), one = two + _mm512_permute_ps(two, 0x55);
        _mm_storeu_ps(to, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, one)));
        return;
    }
#endif
    for (int n = 0; n < N; ++n) to[n] = total(sums[n]);
}

inline float total_of(Floats lanes) {
    float parts[WIDE];
    store(parts, lanes);
    return total(parts);
}

typedef Native Products[STACK][ABREAST];

// sums += rows [STACK, number] @ columns [number, SIDE]; numbers of a row are STEP apart.
template <int64_t STEP = 1>
inline void multiply(const float* const* rows, const float* columns, int64_t number, Products& sums) {
    for (int64_t i = 0; i < number; ++i, columns += SIDE) {
        Native theirs[ABREAST];
        for (int64_t part = 0; part < ABREAST; ++part) theirs[part] = native(columns + part * NATIVE);
#pragma GCC unroll 12
        for (int64_t one = 0; one < STACK; ++one)
#pragma GCC unroll 4
            for (int64_t part = 0; part < ABREAST; ++part) sums[one][part] += rows[one][i * STEP] * theirs[part];
    }
}

constexpr float ROUNDING = 0x1.8p23f;  // adding it rounds numbers below 2^22 to whole ones, half to even

// e^x for x <= 0, 0 below -87: x = n log 2 + r, |r| <= log(2) / 2, and Taylor's polynomial of e^r.
inline Native exponential(Native x) {
    Native bounded = x < -87.0f ? Native{} - 87.0f : x;
    Native shifted = bounded * 1.44269504f + ROUNDING;
    Native n = shifted - ROUNDING;
    Native r = bounded - n * 0.693359375f + n * 2.12194440e-4f;  // log 2 in two parts
    Native sum = r * (1.0f / 5040) + (1.0f / 720);
    for (float term : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) sum = sum * r + term;
    NativeInts power = (NativeInts)shifted - (NativeInts)(Native{} + ROUNDING) + 127;
    return x < -87.0f ? Native{} : sum * (Native)(power << 23);
}

// log(1 + x) for x from 0 to 1: twice the series of atanh z, z = x / (2 + x) <= 1 / 3.
inline Native log_of_one_plus(Native x) {
    Native z = x / (2.0f + x), square = z * z, sum = Native{} + 1.0f / 15;
    for (int odd = 13; odd > 0; odd -= 2) sum = sum * square + 1.0f / odd;
    return 2.0f * z * sum;
}

inline Native larger(Native one, Native other) { return one > other ? one : other; }

// The largest of the numbers of a row, and of `least`; a multiple of NATIVE.
inline float largest_of(const float* row, int64_t numbers, float least) {
    Native tops = Native{} + least;
    for (int64_t i = 0; i < numbers; i += NATIVE) tops = larger(native(row + i), tops);
    float top = least;
    for (int i = 0; i < NATIVE; ++i) top = std::max(top, tops[i]);
    return top;
}

}  // namespace
