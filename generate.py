"""Generate text with a model and a KV-cache method.

python generate.py --prompt "def main():"
python generate.py --method self_index,budget=160 --prompt-file book.txt --max-new-tokens 200
python generate.py --method 0-1:full,2-:sals-12.5 --interactive
python generate.py --prompt-file book.txt --save-cache book.cache
python generate.py --load-cache book.cache --question "Who is Emma?" --question "Where does she live?"
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cache.grammar import check_names, listing, parse_knobs
from runtime.errors import InputError, check_count, run_cli
from runtime.options import Parser, add_calibration, add_precision, answer_early


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    p = Parser(__doc__, shares=True)
    a = p.add_argument
    a("--checkpoint", metavar="DIR", help="Hugging Face folder or GGUF file (default: the shipped models/tiny)")
    a("--random-init", metavar="NAME", help="random weights of a known model instead, e.g. llama-3.1-8b")
    a(
        "--method",
        help="method or preset, with knobs; layers may differ: 0-1:full,2-:sals-12.5,budget=0.1 (default: full, or "
        "that of --load-cache)",
    )
    a("--method-arg", action="append", default=[], metavar="K=V", help="a knob of the method; see --list-methods")
    a("--budget", help="tokens the method attends to or keeps, or a fraction of the length: 512 or 0.125")
    a("--sinks", help="first tokens (or tokens the method chooses) that are always kept")
    a("--recent", help="newest tokens that are always kept")
    a("--prompt", nargs="+", metavar="TEXT", default=[], help="one or more prompts; - reads standard input")
    a("--prompt-file", nargs="+", metavar="F", default=[], help="one or more UTF-8 files, each of them a prompt")
    a(
        "--question",
        action="append",
        default=[],
        metavar="TEXT",
        help="text after every prompt, read through decode: the method compresses the prompt without it (ours). Repeat "
        "the flag to ask more: prompts are read once, and each question starts from the state behind them",
    )
    a(
        "--save-cache",
        metavar="FILE",
        help="write the cache as it is after the prompt; --load-cache continues from it",
    )
    a(
        "--pack",
        nargs="?",
        type=float,
        const=0.5,
        metavar="STEP",
        help="with --save-cache: a small file, in which dense keys and values are rounded to STEP of their standard "
        "deviation (default: 0.5) and entropy-coded",
    )
    a("--load-cache", metavar="FILE", help="continue from a saved cache, instead of reading a prompt")
    a("--max-new-tokens", type=int, default=128, metavar="N", help="the most tokens to generate (default: 128)")
    a("--temperature", type=float, default=0.0, metavar="T", help="0 (the default) is greedy")
    a("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    a("--top-p", type=float, metavar="P", help="draw from the fewest tokens whose probabilities add up to P")
    a("--min-p", type=float, metavar="P", help="draw from the tokens at least P times as likely as the likeliest")
    a(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="above 1: tokens of the prompt and of the text so far become less likely (default: 1)",
    )
    a("--seed", type=int, default=0, help="seed of sampling and of --random-init (default: 0)")
    a("--stop", nargs="+", metavar="TEXT", default=[], help="strings that end the text; the output leaves them out")
    a("--batch-size", type=int, metavar="N", help="prompts that run at a time; a single prompt is repeated N times")
    a("--device", help="cpu, cuda, cuda:1 ... (default: a GPU if there is one)")
    add_precision(p)
    add_calibration(p)
    a("--compile", action=argparse.BooleanOptionalAction,
      help="torch.compile the decode step (default: on a GPU, or if an earlier run has compiled this one)")  # fmt: skip
    a("--prefill-chunk", type=int, metavar="N", help="read prompts N tokens at a time, which needs less memory; "
      "keydiff, knorm and qfilters evict after each")  # fmt: skip
    a("--max-seq-len", type=int, metavar="N", help="capacity of the KV cache in tokens (default: what the run needs)")
    a("--speculate", type=int, metavar="N", help="draft N tokens with the method, check them by exact attention: the "
      "text is that of full")  # fmt: skip
    a("--adaptive", action="store_true", help="with --speculate: fewer than N drafts while many are rejected (ours)")
    a("--interactive", action="store_true", help="hold a conversation; every turn continues the same cache")
    a("--chat", action="store_true", help="wrap prompts in the checkpoint's chat template")
    a("--system", metavar="TEXT", help="with --chat: a system message before the first turn")
    a("--chat-arg", action="append", default=[], metavar="K=V", help="with --chat: a variable of the template")
    a("--profile", metavar="TRACE", help="write a Chrome trace of the run")
    a("--list-methods", action="store_true", help="print every method with its knobs and paper")
    a("--json", action="store_true", help="print one JSON object instead of text")
    return p.parse_args(argv)


def early() -> None:
    """What needs no torch: wrong options, names of methods, and a list of methods that was printed before."""
    opt = parse_args()
    if opt.list_methods:
        text = ""
        with contextlib.suppress(OSError, RuntimeError):
            text = listing().read_text()
        if text:
            run_cli(lambda: print(text, end=""))
    check_names(opt.method or "full")


if __name__ == "__main__":
    answer_early(early)
import torch

from cache.spec import describe
from engine import LLM, Chat, Completion, Ended, Sampling
from engine.compiled import check_compiler
from engine.decode import Batch, Tally
from engine.snapshot import CacheFile
from loading.tokenizer.base import stop_strings
from loading.tokenizer.chat import template_variable
from runtime import parallel
from runtime.machine import TINY, check_out, decode_text, device_name, peak_memory, read_text, versions, written


def knobs(opt: argparse.Namespace) -> dict[str, str]:
    """--method-arg and its shortcuts, as text; cache/spec.py turns them into values and checks them."""
    shortcuts = {k: getattr(opt, k) for k in ("budget", "sinks", "recent")}
    return parse_knobs(opt.method_arg) | {k: v for k, v in shortcuts.items() if v is not None}


def chat_of(opt: argparse.Namespace) -> Chat | None:
    """--chat, --system and --chat-arg K=V; V is parsed as JSON if it is valid JSON (false, 3, []), else it is text."""
    variables = dict(template_variable(item) for item in opt.chat_arg)
    if not opt.chat and (opt.system is not None or variables):
        raise InputError("a system message and template variables are for the chat template: add --chat")
    return Chat(opt.system, variables) if opt.chat else None


def read_prompts(opt: argparse.Namespace, ranks: parallel.Ranks) -> list[str]:
    texts = []
    for text in opt.prompt:
        try:
            texts.append(decode_text(ranks.of_first(sys.stdin.buffer.read)) if text == "-" else text)
        except UnicodeDecodeError as e:
            raise InputError(f"standard input is not UTF-8: {e.reason} at byte {e.start}") from None
        if any(0xDC80 <= ord(c) <= 0xDCFF for c in texts[-1]):  # Python's surrogates for undecodable bytes of argv
            raise InputError("--prompt is not valid UTF-8")
    texts += [read_text(file) for file in opt.prompt_file]
    for i, text in enumerate(texts):
        if not text:
            raise InputError(f"prompt {i + 1} is empty: give some text")
    if not texts:
        raise InputError('no prompt: give --prompt "some text", --prompt-file F, or --interactive')
    return texts


@dataclass
class Report:
    """A run's summary on stderr and its --json object, over all its batches."""

    method: str
    device: torch.device
    processes: int = 1
    completions: list[Completion] = field(default_factory=list)
    error: InputError | None = None  # what ended the run early

    def totals(self) -> dict[str, Any]:
        batches = list({id(c.batch): c.batch for c in self.completions}.values())
        decoded, decode_s = sum(b.decoded for b in batches), sum(b.decode_s for b in batches)
        return dict(
            prefill_tokens=sum(b.read for b in batches),
            prefill_s=sum(b.prefill_s for b in batches),
            decode_tokens=decoded,
            decode_s=decode_s,
            decode_tokens_per_s=decoded / decode_s if decode_s else 0.0,
            compile_s=sum(b.compile_s for b in batches),
            **drafts_of(batches),
            kv_bytes=max((b.kv_bytes for b in batches), default=0),
            kv_bytes_full=max((b.kv_bytes_full for b in batches), default=0),
            processes=self.processes,  # each of which holds this many bytes
            peak_memory_bytes=peak_memory(self.device),
            device=device_name(self.device),
            versions=versions(),
        )

    def json(self) -> str:
        rows = self.completions
        said = dict(method=self.method, text=[c.text for c in rows], tokens=[c.tokens for c in rows],
                    prompt_tokens=[c.prompt_tokens for c in rows])  # fmt: skip
        return json.dumps(said | ({"error": str(self.error)} if self.error else {}) | self.totals())

    def summary(self) -> str:
        t = self.totals()
        compiled = f" (compilation of {t['compile_s']:.1f} s not counted)" if t["compile_s"] else ""
        return "\n".join((
            f"prefill: {t['prefill_tokens']} tokens in {t['prefill_s']:.3f} s, "
            f"{t['prefill_tokens'] / max(t['prefill_s'], 1e-9):,.0f} tokens/s",
            f"decode:  {t['decode_tokens']} tokens in {t['decode_s']:.3f} s, {t['decode_tokens_per_s']:,.1f} tokens/s"
            + compiled,
            *([f"drafts:  {t['acceptance']:.0%} accepted, {t['tokens_per_check']:.2f} tokens a check"]
              if "acceptance" in t else []),
            f"KV cache ({self.method}): {t['kv_bytes'] / 2**20:,.2f} MiB, "
            f"{t['kv_bytes'] / max(t['kv_bytes_full'], 1):.3f} of full"
            + (f", in each of {self.processes} processes" if self.processes > 1 else ""),
            f"peak memory: {t['peak_memory_bytes'] / 2**20:,.0f} MiB on {t['device']}",
        ))  # fmt: skip


