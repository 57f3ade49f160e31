"""Generated sequences with known answers, from which the shipped model learns retrieval, and on which it is measured.

Every sample is (ids, labels), both int64 [T + 1]; a label says what the token is as a *target* (IGNORE, TEXT, ANSWER,
REPEAT). Needles use the wording of RULER (Hsieh et al. 2024) and plainer statements. Evaluations pass text and words
that training never sees.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

import numpy as np

IGNORE, TEXT, ANSWER, REPEAT = 0, 1, 2, 3
FIRST_PLAIN_ID = 260  # ids below are control pieces and the byte fallback of the shipped vocabulary


class Encoder(Protocol):
    vocab_size: int

    def encode(self, text: str, bos: bool = ...) -> list[int]: ...


# (statement, query): the value follows each; {n} is a noun shared by both, {k} the key.
# In the first four the key is right before the value, in the last five there are other words between them.
FORMATS: list[tuple[str, str]] = [
    ("{k} =", "{k} ="),
    ("# {k}:", "# {k}:"),
    ("{k} ->", "{k} ->"),
    ('"{k}":', '"{k}":'),
    ("The {n} for {k} is", "The {n} for {k} is"),
    ("The {n} for {k} is", "Question: what is the {n} for {k}? Answer: the {n} for {k} is"),
    ("Remember: the {n} of {k} is", "What is the {n} of {k}? It is:"),
    ("The {n} of {k} is", "Which {n} does {k} have? Answer:"),
    (
        "One of the special magic numbers for {k} is:",
        "What is the special magic number for {k} mentioned in the provided text? "
        "The special magic number for {k} mentioned in the provided text is",
    ),
]
PLAIN, RULER = 4, 8  # indices into FORMATS used by the evaluations
SEPARATORS = [" =", ":", " is", " ->", " is:", " has the value", ": the answer is", " =>"]
PREFIXES = ["The code for", "#", "Remember:", "What is", "-", "The"]
NOUNS = ["code", "password", "number", "secret", "key", "token", "PIN", "id"]


@dataclass
class Needle:
    statement: list[int]  # "The code for a-b is"
    query: list[int]
    value: list[int]  # " 4917"
    end: list[int]  # ".\n"


@dataclass
class Sample:
    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)

    def add(self, ids: list[int], label: int = IGNORE) -> None:
        self.ids += ids
        self.labels += [label] * len(ids)

    def cut(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        assert len(self.ids) >= n
        return np.array(self.ids[:n]), np.array(self.labels[:n])


class Tasks:
    """A seeded generator of samples over a tokenizer, token arrays of real text, and a list of words for keys."""

    def __init__(
        self, tokenizer: Encoder, texts: list[np.ndarray], weights: list[float], words: list[str], seed: object
    ):
        self.tk, self.texts, self.weights, self.words = tokenizer, texts, weights, words
        self.rng = np.random.default_rng(seed)  # type: ignore[arg-type]
        self.encode = cache(lambda text: tokenizer.encode(text, bos=False))
        self.newline = self.encode("\n")
        self.bos = tokenizer.encode("", bos=True)  # empty if the model's texts do not begin with it

    # ---- pieces ----

    def text(self, n: int) -> list[int]:
        a = self.texts[self.rng.choice(len(self.texts), p=self.weights)]
        i = int(self.rng.integers(0, len(a) - n))
        return a[i : i + n].tolist()

    def word(self) -> str:
        return self.words[self.rng.integers(len(self.words))]

    def key(self) -> str:
        u = self.rng.random()
        if u < 0.6:
            return f"{self.word()}-{self.word()}"
        if u < 0.75:
            return f"{self.word()}_{self.word()}"
        return self.word() if u < 0.9 else f"{self.word()}{self.rng.integers(100)}"

    def digits(self, n: int | None = None) -> str:
        n = n or int(self.rng.integers(4, 8))
        return " " + "".join(map(str, self.rng.integers(0, 10, n)))

    def needles(self, n: int, fmt: int | None = None, digits_only: bool = False) -> list[Needle]:
        """n needles with distinct keys. Half of the time all share a noun, and a format if `fmt` is not given."""
        rng, keys = self.rng, dict[str, None]()
        while len(keys) < n:
            keys[self.key()] = None
        shared = rng.random() < 0.5
        f0, n0 = int(rng.choice(len(FORMATS), p=FORMAT_WEIGHTS)), NOUNS[rng.integers(len(NOUNS))]
        out = []
        for k in keys:
            f = fmt if fmt is not None else f0 if shared else int(rng.choice(len(FORMATS), p=FORMAT_WEIGHTS))
            noun = n0 if shared else NOUNS[rng.integers(len(NOUNS))]
            value = self.digits() if digits_only or rng.random() < 0.8 else f" {self.word()}-{self.word()}"
            s, q = (x.format(n=noun, k=k) for x in FORMATS[f])
            out.append(
                Needle(self.encode(s), self.encode(q), self.encode(value), self.encode(".\n" if f > 3 else "\n"))
            )
        return out

    # ---- samples of T + 1 tokens ----

    def plain_text(self, T: int) -> tuple[np.ndarray, np.ndarray]:
        s = Sample()
        s.add(self.bos)
        s.add(self.text(T + 1), TEXT)
        return s.cut(T + 1)

    def repeats(self, T: int) -> tuple[np.ndarray, np.ndarray]:
        """Random tokens that repeat: one block over and over, or short blocks in random order.

        The alphabet is n tokens of the vocabulary, n log-uniform. Large alphabets make matching general. In small ones
        every token has preceded many others, so that only tokens further back tell how it continues. This teaches heads
        to match by longer context, which they need if a key is not right before its value.
        """
        rng, V = self.rng, self.tk.vocab_size
        alphabet = int(np.exp(rng.uniform(np.log(4), np.log(V - FIRST_PLAIN_ID))))
        tokens = FIRST_PLAIN_ID + rng.permutation(V - FIRST_PLAIN_ID)[:alphabet]
        s = Sample()
        s.add(self.bos)
        if rng.random() < 1 / 3:
            n, L = 1, int(rng.integers(16, max(17, T // 2)))
        else:
            L = int(rng.integers(4, 33)) if alphabet >= 32 else int(rng.integers(16, 49))
            n = int(rng.integers(2, max(3, T // L // 2 + 1)))
        pool, seen = rng.choice(tokens, (n, L)).tolist(), set()
        order = rng.permutation(n).tolist() if rng.random() < 0.5 else []
        while len(s.ids) < T + 1:
            j = order.pop() if order else int(rng.integers(n))
            s.add(pool[j][:1])  # which block comes cannot be known
            s.add(pool[j][1:], REPEAT if j in seen else IGNORE)
            seen.add(j)
        return s.cut(T + 1)

    def key_values(self, T: int) -> tuple[np.ndarray, np.ndarray]:
        """A list of statements, then queries until the end."""
        needles, s = self.needles(int(self.rng.integers(2, max(3, T // 24 + 1)))), Sample()
        s.add(self.bos)
        for x in needles:
            s.add(x.statement + x.value + x.end)
        while len(s.ids) < T + 1:
            x = needles[self.rng.integers(len(needles))]
            s.add(x.query)
            s.add(x.value, ANSWER)
            s.add(x.end)
        return s.cut(T + 1)

    def recall(self, T: int) -> tuple[np.ndarray, np.ndarray]:
        """A stream of short pairs `key separator value`, each of them queried repeatedly.

        All pairs of a sequence have the same separator, so the tokens right before a value are the same everywhere, and
        only the key further back tells which value follows. Several needles of one wording need the same skill.
        """
        rng, V = self.rng, self.tk.vocab_size

        def random_tokens(low: int, high: int) -> list[int]:
            return rng.integers(FIRST_PLAIN_ID, V, int(rng.integers(low, high))).tolist()

        words, digits = rng.random() < 0.3, rng.random() < 0.3
        separator = (
            self.encode(SEPARATORS[rng.integers(len(SEPARATORS))]) if rng.random() < 0.3 else random_tokens(0, 3)
        )
        prefix = self.encode(PREFIXES[rng.integers(len(PREFIXES))]) if rng.random() < 0.2 else []
        end = self.newline if rng.random() < 0.5 else []
        long_key, long_value = (2 if rng.random() < 0.6 else 4 for _ in range(2))
        pairs: dict[tuple[int, ...], list[int]] = {}
        for _ in range(int(rng.integers(3, max(6, T // 10)))):
            key = self.encode(" " + self.key()) if words else random_tokens(1, long_key)
            value = self.encode(self.digits(int(rng.integers(1, 5)))) if digits else random_tokens(1, long_value)
            pairs[tuple(key)] = value
        fresh, seen, s = list(pairs), list[tuple[int, ...]](), Sample()
        s.add(self.bos)
        while len(s.ids) < T + 1:
            new = bool(fresh) and (not seen or rng.random() < 0.4)
            key_ = fresh.pop() if new else seen[rng.integers(len(seen))]
            s.add(prefix + list(key_) + separator)
            s.add(pairs[key_], IGNORE if new else ANSWER)
            s.add(end)
            if new:
                seen.append(key_)
        return s.cut(T + 1)

    def interleaved(self, T: int) -> tuple[np.ndarray, np.ndarray]:
        """Text with statements and queries scattered in it."""
        rng, s, seen = self.rng, Sample(), list[Needle]()
        gap = int(np.exp(rng.uniform(np.log(12), np.log(200))))
        fresh = self.needles(max(2, T // (gap + 30) + 1))
        share, text, p = rng.uniform(0.4, 0.75), self.text(T + 1), 0
        s.add(self.bos)
        while len(s.ids) < T + 1:
            n = int(rng.exponential(gap)) + 1
            s.add(text[p : p + n], TEXT)
            p += n
            s.add(self.newline)
            if seen and (rng.random() < share or not fresh):
                x = seen[rng.integers(len(seen))]
                s.add(x.query)
                s.add(x.value, ANSWER)
            else:
                x = fresh.pop()
                seen.append(x)
                s.add(x.statement + x.value)
            s.add(x.end)
        return s.cut(T + 1)

    def needle_case(
        self,
        T: int,
        n: int = 1,
        fmt: int | None = None,
        depth: float | None = None,
        n_query: int = 1,
        digits_only: bool = False,
    ) -> tuple[Sample, list[Needle]] | None:
        """A context of text with n needles in it, and the needles to ask for; None if T has no room for them.

        The context, and for every needle asked for a newline, query, value and (except for the last one) end, have
        T + 1 tokens together. depth in [0, 1] places all needles at that share of the text, None scatters them.
        """
        rng, needles = self.rng, self.needles(n, fmt, digits_only)
        asked = [needles[i] for i in rng.permutation(n)[:n_query]]
        inserted = [self.newline + x.statement + x.value + x.end for x in needles]
        tail = sum(len(self.newline + x.query + x.value + x.end) for x in asked) - len(asked[-1].end)
        room = T + 1 - len(self.bos) - tail - sum(map(len, inserted))
        if room < 8:
            return None
        text = self.text(room)
        cuts = np.sort(rng.integers(0, room + 1, n)).tolist() if depth is None else [int(depth * room)] * n
        s, p = Sample(), 0
        s.add(self.bos)
        for piece, cut in zip(inserted, cuts, strict=True):
            s.add(text[p:cut], TEXT)
            s.add(piece)
            p = cut
        s.add(text[p:], TEXT)
        return s, asked

    def key_value_case(self, T: int) -> tuple[Sample, Needle]:
        """A context of about T - 16 tokens that has only `"key": value` lines, and the one to ask for."""
        s, listed = Sample(), list[Needle]()
        s.add(self.bos)
        for x in self.needles(T // 8, fmt=3, digits_only=True):
            if len(s.ids) + len(x.statement + x.value + x.end) > T - 16:
                break
            s.add(x.statement + x.value + x.end)
            listed.append(x)
        return s, listed[self.rng.integers(len(listed))]

    def haystack(self, T: int, **case: object) -> tuple[np.ndarray, np.ndarray]:
        """A needle case with its queries and answers at the end. `case`: as in needle_case; random if not given."""
        n = int(self.rng.integers(1, 9))
        case = case or dict(n=n, n_query=int(self.rng.integers(1, min(n, 4) + 1)))
        made = self.needle_case(T, **case)  # type: ignore[arg-type]
        if made is None:
            return self.key_values(T)
        s, asked = made
        for x in asked:
            s.add(self.newline + x.query)
            s.add(x.value, ANSWER)
            if x is not asked[-1]:
                s.add(x.end)
        return s.cut(T + 1)

    def batch(self, B: int, T: int, mix: dict[str, float]) -> tuple[np.ndarray, np.ndarray]:
        """B samples of T + 1 tokens, of kinds drawn by `mix` (weight by method name) -> two [B, T + 1] arrays."""
        p = np.array(list(mix.values()))
        kinds = self.rng.choice(list(mix), B, p=p / p.sum())
        ids, labels = zip(*(getattr(self, kind)(T) for kind in kinds), strict=True)
        return np.stack(ids), np.stack(labels)


# RULER's wording and the other formats with words between key and value are hard, and get more samples.
FORMAT_WEIGHTS = np.array([1, 1, 1, 1, 1.5, 1.5, 2, 2, 4]) / 15
