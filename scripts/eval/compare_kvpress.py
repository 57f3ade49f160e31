"""Our eviction methods beside NVIDIA's kvpress: which tokens of a prompt each keeps, and what each then finds.

    python -m scripts.eval.compare_kvpress                                  # the shipped model, 20 needles in 1K
    python -m scripts.eval.compare_kvpress --samples 100 --seq-len 2048 --out kvpress.json

Both sides read the same checkpoint in fp32 and the same prompts, and keep the same number of tokens. A pair is either
both as they come ("default"), or ours set as theirs is ("alike"): what is left of a difference then is rounding among
nearly equal scores. What no setting of ours does is done on their side, and said in the pair's note.

kvpress compresses the context once, ours by h2o and tova also evicts while the question and the answer are decoded.

kvpress wants an older transformers than our other tests: give it an environment of its own (pip install kvpress).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from errors import InputError, Parser, check_range, run_cli
from runtime import TINY, set_threads
from scripts.eval.evaluation import Evaluation
from scripts.eval.samples import case
from scripts.shared.options import check_folder
from scripts.shared.results import check_out, record, write_json

WINDOW, KERNEL, SINKS = 64, 5, 4  # of kvpress
BETA = 5  # of the pyramid that both can make: theirs has 20, and then is SnapKV with up to 1280 tokens kept


@dataclass
class Pair:
    """A press that keeps `kept` tokens of a prompt, and a spec of ours that keeps as many."""

    name: str
    setting: str  # "default" or "alike"
    press: Callable[[float], Any]  # compression ratio -> press
    ours: Callable[[int], str]  # tokens kept -> spec
    note: str


def heavy_and_recent(ratio: float) -> Any:
    """ObservedAttentionPress as H2O is: sums instead of means, and half of what is kept for the newest tokens."""
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
    """As kvpress rounds."""
    return max(1, int(length * (1 - ratio)))


def steeper(kept: int, window: int) -> float:
    """The beta with which our layers, which keep the window beside the sequence, hold what theirs hold with it."""
    return 1 / (1 - (1 - 1 / BETA) * kept / (kept - window))


def pairs() -> list[Pair]:
    import kvpress as k

    like = f"recent={WINDOW},kernel={KERNEL},pool=avg"
    return [
        Pair("streaming", "default", lambda r: k.StreamingLLMPress(r), lambda n: f"streaming,recent={n - SINKS}",
             "4 sinks and the newest tokens"),
        Pair("snapkv", "default", lambda r: k.SnapKVPress(r), lambda n: f"snapkv,budget={n}",
             "theirs: a window of 64, means of 5; ours: 32, the largest of 7"),
        Pair("snapkv", "alike", lambda r: k.SnapKVPress(r), lambda n: f"snapkv,budget={n},{like}",
             "our window and pooling as theirs"),
        Pair("snapkv", "alike", lambda r: k.SnapKVPress(r, window_size=32, kernel_size=7),
             lambda n: f"snapkv,budget={n},pool=avg", "their window and kernel set as ours, our pooling as theirs"),
        Pair("tova", "default", lambda r: k.TOVAPress(r), lambda n: f"tova,budget={n}", "theirs forces the last token"),
        Pair("tova", "alike", lambda r: k.TOVAPress(r), lambda n: f"tova,budget={n},recent=1", "the last token"),
        Pair("h2o", "default", lambda r: k.ObservedAttentionPress(r),
             lambda n: f"h2o,heavy={n - n // 2},recent={n // 2}",
             "theirs: the mean over the queries that can look, no recent tokens"),
        Pair("h2o", "alike", heavy_and_recent, lambda n: f"h2o,heavy={n - n // 2},recent={n // 2}",
             "their scores times the number of queries that can look, and our recent tokens: no setting of ours"),
        Pair("pyramidkv", "default", lambda r: k.PyramidKVPress(r), lambda n: f"pyramidkv,budget={n}",
             "theirs is SnapKV where its last layer would hold less than the window of 64"),
        Pair("pyramidkv", "alike", lambda r: k.PyramidKVPress(r), lambda n: f"snapkv,budget={n},{like}",
             "what theirs falls back to"),
        Pair("pyramidkv", "alike", lambda r: k.PyramidKVPress(r, window_size=8, beta=BETA),
             lambda n: f"pyramidkv,budget={n},recent=8,kernel={KERNEL},pool=avg,beta={steeper(n, 8)}",
             "their window as ours; they count it in the sequence of sizes, a larger beta of ours makes up for it"),
    ]  # fmt: skip


class Theirs:
    """kvpress on a model of transformers."""

    def __init__(self, checkpoint: Path):
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        # eager attention tells its weights, which ObservedAttentionPress needs
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def prefill(self, ids: list[int], press: Any = None) -> Any:
        """A cache of the context, compressed by the press."""
        from transformers import DynamicCache

        cache, tokens = DynamicCache(), torch.tensor([ids])
        if press is None:
            self.model.model(input_ids=tokens, past_key_values=cache)
        else:
            with press(self.model):
                self.model.model(input_ids=tokens, past_key_values=cache)
        return cache

    def answer(self, cache: Any, length: int, query: list[int], new: int) -> list[int]:
        """Greedy tokens after a context of `length` tokens and a question, one token at a time: layers may differ in
        length, and any mask is made for the first one."""
        self.model.set_attn_implementation("sdpa")  # which makes no mask for a single query
        out: list[int] = []
        for i in range(len(query) + new - 1):
            token = query[i] if i < len(query) else out[-1]
            ids, at = torch.tensor([[token]]), torch.tensor([[length + i]])
            logits = self.model(input_ids=ids, past_key_values=cache, position_ids=at).logits
            if i >= len(query) - 1:
                out.append(int(logits[0, -1].argmax()))
        self.model.set_attn_implementation("eager")
        return out


def positions(kept: Tensor, keys: Tensor) -> list[list[int]]:
    """Which of the keys [Hkv, S, D] are kept [Hkv, n, D], by KV head: presses move keys, they do not change them."""
    out = []
    for some, every in zip(kept, keys, strict=True):
        where = {row.numpy().tobytes(): t for t, row in enumerate(every)}
        out.append(sorted(where[row.numpy().tobytes()] for row in some))
    return out


def our_positions(ev: Evaluation, label: str, length: int) -> list[list[list[int]]]:
    """By layer and KV head, what a cache of one row holds of its prompt."""
    out = []
    for method in ev.caches[label]:
        s = method.shape
        q, pos = torch.zeros(1, s.n_head, s.head_dim), torch.tensor([length - 1])
        held = method.attended(q, None, None, pos).position[0]
        out.append([sorted(t for t in head.tolist() if t >= 0) for head in held])
    return out


def common(ours: list[list[list[int]]], theirs: list[list[list[int]]]) -> np.ndarray:
    """Share of positions in common of the larger of two sets, [layer, KV head]."""
    return np.array([
        [len({*a} & {*b}) / max(len(a), len(b)) for a, b in zip(x, y, strict=True)]
        for x, y in zip(ours, theirs, strict=True)
    ])  # fmt: skip


@torch.inference_mode()
def compare(ev: Evaluation, theirs: Theirs, samples: int, seq_len: int, keep: float) -> Iterator[list[dict[str, Any]]]:
    """After every sample, a row for every pair: positions in common, and needles found by either."""
    each = pairs()
    shares: list[list[np.ndarray]] = [[] for _ in each]  # of each sample, [layer, head]
    sizes, found = ([dict[str, list[Any]](ours=[], theirs=[]) for _ in each] for _ in range(2))
    # in a random order: what an interruption leaves is of all depths
    for i in tqdm(np.random.default_rng(0).permutation(samples).tolist(), leave=False):
        context, query, value = case(ev, "needle", seq_len, i, samples)
        if ev.query_in_prompt:  # but for its last token, which both decode
            context, query = context + query[:-1], query[-1:]
        length, n = len(context), kept_of(len(context), 1 - keep)
        plain = theirs.prefill(context).layers
        seen: dict[str, Any] = {}  # of a press that several pairs have
        for p, share, size, hits in zip(each, shares, sizes, found, strict=True):
            press = p.press(1 - n / length - 1e-9)
            if repr(press) not in seen:
                cache = theirs.prefill(context, press)
                held = [positions(x.keys[0], y.keys[0]) for x, y in zip(cache.layers, plain, strict=True)]
                seen[repr(press)] = held, theirs.answer(cache, length, query, len(value))
            of_theirs, answer = seen[repr(press)]
            ev.setup({p.name: (p.ours(n), {})}, length + 64)
            logits, lengths = ev.prefill([context])
            of_ours = our_positions(ev, p.name, length)
            share.append(common(of_ours, of_theirs))
            for side, held in (("ours", of_ours), ("theirs", of_theirs)):
                size[side].append([np.mean([len(head) for head in layer]) for layer in held])
            ev.model.cache = ev.caches[p.name]
            out = ev.decode(logits[p.name], lengths, [query], [len(value)])
            for side, tokens in (("ours", out[0][len(query) :]), ("theirs", answer)):
                hits[side].append(float(tokens[: len(value)] == value))
        yield [row(*x, kept_of(seq_len, 1 - keep)) for x in zip(each, shares, sizes, found, strict=True)]


def row(p: Pair, shares: list[np.ndarray], sizes: dict[str, Any], found: dict[str, Any], n: int) -> dict[str, Any]:
    share = np.stack(shares)  # [sample, layer, head]
    return dict(
        method=p.name, setting=p.setting, press=repr(p.press(0.5)).split("(")[0].split(".")[-1], ours=p.ours(n),
        note=p.note, samples=len(share), equal=round(float((share == 1).mean()), 4),
        common=round(float(share.mean()), 4), common_min=round(float(share.min()), 4),
        common_by_head=np.round(share.mean(0), 4).tolist(),
        kept_by_layer={side: np.round(np.mean(x, 0), 1).tolist() for side, x in sizes.items()},
        needle={side: round(float(np.mean(x)), 4) for side, x in found.items()}, needle_each=found,
    )  # fmt: skip


def main() -> None:
    p = Parser(__doc__)
    a = p.add_argument
    a("--checkpoint", default=str(TINY))
    a("--samples", type=int, default=20, help="needles, at even depths")
    a("--seq-len", type=int, default=1024, help="tokens of a context")
    a("--keep", type=float, default=0.25, help="share of a context that is kept")
    a("--seed", type=int, default=1)
    a("--query-in-prompt", action="store_true", help="the question is known when the context is compressed")
    a("--threads", type=int, help="CPU threads, default: torch's choice")
    a("--out", help="result file, e.g. kvpress.json")
    a("--json", action="store_true", help="print the result object")
    opt = p.parse_args()
    try:
        version = metadata.version("kvpress")
    except metadata.PackageNotFoundError:
        raise InputError("kvpress is not installed: pip install kvpress, in an environment of its own") from None
    check_folder(opt.checkpoint, "kvpress")
    check_range("--samples", opt.samples, 1, 10**6)
    check_range("--seq-len", opt.seq_len, 256, 2**31 - 1)
    if not (opt.seq_len * opt.keep > 1.1 * WINDOW and opt.keep < 1):
        raise InputError(f"--keep {opt.keep} is out of range: give a share below 1 that is more than {WINDOW} tokens, "
                         "the window of kvpress")  # fmt: skip
    check_out(opt.out)
    set_threads(opt.threads)
    ev = Evaluation(Path(opt.checkpoint), torch.device("cpu"), 1, opt.query_in_prompt, opt.seed)
    settings = {x: getattr(opt, x) for x in ("samples", "seq_len", "keep", "seed", "query_in_prompt")}
    data = record("cpu", checkpoint=Path(opt.checkpoint).name, kvpress=version, settings=settings)
    for data["rows"] in compare(ev, Theirs(Path(opt.checkpoint)), opt.samples, opt.seq_len, opt.keep):
        if opt.out:
            write_json(opt.out, data)
    if opt.json:
        print(json.dumps(data))
        return
    for x in data["rows"]:
        needle = ", ".join(f"{side} {share:.2f}" for side, share in x["needle"].items())
        print(f"{x['method']:10} {x['setting']:8} in common {x['common']:.3f}, least {x['common_min']:.3f}, "
              f"equal heads {x['equal']:.3f}; needle {needle}; {x['note']}")  # fmt: skip


if __name__ == "__main__":
    run_cli(main)