def drafts_of(batches: list[Batch]) -> dict[str, float]:
    """If drafts were made, the share that exact attention accepted, and the tokens that each check gave."""
    drafted, kept, checks = (sum(getattr(b.drafts, x) for b in batches) for x in ("drafted", "kept", "checks"))
    total = Tally(drafted, kept, checks)
    return dict(acceptance=total.acceptance, tokens_per_check=total.tokens_per_check) if checks else {}


@contextlib.contextmanager
def profiled(trace: str | None) -> Iterator[None]:
    """Writes a Chrome trace of the code inside, also if an error ends it; to a temporary name first."""
    if trace is None:
        yield
        return
    from torch.profiler import profile

    path, prof = Path(trace), profile()
    try:
        with prof:
            yield
    finally:
        with written(path) as tmp:
            prof.export_chrome_trace(str(tmp))


def run_once(opt: argparse.Namespace, llm: LLM, sampling: Sampling, report: Report) -> None:
    """Answers the prompts, or the questions about them."""
    texts = None if opt.saved else read_prompts(opt, llm.model.args.ranks)
    rows = len(opt.saved.meta["lengths"]) if texts is None else len(texts)
    if texts and rows == 1 and opt.batch_size:
        texts *= opt.batch_size
    asked = len(opt.question)
    streaming, begun = not opt.json and rows * (opt.batch_size or 1) == 1, set[int]()

    def show(i: int, piece: str) -> None:
        if asked > 1 and i not in begun:
            print(f"{chr(10) * bool(i)}--- {i + 1} ---")
        begun.add(i)
        print(piece, end="", flush=True)

    try:
        with profiled(opt.profile):
            report.completions += llm.generate(
                texts, opt.max_new_tokens, sampling, questions=opt.question, chat=opt.chat, batch_size=opt.batch_size,
                stop=opt.stop, on_text=show if streaming else None, save=opt.save_cache, pack=opt.pack,
                load=opt.saved,
            )  # fmt: skip
    except Ended as e:  # an early end keeps the completions so far
        report.completions += e.completions
        report.error = e
    if streaming:
        print()
    elif not opt.json:
        for i, c in enumerate(report.completions):
            print(f"--- {i + 1} ---\n{c.text}")


