"""Train the shipped model, models/tiny: a small Llama that retrieves and writes Python- and English-like text.

    python scripts/train_tiny.py --out models/tiny                 # the CPU recipe, hours on two cores
    python scripts/train_tiny.py --out models/tiny --recipe gpu    # longer, and up to 16K tokens of context

The recipe. Nothing is seeded by hand: weights start random, and training starts with sequences of 64 tokens in which
random tokens repeat and with the first 3 layers alone, until the model continues repeats (induction heads form); then
it adds the other layers, which start as the identity, lengthens the context stage by stage and mixes in text
(scripts/corpus.py) and retrieval in nine wordings (scripts/tasks.py). rope_theta starts at 1e4, where positions are
learned fast, and is raised once contexts grow. An auxiliary loss, in the early stages, has the second layer name the
tokens 1 to 4 back: with it keys are told apart after 1.6M tokens; a run without it still guessed among four statements
of one wording after 18M. Muon on the matrices, AdamW on embeddings and
norms; the loss is a weighted sum of the per-kind means, and unpredictable tokens are masked.

Batches depend on (seed, step) alone. The state is saved every few minutes; the same command continues from it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import sentencepiece as spm
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from errors import InputError, Parser, run_cli  # noqa: E402
from model import ModelArgs, RopeArgs, Transformer, save_checkpoint_tensors  # noqa: E402
from scripts.corpus import collect  # noqa: E402
from scripts.tasks import ANSWER, PLAIN, REPEAT, RULER, TEXT, Tasks  # noqa: E402

VOCAB = 2048
ARGS = ModelArgs(dim=256, n_layer=6, n_head=8, n_kv_head=4, head_dim=64, ffn_dim=512, vocab_size=VOCAB,
                 max_seq_len=8192, norm_eps=1e-5, tie_embeddings=True)  # fmt: skip


@dataclass
class Stage:
    seq_len: int
    batch: int
    tokens: float  # millions
    theta: float
    mix: dict[str, float]
    n_layer: int = 6  # the first n layers train; those added later start as the identity
    answers: float = 1.0  # weight of the answers' loss; text weighs 1
    repeats: float = 0.5  # weight of the repeats' loss
    context: float = 0.0  # weight of an auxiliary loss: the second layer names the tokens 1 to 4 back
    until: float = 2.0  # the stage ends early once repeats are continued this accurately


def _mix(text: float, rep: float, kv: float, inter: float, hay: float, recall: float = 0) -> dict[str, float]:
    return dict(plain_text=text, repeats=rep, key_values=kv, interleaved=inter, haystack=hay, recall=recall)


SHORT = _mix(0, 0.45, 0.15, 0, 0, recall=0.4)
RECIPES: dict[str, list[Stage]] = {
    "cpu": [
        Stage(64, 64, 4, 1e4, SHORT, n_layer=3, repeats=1, context=0.5, until=0.8),
        Stage(128, 32, 0.8, 1e4, _mix(0.15, 0.2, 0.2, 0.15, 0, recall=0.3), repeats=1, context=0.3),
        Stage(256, 16, 1.25, 1e5, _mix(0.4, 0.2, 0.1, 0.2, 0, recall=0.1), context=0.2),
        Stage(512, 8, 1.2, 5e5, _mix(0.45, 0.15, 0.05, 0.2, 0.1, recall=0.05), context=0.1),
        Stage(1024, 8, 0.9, 5e5, _mix(0.45, 0.15, 0.05, 0.2, 0.15)),
        Stage(2048, 4, 1.3, 5e5, _mix(0.45, 0.15, 0.05, 0.15, 0.2)),
        Stage(4096, 2, 0.6, 5e5, _mix(0.45, 0.15, 0.05, 0.15, 0.2)),
    ],
    "gpu": [
        Stage(64, 128, 20, 1e4, SHORT, n_layer=3, repeats=1, context=0.5, until=0.9),
        Stage(128, 128, 10, 1e4, _mix(0.15, 0.2, 0.2, 0.15, 0, recall=0.3), repeats=1, context=0.3),
        Stage(256, 128, 30, 1e5, _mix(0.4, 0.2, 0.1, 0.2, 0, recall=0.1), context=0.2),
        Stage(512, 64, 60, 5e5, _mix(0.45, 0.15, 0.05, 0.2, 0.1, recall=0.05), context=0.1),
        Stage(1024, 32, 80, 5e5, _mix(0.45, 0.15, 0.05, 0.2, 0.15)),
        Stage(2048, 16, 100, 5e5, _mix(0.45, 0.15, 0.05, 0.15, 0.2)),
        Stage(4096, 8, 60, 5e5, _mix(0.45, 0.15, 0.05, 0.15, 0.2)),
        Stage(8192, 4, 40, 5e5, _mix(0.45, 0.15, 0.05, 0.15, 0.2)),
        Stage(16384, 2, 15, 5e5, _mix(0.45, 0.15, 0.05, 0.15, 0.2)),
    ],
}
MUON_LR, ADAM_LR, WEIGHT_DECAY = 0.01, 2.5e-3, 0.02
BACK = 4  # tokens back that the auxiliary loss asks for
WARMUP, DECAY, FINAL = 40, 0.3, 0.05  # steps up; share of the tokens over which the rate falls; the last rate


# ---- data ----


class Pieces:
    """The SentencePiece vocabulary, with the two things scripts/tasks.py asks of a tokenizer."""

    def __init__(self, path: Path):
        self.sp = spm.SentencePieceProcessor(model_file=str(path))
        self.vocab_size, self.bos_id = self.sp.get_piece_size(), self.sp.bos_id()

    def encode(self, text: str, bos: bool = False) -> list[int]:
        return [self.bos_id] * bos + self.sp.encode(text)


def prepare(data: Path) -> None:
    """Vocabulary, token arrays and word lists from the corpus, written once into `data`."""
    if (data / "meta.json").exists():
        return
    data.mkdir(parents=True, exist_ok=True)
    docs = collect(progress=True)
    train = [d for d in docs if not d.held_out]
    sample = data / "vocabulary.txt"
    prose = "\n".join(d.text for d in train if d.kind == "prose")
    sample.write_text(prose + "\n" + "\n".join(d.text for d in train if d.kind == "code"), encoding="utf-8")
    spm.SentencePieceTrainer.train(
        input=str(sample), model_prefix=str(data / "tokenizer"), vocab_size=VOCAB, model_type="bpe", byte_fallback=True,
        split_digits=True, normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False,
        allow_whitespace_only_pieces=True, user_defined_symbols=["\n"], character_coverage=0.9995,
        input_sentence_size=200_000, shuffle_input_sentence=True, max_sentence_length=8000, minloglevel=2,
        unk_id=0, bos_id=1, eos_id=2, pad_id=-1, num_threads=2,
    )  # fmt: skip
    sample.unlink()
    pieces = Pieces(data / "tokenizer.model")
    meta: dict[str, dict[str, float]] = {}
    for split in ("train", "held_out"):
        for kind in ("code", "prose"):
            texts = [d.text for d in docs if d.kind == kind and d.held_out == (split == "held_out")]
            ids = [i for t in tqdm(texts, desc=f"{split} {kind}") for i in pieces.encode(t, bos=True)]
            np.save(data / f"{split}_{kind}.npy", np.array(ids, dtype=np.uint16), allow_pickle=False)
            n_bytes = sum(len(t.encode()) for t in texts)
            meta[f"{split}_{kind}"] = dict(documents=len(texts), tokens=len(ids), bytes=n_bytes)
    counts = Counter(re.findall(r"(?<![A-Za-z_])[a-z]{3,8}(?![A-Za-z_(])", prose))
    words = [w for w, _ in counts.most_common(5000) if len(pieces.encode(" " + w)) <= 3]
    np.random.default_rng(0).shuffle(words)
    (data / "words.json").write_text(json.dumps(dict(train=words[:-400], held_out=words[-400:])))
    (data / "meta.json").write_text(json.dumps(meta, indent=1))


def make_tasks(data: Path, held_out: bool, seed: object, pieces: Pieces | None = None) -> Tasks:
    split = "held_out" if held_out else "train"
    texts = [np.load(data / f"{split}_{kind}.npy", mmap_mode="r") for kind in ("code", "prose")]
    words = json.loads((data / "words.json").read_text())[split]
    return Tasks(pieces or Pieces(data / "tokenizer.model"), texts, [0.5, 0.5], words, seed)


# ---- optimizer ----


class Muon:
    """Momentum orthogonalized by Newton-Schulz (Jordan et al. 2024), q, k, v, gate and up each on its own.

    Matrices of one shape are stepped as one batch: on a CPU that is several times faster than one by one.
    """

    def __init__(self, model: Transformer, beta: float = 0.95):
        a, self.beta = model.args, beta
        self.views: list[tuple[torch.nn.Parameter, slice]] = []
        for name, p in model.named_parameters():
            if p.dim() != 2 or "tok_embeddings" in name:
                continue
            q, kv = a.n_head * a.head_dim, a.n_kv_head * a.head_dim
            sizes = [q, kv, kv] if "wqkv" in name else [a.ffn_dim] * 2 if "w13" in name else [p.shape[0]]
            ends = np.cumsum([0, *sizes])
            self.views += [(p, slice(int(i), int(j))) for i, j in zip(ends[:-1], ends[1:], strict=True)]
        self.groups: dict[tuple[int, int], list[tuple[torch.nn.Parameter, slice]]] = {}
        for p, s in self.views:
            r, c = s.stop - s.start, p.shape[1]
            self.groups.setdefault((min(r, c), max(r, c)), []).append((p, s))
        dev = self.views[0][0].device
        self.momentum = {k: torch.zeros(len(v), *k, device=dev) for k, v in self.groups.items()}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for shape, views in self.groups.items():
            views = [(p, s) for p, s in views if p.grad is not None]  # layers that wait for their stage have none
            if not views:
                continue
            grads = [p.grad[s] for p, s in views]  # type: ignore[index]
            G = torch.stack([g if g.shape[0] <= g.shape[1] else g.T for g in grads])
            m = self.momentum[shape][: len(views)].lerp_(G, 1 - self.beta)
            X = G.lerp(m, self.beta)
            X = (X / (X.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
            for _ in range(5):
                A = X @ X.mT
                X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
            for (p, s), x, g in zip(views, X, grads, strict=True):
                w = p.data[s]
                w.mul_(1 - lr * WEIGHT_DECAY)
                tall = max(1.0, g.shape[0] / g.shape[1]) ** 0.5
                w.add_(x if g.shape[0] <= g.shape[1] else x.T, alpha=-lr * tall)


# ---- training ----


def init_weights(model: Transformer, seed: int, first: int) -> None:
    """Normal, fan-in scaled; what writes to the residual stream starts small, and at zero in layers added later."""
    gen = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if p.dim() == 2:
            std = 0.02 if "tok_embeddings" in name else p.shape[1] ** -0.5
            if name.endswith(("wo.weight", "w2.weight")):
                std *= 0.3 if int(name.split(".")[1]) < first else 0.0
            with torch.no_grad():
                p.copy_(torch.randn(p.shape, generator=gen) * std)


class Trainer:
    def __init__(self, opt: argparse.Namespace):
        self.opt, self.run, self.data = opt, Path(opt.run), Path(opt.run) / "data"
        prepare(self.data)
        self.pieces = Pieces(self.data / "tokenizer.model")
        self.stages = RECIPES[opt.recipe]
        self.model = Transformer(ARGS)
        init_weights(self.model, opt.seed, self.stages[0].n_layer)
        self.model.to(opt.device)
        self.muon = Muon(self.model)
        # The auxiliary heads. To match a key that stands away from its value, a position must know several tokens
        # before it; nothing rewards that until a later layer matches them, and nothing to match exists until then.
        # Asking for it directly breaks that circle. They are not part of the shipped model.
        self.back = torch.nn.Parameter(torch.zeros(BACK, ARGS.dim, ARGS.dim))
        rest = [(n, p) for n, p in self.model.named_parameters() if p.dim() < 2 or "tok_embeddings" in n]
        groups = [dict(params=[p for _, p in rest if p.dim() == d], scale=s) for d, s in ((2, 1.0), (1, 0.25))]
        groups.append(dict(params=[self.back], scale=1.0))
        self.adam = torch.optim.AdamW(groups, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0)
        self.at = dict(step=0, tokens=0, stage=0, stage_tokens=0, ema={}, log=[])
        self.load()

    # The state is safetensors with JSON in its header, never a pickle.
    def state(self) -> dict[str, Tensor]:
        out = {f"model.{n}": p.data for n, p in self.model.named_parameters()} | {"back": self.back.data}
        out |= {f"muon.{i}": m for i, m in enumerate(self.muon.momentum.values())}
        for g, group in enumerate(self.adam.param_groups):
            for i, p in enumerate(group["params"]):
                for k, v in self.adam.state.get(p, {}).items():
                    out[f"adam.{g}.{i}.{k}"] = v
        return out

    def save(self) -> None:
        path = self.run / "state.safetensors"
        save_file(self.state(), path.with_suffix(".tmp"), metadata={"at": json.dumps(self.at)})
        os.replace(path.with_suffix(".tmp"), path)

    def load(self) -> None:
        path = self.run / "state.safetensors"
        if not path.exists():
            return
        with safe_open(path, framework="pt") as f:
            self.at = json.loads(f.metadata()["at"])
            keys = set(f.keys())
            for n, p in self.model.named_parameters():
                p.data.copy_(f.get_tensor(f"model.{n}"))
            if "back" in keys:
                self.back.data.copy_(f.get_tensor("back"))
            for i, m in enumerate(self.muon.momentum.values()):
                m.copy_(f.get_tensor(f"muon.{i}"))
            for g, group in enumerate(self.adam.param_groups):
                for i, p in enumerate(group["params"]):
                    names = [k for k in keys if k.startswith(f"adam.{g}.{i}.")]
                    if names:
                        self.adam.state[p] = {k.split(".", 3)[3]: f.get_tensor(k).to(p.device) for k in names}
                        self.adam.state[p]["step"] = self.adam.state[p]["step"].cpu()
        print(f"continuing at step {self.at['step']}, {self.at['tokens'] / 1e6:.2f}M tokens", flush=True)

    def rate(self) -> float:
        """Warm up, stay, and fall over the last DECAY of the tokens the recipe has from its second stage on."""
        total = sum(s.tokens for s in self.stages[1:]) * 1e6
        i = self.at["stage"]
        done = (sum(s.tokens for s in self.stages[1:i]) * 1e6 + self.at["stage_tokens"]) if i else 0
        left = 1 - done / total
        return min(1, (self.at["step"] + 1) / WARMUP) * (1 if left > DECAY else FINAL + (1 - FINAL) * left / DECAY)

    def losses(self, trunk, ids: np.ndarray, labels: np.ndarray, tables: tuple[Tensor, Tensor]):
        """Cross entropy, correctness and kind of every position that has a target: three [N] tensors."""
        x = torch.from_numpy(ids).to(self.opt.device)
        kind = torch.from_numpy(labels).to(self.opt.device)[:, 1:].reshape(-1)
        target = x[:, 1:].reshape(-1)
        with torch.autocast(self.opt.device.split(":")[0], torch.bfloat16):
            h, early = trunk(x[:, :-1].contiguous(), *tables)
            h, at = h.flatten(0, 1), kind.nonzero()[:, 0]
            logits = self.model.output(h[at]).float()
        ce = F.cross_entropy(logits, target[at], reduction="none")
        return ce, (logits.detach().argmax(-1) == target[at]).float(), kind[at], early

    def context_loss(self, early: Tensor, ids: np.ndarray) -> Tensor:
        """Cross entropy of naming the tokens 1 to BACK places back from `early` [B, T, dim], at every fourth place."""
        x, first = torch.from_numpy(ids).to(self.opt.device), int(self.at["step"] % 4)
        with torch.autocast(self.opt.device.split(":")[0], torch.bfloat16):
            some = F.rms_norm(early[:, BACK + first :: 4], (ARGS.dim,))
            logits = torch.einsum("btd,jde->jbte", some, self.back) @ self.model.tok_embeddings.weight.T
        places = torch.arange(BACK + first, early.shape[1], 4)
        targets = torch.stack([x[:, places - j] for j in range(1, BACK + 1)])
        return F.cross_entropy(logits.float().flatten(0, 2), targets.flatten())

    def trunk(self, n_layer: int):
        """Transformer.trunk over the first n layers -> its output, and the second layer's."""
        model = self.model

        def run(tokens: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
            x = early = model.tok_embeddings(tokens)
            for i, block in enumerate(model.layers[:n_layer]):
                x = block(x, cos, sin)
                early = x if i == 1 else early
            return model.norm(x), early

        return run

    def set_theta(self, theta: float) -> None:
        self.model.args.rope = RopeArgs(theta=theta)
        self.model._rope = None

    def train(self) -> None:
        at, saved = self.at, time.time()
        stop: list[int] = []  # a signal ends the run after the step it falls into, with the state saved
        for sig in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sig, lambda number, frame: stop.append(number))
        while at["stage"] < len(self.stages):
            st = self.stages[at["stage"]]
            self.set_theta(st.theta)
            torch._dynamo.reset()
            trunk = torch.compile(self.trunk(st.n_layer), dynamic=False) if self.opt.compile else self.trunk(st.n_layer)
            tables = tuple(t.clone() for t in self.model.rope_tables(st.seq_len))
            todo = int(st.tokens * 1e6)
            bar = tqdm(total=todo, initial=at["stage_tokens"], unit="tok", desc=f"T{st.seq_len}", mininterval=10)
            while at["stage_tokens"] < todo and at["ema"].get("acc3", 0) < st.until:
                tasks = make_tasks(self.data, False, [self.opt.seed, at["step"]], self.pieces)
                ids, labels = tasks.batch(st.batch, st.seq_len, st.mix)
                ce, ok, kind, early = self.losses(trunk, ids, labels, tables)
                loss = torch.zeros((), device=self.opt.device)
                if st.context:
                    back = self.context_loss(early, ids)
                    loss = st.context * back
                    at["ema"]["back"] = 0.95 * at["ema"].get("back", back.item()) + 0.05 * back.item()
                for k, weight in ((TEXT, 1.0), (ANSWER, st.answers), (REPEAT, st.repeats)):
                    if (sel := kind == k).any():
                        mean = ce[sel].mean()
                        loss = loss + weight * mean
                        for name, v in ((f"ce{k}", mean.item()), (f"acc{k}", ok[sel].mean().item())):
                            at["ema"][name] = 0.95 * at["ema"].get(name, v) + 0.05 * v
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                rate = self.rate()
                for group in self.adam.param_groups:
                    group["lr"] = ADAM_LR * rate * group["scale"]
                self.muon.step(MUON_LR * rate)
                self.adam.step()
                self.model.zero_grad(set_to_none=True)
                n = st.batch * st.seq_len
                at["step"], at["tokens"], at["stage_tokens"] = at["step"] + 1, at["tokens"] + n, at["stage_tokens"] + n
                bar.update(n)
                if at["step"] % 20 == 0:
                    e = at["ema"]
                    line = dict(step=at["step"], tokens=at["tokens"], seq_len=st.seq_len, rate=round(rate, 3),
                                **{k: round(v, 4) for k, v in sorted(e.items())})  # fmt: skip
                    at["log"].append(line)
                    shown = ("ce", "ac", "ba", "ra")
                    bar.set_postfix_str(" ".join(f"{k} {v}" for k, v in line.items() if k[:2] in shown))
                if stop or time.time() - saved > 180:
                    self.save()
                    saved = time.time()
                if stop:
                    bar.close()
                    raise KeyboardInterrupt
            bar.close()
            at["stage"], at["stage_tokens"] = at["stage"] + 1, 0
            at["ema"] = {}
            self.save()
            print(json.dumps(self.evaluate([st.seq_len])), flush=True)

    # ---- evaluation by teacher forcing: exact match of every answer token under argmax ----

    @torch.no_grad()
    def evaluate(self, lengths: list[int], n: int = 16) -> dict:
        out: dict[str, dict] = {}
        whole = self.trunk(ARGS.n_layer)
        for T in lengths:
            tables = self.model.rope_tables(T)
            row: dict[str, float] = {}
            cases = dict(needle=dict(n=1, fmt=PLAIN, n_query=1), needle4=dict(n=4, fmt=PLAIN, n_query=1),
                         ruler=dict(n=1, fmt=RULER, n_query=1), ruler4=dict(n=4, fmt=RULER, n_query=1))  # fmt: skip
            for name, kw in cases.items():
                hits = []
                for i in range(n if T >= 256 else 0):
                    ids, labels = make_tasks(self.data, True, [7, T, i], self.pieces).haystack(
                        T, digits_only=True, **kw
                    )
                    _, ok, kind, _ = self.losses(whole, ids[None], labels[None], tables)
                    hits.append(ok[kind == ANSWER].min().item())
                if hits:
                    row[name] = round(float(np.mean(hits)), 3)
            for name, kind_id, method in (("text", TEXT, "plain_text"), ("repeats", REPEAT, "repeats")):
                got = []
                for i in range(max(4, 8192 // T)):
                    ids, labels = getattr(make_tasks(self.data, True, [8, T, i], self.pieces), method)(T)
                    ce, ok, kind, _ = self.losses(whole, ids[None], labels[None], tables)
                    got.append((ce if name == "text" else ok)[kind == kind_id].mean().item())
                row[name] = round(float(np.nanmean(got)), 3)
            out[str(T)] = row
        return out

    def export(self, out: Path) -> None:
        """The Hugging Face folder: bf16 weights, config, SentencePiece vocabulary; each written, then renamed."""
        out.mkdir(parents=True, exist_ok=True)
        config = dict(
            architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=VOCAB, hidden_size=ARGS.dim,
            intermediate_size=ARGS.ffn_dim, num_hidden_layers=ARGS.n_layer, num_attention_heads=ARGS.n_head,
            num_key_value_heads=ARGS.n_kv_head, head_dim=ARGS.head_dim, hidden_act="silu",
            max_position_embeddings=max(4096, *(s.seq_len for s in self.stages)), rms_norm_eps=ARGS.norm_eps,
            rope_theta=self.stages[-1].theta, rope_scaling=None, attention_bias=False, mlp_bias=False,
            tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, torch_dtype="bfloat16",
        )  # fmt: skip
        tok_config = dict(
            tokenizer_class="LlamaTokenizer", add_bos_token=True, add_eos_token=False, bos_token="<s>",
            eos_token="</s>", unk_token="<unk>", legacy=False, clean_up_tokenization_spaces=False,
        )  # fmt: skip
        corpus = json.loads((self.data / "meta.json").read_text())
        training = dict(
            recipe=self.opt.recipe, seed=self.opt.seed, stages=[asdict(s) for s in self.stages], corpus=corpus,
            tokens=self.at["tokens"], steps=self.at["step"], log=self.at["log"][:: max(1, len(self.at["log"]) // 150)],
        )  # fmt: skip
        save_file(save_checkpoint_tensors(self.model, torch.bfloat16), out / "model.tmp", metadata={"format": "pt"})
        os.replace(out / "model.tmp", out / "model.safetensors")
        for name, obj in (("config", config), ("tokenizer_config", tok_config), ("training", training)):
            (out / "part.tmp").write_text(json.dumps(obj, indent=1) + "\n")
            os.replace(out / "part.tmp", out / f"{name}.json")
        for name in ("tokenizer.model", "words.json"):
            (out / "part.tmp").write_bytes((self.data / name).read_bytes())
            os.replace(out / "part.tmp", out / name)


def main() -> None:
    p = Parser(__doc__)
    p.add_argument("--out", default="models/tiny", help="where the checkpoint goes when training ends")
    p.add_argument("--run", default="runs/tiny", help="folder of the data and of the state that training resumes from")
    p.add_argument("--recipe", choices=RECIPES, default="cpu")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--threads", type=int, default=0, help="CPU threads, 0: all")
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument(
        "--export-only", action="store_true", help="write the checkpoint from the saved state, train nothing"
    )
    p.add_argument("--evaluate", metavar="T,T,..", help="only evaluate the saved state at these lengths")
    opt = p.parse_args()
    if opt.threads:
        torch.set_num_threads(opt.threads)
    trainer = Trainer(opt)
    if opt.evaluate or opt.export_only:
        if not trainer.at["step"]:
            raise InputError(f"no saved state in {opt.run}: train first")
        trainer.set_theta(trainer.stages[min(trainer.at["stage"], len(trainer.stages) - 1)].theta)
    if opt.evaluate:
        for T in opt.evaluate.split(","):
            print(json.dumps(trainer.evaluate([int(T)], n=50)), flush=True)
        return
    if not opt.export_only:
        trainer.train()
    trainer.export(Path(opt.out))


if __name__ == "__main__":
    run_cli(main)
