"""Compares our methods to NVIDIA's presses of the same names: which tokens of a prompt each keeps, and what it finds.

    python -m tests.audit.compare_kvpress                         # the shipped model, 20 needles in 1K, a quarter kept
    python -m tests.audit.compare_kvpress --checkpoint CKPT --tasks niah_single_1,vt --lengths 2048 --keep 1/2,1/8
    python -m tests.audit.compare_kvpress --method snapkv tova --query-in-prompt --out kvpress.json --resume

Both sides have the same weights and prompts, compute in fp32, and keep the same number of tokens: the share --keep of
the shortest prompt. Our side leaves a quantized file packed, which rounds products; --weights fp32 unpacks it. A pair
compares both sides at their defaults ("default"), or our settings made equal to theirs ("alike"), if need be theirs to
ours, as its note says; then only rounding among nearly equal scores can make a difference. kvpress compresses the
context once; our streaming, h2o, tova, keydiff, knorm and qfilters also evict while the question and the answer are
decoded.

Presses do not change what a prompt's tokens attend to, so one prefill serves all of them, as it does for ours. Presses
that mark tokens instead of dropping them share a second one, and KVzipPress reads every prompt twice. kvpress needs an
older transformers than our other tests: install it in its own environment (pip install kvpress).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib import metadata
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from tqdm import tqdm

from kv_methods.compactor import RIDGE
from loading.checkpoint import save_checkpoint_tensors
from loading.tokenizer import Tokenizer
from loading.tokenizer.turns import chat_parts
from runtime.errors import InputError, run_cli
from runtime.machine import TINY
from runtime.options import Parser
from scripts.eval.evaluation import Evaluation, add_flags, check_flags, names_of, open_evaluation
from scripts.eval.rows import Context, check_names, contexts, rows_of, score
from scripts.eval.ruler import add_sources
from scripts.shared.markdown import both_found, share
from scripts.shared.options import earlier, parse_shares, precision
from scripts.shared.results import record, write_json
from weights import open_checkpoint

WINDOW, SINKS = 64, 4  # kvpress's defaults
LAG = 128  # kvpress's window of LagKV
WHOLE = "no press"
BETA = 5  # a pyramid that both can build; with their default of 20, theirs is SnapKV up to 1280 tokens kept
SETTINGS = ("tasks", "lengths", "samples", "keep", "seed", "query_in_prompt", "max_new_tokens", "no_chat")
Positions = list[list[list[int]]]  # by layer and KV head, ascending


@dataclass
class Pair:
    """A press, and a spec of ours that keeps as many tokens."""

    name: str
    setting: str  # "default" or "alike"
    theirs: str  # the press's name in tables
    press: Callable[[float], Any] | None  # compression ratio -> press; None: nothing is dropped
    ours: str  # the spec, with {n} for the tokens kept, and what `spec` has
    note: str
    keeps: bool = True  # ours keeps some of the tokens; False: it keeps all, or selects at every step
    how: str = "eager"  # tells the weights, which ObservedAttentionPress needs; sdpa: for presses that mark per head

    def spec(self, n: int) -> str:
        """beta: at which our layers, which do not count the window of 8 in the sequence of sizes, hold as many tokens
        as theirs, which do. fifth, half: parts of what is kept, the window counted in, as parts of what is beside it.
        lagged: of each window as large a share as n tokens are of 2K.
        """
        fifth, half = ((max(0, int(n * part) - WINDOW) + 0.5) / (n - WINDOW) for part in (0.2, 0.5))
        beta = 1 / (1 - (1 - 1 / BETA) * n / (n - 8))
        return self.ours.format(n=n, rest=n - SINKS, old=n - n // 2, new=n // 2, beta=beta, fifth=fifth, half=half,
                                lagged=(stays_of(n) + 0.5) / LAG)  # fmt: skip


def kept_of(length: int, ratio: float) -> int:
    """The number of tokens kept, rounded as in kvpress."""
    return max(1, int(length * (1 - ratio)))


def stays_of(n: int) -> int:
    """The tokens of a window that both sides of LagKV keep."""
    return max(1, n * LAG // 2048)


def pairs() -> list[Pair]:
    import kvpress as k

    class Accumulated(k.ObservedAttentionPress):
        """Made equal to H2O: sums instead of means, and half of the kept tokens are the newest."""

        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            n = keys.shape[2]
            scores = super().score(module, hidden_states, keys, values, attentions, kwargs)
            scores = scores * torch.arange(n, 0, -1, device=scores.device)
            scores[..., n - kept_of(n, self.compression_ratio) // 2 :] = float("inf")
            return scores

    class Plain(k.KVzipPress):
        """A budget for each layer, and nothing of a chat template around the request."""

        def prepare(self, *args, **kwargs):
            self.prefix_length, self._suffix_ids = 0, self._suffix_ids[:, :0]
            return super().prepare(*args, **kwargs)

    class Plainly(k.ChunkKVPress):
        """Without the weights of attention, which it refuses and does not need."""

        def compress(self, module, hidden_states, keys, values, attentions, kwargs):
            return super().compress(module, hidden_states, keys, values, None, kwargs)

    class Chunked(Plainly):
        """The newest tokens in no chunk, the last chunk cut to the budget."""

        def compress(self, module, hidden_states, keys, values, *rest):
            press, size, (B, H, n, D) = self.press, self.chunk_length, keys.shape
            old, want, kept = n - WINDOW, kept_of(n, self.compression_ratio) - WINDOW, list[int]()
            scores, chunks = press.score(module, hidden_states, keys, values, *rest)[..., :old], -(-old // size)
            place = torch.arange(old, device=keys.device)[:, None].expand(B, H, old, D)
            for many in range(max(1, want // size), chunks + 1):
                self.press = SimpleNamespace(score=lambda *_: scores, compression_ratio=1 - (many + 0.5) / chunks)
                chosen = super().compress(module, hidden_states, place, place, *rest)[0][0, 0, :, 0].tolist()
                kept += sorted({*chosen} - {*kept})[: want - len(kept)]
            self.press, at = press, torch.tensor([*sorted(kept), *range(old, n)], device=keys.device)
            return keys[:, :, at], values[:, :, at]

    class Lagged(k.LagKVPress):
        """As many tokens of each window as ours keeps, and so no other number in all."""

        def compress(self, module, hidden_states, keys, *rest):
            ratio, n = self.compression_ratio, keys.shape[2]
            dropped = max(0, (n - self.n_sink) // LAG - 1) * (LAG - stays_of(kept_of(n, ratio)))
            self.compression_ratio = (dropped - 0.5) / n
            kept = super().compress(module, hidden_states, keys, *rest)
            self.compression_ratio = ratio
            return kept

    class Filtered(k.QFilterPress):
        """With the directions of our calibration: theirs are downloaded. Their sign is the opposite."""

        def post_init_from_model(self, model):
            self.q_filters = -model.directions()

    padded = k.NonCausalAttnPress.non_causal_chunked_attn

    def unpadded(q, keys, size):
        """Theirs attends to the padding of a last block that is not full."""
        whole, n = keys.shape[2] // size * size, keys.shape[2]
        parts = [(slice(whole), size)] * (whole > 0) + [(slice(whole, n), n - whole)] * (whole < n)
        return torch.cat([padded(q[:, :, part], keys[:, :, part], m) for part, m in parts], 2)

    class Sketched(k.CompactorPress):
        """With our sketch of the keys, what we add to the diagonal, and no padding."""

        def score(self, module, hidden_states, keys, *rest):
            drawn = torch.randn(keys.shape[3], self.sketch_dimension, generator=torch.Generator().manual_seed(0))

            def factor(x, **_):
                more = RIDGE * x.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
                return torch.linalg.cholesky(x + more * torch.eye(x.shape[-1], device=x.device))

            with (
                mock.patch.object(torch, "randn", lambda *size, **_: drawn.to(keys.device).expand(size)),
                mock.patch.object(k.LeverageScorePress, "chol_with_jitter", factor),
                mock.patch.object(k.NonCausalAttnPress, "non_causal_chunked_attn", staticmethod(unpadded)),
            ):
                return super().score(module, hidden_states, keys, *rest)

    snap = f"snapkv,budget={{n}},recent={WINDOW},kernel=5,pool=avg"
    h2o, kvzip, expected = "h2o,heavy={old},recent={new}", "kvzip,budget={n}", "expected_attention,budget={n}"
    zip_plain = lambda r: Plain(r + 2e-9, layerwise=True)  # noqa: E731, what it drops is rounded down
    return [
        Pair("full", "default", WHOLE, None, "full", "every token", keeps=False),
        Pair("random", "default", "RandomPress", k.RandomPress, "random,budget={n}",
             "theirs drops tokens once, ours attends to others at every step", keeps=False),
        Pair("streaming", "default", "StreamingLLMPress", k.StreamingLLMPress, "streaming,recent={rest}",
             "4 sinks and the newest tokens; theirs keeps what is decoded beside them, ours moves its window on"),
        Pair("snapkv", "default", "SnapKVPress", k.SnapKVPress, "snapkv,budget={n}",
             "theirs: a window of 64, means of 5; ours: 32, the largest of 7"),
        Pair("snapkv", "alike", "SnapKVPress", k.SnapKVPress, snap, "our window and pooling as theirs"),
        Pair("snapkv", "alike", "SnapKVPress(window_size=32, kernel_size=7)",
             lambda r: k.SnapKVPress(r, window_size=32, kernel_size=7), "snapkv,budget={n},pool=avg",
             "their window and kernel set as ours, our pooling as theirs"),
        Pair("tova", "default", "TOVAPress", k.TOVAPress, "tova,budget={n}",
             "theirs forces the last token; ours evicts at every step"),
        Pair("tova", "alike", "TOVAPress", k.TOVAPress, "tova,budget={n},recent=1",
             "the last token; ours evicts at every step"),
        Pair("h2o", "default", "ObservedAttentionPress", k.ObservedAttentionPress, h2o,
             "theirs: the mean over the queries that can look, no recent tokens"),
        Pair("h2o", "alike", "ObservedAttentionPress, sums and recent tokens", Accumulated, h2o,
             "their scores times the number of queries that can look, and our recent tokens: no setting of ours; "
             "ours evicts at every step"),
        Pair("pyramidkv", "default", "PyramidKVPress", k.PyramidKVPress, "pyramidkv,budget={n}",
             "theirs is SnapKV where its last layer would hold less than the window of 64"),
        Pair("pyramidkv", "alike", "PyramidKVPress", k.PyramidKVPress, snap, "what theirs falls back to"),
        Pair("pyramidkv", "alike", f"PyramidKVPress(window_size=8, beta={BETA})",
             lambda r: k.PyramidKVPress(r, window_size=8, beta=BETA),
             "pyramidkv,budget={n},recent=8,kernel=5,pool=avg,beta={beta}",
             "their window as ours; they count it in the sequence of sizes, a larger beta of ours makes up for it"),
        Pair("keydiff", "alike", "KeyDiffPress", k.KeyDiffPress, "keydiff,budget={n}",
             "at their defaults they score alike; ours evicts at every step"),
        Pair("knorm", "alike", "KnormPress", k.KnormPress, "knorm,budget={n},skip_layers=none",
             "theirs compresses all layers; ours evicts at every step"),
        Pair("expected_attention", "default", "ExpectedAttentionPress", k.ExpectedAttentionPress, expected,
             "theirs: heads hold equally many, no epsilon"),
        Pair("expected_attention", "alike", "ExpectedAttentionPress", k.ExpectedAttentionPress,
             f"{expected},adaptive=False,epsilon=0.0", "ours set so, too"),
        Pair("expected_attention", "alike", "AdaKVPress(ExpectedAttentionPress(epsilon=0.01))",
             lambda r: k.AdaKVPress(k.ExpectedAttentionPress(r, epsilon=0.01)), expected,
             "as their evaluation has it, and ours comes", how="sdpa"),
        Pair("kvzip", "default", "KVzipPress", k.KVzipPress, kvzip,
             "theirs: one budget for all layers, the chat template around the request and not repeated", how="again"),
        Pair("kvzip", "alike", "KVzipPress(layerwise=True), no template", zip_plain, kvzip,
             "a budget for each layer, and the request alone", how="again, plain"),
        Pair("adakv", "default", "AdaKVPress(SnapKVPress)", lambda r: k.AdaKVPress(k.SnapKVPress(r)),
             f"{snap},adaptive=True", "theirs counts the window in what each head has by itself", how="sdpa"),
        Pair("adakv", "alike", "AdaKVPress(SnapKVPress)", lambda r: k.AdaKVPress(k.SnapKVPress(r)),
             f"{snap},adaptive=True,safeguard={{fifth}}", "our safeguard as theirs", how="sdpa"),
        Pair("criticalkv", "default", "CriticalKVPress(SnapKVPress)", lambda r: k.CriticalKVPress(k.SnapKVPress(r)),
             f"{snap},value_aware=True", "theirs counts the window in its first stage, and adds 1e-4 to the scores"),
        Pair("criticalkv", "alike", "CriticalKVPress(SnapKVPress, epsilon=0)",
             lambda r: k.CriticalKVPress(k.SnapKVPress(r), epsilon=0.0),
             f"{snap},value_aware=True,first_stage={{half}}", "our first stage as theirs, and nothing added"),
        Pair("chunkkv", "default", "ChunkKVPress(SnapKVPress)", lambda r: Plainly(k.SnapKVPress(r)),
             f"{snap},chunk_length=20", "theirs: newest tokens in chunks, the last chunk not cut"),
        Pair("chunkkv", "alike", "ChunkKVPress(SnapKVPress), newest tokens apart", lambda r: Chunked(k.SnapKVPress(r)),
             f"{snap},chunk_length=20", "newest tokens in no chunk, the last chunk cut: no setting of theirs"),
        Pair("lagkv", "alike", "LagKVPress", Lagged, f"lagkv,sinks=4,lag={LAG},ratio={{lagged}}",
             "our window and sinks as theirs; of each window as large a share as the tokens kept are of 2K"),
        Pair("qfilters", "alike", "QFilterPress", Filtered, "qfilters,budget={n},recent=0",
             "with our directions; ours evicts at every step"),
        Pair("compactor", "default", "CompactorPress", k.CompactorPress, "compactor,budget={n}",
             "theirs: heads hold equally many, leverage weighs as much as the share dropped, another sketch"),
        Pair("compactor", "alike", "CompactorPress(blending=0.5), our sketch, no padding",
             lambda r: Sketched(r, blending=0.5), "compactor,budget={n},adaptive=False",
             "our sketch and ridge in theirs, and no attention to padding"),
    ]  # fmt: skip


# ---- their side ----


@dataclass
class Held:
    """What a press leaves of a prompt: K and V [1, Hkv, n, D] by layer; for a press that marks, the dropped tokens."""

    layers: list[tuple[Tensor, Tensor]]
    dropped: list[tuple[Tensor, ...] | None]  # row, head and position of each


class ChatTokenizer:
    """The part of transformers' tokenizer that KVzipPress uses, for GGUF files, which it cannot read."""

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
        state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
        model.load_state_dict(state, assign=True)
        model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are in no checkpoint
        model.directions = lambda: ev.model.find_calibration().stack("qfilters.direction")
        self.model, self.stops = model.to(ev.device).eval(), ev.stops
        self.attention = [layer.self_attn for layer in model.model.layers]
        for attention in self.attention:
            attention.rotary_emb = model.model.rotary_emb  # as applying a press does
            attention.masked_key_indices = None

    def prefill(self, ids: list[int], presses: dict[str, Any], how: str) -> tuple[dict[str, Held], Tensor]:
        """What each press leaves of one prompt, and the last token's logits [V]."""
        from transformers import DynamicCache

        self.model.set_attn_implementation(how)
        left = {name: Held([], []) for name in presses}

        def compress(module, inputs, kwargs, output):
            layer = kwargs["past_key_values"].layers[module.layer_idx]
            for name, press in presses.items():
                kv = layer.keys, layer.values
                if press is not None:
                    kv = press.compress(module, kwargs["hidden_states"], *kv, output[1], kwargs)
                left[name].layers.append(kv)
                left[name].dropped.append(module.masked_key_indices)
                module.masked_key_indices = None

        for press in filter(None, presses.values()):
            press.post_init_from_model(self.model)
        hooks = [attention.register_forward_hook(compress, with_kwargs=True) for attention in self.attention]
        try:
            hidden = self._read(ids, DynamicCache())
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
            self._read(ids, cache)
        return {name: Held([(x.keys, x.values) for x in cache.layers], marks) for name, marks in dropped.items()}

    def _read(self, ids: list[int], cache: Any, at: int = 0) -> Tensor:
        """Tokens after `at` others -> hidden states."""
        tokens = torch.tensor([ids], device=self.model.device)
        where = torch.arange(at, at + len(ids), device=tokens.device)[None]
        return self.model.model(input_ids=tokens, past_key_values=cache, position_ids=where).last_hidden_state

    def answer(self, held: Held, length: int, first: int, asked: list[int], new: int) -> list[int]:
        """Greedy tokens after a prompt of `length` tokens, whose logits give `first`, and a question. The question is
        read in one pass; if layers differ in length, token by token, because masks are made for the first layer."""
        from transformers import DynamicCache

        self.model.set_attn_implementation("sdpa")  # makes no mask for a single query
        cache = DynamicCache()
        for i, (attention, kv) in enumerate(zip(self.attention, held.layers, strict=True)):
            cache.update(*kv, i)
            attention.masked_key_indices = held.dropped[i]
        uneven = any(held.dropped) or len({k.shape[2] for k, _ in held.layers}) > 1
        drawn, out = first, list[int]()
        todo = [[token] for token in asked] if uneven else [asked] if asked else []
        while True:
            for part in todo:
                drawn = int(self.model.lm_head(self._read(part, cache, length)[0, -1]).argmax())
                length += len(part)
            out.append(drawn)
            if len(out) == new or drawn in self.stops:
                break
            todo = [[drawn]]
        for attention in self.attention:
            attention.masked_key_indices = None
        return out


