"""Decode tokens/s end to end, of methods (eager and compiled) and of peers in one run; and the cost of prefill.

    python -m scripts.bench.bench_generate --peer transformers
    python -m scripts.bench.bench_generate --method full self_index --batch 1 8 --length 2048 --out generate.json
    python -m scripts.bench.bench_generate --random-init llama-3.1-8b --synthetic --peer gpt-fast:../gpt-fast
    python -m scripts.bench.bench_generate --prefill --method full self_index --size 1x4096 2x2048
    python -m scripts.bench.bench_generate --restore --method full self_index --size 1x8192    # a cache as a file
    python -m scripts.bench.bench_generate --texts --speculate 4 --method quest --checkpoint CKPT    # acceptance

Prompts are random tokens. `--synthetic` skips the prefill: every layer's cache is filled with random keys and values
through its method's own `compress`. Methods are specs of cache/spec.py: `0-1:full,2-:sals-12.5,budget=512`.

Modes: `eager`; `compiled`, as in generate.py; `trees`, the whole step as one compiled function, which inductor captures
in its own CUDA graphs: to hold ours against, slow to compile.

On a CPU the runs of a batch and length take turns (ours, peer, ours, peer, ...), so that a noisy machine slows all of
them equally. On a GPU, where two caches may not fit, they run one after the other (`--interleave` if they fit).
`--prefill` always takes turns with `full`. Medians and ratios of medians are reported; the raw times of every round are
in the JSON. Compilation and prefill are not counted. Standard error shows what runs now and about how long all of it
takes; Ctrl-C ends the run and keeps what has been measured.
`limit_share` is (bytes of the weights + bytes the cache reads) / the measured bandwidth, as a share of the step's time.
On a CPU the bandwidth is the better of before and after the run.

With --speculate each method that can also drafts N tokens per round, which exact attention checks; --acceptance
enforces the share of right ones. Its `limit_share` counts the bytes that all passes of a round read, per token that a
round gives on average. --texts measures the share instead, on five texts (texts.py), and no time.

`second_token_s` is the time of the prompt and the first decode step, if there is a prefill.

Peers decode greedily at the same batch, length and number of tokens. `transformers` is its generate() with dynamic and
static cache, minus a run of one token; with --synthetic its forward in a loop. `bridge:METHOD` is the same with a
method as its cache (engine/bridge.py). `gpt-fast:PATH` is a checkout of
gpt-fast, which runs in its own process with a cache filled with random keys (peer_decode.py).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cache.spec import layer_methods
from engine import LLM
from loading.config import read_args
from model import Transformer
from runtime.errors import InputError, run_cli
from runtime.machine import TINY, peak_memory, pick_device, set_threads
from runtime.options import Parser, add_calibration, add_precision
from scripts.bench import texts
from scripts.bench.our_runs import MODES, Drafting, Ours, Prefill, Restoring
from scripts.bench.peer_runs import Run, Work
from scripts.bench.peers import check_peer, peer_runs
from scripts.shared.options import (
    PRECISION,
    SPECS_BY_LAYER,
    Steps,
    add_run,
    check_folder,
    check_run,
    checked,
    earlier,
    load_model,
    precision,
    shapes,
)
from scripts.shared.results import record, write_json
from scripts.shared.timing import ceilings, end, reason, recover, settled, spread
from weights import Experts, PackedLinear, WeightFormat

TIMES = ("seconds_per_step", "restore_s", "prefill_s")  # the first of them that a row has tells its rounds
# a row's key for its ratio to a peer's tokens/s -> how the names of the peer's runs begin
PEERS = {"times_peer": "transformers ", "times_gpt_fast": "gpt-fast", "times_llama_cpp": "llama.cpp"}


# ---- rows ----


def weight_bytes(model: Transformer, batch: int) -> int:
    """The bytes of weights that a step of so many rows reads: all except an untied embedding, of which it reads single
    rows, and except the experts that no row chose, if rows choose them evenly."""
    rows = model.tok_embeddings
    unread = set() if model.args.tie_embeddings else {id(t) for t in (*rows.parameters(), *rows.buffers())}
    tensors = [*model.parameters(), *(b for m in model.modules() if isinstance(m, PackedLinear) for b in m.buffers())]
    idle = sum(m.nbytes() * (1 - m.active / m.experts) ** batch for m in model.modules() if isinstance(m, Experts))
    return sum(t.nbytes for t in tensors if id(t) not in unread) - round(idle)


def rounds(
    group: list[Run], n: int, warm: int, out: dict[str, dict[str, Any]], progress: Steps, keep: Callable[[], Any]
) -> None:
    """Runs that take turns -> out: {name: {"step": [seconds, ...], "prefill": [...]}}, or {"error": the reason}.

    `out` is filled as the runs go, so that it has everything measured before an interruption. keep is called after
    every round.
    """
    opened: list[Run] = []

    def attempt(run: Run, what: str, call: Callable[[], Any]) -> dict[str, float]:
        """The times of one round; empty after an error, which excludes the run from further rounds."""
        progress.now(f"batch {run.work.batch} length {run.work.length}: {run.name}, {what}")
        try:
            return call() or {}
        except Exception as e:  # out of memory, or a peer that is missing or fails: the others go on
            out[run.name] = dict(error=reason(e))
            recover(run.work.device, lambda: out[run.name].update(lost=True))
        return {}

    try:
        for run in group:
            opened.append(run)
            attempt(run, run.opening, run.open)
        for i in range(warm + n):
            for run in [r for r in group if "error" not in out.get(r.name, {})]:
                what = f"round {i - warm + 1} of {n}" if i >= warm else f"warm-up round {i + 1} of {warm}"
                times = attempt(run, what, run)
                for key, seconds in times.items() if i >= warm else ():
                    out.setdefault(run.name, {}).setdefault(key, []).append(seconds)
            keep()
    finally:
        for run in opened:
            run.close()


def make_rows(work: Work, group: list[Run], times: dict[str, dict], bandwidth: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for run in [r for r in group if r.name in times]:
        t, row = times[run.name], dict[str, Any](batch=work.batch, length=work.length, run=run.name, kv_bytes=None)
        rows.append(row)
        if isinstance(run, Ours):
            row |= dict(method=run.method, mode=run.mode)
        row |= run.info
        row |= {key: t[key] for key in ("error", "lost") if key in t}
        if "step" in t:
            step = statistics.median(t["step"])
            row |= dict(tokens_per_s=round(work.batch / step, 1), seconds_per_step=t["step"],
                        spread=round(spread(t["step"]), 3))  # fmt: skip
            if isinstance(run, Ours):
                # weights are read in every pass: one per token, or with drafts the passes of a round per token
                weights = weight_bytes(work.model, work.batch) * run.info.get("passes", 1)
                row["limit_share"] = (weights + run.info["traffic"]) / bandwidth / step
        row |= {f"{key}_s": t[key] for key in ("prefill", "second_token", "save", "restore") if key in t}
        row |= dict(prefill_spread=round(spread(t["prefill"]), 3)) if "prefill" in t else {}
    return rows


def speed_of(row: dict[str, Any]) -> float:
    """Tokens per second, not rounded."""
    return row["batch"] / statistics.median(row["seconds_per_step"])


def compare(rows: list[dict[str, Any]]) -> None:
    """Adds to our rows of one batch and length their ratios to `full` in the same mode, and to the peers."""
    for row in (r for r in rows if "method" in r):
        same = [r for r in rows if (r.get("method"), r.get("mode")) == ("full", row["mode"]) and "error" not in r]
        timed = all("second_token_s" in r and "prefill_overhead" not in r for r in (row, *same))
        if same and timed and row["method"] != "full":
            mine, full = statistics.median(row["prefill_s"]), statistics.median(same[0]["prefill_s"])
            row |= dict(prefill_overhead=mine / full - 1, full_prefill_s=same[0]["prefill_s"],
                        full_second_token_s=same[0]["second_token_s"])  # fmt: skip
        if "tokens_per_s" not in row:
            continue
        if same:
            row["times_full"] = round(speed_of(row) / speed_of(same[0]), 3)
        for key, peer in PEERS.items():
            theirs = [r for r in rows if r["run"].startswith(peer) and "tokens_per_s" in r and r.get("compiled", True)]
            if theirs:  # a peer that could not be compiled is shown, but not compared to
                row[key] = round(speed_of(row) / max(map(speed_of, theirs)), 2)


def line(row: dict[str, Any]) -> str:
    text = f"batch {row['batch']:3d} length {row['length']:6d}  {row['run']:32s}"
    if "error" in row:
        return f"{text} {row['error']}"
    if "tokens_per_s" in row:
        text += f" {row['tokens_per_s']:10.1f} tokens/s"
    if not row.get("compiled", True):
        text += f"  (not compiled: {row['why']})"
    if "limit_share" in row:
        text += f"  {100 * row['limit_share']:3.0f} % of the byte limit"
    if "prefill_s" in row:
        text += f"  prefill {statistics.median(row['prefill_s']):.3f} s"
    if row.get("kv_bytes"):
        text += f"  KV {row['kv_bytes'] / 2**20:.1f} MiB"
    if "prefill_overhead" in row:
        text += f" ({100 * row['prefill_overhead']:+.1f} % on full)"
    if "restore_s" in row:
        save, restore = (statistics.median(row[key]) for key in ("save_s", "restore_s"))
        text += f"  {row['file_bytes'] / 2**20:.1f} MiB, written in {save:.3f} s, restored in {restore:.3f} s"
    for key, what in (("times_full", "full"), *PEERS.items()):
        if key in row:
            text += f"  {row[key]:.2f}x {what.strip()}"
    return text


def parser() -> Parser:
    p = Parser(__doc__)
    a = p.add_argument
    a("--checkpoint", default=str(TINY), help="Hugging Face folder or GGUF file")
    a("--random-init", metavar="NAME", help="random weights of a known model, or of a config.json, instead")
    a("--method", nargs="+", default=["full"], help=SPECS_BY_LAYER)
    a("--batch", nargs="+", type=int, default=[1, 8], help="batch sizes; default: 1 8")
    a("--length", nargs="+", type=int, default=[512], help="prompt tokens; default: 512")
    a("--size", nargs="+", metavar="BxT", help="batch x prompt tokens, in this order, instead of --batch and --length")
    a("--new", type=int, default=128, help="tokens decoded; default: 128")
    a("--synthetic", action="store_true", help="fill the caches with random keys and values instead of a prefill")
    a("--prefill", action="store_true", help="measure only the prefill, each method in turns with full")
    a("--restore", action="store_true", help="measure only the cache as a file: its size, writing and restoring it")
    a("--texts", action="store_true", help="measure the share of right drafts on five texts; needs --speculate N")
    a("--mode", nargs="+", choices=MODES, default=["eager", "compiled"], help="default: eager compiled")
    a("--rounds", type=int, default=5, help="rounds that count; default: 5")
    a("--warm-up", type=int, default=1, metavar="N", help="rounds before them; default: 1")
    a("--interleave", action=argparse.BooleanOptionalAction, help="all runs of a size take turns (default: on a CPU)")
    a("--peer", nargs="*", default=[], metavar="PEER",
      help="transformers, bridge:METHOD, gpt-fast:PATH of a checkout, llama.cpp:PATH of its llama-bench "
      "(scripts/bench/llama_cpp.py says how to build it)")  # fmt: skip
    a("--speculate", nargs="+", type=int, default=[], metavar="N", help="also run N drafts by each method and a check")
    a("--acceptance", nargs="+", type=float, metavar="A",
      help="with --speculate, the enforced chance that a draft is right (default: 0.8)")  # fmt: skip
    a("--time-limit", type=float, metavar="S", help="start nothing new after S seconds")
    add_precision(p)
    add_calibration(p)
    add_run(p)
    return p


def parse_args() -> argparse.Namespace:
    opt = parser().parse_args()
    check_run(opt)
    for several in (opt.mode, opt.peer, opt.speculate, opt.acceptance or []):
        several[:] = dict.fromkeys(several)  # equal runs would share their times
    if opt.warm_up < 0:
        raise InputError(f"--warm-up {opt.warm_up} is below 0")
    if opt.new < 2:
        raise InputError(f"--new {opt.new} is below 2: steps are timed after the first token; give 2 or more")
    if opt.texts and (opt.synthetic or opt.prefill or opt.restore or opt.acceptance or opt.time_limit):
        raise InputError("--texts decodes texts and times nothing: drop --synthetic, --prefill, --restore, "
                         "--acceptance and --time-limit")  # fmt: skip
    if opt.acceptance and not opt.speculate:
        raise InputError("--acceptance is the chance that a draft is right: add --speculate N")
    opt.acceptance = opt.acceptance or [0.8]
    if min(opt.speculate, default=1) < 1 or not all(0 <= a <= 1 for a in opt.acceptance):
        raise InputError("--speculate takes numbers of drafts of at least 1, --acceptance shares from 0 to 1")
    WeightFormat.parse(opt.weights, opt.head)
    for peer in opt.peer:
        check_peer(peer)
    if not opt.random_init and any(peer.startswith(("transformers", "bridge")) for peer in opt.peer):
        check_folder(opt.checkpoint, "--peer transformers")
    if opt.peer and (opt.prefill or opt.restore or opt.texts):
        raise InputError("--prefill, --restore and --texts compare methods: drop --peer")
    if (opt.prefill or opt.restore) and opt.speculate:
        raise InputError("--prefill and --restore time no decoding: drop --speculate")
    if opt.texts and (len(opt.speculate) != 1 or opt.random_init or min(n for _, n in opt.size) < opt.new + 512):
        raise InputError("--texts needs --speculate with one N, --checkpoint, and a --length of at least --new + 512")
    bridged = [peer.removeprefix("bridge:") for peer in opt.peer if peer.startswith("bridge:")]
    if opt.synthetic and bridged:
        raise InputError("--peer bridge:METHOD reads prompts: drop --synthetic")
    if opt.synthetic and opt.prefill:
        raise InputError("--synthetic skips the prefill that --prefill measures: drop one of them")
    # before any weight is loaded
    args = shapes(opt.random_init) if opt.random_init else read_args(opt.checkpoint)
    opt.method = checked(opt.method, args.n_layer)
    checked(bridged, args.n_layer)
    set_threads(opt.threads)
    return opt


def groups(work: Work, opt: argparse.Namespace) -> list[list[Run]]:
    """The runs of a size; those of one group take turns."""
    if opt.prefill:  # a ratio of a few percent needs runs next to each other in time
        others = [m for m in opt.method if m != "full"]
        return [[Prefill(work, "full"), Prefill(work, m)] for m in others] or [[Prefill(work, "full")]]
    if opt.restore:
        return [[Restoring(work, m)] for m in opt.method]
    runs: list[Run] = [Ours(work, method, mode) for method in opt.method for mode in opt.mode]
    for method, mode, n in itertools.product(opt.method, set(opt.mode) & {"eager", "compiled"}, opt.speculate):
        if method != "full" and all(cls.verifies for cls, _ in layer_methods(method, work.model.args.n_layer)):
            first = Drafting(work, method, mode, n, opt.acceptance[0])
            runs += [first, *(Drafting(work, method, mode, n, a, first) for a in opt.acceptance[1:])]
    for peer in opt.peer:
        runs += peer_runs(work, peer, None if opt.random_init else opt.checkpoint, opt.threads or 0)
    return [runs] if opt.interleave else [[run] for run in runs]


def main() -> None:
    opt, begin = parse_args(), time.monotonic()
    device = pick_device(opt.device)
    if opt.interleave is None:
        opt.interleave = device.type == "cpu"
    # all runs compile the same functions, and none of their code may be dropped while runs take turns
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10_000
    lengths = list(dict.fromkeys(length for _, length in opt.size))
    known = dict(prompt_tokens=lengths[0] if len(lengths) == 1 else lengths, new_tokens=opt.new,
                 model=opt.random_init or Path(opt.checkpoint).name, synthetic=opt.synthetic)  # fmt: skip
    if opt.texts:
        return on_texts(opt, known)
    with Steps(total=2) as progress:
        progress.now(f"{'making' if opt.random_init else 'loading'} {known['model']}")
        start = time.perf_counter()
        model = load_model(opt, device)
        loaded = dict(load_seconds=time.perf_counter() - start, load_peak_bytes=peak_memory(device))
        known |= precision(opt, model)
        same = ("device", "commit", "model", "new_tokens", "synthetic", "speculate", *PRECISION)  # the last of --texts
        old = earlier(opt.out, record(device, **known), same, ("rows",)) if opt.resume else {}
        progress.now("bandwidth and matrix products of this machine")
        limits = ceilings(device, model.dtype, 3)
        loaded |= dict(weight_bytes=weight_bytes(model, opt.size[0][0]))
        data = record(device, **known, **loaded, **limits, rows=[]) | old
        run_all(model, opt, data, begin, progress)
    if opt.out:
        write_json(opt.out, data)
    if opt.json:
        print(json.dumps(data))
    end(data["rows"])


def on_texts(opt: argparse.Namespace, known: dict[str, Any]) -> None:
    """--texts: a row per method, length and text."""
    llm = LLM(opt.checkpoint, calibration=opt.calibration, device=opt.device, dtype=opt.dtype, weights=opt.weights,
              head=opt.head, kv_dtype=opt.kv_dtype, compile=False)  # fmt: skip
    (n,), known = opt.speculate, known | precision(opt, llm.model) | dict(speculate=opt.speculate[0])
    data = record(llm.model.device, **known, rows=[])
    if opt.resume:
        data |= earlier(opt.out, data, ("device", "commit", *known, *PRECISION), ("rows",))
    done = {(r["method"], r["length"], r["text"]) for r in data["rows"]}
    lengths = [length for _, length in opt.size]
    with Steps(total=len(lengths) * len(texts.KINDS) * len(opt.method)) as progress:
        for length in lengths:
            args = Path(opt.checkpoint), length, opt.new, n, opt.method, done, progress.now
            for row in texts.accepted(llm, *args):
                data["rows"].append(row)
                if opt.out:
                    write_json(opt.out, data)
                if not opt.json:
                    progress.write(texts.line(row), file=sys.stdout)
    if opt.json:
        print(json.dumps(data))


def run_all(model: Transformer, opt: argparse.Namespace, data: dict[str, Any], begin: float, progress: Steps) -> None:
    """Measures every group of runs that is not in `data` yet, and adds it."""
    todo: list[tuple[Work, list[Run]]] = []
    for batch, length in opt.size:
        work = Work(model, batch, length, opt.new, opt.synthetic)
        here = [r for r in data["rows"] if (r["batch"], r["length"]) == (batch, length) and settled(r)]
        known = {r["run"] for r in here if len(next((r[k] for k in TIMES if k in r), ())) >= opt.rounds}
        lost = {r["run"] for r in here if r.get("lost")}
        # leave out the runs that the resumed file has measured, or that crashed its device
        rest = ([run for run in group if run.name not in lost] for group in groups(work, opt))
        todo += [(work, group) for group in rest if not {run.name for run in group} <= known]
    runs = sum(len(group) for _, group in todo)
    progress.total += runs * (1 + opt.warm_up + opt.rounds)
    for work, group in todo:
        if opt.time_limit is not None and time.monotonic() - begin > opt.time_limit:
            data["stopped"] = f"the time limit of {opt.time_limit:g} s"
            break
        torch._dynamo.reset()
        times: dict[str, dict[str, Any]] = {}
        keep = functools.partial(keep_rows, data, work, group, times, opt.out)
        try:
            rounds(group, opt.rounds, opt.warm_up, times, progress, keep)
            if work.device.type == "cpu":  # others may load it, too; a GPU's memory is full of caches now
                data.update(max(data, ceilings(work.device, model.dtype, 3), key=lambda d: d["bandwidth"]))
        finally:
            rows = keep()
            if rows and not opt.json:
                progress.write("\n".join(map(line, rows)), file=sys.stdout)
        recover(work.device)


def keep_rows(
    data: dict[str, Any], work: Work, group: list[Run], times: dict[str, dict[str, Any]], out: str | None
) -> list[dict[str, Any]]:
    """Adds a group's measurements so far to `data` and writes it."""
    rows = make_rows(work, group, times, data["bandwidth"])
    enter(data, work, rows)
    if out:
        write_json(out, data)
    return rows


def enter(data: dict[str, Any], work: Work, rows: list[dict[str, Any]]) -> None:
    """Replaces the rows of the same runs by new ones, and compares all rows of a batch and length."""

    def here(row: dict[str, Any]) -> bool:
        return (row["batch"], row["length"]) == (work.batch, work.length)

    new = {r["run"] for r in rows}
    data["rows"] = [r for r in data["rows"] if not (here(r) and r["run"] in new)] + rows
    compare([r for r in data["rows"] if here(r)])


if __name__ == "__main__":
    run_cli(main)
