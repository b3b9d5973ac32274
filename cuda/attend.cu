// Attend: attention of new tokens to rows of a cache in any order, one pass over the rows.
//
// Query i of each head has position input_pos + i and sees the rows whose token_pos is at most that
// and at least first[batch] (0 if `first` is null). `out` becomes the rows' values by softmax,
// `lse` the logarithm of the sum of exp(score), for `attend_weights`; a query that sees nothing
// gets zeros and infinity. The query heads of a KV head are adjacent: query n of a group is token n
// % new of head n / new. `scale` is the bits of an fp32 number. Strides are in numbers. Grid: x
// over tiles of QUERIES queries of a group, y over KV heads, z over the batch. Cost: keys and
// values once per tile of queries; scores never leave the block.

#include "attend.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) attend(
    const ROW* __restrict__ query, long long query_batch, long long query_head,
    long long query_row, const ROW* __restrict__ keys, long long key_batch, long long key_head,
    long long key_row, const ROW* __restrict__ values, long long value_batch,
    long long value_head, long long value_row, const long long* __restrict__ token_pos,
    long long pos_batch, long long pos_head, const long long* __restrict__ first,
    long long input_pos, long long scale, long long each, long long new_tokens, long long rows,
    long long dim, ROW* __restrict__ out, long long out_batch, long long out_head,
    long long out_row, float* __restrict__ lse) {
    constexpr unsigned SHARES = sizeof(ROW) == 2 ? KEYS + 2 : SCORES;
    alignas(16) __shared__ ROW asked[QUERIES * STRIDE];
    alignas(16) __shared__ ROW held[KEYS * STRIDE];
    alignas(16) __shared__ ROW given[KEYS * STRIDE];
    __shared__ float scores[QUERIES * SCORES];
    alignas(16) __shared__ ROW rounded_shares[sizeof(ROW) == 2 ? QUERIES * SHARES : 1];
    __shared__ float most[QUERIES], total[QUERIES], shrunk[QUERIES], part[THREADS];

    const unsigned group = blockIdx.y, batch = blockIdx.z, width = static_cast<unsigned>(dim);
    const long long begin = static_cast<long long>(blockIdx.x) * QUERIES;
    const long long asking = each * new_tokens;
    const float factor = __uint_as_float(static_cast<unsigned>(scale));
    const long long from = first ? first[batch] : 0;
    const long long* pos = token_pos + batch * pos_batch + group * pos_head;
    // One thread in two per query looks at the even half of a tile's keys, the other at the odd.
    const unsigned mine = threadIdx.x / 2, half = threadIdx.x % 2;
    const long long until = input_pos + (begin + mine) % new_tokens;
    ROW* shares = sizeof(ROW) == 2 ? rounded_shares : reinterpret_cast<ROW*>(scores);

    bring<QUERIES>(asked, width, [&](unsigned row) -> const ROW* {
        const long long n = begin + row;
        if (n >= asking) return nullptr;
        const long long head = group * each + n / new_tokens;
        return query + batch * query_batch + head * query_head + n % new_tokens * query_row;
    });
    if (half == 0) {
        most[mine] = -infinity();
        total[mine] = 0.f;
    }
    Tile sums[WIDTH / 8];
    const unsigned top = threadIdx.x / WARP * 16;
    for (long long at = 0; at < rows; at += KEYS) {
        bring<KEYS>(held, width, [&](unsigned row) -> const ROW* {
            if (at + row >= rows) return nullptr;
            return keys + batch * key_batch + group * key_head + (at + row) * key_row;
        });
        bring<KEYS>(given, width, [&](unsigned row) -> const ROW* {
            if (at + row >= rows) return nullptr;
            return values + batch * value_batch + group * value_head + (at + row) * value_row;
        });
        __syncthreads();
        score(scores, asked, held, factor);
        __syncthreads();
        float seen[KEYS / 2], largest = -infinity();
        for (unsigned k = 0; k < KEYS / 2; ++k) {
            const long long row = at + 2 * k + half;
            const long long token = row < rows ? pos[row] : -1;
            const bool sees = row < rows && from <= token && token <= until;
            seen[k] = sees ? scores[mine * SCORES + 2 * k + half] : -infinity();
            largest = fmaxf(largest, seen[k]);
        }
        const float before = most[mine];
        part[threadIdx.x] = largest;
        __syncthreads();
        largest = fmaxf(before, fmaxf(part[threadIdx.x], part[threadIdx.x ^ 1]));
        const float base = largest == -infinity() ? 0.f : largest;
        float sum = 0.f;
        for (unsigned k = 0; k < KEYS / 2; ++k) {
            const float share = expf(seen[k] - base);
            sum += share;
            shares[mine * SHARES + 2 * k + half] = narrow<ROW>(share);
        }
        __syncthreads();
        part[threadIdx.x] = sum;
        if (half == 0) {
            most[mine] = largest;
            shrunk[mine] = expf(before - base);
        }
        __syncthreads();
        if (half == 0)
            total[mine] =
                total[mine] * shrunk[mine] + part[threadIdx.x] + part[threadIdx.x + 1];
        const float upper = shrunk[top + tile_row()], lower = shrunk[top + tile_row() + 8];
        UNROLLED for (unsigned n = 0; n < WIDTH / 8; ++n) {
            sums[n].at[0] *= upper;
            sums[n].at[1] *= upper;
            sums[n].at[2] *= lower;
            sums[n].at[3] *= lower;
            for (unsigned k = 0; k < KEYS; k += DEPTH)
                multiply<STRIDE>(sums[n], shares + top * SHARES + k, SHARES,
                                 given + k * STRIDE + n * 8, 1);
        }
        __syncthreads();
    }
    __syncthreads();
    UNROLLED for (unsigned lower = 0; lower < 2; ++lower) {
        const unsigned row = top + tile_row() + 8 * lower;
        const long long n = begin + row;
        if (n >= asking) break;
        const long long head = group * each + n / new_tokens, token = n % new_tokens;
        const float whole = total[row] > 0.f ? 1.f / total[row] : 0.f;
        ROW* to = out + batch * out_batch + head * out_head + token * out_row;
        UNROLLED for (unsigned k = 0; k < WIDTH / 8; ++k)
            for (unsigned two = 0; two < 2; ++two) {
                const unsigned column = k * 8 + tile_column() + two;
                if (column < width) to[column] = narrow<ROW>(sums[k].at[2 * lower + two] * whole);
            }
        if (tile_column() == 0)
            lse[(batch * gridDim.y * each + head) * new_tokens + token] =
                total[row] > 0.f ? most[row] + logf(total[row]) : infinity();
    }
}
