"""Decode tokens/s end to end, each method eager and compiled, beside peers in the same run; and what prefill costs.

    python scripts/bench_generate.py --peer transformers
    python scripts/bench_generate.py --method full self_index --batch 1 8 --length 2048 --out results/generate.json
    python scripts/bench_generate.py --random-init llama-3.1-8b --synthetic --length 32768 --peer gpt-fast:../gpt-fast
    python scripts/bench_generate.py --prefill --method full self_index --length 4096 --batch 1

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

Peers decode greedily at the same batch, length and number of tokens. `transformers`: its generate(), dynamic and
static cache, a run of one token subtracted; with --synthetic its forward in a loop.
`gpt-fast:PATH`: a checkout of gpt-fast, in a process of its own, its cache filled with random keys, see
peer_gpt_fast.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
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
    generate,
    kv_bytes,
    kv_bytes_full,
    make_step,
    pick_device,
    pick_dtype,
)
from model import ModelArgs, Transformer, load_checkpoint, random_transformer  # noqa: E402
from scripts.bench_attention import ceilings, fill, make_method, reason, recover, shapes, split_knobs  # noqa: E402
from scripts.results import record, write_json  # noqa: E402

MODES = ("eager", "compiled", "captured", "blocks")


class Work:
    """What every run of a row group does: batch rows of length tokens in the cache, new tokens decoded."""

    def __init__(self, model: Transformer, batch: int, length: int, new: int, synthetic: bool):
        self.model, self.batch, self.length, self.new, self.synthetic = model, batch, length, new, synthetic
        self.device, self.dtype = model.norm.weight.device, model.norm.weight.dtype
        gen = torch.Generator().manual_seed(batch)
        self.tokens = torch.randint(3, model.args.vocab_size, (batch, length), generator=gen)

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def random_kv(self) -> tuple[Tensor, Tensor]:
        """k and v [B, Hkv, length, D], the same for all layers: a step cannot tell."""
        a, gen = self.model.args, torch.Generator(self.device).manual_seed(self.batch)
        size = (self.batch, a.n_kv_head, self.length, a.head_dim)
        k, v = (torch.randn(size, generator=gen, device=self.device, dtype=self.dtype) for _ in range(2))
        return k, v


class Run:
    """One side of a comparison: `open` allocates and compiles, a call is one round, `close` frees."""

    name: str
    info: dict[str, Any]  # what else its row says

    def open(self) -> None: ...

    def __call__(self) -> dict[str, float]:
        """One round: `step` seconds per decode step, `prefill` seconds."""
        raise NotImplementedError

    def close(self) -> None: ...


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
                self.step = torch.compile(self.step, fullgraph=True)
            if w.device.type == "cuda":
                with self._blocks():
                    self.step = capture(self.step, w.batch, w.device)
        with self._blocks():
            Session(model, self.step, sampling).warm_up(w.batch)
        read = sum(m.traffic(w.length + w.new // 2) for m in self.cache)
        self.info = dict(kv_bytes=kv_bytes(model), kv_bytes_full=kv_bytes_full(model, w.batch, size), traffic=read)

    def _blocks(self) -> Any:
        return compiled_blocks(self.work.model) if self.mode == "blocks" else contextlib.nullcontext()

    def __call__(self) -> dict[str, float]:
        w = self.work
        w.model.cache = self.cache
        session = Session(w.model, self.step, self.sampling)
        with self._blocks():
            result = self._synthetic(session) if w.synthetic else generate(session, w.tokens.tolist(), w.new)
        if w.device.type == "cuda":
            self.info["peak_memory_bytes"] = torch.cuda.max_memory_allocated(w.device)
        out = dict(step=result.decode_s / max(1, result.steps))
        return out if w.synthetic else out | dict(prefill=result.prefill_s)

    @torch.inference_mode()
    def _synthetic(self, session: Session) -> Result:
        """Fill, then decode: new steps."""
        w, a = self.work, self.work.model.args
        w.model.reset_cache()
        k, v = w.random_kv()
        q = torch.randn(w.batch, a.n_head, 1, a.head_dim, device=w.device, dtype=w.dtype)
        for method in self.cache:
            fill(method, q, k, v)
        del k, v
        session.pos = torch.full((w.batch,), w.length, device=w.device)
        session.next = w.tokens[:, -1].to(w.device)
        result = Result([[] for _ in range(w.batch)], [w.length] * w.batch)
        session.sync()
        continue_rows(session, result, w.new + 1, frozenset(), None)  # one token is there before the first step
        return result

    def close(self) -> None:
        self.cache = self.work.model.cache = self.step = None  # type: ignore[assignment]


class Prefill(Ours):
    """The prompt alone."""

    def __init__(self, work: Work, method: str):
        super().__init__(work, method, "eager")
        self.name = f"{method} prefill"

    @torch.inference_mode()
    def __call__(self) -> dict[str, float]:
        w = self.work
        w.model.cache = self.cache
        w.model.reset_cache()
        session = Session(w.model, self.step, self.sampling)
        session.sync()
        start = time.perf_counter()
        session.prefill(w.tokens.tolist())
        session.sync()
        if w.device.type == "cuda":
            self.info["peak_memory_bytes"] = torch.cuda.max_memory_allocated(w.device)
        return dict(prefill=time.perf_counter() - start)


# ---- peers ----


def hf_config(a: ModelArgs) -> Any:
    """transformers' configuration of the same shapes."""
    import transformers as t

    kind: Any = t.Qwen3Config if a.qk_norm else t.Qwen2Config if a.qkv_bias else t.LlamaConfig
    return kind(
        hidden_size=a.dim,
        num_hidden_layers=a.n_layer,
        num_attention_heads=a.n_head,
        num_key_value_heads=a.n_kv_head,
        head_dim=a.head_dim,
        intermediate_size=a.ffn_dim,
        vocab_size=a.vocab_size,
        max_position_embeddings=a.max_seq_len,
        tie_word_embeddings=a.tie_embeddings,
        # the angles cost the same whatever they are
        rope_parameters=dict(rope_type="default", rope_theta=a.rope.theta),
    )


