"""Compares our methods to NVIDIA's presses of the same names: which tokens of a prompt each keeps, and what it finds.

    python -m scripts.eval.compare_kvpress                         # the shipped model, 20 needles in 1K, a quarter kept
    python -m scripts.eval.compare_kvpress --checkpoint CKPT --tasks niah_single_1,vt --lengths 2048 --keep 1/2,1/8
    python -m scripts.eval.compare_kvpress --method snapkv tova --query-in-prompt --out kvpress.json --resume

Both sides have the same weights and prompts, compute in fp32, and keep the same number of tokens: the share --keep of
the shortest prompt. Our side leaves a quantized file packed, which rounds products; --weights fp32 unpacks it.

A pair compares both sides at their defaults ("default"), or our settings made equal to theirs ("alike"); then only
rounding among nearly equal scores can make a difference. If no setting of ours can equal theirs, theirs is changed, and
the pair's note says so. Pairs with a method or knob that does not exist here are left out.

kvpress compresses the context once; our h2o and tova also evict while the question and the answer are decoded.
Presses do not change what a prompt's tokens attend to, so one prefill serves all of them, as it does for ours. Presses
that mark tokens instead of dropping them share a second one, and KVzipPress reads every prompt twice.

kvpress needs an older transformers than our other tests: install it in its own environment (pip install kvpress).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from cache.spec import layer_methods
from loading.checkpoint import save_checkpoint_tensors
from loading.tokenizer import Tokenizer
from loading.tokenizer.turns import chat_parts
from runtime.errors import InputError, Parser, did_you_mean, run_cli
from runtime.machine import TINY, set_threads
from scripts.eval.evaluation import Context, Evaluation, contexts, names_of, open_evaluation, parse_flags
from scripts.eval.rows import score
from scripts.eval.ruler import TASKS as RULER_TASKS
from scripts.eval.ruler import add_sources, check_tasks
from scripts.eval.samples import TASKS, rows_of
from scripts.report.markdown import share, wilson
from scripts.report.published import both_found
from scripts.shared.options import earlier, precision
from scripts.shared.results import record, write_json
from weights import open_checkpoint

WINDOW, KERNEL, SINKS = 64, 5, 4  # kvpress's defaults
WHOLE = "no press"
EMBEDDING = "model.embed_tokens.weight"
BETA = 5  # a pyramid that both can build; with their default of 20, theirs is SnapKV up to 1280 tokens kept
SETTINGS = ("tasks", "lengths", "samples", "keep", "seed", "query_in_prompt", "max_new_tokens", "no_chat")
Positions = list[list[list[int]]]  # by layer and KV head, ascending


@dataclass
class Pair:
    """A press that keeps `kept` tokens of a prompt, and a spec of ours that keeps as many."""

    name: str
    setting: str  # "default" or "alike"
    theirs: str  # the press's name in tables
    press: Callable[[float], Any] | None  # compression ratio -> press; None: nothing is dropped
    ours: Callable[[int], str]  # tokens kept -> spec
    note: str
    keeps: bool = True  # ours keeps some of the tokens; False: it keeps all, or selects at every step
    marks: bool = False  # theirs marks dropped tokens per head, which needs SDPA
    again: bool = False  # theirs reads the prompt a second time, whatever the ratio


def heavy_and_recent(ratio: float) -> Any:
    """ObservedAttentionPress made equal to H2O: sums instead of means, and half of the kept tokens are the newest."""
    import kvpress

    class Accumulated(kvpress.ObservedAttentionPress):
        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            n = keys.shape[2]
            scores = super().score(module, hidden_states, keys, values, attentions, kwargs)
            scores = scores * torch.arange(n, 0, -1, device=scores.device)
            scores[..., n - kept_of(n, self.compression_ratio) // 2 :] = float("inf")
            return scores

    return Accumulated(ratio)


def kept_of(length: int, ratio: float) -> int:
    """The number of tokens kept, rounded as in kvpress."""
    return max(1, int(length * (1 - ratio)))


def steeper(kept: int, window: int) -> float:
    """The beta at which our layers, which do not count the window in the sequence of sizes, hold as many tokens as
    theirs, which do."""
    return 1 / (1 - (1 - 1 / BETA) * kept / (kept - window))


def beside_window(kept: int, part: float) -> float:
    """That part of what is kept, the window counted in it, as a part of what is kept beside the window."""
    return (max(0, int(kept * part) - WINDOW) + 0.5) / (kept - WINDOW)


def plain_request(ratio: float) -> Any:
    """KVzipPress with a budget for each layer, whose request has nothing of a chat template around it."""
    import kvpress

    class Plain(kvpress.KVzipPress):
        def prepare(self, *args, **kwargs):
            self.prefix_length, self._suffix_ids = 0, self._suffix_ids[:, :0]
            return super().prepare(*args, **kwargs)

    return Plain(ratio + 2e-9, layerwise=True)  # what it drops is rounded down


def pairs() -> list[Pair]:
    import kvpress as k

    like = f"recent={WINDOW},kernel={KERNEL},pool=avg"
    return [
        Pair("full", "default", WHOLE, None, lambda n: "full", "every token", keeps=False),
        Pair("random", "default", "RandomPress", lambda r: k.RandomPress(r), lambda n: f"random,budget={n}",
             "theirs drops tokens once, ours attends to others at every step", keeps=False),
        Pair("streaming", "default", "StreamingLLMPress", lambda r: k.StreamingLLMPress(r),
             lambda n: f"streaming,recent={n - SINKS}",
             "4 sinks and the newest tokens; theirs keeps what is decoded beside them, ours moves its window on"),
        Pair("snapkv", "default", "SnapKVPress", lambda r: k.SnapKVPress(r), lambda n: f"snapkv,budget={n}",
             "theirs: a window of 64, means of 5; ours: 32, the largest of 7"),
        Pair("snapkv", "alike", "SnapKVPress", lambda r: k.SnapKVPress(r), lambda n: f"snapkv,budget={n},{like}",
             "our window and pooling as theirs"),
        Pair("snapkv", "alike", "SnapKVPress(window_size=32, kernel_size=7)",
             lambda r: k.SnapKVPress(r, window_size=32, kernel_size=7), lambda n: f"snapkv,budget={n},pool=avg",
             "their window and kernel set as ours, our pooling as theirs"),
        Pair("tova", "default", "TOVAPress", lambda r: k.TOVAPress(r), lambda n: f"tova,budget={n}",
             "theirs forces the last token; ours evicts at every step"),
        Pair("tova", "alike", "TOVAPress", lambda r: k.TOVAPress(r), lambda n: f"tova,budget={n},recent=1",
             "the last token; ours evicts at every step"),
        Pair("h2o", "default", "ObservedAttentionPress", lambda r: k.ObservedAttentionPress(r),
             lambda n: f"h2o,heavy={n - n // 2},recent={n // 2}",
             "theirs: the mean over the queries that can look, no recent tokens"),
        Pair("h2o", "alike", "ObservedAttentionPress, sums and recent tokens", heavy_and_recent,
             lambda n: f"h2o,heavy={n - n // 2},recent={n // 2}",
             "their scores times the number of queries that can look, and our recent tokens: no setting of ours; "
             "ours evicts at every step"),
        Pair("pyramidkv", "default", "PyramidKVPress", lambda r: k.PyramidKVPress(r),
             lambda n: f"pyramidkv,budget={n}",
             "theirs is SnapKV where its last layer would hold less than the window of 64"),
        Pair("pyramidkv", "alike", "PyramidKVPress", lambda r: k.PyramidKVPress(r),
             lambda n: f"snapkv,budget={n},{like}", "what theirs falls back to"),
        Pair("pyramidkv", "alike", f"PyramidKVPress(window_size=8, beta={BETA})",
             lambda r: k.PyramidKVPress(r, window_size=8, beta=BETA),
             lambda n: f"pyramidkv,budget={n},recent=8,kernel={KERNEL},pool=avg,beta={steeper(n, 8)}",
             "their window as ours; they count it in the sequence of sizes, a larger beta of ours makes up for it"),
        Pair("keydiff", "alike", "KeyDiffPress", lambda r: k.KeyDiffPress(r), lambda n: f"keydiff,budget={n}",
             "at their defaults they score alike; ours evicts at every step"),
        Pair("expected_attention", "default", "ExpectedAttentionPress", lambda r: k.ExpectedAttentionPress(r),
             lambda n: f"expected_attention,budget={n}", "theirs: heads hold equally many, no epsilon"),
        Pair("expected_attention", "alike", "ExpectedAttentionPress", lambda r: k.ExpectedAttentionPress(r),
             lambda n: f"expected_attention,budget={n},adaptive=False,epsilon=0.0", "ours set so, too"),
        Pair("expected_attention", "alike", "AdaKVPress(ExpectedAttentionPress(epsilon=0.01))",
             lambda r: k.AdaKVPress(k.ExpectedAttentionPress(r, epsilon=0.01)),
             lambda n: f"expected_attention,budget={n}", "as their evaluation has it, and ours comes", marks=True),
        Pair("kvzip", "default", "KVzipPress", lambda r: k.KVzipPress(r), lambda n: f"kvzip,budget={n}",
             "theirs: one budget for all layers, the chat template around the request and not repeated",
             marks=True, again=True),
        Pair("kvzip", "alike", "KVzipPress(layerwise=True), no template", plain_request,
             lambda n: f"kvzip,budget={n}", "a budget for each layer, and the request alone", marks=True, again=True),
        Pair("adakv", "default", "AdaKVPress(SnapKVPress)", lambda r: k.AdaKVPress(k.SnapKVPress(r)),
             lambda n: f"snapkv,budget={n},{like},adaptive=True",
             "theirs counts the window in what each head has by itself", marks=True),
        Pair("adakv", "alike", "AdaKVPress(SnapKVPress)", lambda r: k.AdaKVPress(k.SnapKVPress(r)),
             lambda n: f"snapkv,budget={n},{like},adaptive=True,safeguard={beside_window(n, 0.2)}",
             "our safeguard as theirs", marks=True),
        Pair("criticalkv", "default", "CriticalKVPress(SnapKVPress)",
             lambda r: k.CriticalKVPress(k.SnapKVPress(r)),
             lambda n: f"snapkv,budget={n},{like},value_aware=True",
             "theirs counts the window in its first stage, and adds 1e-4 to the scores"),
        Pair("criticalkv", "alike", "CriticalKVPress(SnapKVPress, epsilon=0)",
             lambda r: k.CriticalKVPress(k.SnapKVPress(r), epsilon=0.0),
             lambda n: f"snapkv,budget={n},{like},value_aware=True,first_stage={beside_window(n, 0.5)}",
             "our first stage as theirs, and nothing added"),
    ]  # fmt: skip


def usable(n_layer: int, wanted: Sequence[str]) -> list[Pair]:
    """The pairs of the wanted methods (default: all) that exist here; prints a line for each that does not."""
    every = pairs()
    if unknown := {*wanted} - {p.name for p in every}:
        raise InputError(f"no pair has {min(unknown)!r}: use {', '.join(dict.fromkeys(p.name for p in every))}")
    out = []
    for p in (p for p in every if not wanted or p.name in wanted):
        try:
            layer_methods(p.ours(4 * WINDOW), n_layer, {})
        except InputError as e:
            print(f"{p.name} is left out: {str(e).partition(': use one of')[0]}", file=sys.stderr)
        else:
            out.append(p)
    return out


# ---- their side ----


@dataclass
class Held:
    """What a press leaves of a prompt: K and V [1, Hkv, n, D] by layer; for a press that marks, the dropped tokens."""

    layers: list[tuple[Tensor, Tensor]]
    dropped: list[tuple[Tensor, ...] | None]  # row, head and position of each

    def lengths(self) -> tuple[Any, ...]:
        """Tokens per layer, and whether any are marked; caches that agree in these can form a batch."""
        return (*(k.shape[2] for k, _ in self.layers), any(d is not None for d in self.dropped))


class ChatTokenizer:
    """The part of transformers' tokenizer that KVzipPress uses (chat template, ids), for GGUF files, which it cannot
    read."""

    def __init__(self, tk: Tokenizer):
        self.tk, self.parts = tk, chat_parts(tk, True)
        self.chat_template = self.parts.head or None

    def apply_chat_template(self, messages: list[dict[str, str]], **how: Any) -> str:
        return f"{self.parts.head}{messages[0]['content']}{self.parts.tail}"

    def encode(self, text: str, **how: Any) -> Tensor:
        return torch.tensor([self.tk.encode(text, bos=False)], dtype=torch.long)


class Theirs:
    """kvpress on transformers' model with our weights."""

    def __init__(self, ev: Evaluation):
        from kvpress.presses import kvzip_press
        from transformers import AutoConfig, AutoModelForCausalLM

        kvzip_press.AutoTokenizer = SimpleNamespace(from_pretrained=lambda path: ChatTokenizer(ev.tk))
        config = AutoConfig.for_model(**open_checkpoint(ev.checkpoint).config)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        state = save_checkpoint_tensors(ev.model, torch.float32)
        model.load_state_dict(state | {"lm_head.weight": state.get("lm_head.weight", state[EMBEDDING])}, assign=True)
        model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are in no checkpoint
        self.model, self.stops = model.to(ev.device).eval(), ev.stops
        self.attention = [layer.self_attn for layer in model.model.layers]
        for attention in self.attention:
            attention.rotary_emb = model.model.rotary_emb  # as applying a press does
            attention.masked_key_indices = None

    def prefill(self, ids: list[int], presses: dict[str, Any], how: str = "eager") -> tuple[dict[str, Held], Tensor]:
        """What each press leaves of one prompt, and the last token's logits [V]. Eager attention tells its weights,
        which ObservedAttentionPress needs; those that mark refuse it."""
        from transformers import DynamicCache

        self.model.set_attn_implementation(how)
        left: dict[str, Held] = {name: Held([], []) for name in presses}

        def compress(module, inputs, kwargs, output):
            layer = kwargs["past_key_values"].layers[module.layer_idx]
            for name, press in presses.items():
                kv = layer.keys, layer.values
                if press is not None:
                    kv = press.compress(module, kwargs["hidden_states"], *kv, output[1], kwargs)
                left[name].layers.append(kv)
                left[name].dropped.append(module.masked_key_indices)
                module.masked_key_indices = None

        for press in presses.values():
            if press is not None:
                press.post_init_from_model(self.model)
        hooks = [attention.register_forward_hook(compress, with_kwargs=True) for attention in self.attention]
        try:
            hidden = self._run(ids, DynamicCache())
        finally:
            for hook in hooks:
                hook.remove()
        return left, self.model.lm_head(hidden[0, -1])

    def read_again(self, ids: list[int], presses: dict[str, Any]) -> dict[str, Held]:
        """What presses that read a prompt a second time leave of it, and differ in their ratios alone."""
        from transformers import DynamicCache

        self.model.set_attn_implementation("sdpa")
        cache, one, dropped = DynamicCache(), next(iter(presses.values())), dict[str, list[Any]]()
        drop = one.compress_post

        def drop_each(model):
            for name, press in presses.items():
                one.compression_ratio = press.compression_ratio
                drop(model)
                dropped[name] = [attention.masked_key_indices for attention in self.attention]

        one.compress_post = drop_each
        with one(self.model):
            self._run(ids, cache)
        layers = [(layer.keys, layer.values) for layer in cache.layers]
        return {name: Held(layers, marks) for name, marks in dropped.items()}

    def _run(self, ids: list[int], cache: Any) -> Tensor:
        tokens = torch.tensor([ids], device=self.model.device)
        return self.model.model(input_ids=tokens, past_key_values=cache).last_hidden_state

    def answers(self, left: Sequence[Held], length: int, first: int, asked: list[int], new: int) -> list[list[int]]:
        """Greedy tokens after a prompt of `length` tokens, whose logits give `first`, and a question, for caches of
        equal lengths. The question is read in one pass; if layers differ in length, token by token, because masks are
        made for the first layer."""
        from transformers import DynamicCache

        self.model.set_attn_implementation("sdpa")  # makes no mask for a single query
        cache, rows = DynamicCache(), len(left)
        for i, attention in enumerate(self.attention):
            cache.update(*(torch.cat([held.layers[i][x] for held in left]) for x in (0, 1)), i)
            marks = [(d[0] + row, *d[1:]) for row, held in enumerate(left) if (d := held.dropped[i]) is not None]
            attention.masked_key_indices = tuple(torch.cat(x) for x in zip(*marks, strict=True)) if marks else None
        *sizes, marked = left[0].lengths()
        parts = [[token] for token in asked] if marked or len({*sizes}) > 1 else [asked] if asked else []
        drawn = torch.full((rows,), first, device=self.model.device)
        for part in parts:
            ids = torch.tensor([part] * rows, device=self.model.device)
            drawn, length = self._step(ids, cache, length)
        out: list[list[int]] = [[] for _ in left]
        for i in range(new):
            for row, token in zip(out, drawn.tolist(), strict=True):
                row += [] if row and row[-1] in self.stops else [token]
            if i == new - 1 or all(row[-1] in self.stops for row in out):
                break
            drawn, length = self._step(drawn[:, None], cache, length)
        for attention in self.attention:
            attention.masked_key_indices = None
        return out

    def _step(self, ids: Tensor, cache: Any, length: int) -> tuple[Tensor, int]:
        """Tokens [B, n] after `length` others -> the likeliest next tokens [B], and the new length."""
        at = torch.arange(length, length + ids.shape[1], device=ids.device).expand_as(ids)
        hidden = self.model.model(input_ids=ids, past_key_values=cache, position_ids=at).last_hidden_state
        return self.model.lm_head(hidden[:, -1]).argmax(-1), length + ids.shape[1]