def positions(held: Held, whole: Held) -> Positions:
    """Which tokens of the whole prompt a press leaves; presses move keys but do not change them."""

    def rows(x: Tensor) -> list[bytes]:  # the bytes of each key, to compare them exactly
        return x.contiguous().cpu().numpy().view(f"V{x.shape[1] * x.element_size()}").ravel().tolist()

    out = []
    for (kept, _), (every, _), dropped in zip(held.layers, whole.layers, held.dropped, strict=True):
        if dropped is not None:  # all tokens are still there, in order
            gone = {*zip(dropped[1].tolist(), dropped[2].tolist(), strict=True)}
            heads = [[t for t in range(every.shape[2]) if (h, t) not in gone] for h in range(every.shape[1])]
        else:
            where = [{row: t for t, row in enumerate(rows(keys))} for keys in every[0]]
            heads = [sorted(at[row] for row in rows(some)) for some, at in zip(kept[0], where, strict=True)]
        out.append(heads)
    return out


# ---- both ----


def our_positions(ev: Evaluation, label: str, length: Tensor) -> Positions:
    """The positions that a cache of one row holds of its prompt."""
    out = []
    for method in ev.caches[label]:
        q = torch.zeros(1, method.shape.n_head, method.shape.head_dim, device=ev.device)
        place = method.attended(q, None, None, length - 1).position[0]
        out.append([sorted(t for t in head.tolist() if t >= 0) for head in place])
    return out