class Transformers(Run):
    def __init__(self, work: Work, folder: str | None, cache: str):
        self.work, self.folder, self.cache, self.name = work, folder, cache, f"transformers {cache}"
        self.info = {}

    def open(self) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import is_flash_attn_2_available

        w, gpu = self.work, self.work.device.type == "cuda"
        flash = gpu and self.cache == "dynamic" and is_flash_attn_2_available()
        how: dict[str, Any] = dict(dtype=w.dtype, attn_implementation="flash_attention_2" if flash else "sdpa")
        if self.folder:
            self.hf: Any = AutoModelForCausalLM.from_pretrained(self.folder, **how)
        else:
            with torch.device(w.device):
                self.hf = AutoModelForCausalLM.from_config(hf_config(w.model.args), **how)
        self.hf = self.hf.to(w.device).eval()
        self.hf.generation_config.eos_token_id = None
        self.kv: Any = None
        self.forward: Any = self.hf.forward
        if w.synthetic:
            if gpu and self.cache == "static":  # as its generate() does
                self.forward = torch.compile(self.hf.forward, mode="reduce-overhead")
            self._loop(min(4, w.new))

    @torch.inference_mode()
    def _loop(self, n: int) -> float:
        """Seconds for n steps from the filled length on."""
        from transformers import DynamicCache, StaticCache

        w = self.work
        if self.cache == "dynamic":
            self.kv = DynamicCache()
        elif self.kv is None:
            self.kv = StaticCache(config=self.hf.config, max_cache_len=w.length + w.new)
        else:
            self.kv.reset()  # the same buffers: a compiled step keeps them
        kv = w.random_kv()
        for layer in range(self.hf.config.num_hidden_layers):
            self.kv.update(*kv, layer)
        token = w.tokens[:, -1:].to(w.device)
        w.sync()
        start = time.perf_counter()
        for _ in range(n):
            logits = self.forward(input_ids=token, past_key_values=self.kv, use_cache=True).logits
            token = logits[:, -1:].argmax(-1).clone()
        w.sync()
        return time.perf_counter() - start

    def _generate(self, new: int) -> float:
        w, ids = self.work, self.work.tokens.to(self.work.device)
        w.sync()
        start = time.perf_counter()
        with torch.inference_mode():
            self.hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
                             do_sample=False, pad_token_id=0,
                             cache_implementation=None if self.cache == "dynamic" else self.cache)  # fmt: skip
        w.sync()
        return time.perf_counter() - start

    def __call__(self) -> dict[str, float]:
        n = self.work.new
        if self.work.synthetic:
            return dict(step=self._loop(n) / n)
        first = self._generate(1)
        return dict(step=(self._generate(n) - first) / (n - 1), prefill=first)

    def close(self) -> None:
        self.hf = self.kv = self.forward = None