def rows_as_bytes(x: Tensor) -> list[bytes]:
    """The bytes of each row of x [n, D], to compare rows exactly."""
    x = x.contiguous().cpu()
    return x.numpy().view(f"V{x.shape[1] * x.element_size()}").ravel().tolist()


def positions(held: Held, whole: Held) -> Positions:
    """Which tokens of the whole prompt a press leaves; presses move keys but do not change them."""
    out = []
    for (kept, _), (every, _), dropped in zip(held.layers, whole.layers, held.dropped, strict=True):
        if dropped is not None:  # all tokens are still there, in order
            gone = {*zip(dropped[1].tolist(), dropped[2].tolist(), strict=True)}
            heads = [[t for t in range(every.shape[2]) if (h, t) not in gone] for h in range(every.shape[1])]
        else:
            heads = []
            for some, keys in zip(kept[0], every[0], strict=True):
                where = {row: t for t, row in enumerate(rows_as_bytes(keys))}
                heads.append(sorted(where[row] for row in rows_as_bytes(some)))
        out.append(heads)
    return out


# ---- our side ----


def our_positions(ev: Evaluation, label: str, lengths: Tensor) -> list[Positions]:
    """The positions that a cache holds of each of its prompts, lengths [B]."""
    out: list[Positions] = [[] for _ in lengths]
    for method in ev.caches[label]:
        s = method.shape
        q = torch.zeros(len(lengths), s.n_head, s.head_dim, device=ev.device)
        place = method.attended(q, None, None, lengths - 1).position
        for row, held in zip(out, place, strict=True):
            row.append([sorted(t for t in head.tolist() if t >= 0) for head in held])
    return out


