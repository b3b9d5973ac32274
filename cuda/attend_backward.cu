// Attend backward: the gradients of `attend`, of queries by tiles of queries, of K and V by tiles
// of rows.
//
// Weights P are computed again from `lse`. With T = grad Vᵀ and E = P (T - delta), where delta is
// the sum of grad times out of each query, query_grad becomes scale E K; scale Eᵀ Q and Pᵀ grad,
// sums over the query heads of a KV head, are added to key_grad and value_grad. The mask and all
// other arguments are those of `attend`; delta has the layout of lse. Only the last two are fp32. A
// block of threads owns OWN queries or rows and goes over all rows or queries, OTHER at a time;
// each warp has 16 of them. Heads of up to 512 bytes fit. Invariant: one block adds up all of a
// number, in one order: the same bits each time. Grid: x over tiles of queries of a group, then of
// rows for K, then of rows for V; y over KV heads, z over the batch. Cost: eight products, of which
// P takes three; nothing but the gradients leaves the block.

#include "attend.cuh"

constexpr unsigned OWN = BYTES <= 128 ? 64 : BYTES <= 256 ? 32 : 16;
constexpr unsigned OTHER = BYTES <= 256 ? 32 : 16;
constexpr unsigned ERRORS = OTHER + (sizeof(ROW) == 2 ? 2 : 1);
constexpr long long NEVER = 0x7fffffffffffffff;  // a token that no query sees