class GptFast(Run):
    name = "gpt-fast"

    def __init__(self, work: Work, path: str, threads: int):
        self.work, self.path, self.threads, self.info = work, path, threads, {}
        self.process: subprocess.Popen | None = None

    def open(self) -> None:
        w, a = self.work, self.work.model.args
        if a.head_dim * a.n_head != a.dim or a.qk_norm or a.qkv_bias:
            raise InputError("gpt-fast has no q/k norm, no biases, and head_dim = dim / n_head")
        model = dict(block_size=max(a.max_seq_len, w.length + w.new + 8), vocab_size=a.vocab_size, n_layer=a.n_layer,
                     n_head=a.n_head, dim=a.dim, intermediate_size=a.ffn_dim, n_local_heads=a.n_kv_head,
                     rope_base=a.rope.theta, norm_eps=a.norm_eps)  # fmt: skip
        setup = dict(model=model, batch=w.batch, length=w.length, new=w.new, device=str(w.device),
                     dtype=str(w.dtype).removeprefix("torch."), threads=self.threads)  # fmt: skip
        worker = Path(__file__).with_name("peer_gpt_fast.py")
        pipe = subprocess.PIPE
        command = [sys.executable, str(worker), self.path, json.dumps(setup)]
        # a pipe that nobody reads would fill up and stop it
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115, open as long as the process
        self.process = subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=self.log)
        self.info = self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process is not None and self.process.stdout is not None
        for text in self.process.stdout:
            if text.startswith("{"):
                return json.loads(text)
        self.log.seek(0)
        said = self.log.read().strip().splitlines() or ["without a word"]
        raised = [x for x in said if re.match(r"[\w.]*(Error|Exception|Unsupported|Interrupt)\b", x)]
        raise RuntimeError(f"gpt-fast ended: {(raised or said)[-1]}")

    def __call__(self) -> dict[str, float]:
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        return dict(step=self._read()["seconds_per_step"])

    def close(self) -> None:
        if self.process is not None:
            self.process.communicate()  # its input ends, and so does it
            self.process = None


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
    return rows


def compare(rows: list[dict[str, Any]]) -> None:
    """Add to our rows of one batch and length how they stand against `full` in the same mode, and against the peers."""
    for row in (r for r in rows if "method" in r):
        same = [r for r in rows if (r.get("method"), r.get("mode")) == ("full", row["mode"]) and "error" not in r]
        timed = all("prefill_s" in r and "prefill_overhead" not in r for r in (row, *same))
        if same and timed and row["method"] != "full":
            mine, full = statistics.median(row["prefill_s"]), statistics.median(same[0]["prefill_s"])
            row |= dict(prefill_overhead=mine / full - 1, full_prefill_s=same[0]["prefill_s"])
        if "tokens_per_s" not in row:
            continue
        if same:
            row["times_full"] = round(row["tokens_per_s"] / same[0]["tokens_per_s"], 3)
        for key, peer in (("times_peer", "transformers "), ("times_gpt_fast", "gpt-fast")):
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
    for key, what in (("times_full", "full"), ("times_peer", "the best transformers"), ("times_gpt_fast", "gpt-fast")):
        if key in row:
            text += f"  {row[key]:.2f}x {what}"
    return text


