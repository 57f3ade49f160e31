"""Generate text: prefill, decode loop, sampling, and the command line.

python generate.py --prompt "def main():"
python generate.py --method self_index --prompt-file book.txt --max-new-tokens 200
python generate.py --method streaming --recent 256 --interactive
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from errors import InputError, Parser, run_cli
from kv_methods import describe
from model import ModelArgs, Transformer, load_checkpoint, random_transformer
from tokenizer import Tokenizer, load_tokenizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LAG = 2  # decode steps in flight before a token is read on the host: the device never waits for the stop check
INTERACTIVE_CONTEXT = 8192  # slots allocated for a conversation, if the model's context has as many
TINY = Path(__file__).parent / "models" / "tiny"

Step = Callable[[Tensor, Tensor], Tensor]  # tokens [B], pos [B] -> the next tokens [B]


# ---- sampling ----


@dataclass
class Sampling:
    """temperature 0 is greedy; top_k and top_p cut the distribution before drawing; seed makes a run repeatable."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise InputError(f"--temperature {self.temperature} is below 0: use 0 for greedy decoding")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"--top-k {self.top_k} is below 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"--top-p {self.top_p} is outside (0, 1]")

    def draw(self, logits: Tensor) -> Tensor:
        """logits [B, V] -> tokens [B]; no synchronization."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[:, -1:], float("-inf"))
        probs = logits.softmax(-1)
        if self.top_p is not None and self.top_p < 1:
            sorted_probs, order = probs.sort(-1, descending=True)
            kept = sorted_probs.cumsum(-1) - sorted_probs < self.top_p  # the token that crosses top_p is kept
            probs = torch.zeros_like(probs).scatter(-1, order, torch.where(kept, sorted_probs, 0))
        # argmax of p / Exp(1) draws from p, without the synchronization of torch.multinomial
        return (probs / torch.empty_like(probs).exponential_(1.0)).argmax(-1)


# ---- the decode loop ----


def make_step(model: Transformer, sampling: Sampling, compile: bool) -> Step:
    """One decode step and the draw. Compiled with fullgraph, so that a graph break is an error and not a slowdown."""

    def step(tokens: Tensor, pos: Tensor) -> Tensor:
        return sampling.draw(model.decode(tokens, pos))

    if not compile:
        return step
    cuda = model.tok_embeddings.weight.device.type == "cuda"
    # a cache of another size, as the last batch of a run may have, is another static graph, not one of any size
    return torch.compile(step, fullgraph=True, dynamic=False, mode="reduce-overhead" if cuda else None)


def pad(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Right-padded tokens [B, S] int64 and lengths [B], what `Transformer.prefill` takes."""
    lengths = torch.tensor([len(p) for p in prompts])
    tokens = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
    for row, p in enumerate(prompts):
        tokens[row, : len(p)] = torch.tensor(p)
    return tokens.to(device), lengths.to(device)


class Session:
    """A batch of rows and its KV cache: `prefill` once, then `generate`, and `feed` for the turns that follow."""

    def __init__(self, model: Transformer, step: Step, sampling: Sampling):
        self.model, self.step, self.sampling = model, step, sampling
        self.device = model.tok_embeddings.weight.device
        self.lag = LAG if self.device.type == "cuda" else 0
        self.decoded = 0  # steps since the prompt, what `maintain` counts
        self.pos = self.next = torch.empty(0, dtype=torch.int64)

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @torch.inference_mode()
    def warm_up(self, batch: int) -> float:
        """Compile the step (and capture its graph) on an empty cache; returns the seconds it took."""
        start = time.perf_counter()
        # two tensors: the code for one that is both would be compiled again at the first real step
        tokens, pos = (torch.zeros(batch, dtype=torch.int64, device=self.device) for _ in range(2))
        for _ in range(3):
            self.step(tokens, pos)
        self.sync()
        self.model.reset_cache()
        return time.perf_counter() - start

    @torch.inference_mode()
    def prefill(self, prompts: list[list[int]]) -> None:
        """Right-pad the prompts, run them, and draw the first new token of each row."""
        tokens, self.pos = pad(prompts, self.device)
        self.decoded = 0
        torch.manual_seed(self.sampling.seed)
        self.next = self.sampling.draw(self.model.prefill(tokens, self.pos))

    @torch.inference_mode()
    def advance(self, tokens: Tensor) -> None:
        """One decode step with these tokens; `next` is what follows them."""
        # a clone: under CUDA graphs the output's memory is reused by the next replay
        self.next = self.step(tokens, self.pos).clone()
        self.pos = self.pos + 1
        self.decoded += 1
        self.model.maintain(self.decoded)

    def feed(self, tokens: list[int]) -> None:
        """A further turn of a single row: its tokens go through decode, what was compressed stays as it is."""
        for t in tokens:
            self.advance(torch.tensor([t], device=self.device))

    def tokens(self, n: int) -> Iterator[list[int]]:
        """Yield n times the next token of every row.

        With `lag` steps in flight a token is read on the host after the steps that follow it were launched: the device
        never waits for us, and has run up to `lag` steps too many when the caller stops. With lag 0 a token is yielded
        before it is fed, so that stopping leaves the cache at the text's end.
        """
        flying: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        for i in range(n):
            if self.lag == 0:
                yield self.next.tolist()
            else:
                host = torch.empty(self.next.shape, dtype=self.next.dtype, pin_memory=True)
                host.copy_(self.next, non_blocking=True)
                flying.append((host, torch.cuda.Event()))
                flying[-1][1].record()
            if i + 1 < n:
                self.advance(self.next)
            while len(flying) > (self.lag if i + 1 < n else 0):
                host, ready = flying.popleft()
                ready.synchronize()
                yield host.tolist()