extern "C" __global__ void __launch_bounds__(2 * OWN) attend_backward(
    const ROW* __restrict__ query, long long query_batch, long long query_head,
    long long query_row, const ROW* __restrict__ keys, long long key_batch, long long key_head,
    long long key_row, const ROW* __restrict__ values, long long value_batch,
    long long value_head, long long value_row, const long long* __restrict__ token_pos,
    long long pos_batch, long long pos_head, const long long* __restrict__ first,
    long long input_pos, long long scale, long long each, long long new_tokens, long long rows,
    long long dim, const ROW* __restrict__ grad, long long grad_batch, long long grad_head,
    long long grad_row, const float* __restrict__ lse, const float* __restrict__ delta,
    ROW* __restrict__ query_grad, float* __restrict__ key_grad, long long key_grad_batch,
    long long key_grad_head, long long key_grad_row, float* __restrict__ value_grad,
    long long value_grad_batch, long long value_grad_head, long long value_grad_row) {
    alignas(16) __shared__ ROW own[OWN * STRIDE];          // queries, or keys
    alignas(16) __shared__ ROW own_beside[OWN * STRIDE];   // their gradients, or values
    alignas(16) __shared__ ROW other[OTHER * STRIDE];      // keys, or queries
    alignas(16) __shared__ ROW other_beside[OTHER * STRIDE];
    alignas(16) __shared__ ROW errors[OWN * ERRORS];
    __shared__ long long until[OWN], token[OWN];
    __shared__ float base[OWN], less[OWN];

    const unsigned group = blockIdx.y, batch = blockIdx.z, width = static_cast<unsigned>(dim);
    const long long asking = each * new_tokens;
    const unsigned query_tiles = static_cast<unsigned>((asking + OWN - 1) / OWN);
    const unsigned row_tiles = static_cast<unsigned>((rows + OWN - 1) / OWN);
    const bool by_rows = blockIdx.x >= query_tiles;
    const bool of_values = blockIdx.x >= query_tiles + row_tiles;
    const unsigned tile =
        blockIdx.x - (by_rows ? query_tiles : 0) - (of_values ? row_tiles : 0);
    const long long begin = static_cast<long long>(tile) * OWN;
    const long long many = by_rows ? rows : asking, others = by_rows ? asking : rows;
    const float factor = __uint_as_float(static_cast<unsigned>(scale));
    const long long from = first ? first[batch] : 0;
    const long long* pos = token_pos + batch * pos_batch + group * pos_head;
    const unsigned top = threadIdx.x / WARP * 16;

    const auto of_query = [&](const ROW* of, Apart apart, long long n) -> const ROW* {
        if (n >= asking) return nullptr;
        const long long head = group * each + n / new_tokens;
        return of + batch * apart.batch + head * apart.head + n % new_tokens * apart.row;
    };
    const auto of_row = [&](const ROW* of, Apart apart, long long n) -> const ROW* {
        return n < rows ? of + batch * apart.batch + group * apart.head + n * apart.row : nullptr;
    };
    const auto query_at = [&](long long n) {
        return of_query(query, {query_batch, query_head, query_row}, n);
    };
    const auto grad_at = [&](long long n) {
        return of_query(grad, {grad_batch, grad_head, grad_row}, n);
    };
    const auto key_at = [&](long long n) {
        return of_row(keys, {key_batch, key_head, key_row}, n);
    };
    const auto value_at = [&](long long n) {
        return of_row(values, {value_batch, value_head, value_row}, n);
    };
    // Positions and sums of `size` queries or rows from n on.
    const auto note_queries = [&](long long n, unsigned size) {
        if (threadIdx.x >= size) return;
        n += threadIdx.x;
        const bool there = n < asking;
        const long long head =
            static_cast<long long>(batch * gridDim.y + group) * each + n / new_tokens;
        const long long at = head * new_tokens + n % new_tokens;
        until[threadIdx.x] = input_pos + n % new_tokens;
        base[threadIdx.x] = there ? lse[at] : infinity();
        less[threadIdx.x] = there ? delta[at] : 0.f;
    };
    const auto note_rows = [&](long long n, unsigned size) {
        if (threadIdx.x >= size) return;
        n += threadIdx.x;
        const long long stands = n < rows ? pos[n] : NEVER;
        token[threadIdx.x] = stands < from ? NEVER : stands;
    };

    bring<OWN, 2 * OWN>(own, width, [&](unsigned n) {
        return by_rows ? key_at(begin + n) : query_at(begin + n);
    });
    if (!of_values)
        bring<OWN, 2 * OWN>(own_beside, width, [&](unsigned n) {
            return by_rows ? value_at(begin + n) : grad_at(begin + n);
        });
    if (by_rows)
        note_rows(begin, OWN);
    else
        note_queries(begin, OWN);

    Tile sums[WIDTH / 8];
    for (long long at = 0; at < others; at += OTHER) {
        bring<OTHER, 2 * OWN>(other, width, [&](unsigned n) {
            return by_rows ? query_at(at + n) : key_at(at + n);
        });
        bring<OTHER, 2 * OWN>(other_beside, width, [&](unsigned n) {
            return by_rows ? grad_at(at + n) : value_at(at + n);
        });
        if (by_rows)
            note_queries(at, OTHER);
        else
            note_rows(at, OTHER);
        __syncthreads();
        for (unsigned n = 0; n < OTHER; n += 8) {
            Tile score, share;
            for (unsigned k = 0; k < WIDTH; k += DEPTH)
                multiply<1>(score, own + top * STRIDE + k, STRIDE, other + n * STRIDE + k,
                            STRIDE);
            if (!of_values)
                for (unsigned k = 0; k < WIDTH; k += DEPTH)
                    multiply<1>(share, own_beside + top * STRIDE + k, STRIDE,
                                other_beside + n * STRIDE + k, STRIDE);
            UNROLLED for (unsigned k = 0; k < 4; ++k) {
                const unsigned mine = top + tile_row() + 8 * (k / 2);
                const unsigned across = n + tile_column() + k % 2;
                const unsigned asks = by_rows ? across : mine, held = by_rows ? mine : across;
                const bool sees = token[held] <= until[asks];
                const float weight = sees ? expf(score.at[k] * factor - base[asks]) : 0.f;
                errors[mine * ERRORS + across] =
                    narrow<ROW>(of_values ? weight : weight * (share.at[k] - less[asks]));
            }
        }
        __syncthreads();
        const ROW* right = of_values ? other_beside : other;
        UNROLLED for (unsigned n = 0; n < WIDTH / 8; ++n)
            for (unsigned k = 0; k < OTHER; k += DEPTH)
                multiply<STRIDE>(sums[n], errors + top * ERRORS + k, ERRORS,
                                 right + k * STRIDE + n * 8, 1);
        __syncthreads();
    }
    UNROLLED for (unsigned lower = 0; lower < 2; ++lower) {
        const long long n = begin + top + tile_row() + 8 * lower;
        if (n >= many) break;
        const long long head = static_cast<long long>(batch * gridDim.y + group) * each;
        ROW* queries = query_grad + (head * new_tokens + n) * dim;
        float* found = of_values ? value_grad + batch * value_grad_batch +
                                       group * value_grad_head + n * value_grad_row
                                 : key_grad + batch * key_grad_batch + group * key_grad_head +
                                       n * key_grad_row;
        UNROLLED for (unsigned k = 0; k < WIDTH / 8; ++k)
            for (unsigned two = 0; two < 2; ++two) {
                const unsigned column = k * 8 + tile_column() + two;
                const float sum = sums[k].at[2 * lower + two];
                if (column >= width) continue;
                if (by_rows)
                    found[column] += of_values ? sum : sum * factor;
                else
                    queries[column] = narrow<ROW>(sum * factor);
            }
    }
}