def common(ours: Positions, theirs: Positions) -> tuple[list[float], int]:
    """Of every layer and KV head the positions in common, as a share of the larger of the two sets; and the largest
    difference of their sizes."""
    both = [(x, y) for a, b in zip(ours, theirs, strict=True) for x, y in zip(a, b, strict=True)]
    return [len({*x} & {*y}) / max(len(x), len(y)) for x, y in both], max(abs(len(x) - len(y)) for x, y in both)


Case = tuple[Pair, str, int]  # a pair at a share of the prompt, and the tokens kept


def cases_of(each: Sequence[Pair], keep: Sequence[Fraction], shortest: int) -> list[Case]:
    """Every pair at every share of the shortest prompt; a pair that drops nothing only once."""
    sizes = [(part, kept_of(shortest, 1 - float(part))) for part in keep]
    if small := [part for part, n in sizes if n <= 1.1 * WINDOW]:
        raise InputError(f"--keep {small[0]} of {shortest} tokens is no more than kvpress's window, {WINDOW}: give "
                         "a larger share")  # fmt: skip
    return [(p, str(part) if p.press else "1", n) for part, n in sizes for p in each if p.press or part == keep[0]]


@torch.inference_mode()
def compare(ev: Evaluation, theirs: Theirs, c: Context, cases: Sequence[Case]) -> dict[str, Any]:
    """One sample: for each case, the scores of both sides and the positions in common."""
    row, ids, asked, length = c.rows[0], c.prompt, c.asked[0], len(c.prompt)
    first, lengths = ev.prefill([ids])
    torch.manual_seed(row["index"])  # of RandomPress
    by: dict[str, dict[str, Any]] = {"eager": {WHOLE: None}}  # how a prompt is read -> presses by name
    for p, _, n in cases:
        if p.press:
            by.setdefault(p.how, {})[f"{p.theirs}, {n} kept"] = p.press(1 - n / length - 1e-9)
    left, logits = theirs.prefill(ids, by.pop("eager"), "eager")
    for how, presses in by.items():
        left |= theirs.prefill(ids, presses, how)[0] if how == "sdpa" else theirs.read_again(ids, presses)

    def found(tokens: list[int]) -> float:
        return score(row, ev.tk.decode([t for t in tokens if t not in ev.stops]))

    ours = {p.spec(n): our_positions(ev, p.spec(n), lengths) for p, _, n in cases if p.keeps}
    said = {}
    for spec, cache in ev.caches.items():
        ev.model.cache = cache
        said[spec] = ev.decode(first[spec], lengths, [asked], [row["max_new_tokens"]], ev.stops)[0][len(asked) :]
    results, answers = [], dict[str, list[int]]()
    for p, _, n in cases:
        name, spec, result = f"{p.theirs}, {n} kept" if p.press else WHOLE, p.spec(n), dict[str, Any]()
        if name not in answers:  # pairs may have one press
            answers[name] = theirs.answer(left[name], length, int(logits.argmax()), asked, row["max_new_tokens"])
        if p.keeps:
            parts, apart = common(ours[spec], positions(left[name], left[WHOLE]))
            result = dict(common=round(sum(parts) / len(parts), 4), common_min=round(min(parts), 4), sizes_apart=apart)
        results.append(dict(ours=spec, theirs=p.theirs, found=[found(said[spec]), found(answers[name])]) | result)
    apart = float((first["full"][0].float() - logits).abs().max()) if "full" in first else None
    return dict(task=row["task"], length=row["length"], index=row["index"], tokens=length, logits_apart=apart,
                cases=results)  # fmt: skip