@dataclass
class Result:
    """Tokens of each row (the stop token not included), and what it took."""

    tokens: list[list[int]]
    prompt_tokens: list[int]
    prefill_s: float = 0.0
    decode_s: float = 0.0
    steps: int = 0
    compile_s: float = 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        return self.steps * len(self.tokens) / self.decode_s if self.decode_s else 0.0


def generate(
    session: Session,
    prompts: list[list[int]],
    max_new_tokens: int,
    stop_ids: frozenset[int] = frozenset(),
    on_token: Callable[[int, int], None] | None = None,
) -> Result:
    """Prefill `prompts` and decode until every row has met a stop id or has max_new_tokens.

    on_token(row, id) is called for every token kept. Ctrl-C ends early and keeps what there is.
    """
    result = Result([[] for _ in prompts], [len(p) for p in prompts])
    session.sync()
    start = time.perf_counter()
    session.prefill(prompts)
    session.sync()
    result.prefill_s = time.perf_counter() - start
    continue_rows(session, result, max_new_tokens, stop_ids, on_token)
    return result


def continue_rows(
    session: Session,
    result: Result,
    max_new_tokens: int,
    stop_ids: frozenset[int],
    on_token: Callable[[int, int], None] | None,
) -> None:
    """The decode loop: from `session.next` on, until all rows stop."""
    done, before, start = [False] * len(result.tokens), session.decoded, time.perf_counter()
    with contextlib.suppress(KeyboardInterrupt):
        for ids in session.tokens(max_new_tokens):
            for row, token in enumerate(ids):
                done[row] = done[row] or token in stop_ids
                if not done[row]:
                    result.tokens[row].append(token)
                    if on_token:
                        on_token(row, token)
            if all(done):
                break
    session.sync()
    result.decode_s += time.perf_counter() - start
    result.steps += session.decoded - before


# ---- what the command line says ----


