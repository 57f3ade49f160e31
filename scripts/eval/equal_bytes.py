"""Methods at equal bytes: each one's knob is set so that its cache holds, or a step reads, a share of full's bytes.

    python -m scripts.eval.equal_bytes --settings                              # what would be run, with its bytes
    python -m scripts.eval.equal_bytes --out results/equal_bytes.json          # 1K, 2K and 4K, 100 samples a cell
    python -m scripts.eval.equal_bytes --method quest sals --read 1/8 --lengths 2048 --samples 20

For every target and length a method gets the largest setting of its LADDER that stays within the target; the knobs that
a ladder does not name are the method's defaults. A method whose smallest setting is above a target is left out there,
and the file says so. Bytes held count every buffer, fixed costs too; bytes read are `traffic()` at the end of the
context. `oracle` and `random` attend to the target's share of tokens; what they read to choose them is not counted.

Samples come in a random order and --out is written after every batch: Ctrl-C keeps what is done, --resume goes on.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import torch

from errors import InputError, Parser, run_cli
from model import Transformer
from runtime import TINY, pick_device, set_threads
from scripts.eval.evaluation import NEEDLES, NEW, Evaluation, evaluate, parse_flags
from scripts.shared.options import earlier, load_model, precision
from scripts.shared.results import check_out, record, write_json
from weights import WeightFormat

Ladder = Callable[[int, float], Sequence[str]]  # (tokens, target share) -> specs, from few bytes to many


def tokens(spec: str, least: int = 1) -> Ladder:
    """`{}` of a spec is a number of tokens, `least` and up to all."""
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
    """3 bits as long as they reach, as in the seed papers' rows; whole coordinates above."""
    ranks = [i / 8 for i in range(1, 9)]
    return [f"palu,rank={r},bits=3" for r in ranks] + [f"palu,rank={r},bits=16" for r in ranks[2:]]


def loki_reads(T: int, target: float) -> list[str]:
    """Coordinates that score are at most half of the target: d_f of K is d_f / 2 of K and V."""
    return [f"loki,dims={min(0.25, target)},budget={n}" for n in range(1, T + 1)]


def sparq_reads(T: int, target: float) -> list[str]:
    """As `loki_reads`: r channels of K are r / 2 of K and V. A quarter of the tokens are the newest, as in SparQ."""
    return [f"sparq,channels={min(0.25, target)},budget={n},recent={n // 4 + 1}" for n in range(2, T + 1)]


def quest_reads(T: int, target: float) -> list[str]:
    """Whole pages. Two vectors a page of 16 are 1/16 of K and V: pages of 32 where this would leave nothing."""
    page = 16 if target > 1 / 16 else 32
    return [f"quest,page={page},budget={n}" for n in range(page, T + 1, page)]


# What sets the bytes that a method holds. Of those that read all they hold, these are the bytes read, too.
HELD: dict[str, Ladder] = {
    "streaming": tokens("streaming,recent={}"),
    "h2o": halves,
    "tova": tokens("tova,budget={}"),
    "snapkv": tokens("snapkv,budget={}", 32),
    "pyramidkv": shares("pyramidkv,budget={}", 400),
    "razor": shares("razor,window=64,share={}", 100),
    "ojakv": shares("ojakv,rank={}", 32),
    "palu": palu_bytes,
    "kivi": bits("kivi,residual=32,bits={}", 2, 3, 4, 8),
    "hadamard": bits("hadamard,recent=32,bits={}", 2, 3, 4, 8),
    "sals": sals_bytes,
    "self_index": bits("self_index,store_bits={}", 2, 4, 8),
}
# What sets the bytes that a step reads, of methods that hold more than they read.
READ: dict[str, Ladder] = {
    "oracle": tokens("oracle,budget={}", 20),
    "random": tokens("random,budget={}", 20),
    "double_sparsity": tokens("double_sparsity,budget={}"),
    "quest": quest_reads,
    "sparq": sparq_reads,
    "loki": loki_reads,
    "hshare": tokens("hshare,budget={}", 80),
    "sals": tokens("sals,budget={}", 80),
    "self_index": tokens("self_index,budget={}", 65),
}
BOUNDS = ("oracle", "random")  # what they read to choose is not counted
BY_AXIS = dict(kv=HELD, read=READ)


