"""Compare methods, budgets, tasks and lengths on the same samples: the score of each, and the bytes it takes.

    python -m scripts.eval.compare --method full sals-12.5 --tasks needle --lengths 512 --samples 10
    python -m scripts.eval.compare --checkpoint CKPT --kv 1/2,1/4,1/8 --read 1/4,1/8,1/16 --lengths 2048,4096 --out DIR
    python -m scripts.eval.compare --checkpoint CKPT --dataset examples/observatory.jsonl --method full snapkv
    python -m scripts.eval.compare --tasks kv,prefix_suffix --multi-turn --query-in-prompt --method full snapkv
    python -m scripts.eval.compare --transformers NAME --method full self_index    # a model of transformers
    python -m scripts.eval.compare --kv 1/8 --settings                    # print settings and bytes, run nothing

--method names specs, which run as they are. With --kv or --read it names methods, with or without knobs; each of them
gets the largest setting of its ladder (ladders.py) whose bytes held, or read per step, are within each share of full's.

The question comes through decode, so that no method knows it when it compresses; --query-in-prompt prefills it, too.
Several questions about one context each start from the state after it, or follow one another with --multi-turn. A
context is prefilled once for all methods whose prefill is exact attention.

--out DIR gets samples.jsonl (one line per sample, appended after every batch, from which --resume continues),
compare.json, table.md, held.png and read.png; after Ctrl-C, they have the tasks that every setting has answered. Means
over tasks leave out tasks of which full finds less than half, because these measure nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from statistics import mean
from typing import Any

from tqdm import tqdm

from loading.tokenizer.turns import chat_parts
from runtime.errors import InputError, did_you_mean, run_cli, warn_once
from runtime.hub import add_checkpoint
from runtime.machine import require_memory, written
from runtime.options import Parser
from runtime.parallel import ONE, Ranks
from scripts.eval.evaluation import (
    Evaluation,
    add_flags,
    check_flags,
    names_of,
    open_evaluation,
)
from scripts.eval.ladders import BOUNDS, BY_AXIS, Sizes
from scripts.eval.rows import TASKS, Context, Row, check_metric, check_names, contexts, read_rows, rows_of
from scripts.eval.ruler import add_sources, sized
from scripts.shared.markdown import against_full, measuring, table, tasks_of, wilson
from scripts.shared.options import SPECS_BY_LAYER, checked, earlier, inputs, layers_of, parse_shares, precision
from scripts.shared.results import record, save_figure, write_json

FILES = ("compare.json", "samples.jsonl", "table.md", "held.png", "read.png")
# samples and answers are the same if these are
SETTINGS = ("samples", "seed", "part", "max_new_tokens", "batch_size", "no_chat", "dataset")
AXES = dict(kv=("held", "kv_share"), read=("read", "read_share"))
JOINTS = 8  # tokens
Key = tuple[Any, ...]


def parser() -> Parser:
    p = Parser(__doc__)
    a = p.add_argument
    add_checkpoint(p)
    a("--method", nargs="+", default=[], help=f"{SPECS_BY_LAYER}; `all`: every method and preset; default: full, or "
      "with --kv or --read every method that has a ladder")  # fmt: skip
    a("--kv", default="", help="targets for the bytes held, as shares of full's: 1/2,1/4,1/8")
    a("--read", default="", help="targets for the bytes that a step reads: 1/4,1/8,1/16")
    a("--tasks", default="needle,key_value", help=f"some of {', '.join(TASKS)}")
    a("--dataset", help="rows in kvpress's format, .jsonl or .parquet, instead of --tasks and --lengths")
    a("--lengths", default="1024,2048,4096", help="tokens of prompt and answer together")
    a("--samples", type=int, help="the most samples per task and length; default: 50, or all of a dataset")
    a("--part", default="1/1", metavar="I/N", help="every N-th sample from the I-th on; with --resume in one "
      "folder, and at last without --part, N commands make one result")  # fmt: skip
    a("--max-new-tokens", type=int, metavar="N", help="the most tokens of an answer; default: each task's own")
    a("--batch-size", type=int, default=4, help="contexts that run at a time; default: 4")
    a("--at-once", type=int, default=24, help="settings whose caches are in memory together and share prefills")
    a("--multi-turn", action="store_true", help="ask the questions about a context in turn, each after earlier answers")
    a("--no-chat", action="store_true", help="do not use the checkpoint's chat template")
    add_sources(p)
    a("--settings", action="store_true", help="print the settings and their bytes, run nothing")
    add_flags(p)
    return p


def parse_args() -> argparse.Namespace:
    opt = check_flags(parser().parse_args(), FILES[0])
    opt.targets = {}
    for axis in ("kv", "read"):
        if text := getattr(opt, axis):
            opt.targets[axis] = parse_shares(f"--{axis}", text)
    if opt.targets:
        laddered = sorted({m for axis in opt.targets for m in BY_AXIS[axis]})
        if wrong := {m.partition(",")[0] for m in opt.method} - {*laddered, "full"}:
            hint = did_you_mean(min(wrong), laddered)
            raise InputError(f"{min(wrong)!r} has no ladder: {hint}use some of {', '.join(laddered)}")
    else:
        opt.method = checked(opt.method or ["full"], layers_of(opt), True)
    opt.rows = None
    opt.samples = 50 if opt.samples is None and not opt.dataset else opt.samples
    if opt.dataset:
        opt.rows, opt.lengths = read_rows(opt.dataset), [0]
        opt.samples = len(opt.rows) if opt.samples is None else opt.samples
        opt.tasks = list(dict.fromkeys(r["task"] for r in opt.rows))
        for task in opt.tasks:
            check_metric(task)
    else:
        opt.tasks = check_names(opt.tasks, opt)
        if min(opt.lengths) < (128 if opt.targets else 32):
            raise InputError(f"--lengths {min(opt.lengths)} has no room for a task, or its budget: give 128 or more")
    most = 1 if opt.max_new_tokens is None else opt.max_new_tokens
    if min(opt.samples, opt.batch_size, opt.at_once, most) < 1:
        raise InputError("--samples, --batch-size, --at-once and --max-new-tokens must be at least 1")
    i, n = map(int, opt.part.split("/")) if re.fullmatch(r"\d+/\d+", opt.part) else (0, 0)
    if not 1 <= i <= n:
        raise InputError(f"--part {opt.part} is not a part such as 1/4")
    opt.slice = slice(i - 1, None, n)
    return opt


# ---- answered samples ----


class Store:
    """One line per sample, appended after every batch and read by --resume. A line cut off by a kill is dropped."""

    def __init__(self, path: Path | None, resume: bool, ranks: Ranks = ONE):
        """All ranks know every sample; the first one has the file."""
        self.path, self.known = path if ranks.rank == 0 else None, dict[Key, Row]()
        lines = self.path.read_bytes() if self.path and resume and self.path.exists() else b""
        lines = lines[: lines.rfind(b"\n") + 1]
        for i, line in enumerate(ranks.all(lines)[0].splitlines(), 1):
            try:
                row = json.loads(line)
                self.known[self.key(row)] = row
            except (ValueError, AttributeError):
                raise InputError(f"--resume: line {i} of {path} is damaged: remove that line") from None
        if self.path:
            self.path.write_bytes(lines)

    @staticmethod
    def key(row: Row) -> Key:
        return tuple(row.get(k) for k in ("method", "task", "length", "index", "turn", "question", "turns"))

    def add(self, rows: Iterable[Row]) -> None:
        new = [r for r in rows if self.key(r) not in self.known]
        self.known.update((self.key(r), r) for r in new)
        if self.path:
            with open(self.path, "ab") as f:
                f.write("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in new).encode())
                f.flush()
                os.fsync(f.fileno())


class Run:
    """One length: its samples, the settings to answer them with, and the answers."""

    def __init__(self, opt: argparse.Namespace, ev: Evaluation, length: int, common: Row):
        self.opt, self.ev, self.length, self.common = opt, ev, length, common
        most = ev.model.args.context
        # the parts of a prompt may be some tokens more than their text at once: within the context, texts are shorter
        for room in (length,) if opt.rows is not None or length < most else (length, length - JOINTS):
            self.groups = {task: self.contexts(task, room) for task in tqdm(
                opt.tasks, desc=f"samples of {length} tokens", leave=False, disable=len(opt.tasks) < 2)}  # fmt: skip
            every = [c for groups in self.groups.values() for c in groups]
            after = [(c, len(a) + r["max_new_tokens"]) for c in every for a, r in zip(c.asked, c.rows, strict=True)]
            if (longest := max(len(c.prompt) + n for c, n in after)) <= most:
                break
        for (c, n), r in zip(after, (r for x in every for r in x.rows), strict=True):
            r |= sized(len(c.prompt) + n, length)
        if longest > most:
            raise InputError(f"a prompt and its answer have {longest} tokens, the model's context {most}: give "
                             "smaller --lengths, or leave the longest rows of --dataset out")  # fmt: skip
        for r in (r for c in every for r in c.rows if opt.max_new_tokens):  # a sample's length counts its own answer
            r["max_new_tokens"] = min(r["max_new_tokens"], opt.max_new_tokens)
        new = {t: max(len(a) + r["max_new_tokens"] for c in g for a, r in zip(c.asked, c.rows, strict=True))
               for t, g in self.groups.items()}  # fmt: skip
        self.new = max(new.values())
        self.size = self.new + max(len(c.prompt) for c in every)  # a row that is done steps on with others
        if opt.targets and self.new - min(new.values()) > self.size / 50:
            longest = max(new, key=lambda t: new[t])
            warn_once(f"--kv and --read are shares of the cache that {longest} needs, with room for {self.new} new "
                      "tokens; alone, other tasks would get smaller budgets: ask tasks of one kind")  # fmt: skip
        self.groups = {t: g[opt.slice] for t, g in self.groups.items()}  # sizes are those of all parts
        if not all(self.groups.values()):
            raise InputError(f"--part {opt.part} has no context of some task: give fewer parts")
        self.sizes = Sizes(ev.model, opt.batch_size, self.size, self.new)
        self.cells, self.missing = self.sizes.cells(opt.targets, opt.method, length)
        chosen = [c["spec"] for c in self.cells] if opt.targets else opt.method
        self.specs = list(dict.fromkeys((["full"] if opt.targets else []) + chosen))

    def contexts(self, task: str, room: int) -> list[Context]:
        """The samples of a task, of up to `room` tokens."""
        opt, ev = self.opt, self.ev
        chat = chat_parts(ev.tk, not opt.no_chat)
        if opt.rows is not None:
            rows = [r for r in opt.rows if r["task"] == task][: opt.samples]
        else:
            made = rows_of(ev, task, room, opt.samples, opt, chat.tokens(ev.tk))
            rows = [r | dict(length=self.length) for r in made]
        return contexts(rows, ev.tk, chat, opt.query_in_prompt, opt.multi_turn)

    def keyed(self, method: str, row: Row) -> Row:
        """The fields that identify a sample in samples.jsonl, across runs."""
        where = {k: row[k] for k in ("task", "length", "index", "turn", "depth", "tokens", "short") if k in row}
        return dict(method=method) | where | self.common

    @property
    def units(self) -> list[Sequence[Context]]:
        """Batches of contexts, in the order of tasks."""
        n = self.opt.batch_size
        return [groups[j : j + n] for groups in self.groups.values() for j in range(0, len(groups), n)]

    def check_memory(self, specs: Sequence[str]) -> None:
        need = int(sum(self.sizes.of(s)[0] for s in specs) * self.sizes.full[0])
        what = f"a cache for each of {len(specs)} settings"
        require_memory(need, self.ev.device, what, "lower --at-once or --batch-size")

    def answer(self, store: Store) -> None:
        """Ask what is not in the store yet: group by group of settings, tasks in order, a batch of contexts at a time.
        Each rank takes its own batch."""
        opt, ev = self.opt, self.ev
        for i in range(0, len(self.specs), opt.at_once):
            part = self.specs[i : i + opt.at_once]
            wanted = {s: {k for u in self.units for k in self._keys(s, u)} - store.known.keys() for s in part}
            units = [u for u in self.units if any(wanted[s].intersection(self._keys(s, u)) for s in part)]
            if not units:
                continue
            todo = [s for s in part if wanted[s]]
            self.check_memory(todo)
            ev.setup({s: (s, {}) for s in todo}, self.size, self.new)
            every = ev.caches

            def ask(unit: Sequence[Context], every: dict = every, wanted: dict = wanted) -> list[Row]:
                ev.caches = {s: c for s, c in every.items() if set(self._keys(s, unit)) & wanted[s]}
                answers = list(ev.ask(unit))
                read = {name: ev.bytes(name, self.sizes.T - 1)["read_share"] for name in ev.noting()}
                return [self.keyed(method, row) | dict(score=round(score, 4), said=said)
                        | (dict(read=read[method]) if method in read else {})
                        for method, row, said, score in answers]  # fmt: skip

            desc = f"{self.length or 'dataset'}: {len(every)} settings"
            for rows in tqdm(opt.ranks.in_turns(units, ask), desc=desc, total=len(units), leave=False):
                store.add(rows)
            ev.caches = {}

    def _keys(self, method: str, unit: Sequence[Context]) -> list[Key]:
        return [Store.key(self.keyed(method, row)) for c in unit for row in c.rows]

    def complete(self, store: Store) -> list[list[Context]]:
        """The groups of tasks that every setting has answered."""
        return [g for g in self.groups.values() if all({*self._keys(m, g)} <= store.known.keys() for m in self.specs)]

    def rows(self, store: Store) -> list[Row]:
        """One row per setting: its bytes, and per task the mean, Wilson's interval and each sample's score. A task
        that some setting has not answered is left out."""
        out, complete = [], self.complete(store)
        for method in self.specs:
            held, read = self.sizes.of(method)
            noted = [r["read"] for g in complete for k in self._keys(method, g) if "read" in (r := store.known[k])]
            read = mean(noted) if noted else read  # what steps read, not the most that they may
            row = dict(method=method, knobs={}, seq_len=self.length, samples=self.opt.samples,
                       query_in_prompt=self.opt.query_in_prompt)  # fmt: skip
            row |= dict(multi_turn=True) if self.opt.multi_turn else {}
            row |= dict(kv_share=round(held, 4), read_share=round(read, 4))
            for groups in complete:
                found = [store.known[key] for key in self._keys(method, groups)]
                each = [r["score"] for r in found]
                task = found[0]["task"]
                row |= {task: round(mean(each), 4), f"{task}_each": each}
                row[f"{task}_tokens"] = [f([r["tokens"] for r in found]) for f in (min, max)]
                hits = {*each} <= {0, 1} and all(len(c.rows) == 1 for c in groups)  # and independent
                row[f"{task}_interval"] = [round(x, 4) for x in wilson(sum(each), len(each))] if hits else None
            out.append(row)
        return out


# ---- results ----


def points(data: Row, axis: str, length: int) -> list[tuple[str, float, float]]:
    """(method, share of bytes, mean score) of every setting; if there are targets, of the settings of this axis."""
    rows = {r["method"]: r for r in data["rows"] if r["seq_len"] == length}
    tasks = measuring(data["rows"], length)
    cells = [c for c in data["cells"] if c["axis"] == axis and c["seq_len"] == length]
    named = [(c["method"], c["spec"], c["target"]) for c in cells] or [(s, s, None) for s in rows if not data["cells"]]
    out = []
    for method, spec, target in named if tasks else ():
        x = float(Fraction(target)) if method in BOUNDS and target else rows[spec][AXES[axis][1]]
        out.append((method, x, mean(rows[spec][t] for t in tasks)))
    return out


def found(row: Row, task: str) -> str:
    """The mean score and its interval, `93 (86-97) %`; without one if samples are no hits, or share a context."""
    each = row[f"{task}_each"]
    interval = row.get(f"{task}_interval", wilson(sum(each), len(each)))
    if interval is None:
        return f"{100 * mean(each):.0f} %"
    return f"{100 * mean(each):.0f} ({100 * interval[0]:.0f}-{100 * interval[1]:.0f}) %"


def markdown(data: Row) -> str:
    """One table per length, one row per setting, with Wilson's intervals and the paired difference to full. Tasks that
    measure nothing are in brackets and not in the mean."""
    out, tasks = [], tasks_of(data["rows"])
    for length in dict.fromkeys(r["seq_len"] for r in data["rows"]):
        counted = measuring(data["rows"], length)
        names = [t if t in counted else f"({t})" for t in tasks]
        cells, here = [], [r for r in data["rows"] if r["seq_len"] == length]
        sizes = sorted({len(r[f"{t}_each"]) for r in here for t in tasks_of([r])})
        for r in here:
            average = f"{100 * mean(r[t] for t in counted):.0f} %" if counted else "-"
            cells.append([f"`{r['method']}`", f"{r['kv_share']:.3f}", f"{r['read_share']:.3f}", average,
                          against_full(r, here, counted),
                          *(found(r, t) if t in r else "-" for t in tasks)])  # fmt: skip
        known = "known" if here[0]["query_in_prompt"] else "not known"
        question = "first of the questions asked in turn" if here[0].get("multi_turn") else "question"
        title = f"{length} tokens" if length else "the dataset"
        title += f", {' to '.join(map(str, sizes[:: len(sizes) - 1 or 1]))} samples of a task, 95 % intervals by Wilson"
        out.append(f"{title}, the {question} {known} when the context is compressed:\n\n"
                   + table(["method", "held", "read", "mean", "all samples to full", *names], cells))  # fmt: skip
    out += [f"{c['method']} cannot be at {c['axis']} {c['target']} of {c['seq_len']} tokens: {c['least']} at least"
            for c in data["missing"]]  # fmt: skip
    return "\n\n".join(out) + "\n"


def draw_pareto(data: Row, axis: str, path: Path) -> None:
    """Mean score against bytes, one panel per length; the dashed line is the Pareto front."""
    from matplotlib.figure import Figure

    by_length = {T: p for T in dict.fromkeys(r["seq_len"] for r in data["rows"]) if (p := points(data, axis, T))}
    if not by_length:
        path.unlink(missing_ok=True)  # an earlier run's
        return
    fig = Figure(figsize=(5 * len(by_length), 4), layout="constrained")
    for ax, (length, found) in zip(fig.subplots(1, len(by_length), squeeze=False)[0], by_length.items(), strict=True):
        for method in dict.fromkeys(m for m, *_ in found):
            xy = sorted((x, 100 * y) for m, x, y in found if m == method)
            ax.plot(*zip(*xy, strict=True), "o-", ms=4, lw=1, alpha=0.8, label=method)
        best, most = [], -1.0
        for x, y in sorted((x, 100 * y) for m, x, y in found if m not in BOUNDS):
            if y > most:
                best, most = [*best, (x, y)], y
        if best:  # the bounds may be all there is
            ax.step(*zip(*best, strict=True), "k--", where="post", lw=1)
        ax.set(xscale="log", xlabel=f"bytes {AXES[axis][0]} / full", ylabel="found, %", ylim=(-3, 103))
        ax.set_title(f"{length} tokens" if length else "the dataset", fontsize=9)
        ax.grid(alpha=0.3)
    ax.legend(fontsize=6, ncols=2)
    save_figure(fig, path)


def main() -> None:
    opt = parse_args()
    ev, ranks = open_evaluation(opt, opt.batch_size), opt.ranks
    out = Path(opt.out) if opt.out else None
    settings = {k: getattr(opt, k) for k in SETTINGS} | precision(opt, ev.model)
    settings |= inputs(opt, ev.model, opt.dataset, opt.essays, opt.squad, opt.hotpotqa,
                       tokens=None if opt.dataset else ev.text_hashes())  # fmt: skip
    data = record(ev.device, **names_of(opt), settings=settings)
    if out and opt.resume and ranks.rank == 0:
        if (out / FILES[1]).exists() and not (out / FILES[0]).exists():
            raise InputError(f"--resume: {out / FILES[1]} has samples, but without {FILES[0]} nothing says of what: "
                             "remove it, or give another --out")  # fmt: skip
        earlier(str(out / FILES[0]), data, ("commit", "fingerprint", "settings"), (), free=("part",))
    mode = dict(question="known" if opt.query_in_prompt else "unknown", turns=opt.multi_turn)
    common = mode | dict(chat=chat_parts(ev.tk, not opt.no_chat).head != "", seed=opt.seed, model=data["fingerprint"])
    with ranks.agreed():
        runs = [Run(opt, ev, T, common) for T in opt.lengths]
        data["slots"] = slots_of(runs, out if opt.resume and ranks.rank == 0 else None)
    if opt.settings:
        each = [(run.length, spec, *run.sizes.of(spec)) for run in runs for spec in run.specs]
        missing = [c for run in runs for c in run.missing]
        if opt.json:
            names = "seq_len", "method", "kv_share", "read_share"
            print(json.dumps(dict(rows=[dict(zip(names, x, strict=True)) for x in each], missing=missing)))
            return
        for length, spec, held, read in each:
            print(f"{length}  {spec}  holds {held:.3f}  reads {read:.3f}")
        for c in missing:
            print(f"{c['seq_len']}  {c['method']} at {c['axis']} {c['target']}: {c['least']} at least")
        return
    for run in runs:  # before anything of an earlier run is replaced
        for i in range(0, len(run.specs), opt.at_once):
            run.check_memory(run.specs[i : i + opt.at_once])
    if out and ranks.rank == 0:
        out.mkdir(exist_ok=True)
        write_json(out / FILES[0], data)
    store = Store(out / FILES[1] if out else None, opt.resume, ranks)
    try:
        for run in runs:
            run.answer(store)
    except KeyboardInterrupt:
        runs = [run for run in runs if run.complete(store)]
        if out and runs and ranks.rank == 0:
            report(data | dict(interrupted=True), runs, store, out)
        raise
    if ranks.rank:
        return
    data = report(data, runs, store, out)
    print(json.dumps(data) if opt.json else markdown(data))


def slots_of(runs: Sequence[Run], out: Path | None) -> dict[str, list[int]]:
    """Length -> tokens of a cache, and how many of them are new; also of the run that goes on in the folder `out`.
    Raises InputError if other tasks gave its samples other caches, whose bytes are not theirs."""
    old = json.loads((out / FILES[0]).read_text()).get("slots", {}) if out and (out / FILES[0]).exists() else {}
    new = {str(run.length): [run.size, run.new] for run in runs}
    for length in (n for n in new if old.get(n, new[n]) != new[n]):
        raise InputError(f"--resume: samples in {out} of {length} tokens had caches of {old[length][0]} tokens, "
                         f"{old[length][1]} of them new, these tasks need {new[length][0]} and {new[length][1]}: "
                         "give another --out")  # fmt: skip
    return old | new


def report(data: Row, runs: Sequence[Run], store: Store, out: Path | None) -> Row:
    """The result object of what is in the store; also as files in the folder `out`."""
    data = data | dict(cells=[c for r in runs for c in r.cells], missing=[c for r in runs for c in r.missing])
    data["rows"] = [row for r in runs for row in r.rows(store)]
    if out:
        write_json(out / FILES[0], data)
        with written(out / FILES[2]) as tmp:
            tmp.write_text(markdown(data), encoding="utf-8")
        for axis, file in zip(AXES, FILES[3:], strict=True):
            draw_pareto(data, axis, out / file)
    return data


if __name__ == "__main__":
    run_cli(main)
