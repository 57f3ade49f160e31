"""Trains the shipped model, models/tiny: a small Llama that retrieves and writes Python- and English-like text.

    python -m models.tiny.training.train_tiny --out models/tiny                 # the CPU recipe, hours on two cores
    python -m models.tiny.training.train_tiny --out models/tiny --recipe gpu    # longer, up to 16K tokens of context

The recipe. No circuit is built in by hand: weights start random. Training begins with the first 3 layers and sequences
of 64 tokens in which random tokens repeat, until the model continues repeats (induction heads form). Then it adds the
other layers, which start as the identity, lengthens the context stage by stage, and mixes in text of the corpus and
retrieval in nine wordings (tasks.py). rope_theta starts at 1e4, with which positions are learned fast, and
is raised as contexts grow. In the early stages an auxiliary loss makes the second layer predict the tokens 1 to 4 back.
With it the model distinguishes keys after 1.6M tokens; a run without it still guessed among four statements of one
wording after 18M. Matrices are trained by Muon, embeddings and norms by AdamW. The loss is a weighted sum of the means
of each kind of token; unpredictable tokens are masked.

Batches depend only on (seed, step). The state is saved every few minutes; the same command continues from it.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from cache.calibration import write_tensors
from kernels.rope import RopeArgs
from loading.checkpoint import save_checkpoint_tensors
from model import Transformer
from models.tiny.training.data import VOCAB, Pieces, make_tasks, prepare
from models.tiny.training.muon import Muon
from models.tiny.training.recipe import ARGS, RECIPES
from models.tiny.training.tasks import ANSWER, PLAIN, REPEAT, RULER, TEXT
from runtime.errors import InputError, run_cli
from runtime.machine import pick_device, set_threads, written
from runtime.options import Parser
from scripts.shared.results import check_out, write_json

MUON_LR, ADAM_LR = 0.01, 2.5e-3
BACK = 4  # how many tokens back the auxiliary loss predicts
WARMUP, DECAY, FINAL = 40, 0.3, 0.05  # warm-up steps; share of the tokens over which the rate decays; the last rate


# ---- training ----


def init_weights(model: Transformer, seed: int, first: int) -> None:
    """Normal, scaled by fan-in. Matrices that write to the residual stream start small, or at zero in later layers."""
    gen = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if p.dim() == 2:
            std = 0.02 if "tok_embeddings" in name else p.shape[1] ** -0.5
            if name.endswith(("wo.weight", "w2.weight")):
                std *= 0.3 if int(name.split(".")[1]) < first else 0.0
            with torch.no_grad():
                p.copy_(torch.randn(p.shape, generator=gen) * std)


Trunk = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # tokens, cos, sin -> output, second layer's output


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
        # The auxiliary heads. To match a key that is not right before its value, a position must know several tokens
        # before it. Nothing rewards that until a later layer matches them, and that layer has nothing to match before.
        # A direct loss breaks the circle. The heads are not part of the shipped model.
        self.back = torch.nn.Parameter(torch.zeros(BACK, ARGS.dim, ARGS.dim))
        rest = [(n, p) for n, p in self.model.named_parameters() if p.dim() < 2 or "tok_embeddings" in n]
        groups = [dict(params=[p for _, p in rest if p.dim() == d], scale=s) for d, s in ((2, 1.0), (1, 0.25))]
        groups.append(dict(params=[self.back], scale=1.0))
        self.adam = torch.optim.AdamW(groups, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0)
        self.at: dict[str, Any] = dict(step=0, tokens=0, stage=0, stage_tokens=0, ema={}, log=[])
        self.load()

    # the state is a safetensors file with JSON in its header, never a pickle
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
        write_tensors(path, self.state(), {"at": json.dumps(self.at)})

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
        print(f"continuing at step {self.at['step']}, {self.at['tokens'] / 1e6:.2f}M tokens", file=sys.stderr)

    def rate(self) -> float:
        """The learning rate warms up, stays constant, and decays over the last share DECAY of the recipe's tokens,
        counted from its second stage on."""
        total = sum(s.tokens for s in self.stages[1:]) * 1e6
        i = self.at["stage"]
        done = (sum(s.tokens for s in self.stages[1:i]) * 1e6 + self.at["stage_tokens"]) if i else 0
        left = 1 - done / total
        return min(1, (self.at["step"] + 1) / WARMUP) * (1 if left > DECAY else FINAL + (1 - FINAL) * left / DECAY)

    def losses(self, trunk: Trunk, ids: np.ndarray, labels: np.ndarray, tables: tuple[Tensor, Tensor]):
        """Cross entropy, correctness and kind of every position that has a target: three [N] tensors; and the second
        layer's output [B, T, dim]."""
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
        """Cross entropy of predicting the tokens 1 to BACK positions back from `early` [B, T, dim], at every fourth
        position."""
        x, first = torch.from_numpy(ids).to(self.opt.device), int(self.at["step"] % 4)
        with torch.autocast(self.opt.device.split(":")[0], torch.bfloat16):
            some = F.rms_norm(early[:, BACK + first :: 4], (ARGS.dim,))
            logits = torch.einsum("btd,jde->jbte", some, self.back) @ self.model.tok_embeddings.weight.T
        places = torch.arange(BACK + first, early.shape[1], 4)
        targets = torch.stack([x[:, places - j] for j in range(1, BACK + 1)])
        return F.cross_entropy(logits.float().flatten(0, 2), targets.flatten())

    def trunk(self, n_layer: int) -> Trunk:
        """A teacher-forced pass through the first n layers and the last norm -> its output, and the second layer's."""
        model = self.model

        def run(tokens: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
            x = early = model.tok_embeddings(tokens)
            for i, block in enumerate(model.layers[:n_layer]):
                x = block(x, block.attention.uncached(cos, sin))
                early = x if i == 1 else early
            return model.norm(x), early

        return run

    def set_theta(self, theta: float) -> None:
        self.model.args.rope = RopeArgs(theta=theta)

    def train(self) -> None:
        at, saved = self.at, time.time()
        stop: list[int] = []  # a signal ends the run after the current step, with the state saved
        for sig in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sig, lambda number, frame: stop.append(number))
        while at["stage"] < len(self.stages):
            st = self.stages[at["stage"]]
            self.set_theta(st.theta)
            torch._dynamo.reset()
            trunk = torch.compile(self.trunk(st.n_layer), dynamic=False) if self.opt.compile else self.trunk(st.n_layer)
            cos, sin = self.model.rope_tables(st.seq_len)
            tables = cos.clone(), sin.clone()
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
            print(json.dumps(self.evaluate([st.seq_len])), file=sys.stderr if self.opt.json else sys.stdout, flush=True)

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
        """Writes the Hugging Face folder: bf16 weights, config, SentencePiece vocabulary."""
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
        write_tensors(out / "model.safetensors", save_checkpoint_tensors(self.model, torch.bfloat16), {"format": "pt"})
        for name, obj in (("config", config), ("tokenizer_config", tok_config), ("training", training)):
            write_json(out / f"{name}.json", obj)
        for name in ("tokenizer.model", "words.json"):
            with written(out / name) as tmp:
                tmp.write_bytes((self.data / name).read_bytes())