class Sizes:
    """Bytes of settings, computed on the meta device: nothing is allocated."""

    def __init__(self, model: Transformer, batch: int):
        self.batch = batch
        with torch.device("meta"):
            self.model = Transformer(model.args)
        self.model.kv_dtype = model.kv_dtype or model.dtype
        self.model.calibration = model.find_calibration()
        self.full: dict[int, tuple[float, float]] = {}

    def of(self, spec: str, T: int) -> tuple[float, float]:
        """Bytes held with T + NEW slots, bytes read at the last of T tokens, each as a share of full's."""
        self.model.setup(spec, self.batch, T + NEW, NEW, {})
        assert self.model.cache is not None
        held, read = self.model.kv_bytes(), sum(m.traffic(T - 1) for m in self.model.cache)
        if spec == "full":
            return held, read
        if T not in self.full:
            self.full[T] = self.of("full", T)
        return held / self.full[T][0], read / self.full[T][1]

    def share(self, axis: str, method: str, spec: str, T: int) -> float:
        if method in BOUNDS:
            return int(spec.rpartition("=")[2]) / T
        return self.of(spec, T)[axis == "read"]

    def best(self, axis: str, method: str, target: Fraction, T: int) -> tuple[str | None, float]:
        """The last setting of a ladder within the target, with its share; None and the least share if all are above."""
        ladder = BY_AXIS[axis][method](T, float(target))
        low, high = -1, len(ladder)  # within, above
        while high - low > 1:
            middle = (low + high) // 2
            within = self.share(axis, method, ladder[middle], T) <= target
            low, high = (middle, high) if within else (low, middle)
        spec = ladder[max(low, 0)]
        return (spec if low >= 0 else None), round(self.share(axis, method, spec, T), 4)


def settings(sizes: Sizes, opt: argparse.Namespace, T: int) -> tuple[list[dict], list[dict]]:
    """Cells (axis, target, method, spec, share) at one length, and those that cannot be."""
    cells: list[dict] = []
    missing: list[dict] = []
    for axis, targets in (("kv", opt.kv), ("read", opt.read)):
        for method in BY_AXIS[axis]:
            if opt.method and method not in opt.method:
                continue
            for target in targets:
                spec, share = sizes.best(axis, method, target, T)
                cell = dict(axis=axis, target=str(target), method=method, seq_len=T)
                if spec is None:
                    missing.append(cell | dict(least=share))
                elif not any(c["method"] == method and c["axis"] == axis and c["spec"] == spec for c in cells):
                    cells.append(cell | dict(spec=spec))  # a ladder of few steps may have one for two targets
    return cells, missing


