"""`keep=full`: stores all keys and values beside a method that does not, so that its drafts can be verified.

The method decodes as it does alone. Memory is the sum of the method's and the full store's. A step reads only what the
method reads, and `verify` (base.py) reads the full store once for several tokens.
"""

from __future__ import annotations

from typing import Any, ClassVar

from cache.base import KVMethod
from cache.dense import Dense
from runtime.errors import InputError


class Kept(KVMethod):
    """A method and a dense store of the same tokens. `kept` makes a subclass for each method class."""

    inner_class: ClassVar[type[KVMethod]]
    verifies = True

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        self.inner = self.inner_class(args, shape, layer, rope, calib)
        self.full = Dense(args, shape, layer, rope)
        if not self.inner.exact_prefill:
            raise InputError(f"{self.inner_class.__name__} approximates attention within a prompt: it cannot keep=full")
        self.takes_chunks, self.predicts = self.inner.takes_chunks, self.inner.predicts

    def connect(self, layers):
        if layers[0] is self:  # connect the inner methods with each other, once
            for method in (inner := [m.inner if isinstance(m, Kept) else m for m in layers]):
                if any(isinstance(m, Kept) and m.inner is method for m in layers):
                    method.connect(inner)

    # ---- the prompt ----

    def prefill(self, q, k, v, lengths, start=None):
        B, S, first = len(k), k.shape[2], start or 0
        self.full.k[:B, :, first : first + S] = self.rope.rotate_prompt(k, first)
        self.full.v[:B, :, first : first + S] = v
        return self.inner.prefill(q, k, v, lengths, start)

    def compress(self, q, k, v, lengths):
        """Store prompts whose attention is not needed."""
        self.full.compress(q, k, v, lengths)
        self.inner.compress(q, k, v, lengths)

    def begin_prompt(self, total):
        self.inner.begin_prompt(total)

    def end_prompt(self, lengths):
        self.inner.end_prompt(lengths)

    def second_pass(self, tokens, lengths, encode):
        return self.inner.second_pass(tokens, lengths, encode)

    def reread(self, q, k, v, lengths, text):
        return self.inner.reread(q, k, v, lengths, text)

    # ---- one token per row, or several ----

    def decode(self, q, k, v, pos):
        return self.inner.decode(q, k, v, pos)

    def verify(self, q, k, v, pos):
        for i in range(q.shape[2]):
            self.inner.rotate_append(q[:, :, i], k[:, :, i], v[:, :, i], pos + i)
        return self.full.verify(q, k, v, pos)

    def rewind(self, pos, end):
        self.inner.rewind(pos, end)

    @property
    def takes_back(self):
        return self.inner.takes_back

    def prefetch(self, q_hat, pos):
        self.inner.prefetch(q_hat, pos)

    def maintain(self, step):
        self.inner.maintain(step)

    def reset(self):
        self.inner.reset()

    @property
    def in_step(self):
        return self.inner.in_step

    # ---- accounting ----

    def traffic(self, pos):
        return self.inner.traffic(pos)


_CLASSES: dict[type[KVMethod], type[KVMethod]] = {}


def kept(cls: type[KVMethod]) -> type[KVMethod]:
    """`cls` with keep=full. Raises InputError if its appended tokens cannot be taken back."""
    if not cls.rewinds:
        raise InputError(f"{cls.__module__.rpartition('.')[2]} cannot keep=full: appended tokens cannot be taken back")
    same = ("Args", "paper", "statistics", "whole_calibration", "joins_heads", "reads_queries", "supports_window",
            "__module__")  # fmt: skip
    members: dict[str, Any] = {name: getattr(cls, name) for name in same}
    if cls not in _CLASSES:
        _CLASSES[cls] = type(f"Kept{cls.__name__}", (Kept,), members | dict(inner_class=cls, needs=cls.needs))
    return _CLASSES[cls]