def main() -> None:
    p = Parser(__doc__)
    a = p.add_argument
    a("--out", default="models/tiny", help="folder of the checkpoint, written when training ends; default: models/tiny")
    a("--run", default="runs/tiny", help="folder of the data and of the state to resume from; default: runs/tiny")
    a("--recipe", choices=RECIPES, default="cpu", help="default: cpu")
    a("--seed", type=int, default=0, help="seed of weights and batches; default: 0")
    a("--device", help="cpu, cuda, cuda:1 ...; default: a GPU if there is one")
    a("--threads", type=int, help="CPU threads, default: torch's choice")
    a("--compile", action=argparse.BooleanOptionalAction, default=True, help="compile the step (default: yes)")
    a("--export-only", action="store_true", help="write the checkpoint from the saved state, train nothing")
    a("--evaluate", metavar="T,T,..", help="only evaluate the saved state at these lengths")
    a("--json", action="store_true", help="print a JSON object when done: the checkpoint's folder, steps and tokens")
    opt = p.parse_args()
    set_threads(opt.threads)
    opt.device = str(pick_device(opt.device))
    try:
        lengths = [int(T) for T in (opt.evaluate or "").split(",") if T]
    except ValueError:
        raise InputError(f"--evaluate {opt.evaluate} is not a list such as 512,1024") from None
    if (lengths or opt.export_only) and not (Path(opt.run) / "state.safetensors").is_file():
        raise InputError(f"no saved state in {opt.run}: train first, or give another --run")
    for flag, folder in (("--run", opt.run), *(() if lengths else (("--out", opt.out),))):
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise InputError(f"{flag}: cannot make the folder {folder}: {e.strerror}") from None
        check_out(Path(folder) / "config.json", flag)
    trainer = Trainer(opt)
    if lengths or opt.export_only:
        trainer.set_theta(trainer.stages[min(trainer.at["stage"], len(trainer.stages) - 1)].theta)
    for T in lengths:
        print(json.dumps(trainer.evaluate([T], n=50)), flush=True)
    if lengths:
        return
    if not opt.export_only:
        trainer.train()
    trainer.export(Path(opt.out))
    if opt.json:
        print(json.dumps(dict(checkpoint=opt.out, steps=trainer.at["step"], tokens=trainer.at["tokens"])))


if __name__ == "__main__":
    run_cli(main)