def common(ours: Positions, theirs: Positions) -> np.ndarray:
    """Positions in common, as a share of the larger of the two sets, [layer, KV head]."""
    return np.array([
        [len({*a} & {*b}) / max(len(a), len(b)) for a, b in zip(x, y, strict=True)]
        for x, y in zip(ours, theirs, strict=True)
    ])  # fmt: skip


# ---- both ----


@dataclass
class Case:
    """A pair at one share of the prompt, n tokens."""

    pair: Pair
    keep: str
    n: int

    @property
    def spec(self) -> str:
        return self.pair.ours(self.n)

    @property
    def theirs(self) -> str:
        return self.pair.theirs if self.pair.press is None else f"{self.pair.theirs}, {self.n} kept"

    def press(self, length: int) -> Any:
        return self.pair.press and self.pair.press(1 - self.n / length - 1e-9)


def cases_of(each: Sequence[Pair], keep: Sequence[Fraction], shortest: int) -> list[Case]:
    """Every pair at every share of the shortest prompt; a pair that drops nothing only once."""
    out = []
    for part in keep:
        n = kept_of(shortest, 1 - float(part))
        if n <= 1.1 * WINDOW:
            raise InputError(f"--keep {part} of {shortest} tokens is {n}, no more than {WINDOW}, the window of "
                             "kvpress: give a larger share")  # fmt: skip
        out += [Case(p, str(part), n) for p in each if p.press or part == keep[0]]
    return out