class RandomVocabulary:
    """Stands in for a tokenizer under --random-init: bytes in, token numbers out."""

    eos_ids: frozenset[int] = frozenset()

    def encode(self, text: str, bos: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return "".join(f" {i}" for i in ids)

    def stream(self) -> RandomVocabulary:
        return self

    def put(self, token: int) -> str:
        return f" {token}"

    def flush(self) -> str:
        return ""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    p = Parser(__doc__)
    a = p.add_argument
    a("--checkpoint", metavar="DIR", help="Hugging Face folder (default: the shipped models/tiny)")
    a("--random-init", metavar="NAME", help="random weights of a known model instead, e.g. llama-3.1-8b")
    a("--method", default="full", help="KV-cache method or preset, or one for each layer: 0-1:full,2-:streaming")
    a("--method-arg", action="append", default=[], metavar="K=V", help="a knob of the method; see --list-methods")
    a("--budget", help="tokens attended, or a fraction of the length: 512 or 0.125")
    a("--sinks", help="first (or chosen) tokens that are always kept")
    a("--recent", help="newest tokens that are always kept")
    a("--prompt", nargs="+", metavar="TEXT", default=[], help="one or more prompts; - reads standard input")
    a("--prompt-file", nargs="+", metavar="F", default=[], help="one or more UTF-8 files, a prompt each")
    a("--max-new-tokens", type=int, default=128, metavar="N")
    a("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    a("--top-k", type=int, metavar="K")
    a("--top-p", type=float, metavar="P")
    a("--seed", type=int, default=0)
    a("--batch-size", type=int, metavar="N", help="rows at a time; a single prompt is repeated N times")
    a("--device", help="cpu, cuda, cuda:1 ... (default: a GPU if there is one)")
    a("--dtype", choices=DTYPES, help="default: fp32 on the CPU, bf16 on a GPU")
    a("--compile", action=argparse.BooleanOptionalAction, help="torch.compile the decode step (default: on a GPU)")
    a("--interactive", action="store_true", help="a conversation; every turn continues the same cache")
    a("--chat", action="store_true", help="wrap prompts in the checkpoint's chat template")
    a("--profile", metavar="TRACE", help="write a Chrome trace of the run")
    a("--list-methods", action="store_true", help="print every method with its knobs and paper")
    a("--json", action="store_true", help="print one JSON object instead of text")
    return p.parse_args(argv)


def pick_device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"--device {name} is no device: use cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"--device {name} is not supported: use cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"--device {name}: {torch.cuda.device_count()} CUDA devices are visible; use --device cpu")
    return device


def pick_dtype(name: str | None, device: torch.device) -> torch.dtype:
    if name is None:
        bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if bf16 else torch.float32
    if name == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise InputError("--dtype bf16 is not supported by this GPU: use --dtype fp16 or fp32")
    return DTYPES[name]


def knobs(opt: argparse.Namespace) -> dict[str, str]:
    """--method-arg and its shortcuts, as text; kv_methods turns them into values and checks them."""
    out = {}
    for item in opt.method_arg:
        key, eq, value = item.partition("=")
        if not eq or not key:
            raise InputError(f"--method-arg {item!r} is not of the form K=V")
        out[key] = value
    shortcuts = {k: getattr(opt, k) for k in ("budget", "sinks", "recent")}
    return out | {k: v for k, v in shortcuts.items() if v is not None}


def read_prompts(opt: argparse.Namespace) -> list[str]:
    texts = []
    for text in opt.prompt:
        try:
            texts.append(sys.stdin.buffer.read().decode() if text == "-" else text)
        except UnicodeDecodeError as e:
            raise InputError(f"standard input is not UTF-8: {e.reason} at byte {e.start}") from None
        if any(0xDC80 <= ord(c) <= 0xDCFF for c in texts[-1]):  # how Python passes on undecodable bytes of argv
            raise InputError("--prompt is not valid UTF-8")
    for file in opt.prompt_file:
        try:
            texts.append(Path(file).read_text(encoding="utf-8"))
        except UnicodeDecodeError as e:
            raise InputError(f"{file} is not UTF-8: {e.reason} at byte {e.start}; convert it first") from None
        except OSError as e:
            raise InputError(f"cannot read the prompt file {file}: {e.strerror}") from None
    for i, text in enumerate(texts):
        if not text:
            raise InputError(f"prompt {i + 1} is empty: give some text")
    return texts


def encode_prompts(texts: list[str], tk: Tokenizer | RandomVocabulary, chat: bool) -> list[list[int]]:
    if chat and not isinstance(tk, RandomVocabulary):
        return [tk.encode_chat([{"role": "user", "content": t}]) for t in texts]
    return [tk.encode(t, bos=True) for t in texts]


def check_length(model: Transformer, prompts: list[list[int]], max_new_tokens: int) -> int:
    """The slots needed; InputError if the model's context has fewer."""
    longest, context = max(map(len, prompts)), model.args.context
    if longest >= context:
        raise InputError(f"the prompt has {longest} tokens, the model's context {context}: shorten the prompt")
    if longest + max_new_tokens > context:
        raise InputError(f"{longest} prompt tokens and --max-new-tokens {max_new_tokens} exceed the model's context "
                         f"of {context}: use --max-new-tokens {context - longest} or less")  # fmt: skip
    return longest + max_new_tokens


def kv_bytes(model: Transformer) -> int:
    """Bytes of all cache buffers, as allocated."""
    return sum(sum(b.values()) for b in model.cache_nbytes().values())


def kv_bytes_full(model: Transformer, batch: int, max_seq_len: int) -> int:
    """Bytes of a dense K and V of the same capacity and dtype."""
    a, p = model.args, model.tok_embeddings.weight
    return 2 * a.n_layer * batch * a.n_kv_head * max_seq_len * a.head_dim * p.element_size()


def peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__}


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@dataclass
class Report:
    """The summary on stderr and the object of --json, over all batches of a run."""

    method: str
    device: torch.device
    text: list[str] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    kv_bytes: int = 0
    kv_bytes_full: int = 0

    def json(self) -> str:
        r = self.results
        decode_s, rows = sum(x.decode_s for x in r), [t for x in r for t in x.tokens]
        prompt_tokens = [n for x in r for n in x.prompt_tokens]
        decoded = sum(x.steps * len(x.tokens) for x in r)
        return json.dumps(
            dict(
                method=self.method, text=self.text, tokens=rows, prompt_tokens=prompt_tokens,
                prefill_s=sum(x.prefill_s for x in r), decode_tokens_per_s=decoded / decode_s if decode_s else 0.0,
                compile_s=sum(x.compile_s for x in r), kv_bytes=self.kv_bytes, kv_bytes_full=self.kv_bytes_full,
                peak_memory_bytes=peak_memory(self.device), device=device_name(self.device), versions=versions(),
            )
        )  # fmt: skip

    def summary(self) -> str:
        r = self.results
        prompt, prefill = sum(sum(x.prompt_tokens) for x in r), sum(x.prefill_s for x in r)
        steps, decode = sum(x.steps * len(x.tokens) for x in r), sum(x.decode_s for x in r)
        compiled = sum(x.compile_s for x in r)
        lines = [
            f"prefill: {prompt} tokens in {prefill:.3f} s, {prompt / max(prefill, 1e-9):,.0f} tokens/s",
            f"decode:  {steps} tokens in {decode:.3f} s, {steps / max(decode, 1e-9):,.1f} tokens/s"
            + (f" (compilation of {compiled:.1f} s not counted)" if compiled else ""),
            f"KV cache ({self.method}): {self.kv_bytes / 2**20:,.2f} MiB, "
            f"{self.kv_bytes / max(self.kv_bytes_full, 1):.3f} of full",
            f"peak memory: {peak_memory(self.device) / 2**20:,.0f} MiB on {device_name(self.device)}",
        ]
        return "\n".join(lines)


