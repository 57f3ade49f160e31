"""Finds a method's setting for a share of full's bytes, held or read per step: the largest of its ladder within it.

Knobs that a ladder does not name have the method's defaults. Bytes held count every buffer, fixed costs too; bytes read
are `traffic()` at the end of the context. `oracle` and `random` attend to the target's share of tokens; the bytes they
read to choose them are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

import torch

from model import Transformer
from runtime.errors import InputError

Ladder = Callable[[int, float], Sequence[str]]  # (tokens, target share) -> specs, from few bytes to many


def tokens(spec: str, least: int = 1) -> Ladder:
    """The spec with every number of tokens in place of `{}`, from `least` up to all."""
    return lambda T, target: [spec.format(n) for n in range(least, T + 1)]


def halves(T: int, target: float) -> list[str]:
    return [f"h2o,heavy={n},recent={n}" for n in range(1, T // 2 + 1)]


def shares(spec: str, steps: int) -> Ladder:
    return lambda T, target: [spec.format(i / steps) for i in range(1, steps)]


def bits(spec: str, *known: int) -> Ladder:
    return lambda T, target: [spec.format(b) for b in known]


def sals_bytes(T: int, target: float) -> list[str]:
    """Values of 2 bits up to the rank of the paper's 12.5 % row, of 4 bits from there (Section 5.1: 12.5 and 25 %)."""
    return [f"sals,rank={s},value_bits={2 if s <= 0.125 else 4}" for s in [i / 200 for i in range(5, 200)]]


def palu_bytes(T: int, target: float) -> list[str]:
    """3 bits at all ranks, as in the seed papers' rows; then 16 bits, for larger targets."""
    ranks = [i / 8 for i in range(1, 9)]
    return [f"palu,rank={r},bits=3" for r in ranks] + [f"palu,rank={r},bits=16" for r in ranks[2:]]


def turboquant_bytes(T: int, target: float) -> list[str]:
    """The bits of keys and values; an odd sum gives the extra bit to the keys."""
    return [f"turboquant,k_bits={k},v_bits={v}" for k, v in ((2, 2), (3, 2), (3, 3), (4, 3), (4, 4))]


def loki_reads(T: int, target: float) -> list[str]:
    """The coordinates used for scores take at most half of the target: d_f of K is d_f / 2 of K and V."""
    return [f"loki,dims={min(0.25, target)},budget={n}" for n in range(1, T + 1)]


def sparq_reads(T: int, target: float) -> list[str]:
    """As in `loki_reads`: r channels of K are r / 2 of K and V. A quarter of the tokens are the newest, as in SparQ."""
    return [f"sparq,channels={min(0.25, target)},budget={n},recent={n // 4 + 1}" for n in range(2, T + 1)]


def quest_reads(T: int, target: float) -> list[str]:
    """Budgets of whole pages. Two vectors per page of 16 are 1/16 of K and V, so small targets need pages of 32."""
    page = 16 if target > 1 / 16 else 32
    return [f"quest,page={page},budget={n}" for n in range(page, T + 1, page)]