@torch.inference_mode()
def compare(
    ev: Evaluation, theirs: Theirs, batch: Sequence[Context], cases: Sequence[Case]
) -> Iterator[dict[str, Any]]:
    """Yields a sample per context: for each case, the scores of both sides and the positions in common."""
    first, lengths = ev.prefill([c.prompt for c in batch])
    keeping = {case.spec for case in cases if case.pair.keeps}
    held = {spec: our_positions(ev, spec, lengths) for spec in keeping}
    new = [c.rows[0]["max_new_tokens"] for c in batch]
    asked = [c.asked[0] for c in batch]
    said: dict[str, list[list[int]]] = {}
    for spec, cache in ev.caches.items():
        ev.model.cache = cache
        outs = ev.decode(first[spec], lengths, asked, new, ev.stops)
        said[spec] = [out[len(ids) :] for out, ids in zip(outs, asked, strict=True)]
    for i, c in enumerate(batch):
        row, length = c.rows[0], len(c.prompt)
        torch.manual_seed(row["index"])  # of RandomPress
        by: dict[str, dict[str, Any]] = {"eager": {WHOLE: None}}  # how a prompt is read -> presses
        for case in cases:
            p = case.pair
            how = p.theirs if p.again else "sdpa" if p.marks else "eager"
            by.setdefault(how, {})[case.theirs] = case.press(length)
        left, logits = theirs.prefill(c.prompt, by.pop("eager"))
        for how, presses in by.items():
            left |= theirs.prefill(c.prompt, presses, how)[0] if how == "sdpa" else theirs.read_again(c.prompt, presses)
        answers: dict[str, list[int]] = {}
        for sizes in {x.lengths() for x in left.values()}:
            alike = {name: x for name, x in left.items() if x.lengths() == sizes}
            outs = theirs.answers([*alike.values()], length, int(logits.argmax()), asked[i], new[i])
            answers |= zip(alike, outs, strict=True)
        places = {case.theirs: positions(left[case.theirs], left[WHOLE]) for case in cases if case.pair.keeps}

        def found(tokens: list[int], row: dict[str, Any] = row) -> float:
            return score(row, ev.tk.decode([t for t in tokens if t not in ev.stops]))

        results = []
        for case in cases:
            result = dict(
                ours=case.spec, theirs=case.theirs, found=[found(said[case.spec][i]), found(answers[case.theirs])]
            )
            if case.pair.keeps:
                a, b = held[case.spec][i], places[case.theirs]
                parts = common(a, b)
                off = [abs(len(x) - len(y)) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)]
                result |= dict(common=round(float(parts.mean()), 4), common_min=round(float(parts.min()), 4),
                               equal=round(float((parts == 1).mean()), 4), sizes_apart=max(off))  # fmt: skip
            results.append(result)
        apart = float((first["full"][i].float() - logits).abs().max()) if "full" in first else None
        yield dict(task=row["task"], length=row["length"], index=row["index"], tokens=length,
                   logits_apart=apart, cases=results)  # fmt: skip


