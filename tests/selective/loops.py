"""Another selective cache: plain loops over tokens, per batch row and head, in float64.

Rows are lists of tokens; a token leaves the list of those that may go or it does not. Nothing here
knows tensors of rows, scatters or sorts by key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

F32 = np.float32
TIE = 1e-6


def affine(x, bits):
    """A block after coding in 8 or 4 bits."""
    x = x.astype(F32)
    low, high, top = x.min(), x.max(), F32(2**bits - 1)
    scale = max(F32((high - low) / top), F32(2.0**-23))
    zero = -int(np.rint(low / scale))
    inverse = F32(1) / scale
    codes = [min(max(int(np.rint(F32(v * inverse))) + zero, 0), 2**bits - 1) for v in x]
    return np.array([F32(F32(code - zero) * scale) for code in codes])


def int8(x):
    x = x.astype(F32)
    scale = max(F32(np.abs(x).max() / F32(127)), F32(2.0**-126))
    inverse = F32(1) / scale
    return np.array([F32(min(max(int(np.rint(F32(v * inverse))), -127), 127)) * scale for v in x])


def fp8(x):
    """e4m3: three bits after the point, exponents from -6, subnormal below, 448 the largest."""
    x = x.astype(F32)
    scale = max(F32(np.abs(x).max() / F32(448)), F32(2.0**-126))
    inverse = F32(1) / scale
    out = []
    for v in x:
        y = float(F32(v * inverse))
        unit = 2.0 ** (max(math.frexp(y)[1] - 1, -6) - 3) if y else 1.0
        nearest = min(max(round(y / unit) * unit, -448.0), 448.0)  # round: ties to even
        out.append(F32(nearest) * scale)
    return np.array(out)


ROUND = {
    "default": lambda x: x,
    "torch-quantized8": lambda x: affine(x, 8),
    "torch-quantized4": lambda x: affine(x, 4),
    "int8": int8,
    "fp8": fp8,
}


@dataclass
class Token:
    pos: int
    k: np.ndarray
    v: np.ndarray
    kept_k: np.ndarray
    kept_v: np.ndarray
    s: float = 0.0
    vlen: float = 0.0  # its own cumulated score
    slow: float = 0.0  # the decayed one
    a: float = 0.0

    @property
    def norm(self):
        return float(np.linalg.norm(self.v))

    @property
    def error(self):
        return float(np.linalg.norm(self.k - self.kept_k) + np.linalg.norm(self.v - self.kept_v))

    def end_step(self):
        self.now_k, self.now_v = self.kept_k, self.kept_v


def softmax(scores):
    high = max(scores)
    parts = [math.exp(score - high) for score in scores]
    return [part / sum(parts) for part in parts]


def min_max(numbers, everything):
    low, high = min(everything), max(everything)
    return [0.0 if high == low else (x - low) / (high - low) for x in numbers]


class Oracle:
    """All batch rows and heads of one layer; `step` takes arrays `(B, H or G, m, D)`."""

    def __init__(self, policy, buffers, batch, groups, heads, length, *, first=None, **kwargs):
        self.policy, self.round = policy, ROUND[buffers]
        self.batch, self.groups, self.each, self.length = batch, groups, heads // groups, length
        self.grace = kwargs.get("grace_period", 0)
        self.share = kwargs.get("keep_initial_fraction", 0.05)
        self.normal = kwargs.get("normalize_scores", False)
        self.sinks = kwargs.get("sinks", kwargs.get("init_grace_tokens", 0))
        ours = policy not in {"h2o", "qh2o", "h2o-vlen", "qh2o-vlen", "h2o-orig"}
        self.prefill_scores = kwargs.get("prefill_scores", 32 if ours else 0)
        self.decay = kwargs.get("decay", 0.999)
        self.seed = kwargs.get("seed", 0)
        self.first = first or [0] * batch
        self.rows = {(b, g): [] for b in range(batch) for g in range(groups)}
        self.past = {(b, h): [] for b in range(batch) for h in range(heads)}
        self.pos = self.prefill = 0
        self.evicted = False
        self.ties = 0
        self.seen = []  # per step and (b, g): for each query the positions it saw

    # ------------------------------------------------------------------------------ a step

    def step(self, query, key, value, kept=None):  # noqa: C901, PLR0912 - loops on purpose
        """Outputs; `kept` says what another cache holds, to follow it where scores tie."""
        new = key.shape[2]
        full = self.pos >= self.length
        self.kept = kept or {}
        victims = self.victims(new) if full else {}
        self.evicted |= full
        out = np.zeros(query.shape)
        sights = {}
        for (b, g), rows in self.rows.items():
            if full:
                gone = victims[b, g]
                assert len(gone) == new
                rows[:] = [token for token in rows if token.pos not in gone]
            for at in range(new):
                k, v = key[b, g, at], value[b, g, at]
                token = Token(self.pos + at, k, v, self.round(k), self.round(v))
                token.now_k, token.now_v = k, v
                rows.append(token)
            for token in rows:
                token.a = 0.0
            sights[b, g] = []
            for at in range(new):
                pos = self.pos + at
                sight = [t for t in rows if self.first[b] <= t.pos <= pos]
                sights[b, g].append([t.pos for t in sight])
                for head in range(g * self.each, (g + 1) * self.each):
                    q = query[b, head, at]
                    self.past[b, head].append(q)
                    if not sight:
                        continue
                    weights = softmax([float(q @ t.now_k) / math.sqrt(len(q)) for t in sight])
                    out[b, head, at] = sum(w * t.now_v for w, t in zip(weights, sight, strict=True))
                    for w, t in zip(weights, sight, strict=True):
                        if self.counts(at, new):
                            t.a += w / self.each
        self.seen.append(sights)
        prefill = self.pos == 0
        if prefill:
            self.prefill = new
        self.pos += new
        if prefill and self.scored:
            self.smooth()
        if not prefill or self.scored:
            self.cumulate(new)
        for rows in self.rows.values():
            for token in rows:
                token.end_step()
        return out

    @property
    def scored(self):
        return min(self.prefill_scores, self.prefill)

    def counts(self, at, new):
        """Whether a query's weights count: in the first step the last ones, or none."""
        return self.pos > 0 or at >= new - self.prefill_scores

    def smooth(self):
        for rows in self.rows.values():
            for token, mean in zip(rows, pooled([t.a for t in rows]), strict=True):
                token.a = mean

    def cumulate(self, new):
        for (_, g), rows in self.rows.items():
            weighed = sum(t.a * t.norm for t in rows)
            total = sum(t.a for t in rows)
            for token in rows:
                a = token.a
                if self.policy == "h2o-orig":
                    a = sum(
                        next(t.a for t in self.rows[other, g] if t.pos == token.pos)
                        for other in range(self.batch)
                    )
                token.s += a
                token.slow = token.slow * self.decay**new + a
                if weighed:
                    token.vlen += total * token.a * token.norm / weighed

    # ------------------------------------------------------------------------------ victims

    def victims(self, new):
        """Per (b, g) the positions that go."""
        chosen = {}
        for (b, g), rows in self.rows.items():
            by_age = sorted(rows, key=lambda t: t.pos)
            pads = [t.pos for t in by_age if t.pos < self.first[b]]
            kept = range(self.first[b], self.first[b] + self.sinks)
            free = [t for t in by_age if t.pos >= self.first[b] and t.pos not in kept]
            if self.policy == "lastrec":
                order = [t.pos for t in free]
            else:
                ring = {t.pos for t in by_age[len(by_age) - self.grace :]}
                pads = [pos for pos in pads if pos not in ring]
                free = [t for t in free if t.pos not in ring]
                order = self.ordered(b, g, free, ring, max(0, new - len(pads)))
            chosen[b, g] = set((pads + order)[:new])
        return chosen

    def ordered(self, b, g, free, ring, wanted):
        if self.prefill == self.length and not self.evicted and not self.scored:
            start = self.first[b] + max(int(self.share * self.length), self.sinks)
            start = min(start, self.length - self.grace - wanted)
            return [t.pos for t in free if t.pos >= start]
        real = [t for t in self.rows[b, g] if t.pos not in ring and t.pos >= self.first[b]]
        scores = self.score(self.policy, b, g, real, ring)
        free_now = {t.pos for t in free}
        found = sorted((s, t.pos) for s, t in zip(scores, real, strict=True) if t.pos in free_now)
        if 0 < wanted < len(found) and found[wanted][0] - found[wanted - 1][0] < TIE:
            self.ties += 1
            last = found[wanted - 1][0]
            found.sort(
                key=lambda pair: (
                    pair[0] > last - TIE,
                    pair[0] > last + TIE,
                    pair[1] in self.kept.get((b, g), ()),
                    pair,
                )
            )
        return [pos for _, pos in found]

    def score(self, policy, b, g, rows, ring):  # noqa: C901, PLR0911 - a policy a line
        """One number per row, of which the lowest goes first."""
        if policy.startswith("mix-"):
            return self.halves(policy, b, g, rows, ring)
        if policy in {"h2o", "h2o-orig"}:
            return [t.s / self.age(t) for t in rows]
        if policy == "h2o-vlen":
            return [t.vlen / self.age(t) for t in rows]
        if policy == "h2o-decay":
            return [t.slow / self.age(t) for t in rows]
        if policy in {"qh2o", "qh2o-vlen"}:
            plain = policy[1:]
            everywhere = [
                (self.score(plain, b, h, real, ring), [t.error for t in real])
                for h in range(self.groups)
                for real in [self.outside(b, h)]
            ]
            used = [s for scores, _ in everywhere for s in scores]
            wrong = [e for _, errors in everywhere for e in errors]
            mine = self.score(plain, b, g, rows, ring)
            return [
                0.5 * u - 0.25 * e + 0.5
                for u, e in zip(
                    min_max(mine, used), min_max([t.error for t in rows], wrong), strict=True
                )
            ]
        if policy == "knorm":
            return [-np.linalg.norm(t.now_k) for t in rows]
        if policy == "keydiff":
            units = [t.now_k / np.linalg.norm(t.now_k) for t in rows]
            mean = sum(units)
            return [-float(u @ mean) / np.linalg.norm(mean) for u in units]
        if policy == "random":
            return [chance(t.pos, g, self.seed) for t in rows]
        if policy == "tova":
            return self.window(b, g, rows, self.behind(1))
        if policy == "snapkv":
            weights = self.window(b, g, rows, self.behind(32))
            by_age = sorted(range(len(rows)), key=lambda at: rows[at].pos)
            # Padding between is rows that no query sees.
            before = [t for t in self.rows[b, g] if t.pos < self.first[b] and t.pos not in ring]
            smooth = pooled([0.0] * len(before) + [weights[at] for at in by_age])[len(before) :]
            out = [0.0] * len(rows)
            for at, mean in zip(by_age, smooth, strict=True):
                out[at] = mean
            return out
        if policy == "expected":
            return self.expected(b, g, rows)
        raise AssertionError(policy)

    def outside(self, b, g):
        by_age = sorted(self.rows[b, g], key=lambda t: t.pos)
        by_age = by_age[: len(by_age) - self.grace]
        return [t for t in by_age if t.pos >= self.first[b]]

    def age(self, token):
        if not self.normal:
            return 1
        return self.pos - max(token.pos, self.prefill - self.scored - 1)

    def behind(self, width):
        """Number of last queries that count: after the first step at least those that score it."""
        return max(width, self.scored) if self.pos == self.prefill else width

    def window(self, b, g, rows, width):
        total = [0.0] * len(rows)
        for head in range(g * self.each, (g + 1) * self.each):
            for q in self.past[b, head][-width:]:
                weights = softmax([float(q @ t.now_k) / math.sqrt(len(q)) for t in rows])
                total = [s + w / self.each for s, w in zip(total, weights, strict=True)]
        return total

    def expected(self, b, g, rows):
        total = [0.0] * len(rows)
        for head in range(g * self.each, (g + 1) * self.each):
            queries = np.array(self.past[b, head][-self.behind(64) :])
            mean, spread = queries.mean(axis=0), queries.var(axis=0)
            for at, token in enumerate(rows):
                k = token.now_k / math.sqrt(len(token.now_k))
                total[at] += (float(mean @ k) + float(spread @ (k * k)) / 2) / self.each
        return [s + math.log(np.linalg.norm(t.now_v)) for s, t in zip(total, rows, strict=True)]

    def halves(self, policy, b, g, rows, ring):
        """Two lists, best first; rows are taken from them in turn."""
        lists = []
        for part in policy.removeprefix("mix-").split("+"):
            scores = self.score(part, b, g, rows, ring)
            first, last = self.first[b], self.first[b] + self.sinks
            lists.append(
                [
                    t.pos
                    for _, t in sorted(
                        zip(scores, rows, strict=True),
                        key=lambda pair: (first <= pair[1].pos < last, pair[0], pair[1].pos),
                        reverse=True,
                    )
                ]
            )
        taken = []
        for pair in zip(*lists, strict=True):
            taken += [pos for pos in pair if pos not in taken]
        worth = {pos: len(taken) - at for at, pos in enumerate(taken)}
        return [worth[t.pos] for t in rows]


def pooled(numbers):
    return [
        sum(numbers[max(0, at - 2) : at + 3]) / len(numbers[max(0, at - 2) : at + 3])
        for at in range(len(numbers))
    ]


def chance(pos, head, seed):
    mixed = pos * 2_654_435_761 + head * 40_503 + seed * 69_069
    mixed = ((mixed ^ (mixed >> 15)) * 2_246_822_519) & 0xFFFF_FFFF
    return (mixed ^ (mixed >> 13)) & 0xFF_FFFF
