// Pack int4: rows of whole blocks into units of 4-bit codes and their scales; see int4.cuh.
//
// Row `i * tokens + t` is token t of the block at units[i]. Units must differ; the host refuses
// those outside the memory. Grid: x runs over groups: of K a thread has those of one vector of
// channels, of V one group. Cost: two reads of every number, the second out of a cache, and one
// write.

#include "int4.cuh"

// Largest and least numbers, one per lane of a vector.
struct Extremes {
    float most[VECTOR], least[VECTOR];

    __device__ explicit Extremes(const Pack<ROW, VECTOR>& first) {
        for (unsigned k = 0; k < VECTOR; ++k) most[k] = least[k] = widen(first.at[k]);
    }
    __device__ void take(const Pack<ROW, VECTOR>& part) {
        for (unsigned k = 0; k < VECTOR; ++k) {
            most[k] = fmaxf(most[k], widen(part.at[k]));
            least[k] = fminf(least[k], widen(part.at[k]));
        }
    }
};

__device__ inline void pack_keys(const ROW* block, unsigned char* unit, unsigned job,
                                 const Units& of) {
    const unsigned first = job / (of.heads * of.vectors()) * GROUP;
    const unsigned end = first + GROUP < of.tokens ? first + GROUP : of.tokens;
    const unsigned row = of.heads * of.dim, at = job % (of.heads * of.vectors()) * VECTOR;
    Extremes found(load<VECTOR>(block + first * row + at));
    for (unsigned t = first + 1; t < end; ++t) found.take(load<VECTOR>(block + t * row + at));
    Pack<fp16, VECTOR> scales, zeros;
    float inverse[VECTOR];
    for (unsigned k = 0; k < VECTOR; ++k) {
        const Codec codec = codec_of_keys(found.most[k], found.least[k]);
        scales.at[k] = codec.scale;
        zeros.at[k] = codec.zero;
        inverse[k] = codec.inverse();
    }
    fp16* noted = reinterpret_cast<fp16*>(unit + of.scales_at) + first / GROUP * row + at;
    store(noted, scales);
    store(noted + of.token_groups() * row, zeros);
    for (unsigned t = first; t < end; ++t) {
        const auto part = load<VECTOR>(block + t * row + at);
        Pack<unsigned char, VECTOR / 2> codes;
        for (unsigned k = 0; k < VECTOR; k += 2) {
            const Codec even = {scales.at[k], zeros.at[k], 0.f};
            const Codec odd = {scales.at[k + 1], zeros.at[k + 1], 0.f};
            codes.at[k / 2] = static_cast<unsigned char>(
                even.code(widen(part.at[k]), inverse[k]) |
                odd.code(widen(part.at[k + 1]), inverse[k + 1]) << 4);
        }
        store(unit + of.codes_at + (t * row + at) / 2, codes);
    }
}

__device__ inline void pack_values(const ROW* block, unsigned char* unit, unsigned job,
                                   const Units& of) {
    const unsigned head = job / of.groups(), first = job % of.groups() * GROUP;
    const unsigned end = first + GROUP < of.dim ? first + GROUP : of.dim;
    const ROW* row = block + head * of.dim;
    Extremes found(load<VECTOR>(row + first));
    for (unsigned at = first + VECTOR; at < end; at += VECTOR) found.take(load<VECTOR>(row + at));
    float most = found.most[0], least = found.least[0];
    for (unsigned k = 1; k < VECTOR; ++k) {
        most = fmaxf(most, found.most[k]);
        least = fminf(least, found.least[k]);
    }
    const Codec codec = codec_of_values(most, least);
    const float inverse = codec.inverse();
    reinterpret_cast<fp16*>(unit + of.scales_at)[job] = codec.scale;
    for (unsigned at = first; at < end; at += VECTOR) {
        const auto part = load<VECTOR>(row + at);
        Pack<unsigned char, VECTOR / 2> codes;
        for (unsigned k = 0; k < VECTOR; k += 2)
            codes.at[k / 2] =
                static_cast<unsigned char>(codec.code(widen(part.at[k]), inverse) |
                                           codec.code(widen(part.at[k + 1]), inverse) << 4);
        store(unit + of.codes_at + (head * of.dim + at) / 2, codes);
    }
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS) pack_int4(
    const ROW* __restrict__ rows, unsigned char* __restrict__ memory, long long stride,
    long long codes_at, long long scales_at, long long tokens, long long heads, long long dim,
    long long keys, const long long* __restrict__ units, long long count) {
    const Units of = {codes_at, scales_at, static_cast<unsigned>(tokens),
                      static_cast<unsigned>(heads), static_cast<unsigned>(dim)};
    const unsigned jobs = keys ? of.token_groups() * of.heads * of.vectors()
                               : of.tokens * of.heads * of.groups();
    const unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= static_cast<unsigned>(count) * jobs) return;
    const unsigned i = at / jobs, job = at % jobs;
    const ROW* block = rows + i * tokens * heads * dim;
    unsigned char* unit = memory + units[i] * stride;
    if (keys)
        pack_keys(block, unit, job, of);
    else
        pack_values(block, unit, job, of);
}