def summary(samples: Sequence[dict[str, Any]], cases: Sequence[Case], length: int) -> list[dict[str, Any]]:
    """One row per case: per task, each sample's score on either side, and Wilson's intervals."""
    out = []
    samples = [s for s in samples if s["length"] == length]
    for i, case in enumerate(cases if samples else ()):
        p, results = case.pair, [s["cases"][i] for s in samples]
        row: dict[str, Any] = dict(method=p.name, setting=p.setting, ours=case.spec, theirs=p.theirs, note=p.note,
                                   keep=case.keep if p.press else "1", kept=case.n, seq_len=length)  # fmt: skip
        for task in dict.fromkeys(s["task"] for s in samples):
            both = [r["found"] for s, r in zip(samples, results, strict=True) if s["task"] == task]
            for side, each in zip(("ours", "theirs"), map(list, zip(*both, strict=True)), strict=True):
                row |= {f"{task}_{side}": each,
                        f"{task}_{side}_interval": [round(x, 4) for x in wilson(sum(each), len(each))]}  # fmt: skip
        if p.keeps:
            row |= dict(common=round(float(np.mean([r["common"] for r in results])), 4),
                        common_min=min(r["common_min"] for r in results),
                        equal=round(float(np.mean([r["equal"] for r in results])), 4),
                        sizes_apart=max(r["sizes_apart"] for r in results))  # fmt: skip
        out.append(row)
    return out