def parse_args() -> argparse.Namespace:
    p = Parser(__doc__)
    a = p.add_argument
    a("--checkpoint", default=str(TINY))
    a("--random-init", metavar="NAME", help="random weights of a known model, or of a config.json, instead")
    a("--method", nargs="+", default=["full"])
    a("--batch", nargs="+", type=int, default=[1, 8])
    a("--length", nargs="+", type=int, default=[512], help="prompt tokens")
    a("--new", type=int, default=128, help="tokens decoded")
    a("--synthetic", action="store_true", help="fill the caches with random keys and values: no prefill")
    a("--prefill", action="store_true", help="measure the prefill alone, each method in turns with full")
    a("--mode", nargs="+", choices=MODES, default=["eager", "compiled"])
    a("--eager-only", action="store_true", help="as --mode eager")
    a("--rounds", type=int, default=5)
    a("--warm-up", type=int, default=1, metavar="N", help="rounds before those that count")
    a("--interleave", action=argparse.BooleanOptionalAction, help="all runs of a size take turns (default: on a CPU)")
    a("--peer", nargs="+", default=[], metavar="PEER", help="transformers, gpt-fast:PATH")
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
    if min([*opt.batch, *opt.length, opt.rounds]) < 1 or opt.warm_up < 0:
        raise InputError("--batch, --length and --rounds must be at least 1, --warm-up at least 0")
    if opt.new < 2:
        raise InputError(f"--new {opt.new} is below 2: the time of a step is that of the steps after the first token")
    for peer in opt.peer:
        kind, _, path = peer.partition(":")
        if kind not in ("transformers", "gpt-fast") or (kind == "gpt-fast") != bool(path):
            raise InputError(f"--peer {peer} is not known: use transformers or gpt-fast:PATH")
        if path and not (Path(path) / "generate.py").is_file():
            raise InputError(f"--peer {peer}: {path} is no checkout of gpt-fast, it has no generate.py")
    if opt.peer and opt.prefill:
        raise InputError("--prefill compares methods with full: drop --peer")
    if opt.synthetic and opt.prefill:
        raise InputError("--synthetic leaves out what --prefill measures: drop one of them")
    if opt.resume and not opt.out:
        raise InputError("--resume needs --out, the file to go on with")
    if opt.out and not Path(opt.out).parent.is_dir():
        raise InputError(f"cannot write {opt.out}: the folder {Path(opt.out).parent} does not exist")
    return opt


def groups(work: Work, opt: argparse.Namespace) -> list[list[Run]]:
    """The runs of a size; those of one group take turns."""
    if opt.prefill:  # a ratio of a few percent is one of neighbours in time
        others = [m for m in opt.method if m != "full"]
        return [[Prefill(work, "full"), Prefill(work, m)] for m in others] or [[Prefill(work, "full")]]
    runs: list[Run] = [Ours(work, method, mode) for method in opt.method for mode in opt.mode]
    for peer in opt.peer:
        kind, _, path = peer.partition(":")
        if kind == "gpt-fast":
            runs.append(GptFast(work, path, opt.threads))
        else:
            folder = None if opt.random_init else opt.checkpoint
            runs += [Transformers(work, folder, cache) for cache in ("dynamic", "static")]
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
    data = record(device, prompt_tokens=opt.length[0] if len(opt.length) == 1 else opt.length, new_tokens=opt.new,
                  dtype=str(dtype).removeprefix("torch."), model=opt.random_init or Path(opt.checkpoint).name,
                  synthetic=opt.synthetic, weight_bytes=weight_bytes(model), **limits, rows=[])  # fmt: skip
    if opt.resume:
        data["rows"] = earlier(opt.out, data)
    todo = [
        (work, group)
        for batch in opt.batch
        for length in opt.length
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
