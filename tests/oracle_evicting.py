"""Slow float64 oracle of the methods that evict, one row of a batch at a time.

Written from the papers and docs/design.md (section 3), in loops over queries, heads and tokens. Nothing
here imports cache/, kv_methods/ or kernels/.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from oracles import attention, rotate, softmax

Budget = int | float


def tokens(budget: Budget, length: int) -> int:
    """A number of tokens, or a share of the length, rounded up."""
    return min(length, budget if isinstance(budget, int) else math.ceil(budget * length - 1e-6))


class Row:
    """q [Hq, n, D], k and v [Hkv, n, D] of the prompt, rotated. Scores are kept by KV head and position."""

    def __init__(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, *, budget: Budget = 0, recent: Budget = 0):
        self.budget, self.newest = budget, recent
        self.g, self.decoded, self.prompt_len = len(q) // len(k), 0, k.shape[1]
        self.q = [[x[t] for t in range(k.shape[1])] for x in q]  # of all tokens
        self.k = [list(head) for head in k]
        self.v = [list(head) for head in v]
        n = k.shape[1]
        scores = self.scores_of_prompt(q, n)
        self.score: list[dict[int, float]] = [
            {t: scores[head][t] for t in kept} for head, kept in enumerate(self.choose(scores, n))
        ]

    def choose(self, scores: list[list[float]], n: int) -> list[list[int]]:
        """What each head keeps of the prompt."""
        recent = range(max(0, n - self.recent(n)), n)
        best = [sorted((t for t in range(n) if t not in recent), key=lambda t: (-head[t], t)) for head in scores]
        return [[*recent, *others[: self.num_kept(n) - len(recent)]] for others in best]

    def weights(self, x: np.ndarray, head: int, seen: list[int]) -> np.ndarray:
        """Softmax weights of one query x [D] over some tokens of a KV head."""
        return softmax(np.array([x @ self.k[head][t] for t in seen]) / math.sqrt(len(x)))

    def mass(self, q: np.ndarray, n: int, last: int, reduce: Callable[[list[float]], float] = sum) -> list[list[float]]:
        """Attention that each token of the prompt gets from its last queries, by KV head."""
        out = []
        for head in range(len(self.k)):
            each = np.zeros((self.g, n))
            for i, t in np.ndindex(self.g, n):
                if t >= n - last:
                    each[i, : t + 1] += self.weights(q[head * self.g + i, t], head, list(range(t + 1)))
            out.append([float(reduce(list(column))) for column in each.T])
        return out

    def step(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """One token: q [Hq, D], k and v [Hkv, D] -> [Hq, D]."""
        pos, out, seen_by = len(self.k[0]), [], []
        self.rescore()
        for head, score in enumerate(self.score):
            if self.evicts and len(score) >= self.num_kept(pos + 1):
                old = [t for t in sorted(score) if t <= pos - self.recent(pos + 1)]
                del score[min(old, key=lambda t: (score[t], t))]
            score[pos] = 0.0
            self.k[head].append(k[head])
            self.v[head].append(v[head])
            seen, total = sorted(score), np.zeros(len(score))
            seen = self.attended(q[head * self.g : (head + 1) * self.g], head, seen)
            total = np.zeros(len(seen))
            for i in range(self.g):
                x = q[head * self.g + i]
                self.q[head * self.g + i].append(x)
                total += self.weights(x, head, seen)
                out.append(attention(x, [self.k[head][t] for t in seen], [self.v[head][t] for t in seen]))
            seen_by.append(dict(zip(seen, total, strict=True)))
        self.observe(seen_by)
        self.decoded += 1
        if self.every and self.decoded % self.every == 0:
            self.evict_later()
        return np.stack(out)

    every = 0  # decoded tokens between two evictions

    def attended(self, q: np.ndarray, head: int, held: list[int]) -> list[int]:
        return held

    def evict_later(self) -> None:
        """The newest tokens stay, and the best of the others as the method scores what is held."""
        n = len(self.k[0])
        for head, score in enumerate(self.score):
            held = sorted(score)
            worth = dict(zip(held, self.score_held(head, held, n), strict=True))
            best = sorted(held, key=lambda t: (-math.inf if t >= n - self.newest else -worth[t], t))
            for t in best[self.num_kept(n) :]:
                del score[t]

    def score_held(self, head: int, held: list[int], n: int) -> list[float]:
        raise NotImplementedError

    evicts = True

    def scores_of_prompt(self, q: np.ndarray, n: int) -> list[list[float]]:
        return [[0.0] * n for _ in self.k]

    def recent(self, length: int) -> int:
        return min(length, self.newest)

    def num_kept(self, length: int) -> int:
        return max(tokens(self.budget, length), self.recent(length))

    def observe(self, weights: list[dict[int, float]]) -> None:
        """By KV head, the step's weights summed over the group."""

    def rescore(self) -> None:
        """Before a token comes and another goes."""