@contextlib.contextmanager
def profiled(trace: str | None) -> Iterator[None]:
    """A Chrome trace of what runs inside, written to a temporary name first."""
    if trace is None:
        yield
        return
    path = Path(trace)
    if not path.parent.is_dir():
        raise InputError(f"--profile {trace}: the folder {path.parent} does not exist")
    from torch.profiler import profile

    with profile() as prof:
        yield
    tmp = path.with_name(path.name + ".tmp")
    prof.export_chrome_trace(str(tmp))
    tmp.replace(path)


def run_batches(opt: argparse.Namespace, model: Transformer, tk: Tokenizer | RandomVocabulary, report: Report) -> None:
    texts = read_prompts(opt)
    if not texts:
        raise InputError('no prompt: give --prompt "some text", --prompt-file F, or --interactive')
    prompts = encode_prompts(texts, tk, opt.chat)
    if any(not p for p in prompts):
        raise InputError("a prompt has no tokens: give some text")
    batch = opt.batch_size or len(prompts)
    if len(prompts) == 1:
        prompts = prompts * batch
    max_seq_len = check_length(model, prompts, opt.max_new_tokens)
    sampling = Sampling(opt.temperature, opt.top_k, opt.top_p, opt.seed)
    stop = tk.eos_ids | frozenset(model.args.eos_ids)
    for first in range(0, len(prompts), batch):
        rows = prompts[first : first + batch]
        model.setup_cache(opt.method, len(rows), max_seq_len, **knobs(opt))
        session = Session(model, make_step(model, sampling, opt.compile), sampling)
        compile_s = session.warm_up(len(rows)) if opt.compile else 0.0
        streaming = not opt.json and len(prompts) == 1
        stream = tk.stream()

        def show(row: int, token: int, stream=stream) -> None:
            print(stream.put(token), end="", flush=True)

        with profiled(opt.profile):
            result = generate(session, rows, opt.max_new_tokens, stop, show if streaming else None)
        result.compile_s = compile_s
        report.results.append(result)
        report.kv_bytes = max(report.kv_bytes, kv_bytes(model))
        report.kv_bytes_full = max(report.kv_bytes_full, kv_bytes_full(model, len(rows), max_seq_len))
        report.text += [tk.decode(t) for t in result.tokens]
        if streaming:
            print(stream.flush())
        elif not opt.json:
            for row, tokens in enumerate(result.tokens):
                print(f"--- {first + row + 1} ---\n{tk.decode(tokens)}")