def parse_args() -> argparse.Namespace:
    p = Parser(__doc__)
    a = p.add_argument
    a("--checkpoint", default=str(TINY), help="Hugging Face folder or GGUF file")
    a("--method", nargs="+", default=[], help=f"some of {', '.join(sorted({*HELD, *READ}))}; default: all")
    a("--kv", default="1/2,1/4,1/8,1/16", help="bytes held, shares of full's; none: an empty text")
    a("--read", default="1/4,1/8,1/16", help="bytes that a step reads")
    a("--lengths", default="1024,2048,4096")
    a("--tasks", default="needle,key_value", help=f"some of {', '.join([*NEEDLES, 'key_value'])}")
    a("--samples", type=int, default=100, help="of every cell")
    a("--batch-size", type=int, default=10)
    a("--at-once", type=int, default=24, help="settings whose caches are in memory together: they share prefills")
    a("--settings", action="store_true", help="print the settings and their bytes, run nothing")
    opt = parse_flags(p, "equal_bytes")
    if wrong := set(opt.method) - {*HELD, *READ}:
        raise InputError(f"{min(wrong)!r} has no ladder: use some of {', '.join(sorted({*HELD, *READ}))}")
    for name in ("kv", "read"):
        try:
            wanted = [Fraction(part) for part in getattr(opt, name).split(",") if part]
        except (ValueError, ZeroDivisionError):
            wanted = [Fraction(0)]
        if not all(0 < w <= 1 for w in wanted):
            raise InputError(f"--{name} {getattr(opt, name)} is not a list such as 1/2,1/4, each above 0 and at most 1")
        setattr(opt, name, wanted)
    opt.tasks = opt.tasks.split(",")
    if unknown := set(opt.tasks) - {*NEEDLES, "key_value"}:
        raise InputError(f"unknown task {min(unknown)!r}: use {', '.join([*NEEDLES, 'key_value'])}")
    if min(opt.lengths) < 128:
        raise InputError(
            f"--lengths {min(opt.lengths)} is below 128: sinks and windows alone would be above the targets"
        )
    if min(opt.samples, opt.batch_size, opt.at_once) < 1:
        raise InputError("--samples, --batch-size and --at-once must be at least 1")
    check_out(opt.out)
    WeightFormat.parse(opt.weights, opt.head)
    set_threads(opt.threads)
    return opt


def main() -> None:
    opt = parse_args()
    device = pick_device(opt.device)
    opt.dtype, opt.kv_dtype = opt.dtype or "fp32", opt.kv_dtype or "bf16"
    opt.text_samples, opt.decoded = 1, 2  # of tasks that are not run here
    model = load_model(opt, device)
    sizes = Sizes(model, opt.batch_size)
    chosen = {T: settings(sizes, opt, T) for T in opt.lengths}
    if opt.settings:
        for T, (cells, missing) in chosen.items():
            for c in cells:
                held, read = sizes.of(c["spec"], T)
                print(f"{T} {c['axis']} {c['target']:>5}  {c['spec']}  holds {held:.3f}  reads {read:.3f}")
            for c in missing:
                print(f"{T} {c['axis']} {c['target']:>5}  {c['method']}: {c['least']} at least")
        return
    how = {k: getattr(opt, k) for k in ("samples", "seed", "batch_size", "query_in_prompt")} | precision(opt, model)
    data = record(device, checkpoint=Path(opt.checkpoint).name, settings=how)
    old = earlier(opt.out, data, ("device", "commit", "checkpoint", "settings"), ("rows",)) if opt.resume else {}
    rows = {(r["seq_len"], r["method"]): r for r in old.get("rows", [])}  # `method` of a row is the whole spec
    data["missing"] = [m for _, missing in chosen.values() for m in missing]
    data["cells"] = [c for cells, _ in chosen.values() for c in cells]

    ev = Evaluation(Path(opt.checkpoint), device, opt.batch_size, opt.query_in_prompt, opt.seed, model)

    def save(T: int, part: dict[str, dict]) -> None:
        rows.update({(T, spec): r for spec, r in part.items()})
        data["rows"] = list(rows.values())
        if opt.out:
            write_json(opt.out, data)

    for T, (cells, _) in chosen.items():
        specs = list(dict.fromkeys(["full", *(c["spec"] for c in cells)]))
        for i in range(0, len(specs), opt.at_once):
            now = specs[i : i + opt.at_once]
            part = {spec: rows[T, spec] for spec in now if (T, spec) in rows}
            evaluate(ev, {s: (s, {}) for s in now}, opt.tasks, T, opt, part, functools.partial(save, T, part))
            if not opt.json:
                for spec, r in part.items():
                    found = " ".join(f"{task}={r[task]}" for task in opt.tasks)
                    print(f"{T} {spec} holds {r['kv_share']} reads {r['read_share']} {found}", flush=True)
    if opt.json:
        print(json.dumps(data))


if __name__ == "__main__":
    run_cli(main)
