// Attend weights: the attention that each row of a cache was given by the queries of each head.
//
// weights[batch, head, j] becomes the sum over queries i of exp(score_ij - lse_i) for those that
// see row j, with `lse` and sight as of `attend`; a query that saw nothing has an infinite lse and
// gives nothing. Queries are added up in their order, by one thread per row: the same bits each time.
// Grid: x over tiles of KEYS rows, y over query heads, z over the batch. Cost: keys once, queries
// once per tile of rows.

#include "attend.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) attend_weights(
    const ROW* __restrict__ query, long long query_batch, long long query_head,
    long long query_row, const ROW* __restrict__ keys, long long key_batch, long long key_head,
    long long key_row, const long long* __restrict__ token_pos, long long pos_batch,
    long long pos_head, const long long* __restrict__ first, long long input_pos,
    long long scale, long long each, long long new_tokens, long long rows, long long dim,
    const float* __restrict__ lse, float* __restrict__ weights) {
    alignas(16) __shared__ ROW asked[QUERIES * STRIDE];
    alignas(16) __shared__ ROW held[KEYS * STRIDE];
    __shared__ float scores[QUERIES * SCORES];
    __shared__ float sums[QUERIES];

    const unsigned head = blockIdx.y, batch = blockIdx.z, width = static_cast<unsigned>(dim);
    const long long group = head / each, at = static_cast<long long>(blockIdx.x) * KEYS;
    const float factor = __uint_as_float(static_cast<unsigned>(scale));
    const long long from = first ? first[batch] : 0;
    const long long row = at + threadIdx.x;
    const bool there = threadIdx.x < KEYS && row < rows;
    long long token = there ? token_pos[batch * pos_batch + group * pos_head + row] : -1;
    if (token < from) token = input_pos + new_tokens;  // no query sees it
    const float* sum_of = lse + (static_cast<long long>(batch) * gridDim.y + head) * new_tokens;

    bring<KEYS>(held, width, [&](unsigned k) -> const ROW* {
        if (at + k >= rows) return nullptr;
        return keys + batch * key_batch + group * key_head + (at + k) * key_row;
    });
    float weight = 0.f;
    for (long long begin = 0; begin < new_tokens; begin += QUERIES) {
        bring<QUERIES>(asked, width, [&](unsigned n) -> const ROW* {
            if (begin + n >= new_tokens) return nullptr;
            return query + batch * query_batch + head * query_head + (begin + n) * query_row;
        });
        if (threadIdx.x < QUERIES)
            sums[threadIdx.x] = begin + threadIdx.x < new_tokens ? sum_of[begin + threadIdx.x]
                                                                 : infinity();
        __syncthreads();
        score(scores, asked, held, factor);
        __syncthreads();
        if (there) {
            const long long skip = token - input_pos - begin;  // queries before the row's token
            for (long long n = skip > 0 ? skip : 0; n < QUERIES; ++n)
                weight += expf(scores[n * SCORES + threadIdx.x] - sums[n]);
        }
        __syncthreads();
    }
    if (there) weights[(static_cast<long long>(batch) * gridDim.y + head) * rows + row] = weight;
}