def parse_args() -> Any:
    p = Parser(__doc__)
    a = p.add_argument
    a("--checkpoint", default=str(TINY), help="Hugging Face folder or GGUF file")
    a("--method", nargs="+", default=[], help="names of pairs; default: all")
    a("--tasks", default="needle", help=f"some of {', '.join(TASKS)}")
    a("--lengths", default="1024", help="tokens of prompt and answer together")
    a("--samples", type=int, default=20, help="samples per task and length; default: 20")
    a("--keep", default="1/4", help="shares of the shortest prompt that are kept: 1/2,1/4,1/8")
    a("--max-new-tokens", type=int, default=128, help="the most tokens of an answer; a task may have fewer")
    a("--batch-size", type=int, default=1, help="prompts that our side reads at once")
    a("--no-chat", action="store_true", help="do not use the checkpoint's chat template")
    add_sources(p)
    opt = parse_flags(p, "kvpress.json")
    opt.tasks = opt.tasks.split(",")
    if unknown := {*opt.tasks} - {*TASKS} | {*opt.tasks} & {"repeats"}:
        known = [t for t in TASKS if t != "repeats"]
        hint = did_you_mean(min(unknown), known)
        raise InputError(f"no answer to task {min(unknown)!r}: {hint}use {', '.join(known)}")
    check_tasks([t for t in opt.tasks if t in RULER_TASKS], opt)
    try:
        opt.shares = [Fraction(part) for part in opt.keep.split(",")]
    except (ValueError, ZeroDivisionError):
        opt.shares = [Fraction(0)]
    if not all(0 < x < 1 for x in opt.shares):
        raise InputError(f"--keep {opt.keep} is not a list such as 1/2,1/4, each above 0 and below 1")
    if min(opt.samples, opt.batch_size, opt.max_new_tokens) < 1:
        raise InputError("--samples, --batch-size and --max-new-tokens must be at least 1")
    return opt