# The settings that determine the bytes a method holds. Methods that read all they hold read the same bytes.
HELD: dict[str, Ladder] = {
    "streaming": tokens("streaming,recent={}"),
    "h2o": halves,
    "tova": tokens("tova,budget={}"),
    "snapkv": tokens("snapkv,budget={}", 32),
    "pyramidkv": shares("pyramidkv,budget={}", 400),
    "keydiff": tokens("keydiff,budget={}"),
    "expected_attention": tokens("expected_attention,budget={}", 4),
    "kvzip": tokens("kvzip,budget={}", 4),
    "knorm": tokens("knorm,budget={}"),
    "qfilters": tokens("qfilters,budget={},recent=32", 32),
    "lagkv": shares("lagkv,lag=128,ratio={}", 100),
    "compactor": tokens("compactor,budget={}", 12),
    "attention_matching": tokens("attention_matching,budget={}"),
    "triattention": tokens("triattention,buffer=32,budget={}"),
    "razor": shares("razor,window=64,share={}", 100),
    "ojakv": shares("ojakv,rank={}", 32),
    "palu": palu_bytes,
    "kivi": bits("kivi,residual=32,bits={}", 2, 3, 4, 8),
    "hadamard": bits("hadamard,recent=32,bits={}", 2, 3, 4, 8),
    "turboquant": turboquant_bytes,
    "fp8": bits("fp8", 8),
    "rkv": tokens("rkv,buffer=32,budget={}", 8),
    "sals": sals_bytes,
    "self_index": bits("self_index,store_bits={}", 2, 4, 8),
}
# The settings that determine the bytes a step reads, for methods that hold more than they read.
READ: dict[str, Ladder] = {
    "oracle": tokens("oracle,budget={}", 20),
    "random": tokens("random,budget={}", 20),
    "double_sparsity": tokens("double_sparsity,budget={}"),
    "quest": quest_reads,
    "sparq": sparq_reads,
    "loki": loki_reads,
    "hshare": tokens("hshare,budget={}", 80),
    "rocket": tokens("rocket,budget={}", 32),
    "sals": tokens("sals,budget={}", 80),
    "self_index": tokens("self_index,budget={}", 65),
}
BOUNDS = ("oracle", "random")  # the bytes they read to choose are not counted
BY_AXIS = dict(kv=HELD, read=READ)


class Sizes:
    """Bytes of settings, computed on the meta device without allocation, for caches of `size` tokens, `new` of them
    decoded."""

    def __init__(self, model: Transformer, batch: int, size: int, new: int):
        self.batch, self.size, self.new, self.T = batch, size, new, size - new
        with torch.device("meta"):
            self.model = Transformer(model.args)
        self.model.kv_dtype = model.kv_dtype or model.dtype
        self.model.calibration, self.model.folder = model.calibration, model.folder  # read by methods that need it
        self.full = self._bytes("full")

    def _bytes(self, spec: str) -> tuple[int, int]:
        self.model.setup_cache(spec, self.batch, self.size, self.new)
        return self.model.kv_bytes(), sum(m.traffic(self.T - 1) for m in self.model.cache)

    def of(self, spec: str) -> tuple[float, float]:
        """Bytes held, and bytes read at the last token of the longest context, as shares of full's."""
        held, read = self._bytes(spec)
        return held / self.full[0], read / self.full[1]

    def share(self, axis: str, method: str, spec: str) -> float:
        if method in BOUNDS:
            return int(spec.partition("budget=")[2].partition(",")[0]) / self.T
        return self.of(spec)[axis == "read"]

    def best(self, axis: str, method: str, target: Fraction) -> tuple[str | None, float]:
        """The last setting of a ladder within the target, and its share; if all are above, None and the least share."""
        name, _, knobs = method.partition(",")
        ladder = [f"{spec},{knobs}".rstrip(",") for spec in BY_AXIS[axis][name](self.T, float(target))]
        if not ladder:
            raise InputError(f"{method} has no setting for {self.T} tokens: leave it out, or give longer texts")
        low, high = -1, len(ladder)  # within, above
        while high - low > 1:
            middle = (low + high) // 2
            within = self.share(axis, method, ladder[middle]) <= target
            low, high = (middle, high) if within else (low, middle)
        spec = ladder[max(low, 0)]
        return (spec if low >= 0 else None), round(self.share(axis, method, spec), 4)

    def cells(self, targets: dict[str, Sequence[Fraction]], methods: Sequence[str], length: int) -> tuple[
            list[dict], list[dict]]:  # fmt: skip
        """Cells (axis, target, method, spec) at one length, and targets that a method cannot reach. No methods: all of
        them. Knobs of a method apply to every step of its ladder."""
        cells: list[dict] = []
        missing: list[dict] = []
        for axis, wanted in targets.items():
            for method in (m for m in methods or BY_AXIS[axis] if m.partition(",")[0] in BY_AXIS[axis]):
                for target in wanted:
                    spec, share = self.best(axis, method, target)
                    cell = dict(axis=axis, target=str(target), method=method, seq_len=length)
                    if spec is None:
                        missing.append(cell | dict(least=share))
                    elif not any(c["method"] == method and c["axis"] == axis and c["spec"] == spec for c in cells):
                        cells.append(cell | dict(spec=spec))  # a short ladder may have one setting for two targets
        return cells, missing