def summary(samples: Sequence[dict[str, Any]], cases: Sequence[Case], length: int) -> Iterator[dict[str, Any]]:
    """One row per case: per task, each sample's score on either side; the tokens kept in common."""
    samples = [s for s in samples if s["length"] == length]
    for i, (p, keep, n) in enumerate(cases if samples else ()):
        results = [s["cases"][i] for s in samples]
        row: dict[str, Any] = dict(method=p.name, setting=p.setting, ours=p.spec(n), theirs=p.theirs, note=p.note,
                                   keep=keep, kept=n, seq_len=length)  # fmt: skip
        for task in dict.fromkeys(s["task"] for s in samples):
            both = [r["found"] for s, r in zip(samples, results, strict=True) if s["task"] == task]
            row |= {f"{task}_ours": [a for a, _ in both], f"{task}_theirs": [b for _, b in both]}
        if p.keeps:
            row |= dict(common=round(sum(r["common"] for r in results) / len(results), 4),
                        common_min=min(r["common_min"] for r in results),
                        sizes_apart=max(r["sizes_apart"] for r in results))  # fmt: skip
        yield row


def parser() -> Parser:
    p = Parser(__doc__)
    a = p.add_argument
    a("--checkpoint", default=str(TINY), help="Hugging Face folder or GGUF file")
    a("--method", nargs="+", default=[], help="names of pairs; default: all")
    a("--tasks", default="needle", help="tasks of compare.py that have an answer")
    a("--lengths", default="1024", help="tokens of prompt and answer together")
    a("--samples", type=int, default=20, help="samples per task and length; default: 20")
    a("--keep", default="1/4", help="shares of the shortest prompt that are kept: 1/2,1/4,1/8")
    a("--max-new-tokens", type=int, default=128, help="the most tokens of an answer; a task may have fewer")
    a("--no-chat", action="store_true", help="do not use the checkpoint's chat template")
    add_sources(p)
    add_flags(p)
    p.set_defaults(transformers="")  # whose models have no weights of ours
    return p