def run_interactive(opt: argparse.Namespace, llm: LLM, sampling: Sampling, report: Report) -> None:
    """Reads one turn per line from standard input, until it ends."""
    llm.encode("a", opt.chat)  # a template that is missing or cannot render is told before the first turn
    talk, terminal = llm.conversation(sampling, opt.chat, opt.stop), sys.stdin.isatty()
    show = None if opt.json else lambda piece: print(piece, end="", flush=True)
    if terminal:
        print(f"one turn per line; /reset starts over, /exit ends. Context: {talk.size} tokens.", file=sys.stderr)
    while True:
        if terminal:
            print("> ", end="", file=sys.stderr, flush=True)
        data = llm.model.args.ranks.of_first(sys.stdin.buffer.readline)
        if not data or data.strip() == b"/exit":
            return
        try:
            text = decode_text(data).rstrip("\n")
        except UnicodeDecodeError as e:
            print(f"error: the line is not UTF-8: {e.reason} at byte {e.start}", file=sys.stderr)
            continue
        if text.strip() == "/reset":
            talk.forget()
        elif text:
            try:
                report.completions.append(talk.say(text, opt.max_new_tokens, show))
            except InputError as e:
                print(f"error: {e}", file=sys.stderr)
                continue
            if not opt.json:
                print(flush=True)


