"""Decode tokens/s end to end, each method eager and compiled, beside peers in the same run; and what prefill costs.

    python scripts/bench_generate.py --peer transformers
    python scripts/bench_generate.py --method full self_index --batch 1 8 --length 2048 --out results/generate.json
    python scripts/bench_generate.py --random-init llama-3.1-8b --synthetic --length 32768 --peer gpt-fast:../gpt-fast
    python scripts/bench_generate.py --prefill --method full self_index --size 1x4096 2x2048

Prompts are random tokens. `--synthetic` leaves the prefill out: every layer's cache is filled with random keys and
values through its method's own `compress`. A method may carry knobs: `sals-12.5,budget=512`.

Modes: `eager`; `compiled`, what generate.py does (on a GPU with CUDA graphs, reduce-overhead); `captured`, the same
step compiled without that and captured into a CUDA graph by hand; `blocks`, one layer compiled, all layers captured by
hand, which compiles n_layer times faster. On the CPU nothing is captured.

On a CPU the runs of a batch and length take turns (ours, peer, ours, peer, ...), so that a noisy machine slows all
alike; on a GPU, where two caches may not fit, one follows the other (`--interleave` if they fit). `--prefill` always
takes turns with `full`. Medians and ratios of medians are reported, the raw times of every round are in the JSON.
Compilation and prefill are not counted.
`limit_share`: (bytes of the weights + bytes the cache reads) / the measured bandwidth, as a share of the step's time.

`second_token_s`: the prompt and the first decode step, where there is a prefill.

Peers decode greedily at the same batch, length and number of tokens. `transformers`: its generate(), dynamic and
static cache, a run of one token subtracted; with --synthetic its forward in a loop.
`gpt-fast:PATH`, `double-sparse:PATH`: a checkout of gpt-fast, or of the published Double Sparsity that builds on it, in
a process of its own, its cache filled with random keys, see peer_decode.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from errors import InputError, Parser, run_cli  # noqa: E402
from generate import (  # noqa: E402
    DTYPES,
    TINY,
    Result,
    Sampling,
    Session,
    Step,
    continue_rows,
    kv_bytes,
    kv_bytes_full,
    make_step,
    pick_device,
    pick_dtype,
)
from model import Transformer, load_checkpoint, random_transformer  # noqa: E402
from scripts.bench_attention import (  # noqa: E402
    ceilings,
    check_run,
    fill,
    make_method,
    reason,
    recover,
    shapes,
    split_knobs,
)
from scripts.peer_runs import Run, Work, check_peer, peer_runs  # noqa: E402
from scripts.results import record, write_json  # noqa: E402

MODES = ("eager", "compiled", "captured", "blocks")
# what a row says of how many times a peer's tokens/s it has: the key -> how the peer's runs are called
PEERS = {"times_peer": "transformers ", "times_gpt_fast": "gpt-fast", "times_double_sparse": "double-sparse"}


# ---- ours ----


@contextlib.contextmanager
def compiled_blocks(model: Transformer) -> Iterator[None]:
    """Inside, a layer's decode is compiled by itself: layers of one method share the code."""
    compiled: Any = torch.compile(type(model.layers[0]).decode, fullgraph=True, dynamic=False)
    for block in model.layers:
        block.decode = compiled.__get__(block)
    try:
        yield
    finally:
        for block in model.layers:
            del block.decode


def capture(step: Step, batch: int, device: torch.device) -> Step:
    """The step as one CUDA graph; its output is overwritten by the next call, as with reduce-overhead."""
    tokens, pos = (torch.zeros(batch, dtype=torch.int64, device=device) for _ in range(2))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(tokens, pos)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(tokens, pos)

    def replay(t: Tensor, p: Tensor) -> Tensor:
        tokens.copy_(t)
        pos.copy_(p)
        graph.replay()
        return out

    return replay