class H2ORow(Row):
    def __init__(self, q, k, v, *, heavy: Budget, recent: Budget):
        self.heavy = heavy
        super().__init__(q, k, v, recent=recent)

    def scores_of_prompt(self, q, n):
        return self.mass(q, n, n)

    def recent(self, length):
        return tokens(self.newest, length)

    def num_kept(self, length):
        return min(length, tokens(self.heavy, length) + self.recent(length))

    def observe(self, weights):
        for score, seen in zip(self.score, weights, strict=True):
            for t, w in seen.items():
                score[t] += w


class TOVARow(Row):
    def __init__(self, q, k, v, *, heads: str, **knobs):
        self.heads = heads
        super().__init__(q, k, v, **knobs)

    def over_heads(self, by_head):
        """The mean of all query heads, for every KV head; or of each group alone."""
        if self.heads == "kv":
            return by_head
        return [sum(x) / len(by_head) for x in zip(*by_head, strict=True)]

    def scores_of_prompt(self, q, n):
        mass = self.mass(q, n, 1)
        return mass if self.heads == "kv" else [self.over_heads(mass)] * len(mass)

    def observe(self, weights):
        if self.heads == "layer":
            assert all(set(w) == set(weights[0]) for w in weights), "one choice for a layer"
            mean = {t: sum(w[t] for w in weights) / len(weights) for t in weights[0]}
            weights = [mean] * len(weights)
        self.score = [dict(w) for w in weights]


class PromptRow(Row):
    """One that evicts from the prompt alone. weights [Hq, D, dim]: W_O by query head."""

    evicts = False

    def __init__(self, q, k, v, *, adaptive: bool, safeguard: float, value_aware: bool, first_stage: float,
                 weights: np.ndarray, chunk_length: int = 0, **knobs):  # fmt: skip
        self.adaptive, self.safeguard, self.chunk, self.w = adaptive, safeguard, chunk_length, weights
        self.value_aware, self.first_stage = value_aware, first_stage
        super().__init__(q, k, v, **knobs)

    def choose(self, scores, n):
        """AdaKV: each head has its best safeguard * budget, then the best of all; CriticalKV: of what a head has, the
        best by score, then by score times the mean |W_O v|_1 of the group."""
        window = range(max(0, n - self.recent(n)), n)
        before, budget, heads = range(window.start), self.num_kept(n) - len(window), range(len(self.k))
        if self.chunk:  # ChunkKV: the best chunks by their means over tokens and heads; the last is cut
            chunks = [before[i : i + self.chunk] for i in range(0, len(before), self.chunk)]
            means = [sum(np.mean([head[t] for t in chunk]) for head in scores) for chunk in chunks]
            ranked = [t for i in sorted(range(len(chunks)), key=lambda i: -means[i]) for t in chunks[i]]
            return [[*window, *ranked[:budget]] for _ in heads]
        ranked = [sorted(before, key=lambda t: (-scores[h][t], t)) for h in heads]
        count = [budget] * len(heads)
        if self.adaptive:
            count = [int(self.safeguard * budget)] * len(heads)
            rest = [(-scores[h][t], h, t) for h in heads for t in ranked[h][count[h] :]]
            for _, h, _ in sorted(rest)[: budget * len(heads) - sum(count)]:
                count[h] += 1
        out = []
        for h in heads:
            kept = ranked[h][: count[h]]
            if self.value_aware:
                kept = ranked[h][: int(self.first_stage * count[h])]
                others = sorted(
                    (t for t in before if t not in kept), key=lambda t: (-scores[h][t] * self.size(h, t), t)
                )
                kept = kept + others[: count[h] - len(kept)]
            out.append([*window, *kept])
        return out

    def size(self, head: int, t: int) -> float:
        return float(np.mean([np.abs(self.v[head][t] @ self.w[head * self.g + i]).sum() for i in range(self.g)]))