def main(argv: list[str] | None = None) -> int:
    opt = parse_args(argv)
    if opt.list_methods:
        print(text := describe())
        with contextlib.suppress(OSError, RuntimeError), written(listing()) as f:
            f.write_text(text + "\n")  # the next time it is printed without torch
        return 0
    ranks, device = parallel.start(opt.device, parallel.PATIENCE if opt.interactive else parallel.TIMEOUT)
    check_count("--max-new-tokens", opt.max_new_tokens, 1, 2**31 - 1)
    if opt.batch_size is not None:
        check_count("--batch-size", opt.batch_size, 1, 1_000_000)
    if opt.checkpoint and opt.random_init:
        raise InputError("give --checkpoint or --random-init, not both")
    if opt.interactive and (
        opt.prompt or opt.prompt_file or opt.question or opt.random_init or (opt.batch_size or 1) > 1
    ):
        raise InputError(
            "--interactive reads its turns from standard input: drop --prompt, --question, --batch-size, --random-init"
        )
    if sys.stdin is None and (opt.interactive or "-" in opt.prompt):
        raise InputError("standard input is closed: give --prompt TEXT or --prompt-file F")
    if opt.interactive and opt.profile:
        raise InputError("--profile writes a trace of one run: drop --interactive")
    if opt.adaptive and opt.speculate is None:
        raise InputError("--adaptive sets the number of drafts: add --speculate N")
    once = bool(opt.save_cache or opt.load_cache or len(opt.question) > 1 or opt.question and opt.chat)
    if once and (opt.interactive or opt.batch_size is not None):
        raise InputError("--save-cache, --load-cache, several --question and --question with --chat run all prompts as "
                         "one batch: drop --batch-size and --interactive")  # fmt: skip
    if opt.load_cache and (opt.prompt or opt.prompt_file or opt.system is not None):
        raise InputError("--load-cache brings its prompt: drop --prompt, --prompt-file and --system")
    if opt.pack is not None and not opt.save_cache:
        raise InputError("--pack makes a small file of a saved cache: add --save-cache FILE")
    if opt.compile:
        check_compiler(device)
    reads = (opt.checkpoint, *opt.prompt_file, *(opt.calibration or ()))
    if opt.save_cache and opt.profile and Path(opt.save_cache).resolve() == Path(opt.profile).resolve():
        raise InputError(f"--profile and --save-cache name one file, {opt.profile}: give two")
    check_out(opt.profile, "--profile", (*reads, opt.load_cache))
    opt.profile = None if ranks.rank else opt.profile
    check_out(opt.save_cache, "--save-cache", reads)
    opt.saved = CacheFile(opt.load_cache) if opt.load_cache else None  # before a model is loaded
    named: dict[str, str] = {}  # knobs of a saved cache
    if opt.method is None:
        if opt.saved and (given := knobs(opt)):
            raise InputError(f"--load-cache takes the method and the knobs that its file names: drop {min(given)}, or "
                             "give --method, too")  # fmt: skip
        opt.method, named = opt.saved.given if opt.saved else ("full", {})
    sampling = Sampling(opt.temperature, opt.top_k, opt.top_p, opt.seed, opt.min_p, opt.repetition_penalty)
    stop_strings(opt.stop)
    opt.chat = chat_of(opt)
    with ranks.agreed():  # a rank that cannot load ends them all
        llm = LLM(opt.checkpoint or TINY, device=device, dtype=opt.dtype, compile=opt.compile,
                  random_init=opt.random_init, seed=opt.seed, weights=opt.weights, head=opt.head,
                  kv_dtype=opt.kv_dtype, calibration=opt.calibration, max_seq_len=opt.max_seq_len,
                  prefill_chunk=opt.prefill_chunk, ranks=ranks, speculate=opt.speculate,
                  adaptive=opt.adaptive)  # fmt: skip
        llm.use(opt.method, **(named or knobs(opt)))
        if ranks.size > 1 and (opt.save_cache or opt.load_cache):
            raise InputError(f"a cache of {ranks.size} processes cannot be saved or loaded: use one process")
    report = Report(opt.method, llm.model.device, ranks.size)
    stopped = False
    try:
        (run_interactive if opt.interactive else run_once)(opt, llm, sampling, report)
    except KeyboardInterrupt:
        if not opt.json or not report.completions:
            raise
        stopped = True
    if opt.json:
        print(report.json(), flush=True)
    elif not report.error:
        print(report.summary(), file=sys.stderr)
    if report.error:
        raise report.error
    if stopped or not opt.interactive and any(c.batch.interrupted for c in report.completions):
        raise KeyboardInterrupt
    return 0


if __name__ == "__main__":
    run_cli(main)