def main() -> None:
    opt = check_flags(parser().parse_args())
    opt.tasks = check_names(opt.tasks, opt, leave_out=("repeats",))
    shares = parse_shares("--keep", opt.keep)
    if min(opt.samples, opt.max_new_tokens) < 1:
        raise InputError("--samples and --max-new-tokens must be at least 1")
    try:
        version = metadata.version("kvpress")
    except metadata.PackageNotFoundError:
        raise InputError("kvpress is not installed: pip install kvpress, in an environment of its own") from None
    if unknown := {*opt.method} - {p.name for p in pairs()}:
        known = ", ".join(dict.fromkeys(p.name for p in pairs()))
        raise InputError(f"no pair has {min(unknown)!r}: use {known}")
    ev, each = open_evaluation(opt, 1), [p for p in pairs() if not opt.method or p.name in opt.method]
    settings = {k: getattr(opt, k) for k in SETTINGS} | precision(opt, ev.model) | dict(method=[p.name for p in each])
    data = record(ev.device, **names_of(opt), kvpress=version, settings=settings) | dict(rows=[], samples=[])
    if opt.resume:
        data |= earlier(opt.out, data, ("commit", "fingerprint", "settings"), ("rows", "samples"))
    theirs, chat = Theirs(ev), chat_parts(ev.tk, not opt.no_chat)
    done = {(s["task"], s["length"], s["index"]) for s in data["samples"]}
    by_length: dict[int, list[Case]] = {}
    for length in opt.lengths:
        found = []
        for task in opt.tasks:
            rows = [r | dict(max_new_tokens=min(r["max_new_tokens"], opt.max_new_tokens))
                    for r in rows_of(ev, task, length, opt.samples, opt, chat.tokens(ev.tk))
                    if not r.get("turn")]  # fmt: skip  # only the first of several questions about one context
            found.append(contexts(rows, ev.tk, chat, opt.query_in_prompt, False))
        every = [c for turn in zip(*found, strict=True) for c in turn]  # tasks take turns, if it is interrupted
        by_length[length] = cases = cases_of(each, shares, min(len(c.prompt) for c in every))
        new = max(len(c.asked[0]) + c.rows[0]["max_new_tokens"] for c in every)
        ev.setup({p.spec(n): (p.spec(n), {}) for p, _, n in cases}, max(len(c.prompt) for c in every) + new, new)
        for c in tqdm(every, desc=f"{length}: {len(cases)} pairs", leave=False):
            if (c.rows[0]["task"], length, c.rows[0]["index"]) not in done:
                data["samples"].append(compare(ev, theirs, c, cases))
                data["rows"] = [r for n, known in by_length.items() for r in summary(data["samples"], known, n)]
                if opt.out:
                    write_json(opt.out, data)
    if opt.json:
        print(json.dumps(data))
        return
    for x in data["rows"]:
        mine, other = map(share, both_found(x))
        kept = f"in common {x['common']:.3f}, least {x['common_min']:.3f}; " if "common" in x else ""
        print(f"{x['method']:12} {x['setting']:8} {x['kept']:5} kept; found: ours {mine}, theirs {other}; "
              f"{kept}{x['note']}")  # fmt: skip


if __name__ == "__main__":
    run_cli(main)