def run_interactive(opt: argparse.Namespace, model: Transformer, tk: Tokenizer, report: Report) -> None:
    """Turns of one conversation: the first is prefilled, later ones go through decode into the same cache."""
    size = min(model.args.context, INTERACTIVE_CONTEXT)
    sampling = Sampling(opt.temperature, opt.top_k, opt.top_p, opt.seed)
    model.setup_cache(opt.method, 1, size, **knobs(opt))
    session = Session(model, make_step(model, sampling, opt.compile), sampling)
    session.lag = 0  # the next turn continues exactly where this one stopped
    compile_s = session.warm_up(1) if opt.compile else 0.0
    report.kv_bytes, report.kv_bytes_full = kv_bytes(model), kv_bytes_full(model, 1, size)
    stop = tk.eos_ids | frozenset(model.args.eos_ids)
    messages: list[dict[str, str]] = []
    held: list[int] = []  # tokens in the cache
    if sys.stdin.isatty():
        print(f"a turn a line; /reset starts over, /exit ends. Context: {size} tokens.", file=sys.stderr)
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() == "/exit":
            return
        text = line.rstrip("\n")
        if text.strip() == "/reset":
            messages, held = [], []
            continue
        if not text:
            continue
        if opt.chat:
            messages.append({"role": "user", "content": text})
            ids = tk.encode_chat(messages)
            if ids[: len(held)] != held:  # the template rewrote an earlier turn: start over from the whole
                held = []
        else:
            ids = held + tk.encode(text if not held else "\n" + text, bos=not held)
        if len(ids) + 1 > size:
            print(f"error: the conversation has {len(ids)} tokens, the context {size}: /reset to start over",
                  file=sys.stderr)  # fmt: skip
            if opt.chat:
                messages.pop()
            continue
        result = Result([[]], [len(ids) - len(held)], compile_s=compile_s)
        compile_s = 0.0
        session.sync()
        start = time.perf_counter()
        if held:
            session.feed(ids[len(held) :])
        else:
            model.reset_cache()
            session.prefill([ids])
        session.sync()
        result.prefill_s = time.perf_counter() - start
        stream = tk.stream()
        show = None if opt.json else lambda row, token, s=stream: print(s.put(token), end="", flush=True)
        continue_rows(session, result, min(opt.max_new_tokens, size - len(ids)), stop, show)
        held = ids + result.tokens[0]
        session.feed(held[int(session.pos[0]) :])  # the last token, drawn but not fed if max_new_tokens ended the turn
        answer = tk.decode(result.tokens[0])
        messages.append({"role": "assistant", "content": answer})
        report.results.append(result)
        report.text.append(answer)
        if not opt.json:
            print(stream.flush(), flush=True)


def main(argv: list[str] | None = None) -> int:
    opt = parse_args(argv)
    if opt.list_methods:
        print(describe())
        return 0
    if opt.max_new_tokens < 1:
        raise InputError(f"--max-new-tokens {opt.max_new_tokens} is below 1")
    if opt.batch_size is not None and opt.batch_size < 1:
        raise InputError(f"--batch-size {opt.batch_size} is below 1")
    if opt.checkpoint and opt.random_init:
        raise InputError("give --checkpoint or --random-init, not both")
    if opt.interactive and (opt.prompt or opt.prompt_file or opt.random_init or (opt.batch_size or 1) > 1):
        raise InputError(
            "--interactive reads its turns from standard input: drop --prompt, --batch-size, --random-init"
        )
    device = pick_device(opt.device)
    dtype = pick_dtype(opt.dtype, device)
    if opt.compile is None:
        opt.compile = device.type == "cuda"
    tk: Tokenizer | RandomVocabulary
    if opt.random_init:
        model, tk = (
            random_transformer(ModelArgs.from_name(opt.random_init), device, dtype, opt.seed),
            RandomVocabulary(),
        )
    else:
        folder = opt.checkpoint or TINY
        model = load_checkpoint(folder, device, dtype)
        tk = load_tokenizer(folder)
    report = Report(opt.method, device)
    if opt.interactive:
        assert not isinstance(tk, RandomVocabulary)
        run_interactive(opt, model, tk, report)
    else:
        run_batches(opt, model, tk, report)
    print(report.json() if opt.json else report.summary(), file=sys.stdout if opt.json else sys.stderr)
    return 0


if __name__ == "__main__":
    run_cli(main)
