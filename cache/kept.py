"""`keep=full`: a method that also stores all keys and values, so that its drafts can be verified.

The method decodes as it does alone. Memory is the sum of the method's and the full store's. A step reads only what the
method reads, and `verify` (base.py) reads the full store once for several tokens.
"""

from __future__ import annotations

import functools
from typing import Any

from cache.base import KVMethod
from cache.dense import Dense
from runtime.errors import InputError


@functools.cache
def kept(cls: type[KVMethod]) -> type[KVMethod]:
    """`cls` with keep=full. Raises InputError if its appended tokens cannot be taken back."""
    name = cls.__module__.rpartition(".")[2]
    if not cls.rewinds:
        raise InputError(f"{name} cannot keep=full: appended tokens cannot be taken back")

    class Kept(cls):  # type: ignore[misc, valid-type]
        verifies, card_nbytes = True, None

        def __init__(self, args: Any, shape: Any, layer: int, rope: Any, calib: Any = None):
            super().__init__(args, shape, layer, rope, calib)
            if not self.exact_prefill:
                raise InputError(f"{name} approximates attention within a prompt: it cannot keep=full")
            self.full = Dense(args, shape, layer, rope)

        def store_prompt(self, q, k, q_rot, k_rot, v, lengths):
            self.full.compress(q_rot, k_rot, v, lengths)
            super().store_prompt(q, k, q_rot, k_rot, v, lengths)

        def verify(self, q, k, v, pos):
            for i in range(q.shape[2]):
                self.rotate_append(q[:, :, i], k[:, :, i], v[:, :, i], pos + i)
            return self.full.verify(q, k, v, pos)

    Kept.__name__, Kept.__module__ = f"Kept{cls.__name__}", cls.__module__
    return Kept