def prompts(ev: Evaluation, opt: Any, length: int) -> list[list[Context]]:
    """Batches of contexts, each of one task; tasks take turns, so that an interrupted run has samples of all."""
    chat = chat_parts(ev.tk, not opt.no_chat)
    by_task = []
    for task in opt.tasks:
        rows = list(rows_of(ev, task, length, opt.samples, opt, chat.tokens(ev.tk)))
        for row in rows:
            row["max_new_tokens"] = min(row["max_new_tokens"], opt.max_new_tokens)
        # only the first of several questions about one context
        found = contexts([r for r in rows if not r.get("turn")], ev.tk, chat, opt.query_in_prompt, False)
        by_task.append([found[i : i + opt.batch_size] for i in range(0, len(found), opt.batch_size)])
    return [batch for turn in zip(*by_task, strict=True) for batch in turn]


def main() -> None:
    opt = parse_args()
    try:
        version = metadata.version("kvpress")
    except metadata.PackageNotFoundError:
        raise InputError("kvpress is not installed: pip install kvpress, in an environment of its own") from None
    set_threads(opt.threads)
    ev = open_evaluation(opt, opt.batch_size)
    each = usable(ev.model.args.n_layer, opt.method)
    settings = {k: getattr(opt, k) for k in SETTINGS} | precision(opt, ev.model) | dict(method=[p.name for p in each])
    data = record(ev.device, **names_of(opt.checkpoint), kvpress=version, settings=settings)
    data |= dict(rows=[], samples=[])
    if opt.resume:
        data |= earlier(opt.out, data, ("device", "commit", "fingerprint", "settings"), ("rows", "samples"))
    theirs, todo = Theirs(ev), [(length, prompts(ev, opt, length)) for length in opt.lengths]
    done = {(s["task"], s["length"], s["index"]) for s in data["samples"]}
    by_length: dict[int, list[Case]] = {}
    for length, batches in todo:
        every = [c for batch in batches for c in batch]
        by_length[length] = cases = cases_of(each, opt.shares, min(len(c.prompt) for c in every))
        new = max(len(c.asked[0]) + c.rows[0]["max_new_tokens"] for c in every)
        specs = {case.spec: (case.spec, {}) for case in cases}
        ev.setup(specs, max(len(c.prompt) for c in every) + new, new)
        for batch in tqdm(batches, desc=f"{length}: {len(cases)} pairs", leave=False):
            here = [c for c in batch if (c.rows[0]["task"], length, c.rows[0]["index"]) not in done]
            for sample in compare(ev, theirs, here, cases) if here else ():
                data["samples"].append(sample)
                data["rows"] = [r for n, known in by_length.items() for r in summary(data["samples"], known, n)]
                if opt.out:
                    write_json(opt.out, data)
    if opt.json:
        print(json.dumps(data))
        return
    apart = max((s["logits_apart"] for s in data["samples"] if s["logits_apart"] is not None), default=None)
    print("" if apart is None else f"logits of full after the prompts: at most {apart:.2e} apart")
    for x in data["rows"]:
        mine, other = map(share, both_found(x))
        kept = f"in common {x['common']:.3f}, least {x['common_min']:.3f}; " if "common" in x else ""
        print(f"{x['method']:12} {x['setting']:8} {x['kept']:5} kept; found: ours {mine}, theirs {other}; "
              f"{kept}{x['note']}")  # fmt: skip


if __name__ == "__main__":
    run_cli(main)