class SnapKVRow(PromptRow):
    def __init__(self, q, k, v, *, kernel: int, pool: str, group: str, decode_budget: int | None = None,
                 decode_every: int = 64, **knobs):  # fmt: skip
        self.kernel, self.pool, self.group = kernel, pool, group
        self.decode_budget, self.every = decode_budget, decode_every if decode_budget is not None else 0
        super().__init__(q, k, v, **knobs)

    def scores_of_prompt(self, q, n):
        votes = self.mass(q, n, self.newest, max if self.group == "max" else sum)
        out, before = [], max(0, n - self.newest)
        for head in votes:
            near = [[head[j] if 0 <= j < before else 0.0 for j in self.around(t)] for t in range(n)]
            out.append([max(x) if self.pool == "max" else sum(x) / self.kernel for x in near])
        return out

    def evict_later(self):
        """Of decoded tokens alone; votes and pooling are as of a prompt that holds what is held."""
        n, reduce = len(self.k[0]), max if self.group == "max" else sum
        for head, score in enumerate(self.score):
            held = sorted(score)
            each = np.zeros((self.g, len(held)))
            for i in range(self.g):
                for t in range(max(0, n - self.newest), n):
                    seen = [s for s in held if s <= t]
                    each[i, : len(seen)] += self.weights(self.q[head * self.g + i][t], head, seen)
            votes, before = [float(reduce(list(column))) for column in each.T], max(0, len(held) - self.newest)
            near = [[votes[j] if 0 <= j < before else 0.0 for j in self.around(t)] for t in range(len(held))]
            pooled = [max(x) if self.pool == "max" else sum(x) / self.kernel for x in near]
            decoded = [(i, t) for i, t in enumerate(held) if t >= self.prompt_len]
            best = sorted(decoded, key=lambda x: (-math.inf if x[1] >= n - self.newest else -pooled[x[0]], x[1]))
            for _, t in best[self.decode_budget :]:
                del score[t]

    def around(self, t):
        return range(t - self.kernel // 2, t + self.kernel // 2 + 1)


class PyramidKVRow(SnapKVRow):
    def __init__(self, q, k, v, *, beta: float, layer: int, n_layer: int, **knobs):
        self.beta, self.layer, self.n_layer = beta, layer, n_layer
        super().__init__(q, k, v, **knobs)

    def num_kept(self, length):
        """As the published code has it, in its order: a prompt within the capacity is kept; one below twice the
        capacity less the window keeps the capacity in every layer; of others sizes fall, from at most what there is."""
        window, capacity = self.recent(length), tokens(self.budget, length)
        if capacity >= length:
            return length
        rest = max(0, capacity - window)
        if length < 2 * rest:
            return capacity
        low = rest / self.beta
        high = 2 * rest - low
        if high > length - window:
            high = length - window
            low = 2 * rest - high
        size = high - self.layer * (high - low) / (self.n_layer - 1)
        return min(length, window + round(size))


class ExpectedAttentionRow(PromptRow):
    def __init__(
        self, q, k, v, *, sinks: int, future: int, covariance: bool, value_norm: bool, epsilon: float, **knobs
    ):
        self.sinks, self.future, self.covariance = sinks, future, covariance
        self.value_norm, self.epsilon = value_norm and not knobs["value_aware"], epsilon
        super().__init__(q, k, v, **knobs)

    def scores_of_prompt(self, q, n):
        D = q.shape[2]
        turn = np.mean([np.stack([rotate(x, n + j) for x in np.eye(D)], 1) for j in range(self.future)], 0)
        out = []
        for head, keys in enumerate(self.k):
            total, seen = np.zeros(n), range(min(self.sinks, n), n)
            for x in q[head * self.g : (head + 1) * self.g]:
                if not seen:
                    break
                before = np.array([rotate(x[t], -t) for t in seen])  # as it was before its rotation
                mean = sum(before) / len(seen)
                spread = sum(np.outer(y - mean, y - mean) for y in before) / len(seen)
                m, c = turn @ mean, turn @ spread @ turn.T
                logits = [
                    keys[t] @ m / math.sqrt(D) + self.covariance * (keys[t] @ c @ keys[t]) / (2 * D) for t in seen
                ]
                total[list(seen)] += softmax(np.array(logits)) / self.g
            if self.value_norm:
                total = np.array([(total[t] + self.epsilon) * np.linalg.norm(self.v[head][t]) for t in range(n)])
            out.append([math.inf if t < self.sinks else float(total[t]) for t in range(n)])
        return out


class KVzipRow(PromptRow):
    """votes [Hkv][n]: what `most_attention` says of each chunk."""

    def __init__(self, q, k, v, *, votes, sinks: int, **knobs):
        self.votes = [[math.inf if t < sinks else x for t, x in enumerate(head)] for head in votes]
        super().__init__(q, k, v, **knobs)

    def scores_of_prompt(self, q, n):
        return self.votes


def most_attention(q, k, prompt, chunk: range, sinks: int) -> list[list[float]]:
    """q [Hq, n, D] and k [Hkv, n, D] of a repetition, prompt [Hkv, S, D], rotated -> [Hkv][chunk]: the most that any
    query of the group pays to each token of the chunk, of its first tokens, the chunk and the repetition so far."""
    g, out = len(q) // len(k), []
    for head in range(len(k)):
        most = [0.0] * len(chunk)
        for i, t in np.ndindex(g, q.shape[1]):
            first = prompt[head][: min(sinks, chunk.start)]
            keys = np.concatenate((first, prompt[head][chunk.start : chunk.stop], k[head][: t + 1]))
            p = softmax(keys @ q[head * g + i, t] / math.sqrt(q.shape[2]))
            most = [max(a, float(b)) for a, b in zip(most, p[len(first) :], strict=False)]
        out.append(most)
    return out


class KeyDiffRow(Row):
    def distinct(self, keys):
        """Minus the cosine of each key with the mean of all keys divided by their lengths."""
        anchor = sum(key / np.linalg.norm(key) for key in keys) / len(keys)
        return [-(key @ anchor) / (np.linalg.norm(key) * np.linalg.norm(anchor)) for key in keys]

    def scores_of_prompt(self, q, n):
        return [self.distinct(head) for head in self.k]

    def rescore(self):
        for keys, score in zip(self.k, self.score, strict=True):
            held = sorted(score)
            score |= dict(zip(held, self.distinct([keys[t] for t in held]), strict=True))


class FixedScoreRow(Row):
    """A token's score is a function of its key."""

    def of_key(self, head: int, key: np.ndarray) -> float:
        raise NotImplementedError

    def scores_of_prompt(self, q, n):
        return [[self.of_key(head, key) for key in keys] for head, keys in enumerate(self.k)]

    def rescore(self):
        for head, score in enumerate(self.score):
            score |= {t: self.of_key(head, self.k[head][t]) for t in score}


class KnormRow(FixedScoreRow):
    def of_key(self, head, key):
        return -math.sqrt(sum(x * x for x in key))


class QFiltersRow(FixedScoreRow):
    def __init__(self, q, k, v, *, direction: np.ndarray, **knobs):
        self.direction = direction
        super().__init__(q, k, v, **knobs)

    def of_key(self, head, key):
        return float(key @ self.direction[head])


class LagKVRow(Row):
    """Windows behind the sinks, each compressed once the next one is full, at intervals of a window while decoding."""

    evicts = False

    def __init__(self, q, k, v, *, ratio: float, sinks: int, lag: int):
        self.ratio, self.sinks, self.lag, self.every = ratio, sinks, lag, lag
        super().__init__(q, k, v)

    def choose(self, scores, n):
        return [self.compressed(head, list(range(n)), n) for head in range(len(self.k))]

    def evict_later(self):
        for head, score in enumerate(self.score):
            stays = self.compressed(head, sorted(score), len(self.k[0]))
            for t in set(score) - set(stays):
                del score[t]

    def compressed(self, head: int, held: list[int], n: int) -> list[int]:
        out = list(held)
        for first in range(self.sinks, n, self.lag):
            window = [t for t in held if first <= t < first + self.lag]
            after = [t for t in held if first + self.lag <= t < first + 2 * self.lag]
            if len(window) < self.lag or len(after) < self.lag:
                continue
            score = np.zeros(self.lag)
            for x in (self.k[head], self.v[head]):
                low, high = (f([x[t] for t in after], axis=0) for f in (np.min, np.max))
                score += softmax(np.array([np.std((x[t] - low) / (high - low), ddof=1) for t in window]))
            best = sorted(range(self.lag), key=lambda i: -score[i])[: int(self.ratio * self.lag)]
            out = [t for t in out if t not in window or t - first in best]
        return out


class CompactorRow(PromptRow):
    """drawn [D, sketch]: the sketch."""

    def __init__(self, q, k, v, *, sinks: int, block: int, blend: float, drawn: np.ndarray, **knobs):
        self.sinks, self.block, self.blend, self.drawn = sinks, block, blend, drawn
        self.ridge = 1e-5
        super().__init__(q, k, v, **knobs)

    def scores_of_prompt(self, q, n):
        inner = range(self.sinks, n - min(n, self.newest))
        out = [[math.inf if t < self.sinks else 0.0 for t in range(n)] for _ in self.k]
        if not inner:
            return out
        leverage, attention = [], []
        for head, keys in enumerate(self.k):
            before = np.array([rotate(keys[t], -t) for t in inner])
            x = (before - before.mean(0)) @ self.drawn / math.sqrt(self.drawn.shape[1])
            moments = x.T @ x
            moments += self.ridge * np.trace(moments) / len(moments) * np.eye(len(moments))
            leverage.append([row @ np.linalg.inv(moments) @ row for row in x])
            got = np.zeros(len(inner))
            for first in range(0, len(inner), self.block):
                part = range(first, min(first + self.block, len(inner)))
                for i, t in np.ndindex(self.g, len(part)):
                    one = q[head * self.g + i, inner[part[t]]]
                    got[part.start : part.stop] += softmax(np.array([one @ keys[inner[s]] for s in part])) / self.g
            got *= [np.linalg.norm(self.v[head][t]) for t in inner]
            attention.append([sum(got[max(0, i - 1) : i + 2]) / 3 for i in range(len(inner))])
        total = sum(
            weight * (np.array(x) - np.mean(x)) / max(np.std(x), 1e-6 * abs(np.mean(x)))
            for weight, x in ((self.blend, leverage), (1, attention))
        )
        for head, scores in enumerate(out):
            scores[inner.start : inner.stop] = [float(x) for x in total[head]]
        return out


class TriAttentionRow(Row):
    """The trigonometric series in amplitudes and phases, of keys turned back to before their rotation. mean
    [Hq, D] and size [Hq, D / 2]: of the queries; None: of the prompt's."""

    evicts = False

    def __init__(self, q, k, v, *, buffer: int, reach: int, mean=None, size=None, **knobs):
        self.every, self.reach = buffer, reach
        if mean is None:
            before = [[rotate(x[t], -t) for t in range(k.shape[1])] for x in q]
            mean = [sum(x) / len(x) for x in before]
            size = [sum(abs(self.pairs(x)) for x in head) / len(head) for head in before]
        self.mean, self.size = mean, size
        super().__init__(q, k, v, **knobs)

    @staticmethod
    def pairs(x: np.ndarray) -> np.ndarray:
        return x[: len(x) // 2] + 1j * x[len(x) // 2 :]

    def score_held(self, head: int, held: list[int], n: int) -> list[float]:
        best = [-math.inf] * len(held)
        d = len(self.k[head][0])
        w = np.array([10_000.0 ** (-2 * f / d) for f in range(d // 2)])
        for i in range(head * self.g, head * self.g + self.g):
            m, scores = self.pairs(self.mean[i]), []
            for t in held:
                key = self.pairs(rotate(self.k[head][t], -t))
                series, phase = [], np.angle(m / key)
                for j in range(self.reach.bit_length()):
                    series.append(sum(abs(m) * abs(key) * np.cos(w * (n + 2**j - t) + phase)))
                more = sum((self.size[i] - abs(m)) * abs(key))
                scores.append(sum(series) / len(series) + more)
            spread = np.std(scores) or 1.0
            best = [max(a, (b - np.mean(scores)) / spread) for a, b in zip(best, scores, strict=True)]
        return best

    def scores_of_prompt(self, q, n):
        return [self.score_held(head, list(range(n)), n) for head in range(len(self.k))]


class RKVRow(Row):
    """Z = lambda I - (1 - lambda) R, of a prompt and, every `buffer` decoded tokens, of what is held."""

    evicts = False

    def __init__(self, q, k, v, *, buffer: int, mix: float, kernel: int, alike: float, spared: int, **knobs):
        self.every, self.mix, self.kernel, self.alike, self.spared = buffer, mix, kernel, alike, spared
        super().__init__(q, k, v, **knobs)

    def score_held(self, head, held, n):
        keys, before = [self.k[head][t] for t in held], max(0, len(held) - self.newest)
        mean = np.zeros(len(held))
        at = range(max(0, n - self.newest), n)
        for t in at if before else ():
            logits = [max(float(self.q[head * self.g + i][t] @ keys[j]) for i in range(self.g)) for j in range(before)]
            mean[:before] += softmax(np.array(logits) / math.sqrt(len(keys[0]))) / len(at)
        half, m = self.kernel // 2, len(held)
        importance = [max(mean[max(0, j - half) : j + half + 1]) for j in range(m)]
        total = np.zeros(m)
        for j in range(m):
            cos = [float(keys[i] @ keys[j]) / np.linalg.norm(keys[i]) / np.linalg.norm(keys[j]) if i != j else 0.0
                   for i in range(m)]  # fmt: skip
            like = [i for i in range(m) if cos[i] > self.alike and i != j]
            for i in sorted(like, reverse=True)[: self.spared]:
                cos[i] = 0.0
            total += cos
        redundancy = softmax(total / m)
        return [self.mix * a - (1 - self.mix) * b for a, b in zip(importance, redundancy, strict=True)]

    def scores_of_prompt(self, q, n):
        return [self.score_held(head, list(range(n)), n) for head in range(len(self.k))]


class RocketRow(SnapKVRow):
    """SnapKV's eviction, then pages of what is held, and of these few, for each step."""

    def __init__(
        self, q, k, v, *, kept: Budget | None, attended: Budget | None, page: int, channels: int | float, **knobs
    ):
        self.kept, self.exact, self.page, d = kept, attended, page, k.shape[2]
        self.channels = channels if isinstance(channels, int) else max(1, round(channels * d))
        super().__init__(q, k, v, **knobs)

    def num_kept(self, length):
        if self.kept is not None:
            return max(tokens(self.kept, length), self.recent(length))
        ratio = length / tokens(self.budget, length)
        alpha = min(0.2 + 0.06 * math.log2(ratio), 0.8)
        return max(int(length / ratio**alpha + 1e-6), self.recent(length))

    def attended(self, q, head, held):
        length = len(self.k[head])
        n = (tokens(self.budget, length) + 1) // 2 if self.exact is None else tokens(self.exact, length)
        pages = [held[i : i + self.page] for i in range(0, len(held), self.page)]
        d = q.shape[1]
        size = np.abs(q)
        few = sorted(range(d), key=lambda c: -size[:, c].sum())[: self.channels]
        score = np.zeros(len(pages))
        for x in q:
            logits = []
            for page in pages:
                keys = np.array([self.k[head][t] for t in page])
                bound = [keys[:, c].max() if q[:, c].sum() > 0 else keys[:, c].min() for c in few]
                logits.append(sum(x[c] * b for c, b in zip(few, bound, strict=True)))
            covered = np.abs(x[few]).sum() / np.abs(x).sum()
            score += softmax(np.array(logits) / math.sqrt(d * covered))
        wanted = -(-min(len(held), n) // self.page)
        best = sorted(range(len(pages) - 1), key=lambda p: (-score[p], p))[: wanted - 1]
        return sorted(t for p in [*best, len(pages) - 1] for t in pages[p])


class MatchingRow(Row):
    """A prompt compacted for one KV head at a time: which keys, their weights, and fitted values."""

    evicts = False

    def __init__(self, q, k, v, *, keys: str, samples: int, asked=None, **knobs):
        self.keys, self.samples = keys, samples
        self.asked = q if asked is None else asked
        self.bias: list[dict[int, float]] = []
        super().__init__(q, k, v, **knobs)

    def choose(self, scores, n):
        out = []
        for head in range(len(self.k)):
            kept, bias, values = self.compacted(head, n)
            self.bias.append(bias)
            for t in kept:
                self.v[head][t] = values[t]
            out.append(kept)
        return out

    def compacted(self, head: int, n: int):
        size = self.num_kept(n)
        if size == n:
            return list(range(n)), dict.fromkeys(range(n), 0.0), dict(enumerate(self.v[head]))
        steps = self.asked.shape[1]
        at = [round(float(x)) for x in np.linspace(0, steps - 1, min(steps, self.samples))]
        queries = [self.asked[head * self.g + i, t] for i in range(self.g) for t in at]
        logits = np.array([[x @ key for key in self.k[head]] for x in queries]) / math.sqrt(len(queries[0]))
        e = np.exp(logits - logits.max(1)[:, None])
        total = e.sum(1)
        newest = list(range(n - min(n, self.newest), n))
        if self.keys == "attention":
            score = np.sqrt(((e / total[:, None]) ** 2).mean(0))
            best = sorted((t for t in range(n) if t not in newest), key=lambda t: -score[t])
            kept = newest + best[: size - len(newest)]
        else:
            kept, missing = [], total
            while len(kept) < size:
                if kept and len(kept) // 4 % 2 == 0:
                    missing = total - e[:, kept] @ self.weights(e[:, kept], total)
                like = {t: math.inf if t in newest else float(e[:, t] @ missing) for t in range(n) if t not in kept}
                kept += sorted(like, key=lambda t: -like[t])[: min(4, size - len(kept))]
        kept = sorted(kept)
        w = self.weights(e[:, kept], total)
        p = np.array([softmax(row[kept] + np.log(w)) for row in logits])
        fitted = self.fit(p, (e / total[:, None]) @ np.array(self.v[head]))
        return kept, dict(zip(kept, np.log(w), strict=True)), dict(zip(kept, fitted, strict=True))

    def weights(self, e, total):
        low, high, steps = (math.exp(-3), math.exp(3), 2) if self.keys == "attention" else (1e-12, math.exp(7), 0)
        w = np.clip(self.fit(e, total), low, high)
        for _ in range(steps):
            w = np.clip(w - e.T @ (e @ w - total) / np.linalg.norm(e, 2) ** 2, low, high)
        return w

    @staticmethod
    def fit(a, y):
        moments = a.T @ a
        return np.linalg.inv(moments + 1e-6 * np.trace(moments) / len(moments) * np.eye(len(moments))) @ a.T @ y

    def weights_of_step(self, x, head, seen):
        return softmax(np.array([x @ self.k[head][t] / math.sqrt(len(x)) + self.bias[head].get(t, 0.0) for t in seen]))

    def step(self, q, k, v):
        out = []
        for head, score in enumerate(self.score):
            score[len(self.k[head])] = 0.0
            self.k[head].append(k[head])
            self.v[head].append(v[head])
            seen = sorted(score)
            for x in q[head * self.g : (head + 1) * self.g]:
                p = self.weights_of_step(x, head, seen)
                out.append(sum(w * self.v[head][t] for w, t in zip(p, seen, strict=True)))
        return np.stack(out)


ORACLES: dict[str, type[Row]] = dict(
    h2o=H2ORow, tova=TOVARow, snapkv=SnapKVRow, pyramidkv=PyramidKVRow, keydiff=KeyDiffRow,
    expected_attention=ExpectedAttentionRow, rkv=RKVRow, rocket=RocketRow, knorm=KnormRow, qfilters=QFiltersRow,
    lagkv=LagKVRow, compactor=CompactorRow, triattention=TriAttentionRow,
    attention_matching=MatchingRow,
)  # fmt: skip