class Ours(Run):
    def __init__(self, work: Work, method: str, mode: str):
        self.work, self.method, self.mode, self.name = work, method, mode, f"{method} {mode}"
        self.sampling, self.info, self.stack = Sampling(), dict[str, Any](), contextlib.ExitStack()

    @torch.inference_mode()
    def open(self) -> None:
        w, (name, knobs) = self.work, split_knobs(self.method)
        if w.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(w.device)
        size = w.length + w.new
        w.model.setup_cache(name, w.batch, size, **knobs)
        self.cache: Any = w.model.cache
        model, sampling = w.model, self.sampling
        if self.mode in ("eager", "compiled"):
            self.step = make_step(model, sampling, self.mode == "compiled")
        else:
            self.step = lambda tokens, pos: sampling.draw(model.decode(tokens, pos))
            if self.mode == "captured":
                self.step = torch.compile(self.step, fullgraph=True, dynamic=False)
            if w.device.type == "cuda":
                with self._blocks():
                    self.step = capture(self.step, w.batch, w.device)
        with self._blocks():
            Session(model, self.step, sampling).warm_up(w.batch)
        read = sum(m.traffic(w.length + w.new // 2) for m in self.cache)
        self.info = dict(kv_bytes=kv_bytes(model), kv_bytes_full=kv_bytes_full(model, w.batch, size), traffic=read)

    def _blocks(self) -> Any:
        return compiled_blocks(self.work.model) if self.mode == "blocks" else contextlib.nullcontext()

    @torch.inference_mode()
    def __call__(self) -> dict[str, float]:
        """Fill the cache or run the prompt, then decode: new steps, the first of them apart where there is a prompt."""
        w = self.work
        with self._blocks():
            session = self._session()
            times = {} if w.synthetic else self._prompt(session)
            if w.synthetic:
                self._fill(session)
            result = Result([[] for _ in range(w.batch)], [w.length] * w.batch)
            session.sync()
            # one token is there before the first step
            continue_rows(session, result, w.new + w.synthetic, frozenset(), None)
        if result.steps < w.new + w.synthetic - 1:
            raise KeyboardInterrupt  # which the loop takes for the wish to end it
        return times | dict(step=result.decode_s / max(1, result.steps))

    def _session(self) -> Session:
        self.work.model.cache = self.cache
        self.work.model.reset_cache()
        return Session(self.work.model, self.step, self.sampling)

    def _prompt(self, session: Session) -> dict[str, float]:
        session.sync()
        start = time.perf_counter()
        session.prefill(self.work.tokens.tolist())
        session.sync()
        prefill = time.perf_counter() - start
        session.advance(session.next)
        session.sync()
        return dict(prefill=prefill, second_token=time.perf_counter() - start)

    def _fill(self, session: Session) -> None:
        w, a = self.work, self.work.model.args
        k, v = w.random_kv()
        q = torch.randn(w.batch, a.n_head, 1, a.head_dim, device=w.device, dtype=w.dtype)
        for method in self.cache:
            fill(method, q, k, v)
        session.pos = torch.full((w.batch,), w.length, device=w.device)
        session.next = w.tokens[:, -1].to(w.device)

    def close(self) -> None:
        if self.work.device.type == "cuda":
            self.info["peak_memory_bytes"] = torch.cuda.max_memory_allocated(self.work.device)
        self.cache = self.work.model.cache = self.step = None  # type: ignore[assignment]


class Prefill(Ours):
    """The prompt and one step."""

    def __init__(self, work: Work, method: str):
        super().__init__(work, method, "eager")
        self.name = f"{method} prefill"

    @torch.inference_mode()
    def __call__(self) -> dict[str, float]:
        return self._prompt(self._session())


# ---- rows ----


def weight_bytes(model: Transformer) -> int:
    """What a step reads of the weights: all but the rows of an untied embedding that no token asks for."""
    unread = {id(model.tok_embeddings.weight)} if not model.args.tie_embeddings else set()
    return sum(p.nbytes for p in model.parameters() if id(p) not in unread)


def rounds(group: list[Run], n: int, warm: int, out: dict[str, dict[str, Any]]) -> None:
    """Runs that take turns -> out: {name: {"step": [seconds, ...], "prefill": [...]}}, or {"error": why there is none}.

    Filled as it goes: what was measured before an interruption is there.
    """
    opened: list[Run] = []
    try:
        for i in range(-1, warm + n):
            for run in [r for r in group if "error" not in out.get(r.name, {})]:
                try:
                    if i < 0:
                        opened.append(run)
                        run.open()
                        continue
                    times = run()
                except Exception as e:  # out of memory, or a peer that is missing or fails: the others go on
                    out[run.name] = dict(error=reason(e))
                    continue
                for key, seconds in times.items() if i >= warm else ():
                    out.setdefault(run.name, {}).setdefault(key, []).append(seconds)
    finally:
        for run in opened:
            run.close()


def spread(times: list[float]) -> float:
    return round((max(times) - min(times)) / statistics.median(times), 3)


def make_rows(work: Work, group: list[Run], times: dict[str, dict], bandwidth: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for run in [r for r in group if r.name in times]:
        t, row = times[run.name], dict[str, Any](batch=work.batch, length=work.length, run=run.name, kv_bytes=None)
        rows.append(row)
        if isinstance(run, Ours):
            row |= dict(method=run.method, mode=run.mode)
        row |= run.info
        if "error" in t:
            row["error"] = t["error"]
        if "step" in t:
            step = statistics.median(t["step"])
            row |= dict(tokens_per_s=round(work.batch / step, 1), seconds_per_step=t["step"], spread=spread(t["step"]))
            if isinstance(run, Ours):
                row["limit_share"] = (weight_bytes(work.model) + run.info["traffic"]) / bandwidth / step
        if "prefill" in t:
            row |= dict(prefill_s=t["prefill"], prefill_spread=spread(t["prefill"]))
        if "second_token" in t:
            row["second_token_s"] = t["second_token"]
    return rows


def compare(rows: list[dict[str, Any]]) -> None:
    """Add to our rows of one batch and length how they stand against `full` in the same mode, and against the peers."""
    for row in (r for r in rows if "method" in r):
        same = [r for r in rows if (r.get("method"), r.get("mode")) == ("full", row["mode"]) and "error" not in r]
        timed = all("prefill_s" in r and "prefill_overhead" not in r for r in (row, *same))
        if same and timed and row["method"] != "full":
            mine, full = statistics.median(row["prefill_s"]), statistics.median(same[0]["prefill_s"])
            row |= dict(prefill_overhead=mine / full - 1, full_prefill_s=same[0]["prefill_s"],
                        full_second_token_s=same[0]["second_token_s"])  # fmt: skip
        if "tokens_per_s" not in row:
            continue
        if same:
            row["times_full"] = round(row["tokens_per_s"] / same[0]["tokens_per_s"], 3)
        for key, peer in PEERS.items():
            theirs = [r for r in rows if r["run"].startswith(peer) and "tokens_per_s" in r and r.get("compiled", True)]
            if theirs:  # a peer that could not be compiled is shown, but is nothing to be held against
                row[key] = round(row["tokens_per_s"] / max(r["tokens_per_s"] for r in theirs), 2)


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
    if "prefill_overhead" in row:
        text += f" ({100 * row['prefill_overhead']:+.1f} % on full)"
    for key, what in (("times_full", "full"), *PEERS.items()):
        if key in row:
            text += f"  {row[key]:.2f}x {what.strip()}"
    return text


def parse_args() -> argparse.Namespace:
    p = Parser(__doc__)
    a = p.add_argument
    a("--checkpoint", default=str(TINY))
    a("--random-init", metavar="NAME", help="random weights of a known model, or of a config.json, instead")
    a("--method", nargs="+", default=["full"])
    a("--batch", nargs="+", type=int, default=[1, 8])
    a("--length", nargs="+", type=int, default=[512], help="prompt tokens")
    a("--size", nargs="+", metavar="BxT", help="batch x prompt tokens, in this order, instead of --batch and --length")
    a("--new", type=int, default=128, help="tokens decoded")
    a("--synthetic", action="store_true", help="fill the caches with random keys and values: no prefill")
    a("--prefill", action="store_true", help="measure the prefill alone, each method in turns with full")
    a("--mode", nargs="+", choices=MODES, default=["eager", "compiled"])
    a("--eager-only", action="store_true", help="as --mode eager")
    a("--rounds", type=int, default=5)
    a("--warm-up", type=int, default=1, metavar="N", help="rounds before those that count")
    a("--interleave", action=argparse.BooleanOptionalAction, help="all runs of a size take turns (default: on a CPU)")
    a("--peer", nargs="*", default=[], metavar="PEER", help="transformers, gpt-fast:PATH, double-sparse:PATH")
    a("--device")
    a("--dtype", choices=DTYPES)
    a("--threads", type=int, default=0)
    a("--time-limit", type=float, metavar="S", help="start no further run after S seconds")
    a("--resume", action="store_true", help="keep the runs that --out has and measure the missing ones")
    a("--out", help="result file, written after every run, or group of runs that take turns")
    a("--json", action="store_true", help="print the result file's content and nothing else")
    opt = p.parse_args()
    if opt.eager_only:
        opt.mode = ["eager"]
    check_run(opt)
    if opt.warm_up < 0:
        raise InputError(f"--warm-up {opt.warm_up} is below 0")
    if opt.new < 2:
        raise InputError(f"--new {opt.new} is below 2: the time of a step is that of the steps after the first token")
    for peer in opt.peer:
        check_peer(peer)
    if opt.peer and opt.prefill:
        raise InputError("--prefill compares methods with full: drop --peer")
    if opt.synthetic and opt.prefill:
        raise InputError("--synthetic leaves out what --prefill measures: drop one of them")
    return opt


def groups(work: Work, opt: argparse.Namespace) -> list[list[Run]]:
    """The runs of a size; those of one group take turns."""
    if opt.prefill:  # a ratio of a few percent is one of neighbours in time
        others = [m for m in opt.method if m != "full"]
        return [[Prefill(work, "full"), Prefill(work, m)] for m in others] or [[Prefill(work, "full")]]
    runs: list[Run] = [Ours(work, method, mode) for method in opt.method for mode in opt.mode]
    for peer in opt.peer:
        runs += peer_runs(work, peer, None if opt.random_init else opt.checkpoint, opt.threads)
    return [runs] if opt.interleave else [[run] for run in runs]


def earlier(out: str, data: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a file to go on with; InputError if it was measured elsewhere or otherwise."""
    if not Path(out).exists():
        return []
    try:
        old = json.loads(Path(out).read_text())
        keys = ("device", "commit", "dtype", "model", "new_tokens", "synthetic")
        changed = [k for k in keys if old[k] != data[k]]
    except (ValueError, KeyError, TypeError, OSError) as e:
        raise InputError(f"--resume: {out} is no result of this script ({reason(e)})") from None
    if changed:
        raise InputError(f"--resume: {out} has another {changed[0]}: drop --resume, or give another --out")
    return old["rows"]


def main() -> None:
    opt, begin = parse_args(), time.monotonic()
    if opt.threads:
        torch.set_num_threads(opt.threads)
    device = pick_device(opt.device)
    dtype = pick_dtype(opt.dtype, device)
    if opt.random_init:
        model = random_transformer(shapes(opt.random_init), device, dtype)
    else:
        model = load_checkpoint(opt.checkpoint, device, dtype)
    for method in opt.method:
        if ":" not in method:
            make_method(method, model.args)  # a wrong name or knob ends the run before it starts
    if opt.interleave is None:
        opt.interleave = device.type == "cpu"
    # every run compiles code of the same functions: none may be dropped while runs take turns
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10_000
    limits = ceilings(device, dtype, 3)
    lengths = list(dict.fromkeys(length for _, length in opt.size))
    data = record(device, prompt_tokens=lengths[0] if len(lengths) == 1 else lengths, new_tokens=opt.new,
                  dtype=str(dtype).removeprefix("torch."), model=opt.random_init or Path(opt.checkpoint).name,
                  synthetic=opt.synthetic, weight_bytes=weight_bytes(model), **limits, rows=[])  # fmt: skip
    if opt.resume:
        data["rows"] = earlier(opt.out, data)
    todo = [
        (work, group)
        for batch, length in opt.size
        for work in [Work(model, batch, length, opt.new, opt.synthetic)]
        for group in groups(work, opt)
    ]
    for work, group in tqdm(todo, desc="generate", unit="group"):
        where = dict(batch=work.batch, length=work.length)

        def here(row: dict[str, Any], where=where) -> bool:
            return all(row[k] == v for k, v in where.items())

        if {run.name for run in group} <= {r["run"] for r in data["rows"] if here(r) and "error" not in r}:
            continue  # measured in the run that this one resumes
        if opt.time_limit and time.monotonic() - begin > opt.time_limit:
            data["stopped"] = f"the time limit of {opt.time_limit:g} s"
            break
        torch._dynamo.reset()
        times: dict[str, dict[str, Any]] = {}
        try:
            rounds(group, opt.rounds, opt.warm_up, times)
        finally:
            rows = make_rows(work, group, times, limits["bandwidth"])
            data["rows"] = [r for r in data["rows"] if not (here(r) and r["run"] in times)] + rows
            compare([r for r in data["rows"] if here(r)])
            if opt.out:
                write_json(opt.out, data)
            if not opt.json:
                tqdm.write("\n".join(map(line, rows)))
        recover(device)
    if opt.out:
        write_json(opt.out, data)
    if opt.json:
        print(json.dumps(data))


if __name__ == "__main__":
    run_cli(main)
