"""One pass over text -> calibration.safetensors: bases, channel rankings and head scores for the methods.

    python calibrate.py --checkpoint models/tiny                    # default text: English and Python on this machine
    python calibrate.py --checkpoint CKPT --data notes.txt --samples 128 --seq-len 4096

What the file holds, per layer i as `layers.{i}.NAME` (n = KV heads, g = query heads per KV head, d = head_dim):

    sals.basis [n*d, n*d], sals.eigenvalues [n*d]     eigenvectors (columns) of the uncentred K^T K, all heads jointly,
                                                      before rotation (SALS, Sec. 4.2)
    oja.k_basis, oja.v_basis [n, d, d], oja.k_eigenvalues, oja.v_eigenvalues [n, d]
                                                      K^T K + sum over the group of Q^T Q after rotation; V^T V (OjaKV)
    channels.qk, channels.q, channels.k [n, d]        channels by falling mean |q_c k_c|, |q_c|, |k_c| after rotation
                                                      (Double Sparsity, Sec. 4.1)
    razor.induction, razor.echo [n*g], razor.after [n*g, 4]
                                                      attention mass on repeated random tokens (Razor, Sec. 3.3)
    pca.basis [n, d, d], pca.mean [n, d], pca.eigenvalues [n, d]
                                                      centred PCA of keys after rotation, per head (Loki)
    whiten.moments [dim, dim]                         second moments of the attention's input (Palu's whitening)

Everything is a mean over tokens of sums kept in float64: memory is O(width^2), not O(tokens). Ctrl-C keeps what is done
in a .partial file, and the same command continues from it; the result is written under another name and renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from errors import InputError, Parser, run_cli
from model import ModelArgs, Transformer, apply_rope, load_checkpoint

FILE, PARTIAL, VERSION = "calibration.safetensors", "calibration.partial.safetensors", 2
SAVE_EVERY = 60  # seconds
AFTER = 4  # places after an earlier copy whose attention is measured
QUERY_BLOCK = 256  # queries of the random-token pass at a time: bounds its attention matrix


def shapes(args: ModelArgs) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of one layer."""
    n, d, nd = args.n_kv_head, args.head_dim, args.n_kv_head * args.head_dim
    per_head = {"oja.k": (n, d), "oja.v": (n, d), "pca": (n, d)}
    out: dict[str, tuple[int, ...]] = {"sals.basis": (nd, nd), "sals.eigenvalues": (nd,)}
    for name, (heads, width) in per_head.items():
        sep = "_" if name.startswith("oja") else "."
        out |= {f"{name}{sep}basis": (heads, width, width), f"{name}{sep}eigenvalues": (heads, width)}
    out |= {f"channels.{kind}": (n, d) for kind in ("qk", "q", "k")}
    out |= {"razor.induction": (args.n_head,), "razor.echo": (args.n_head,), "razor.after": (args.n_head, AFTER)}
    out |= {"pca.mean": (n, d)}
    return out | {"whiten.moments": (args.dim, args.dim)}


class Calibration:
    """The tensors of a calibration file, in fp32 (channel rankings int64) on the CPU, with its metadata."""

    def __init__(self, tensors: dict[str, Tensor], n_layer: int, meta: dict[str, Any] | None = None):
        self.tensors, self.n_layer, self.meta = tensors, n_layer, meta or {}

    def get(self, layer: int, name: str) -> Tensor:
        """One tensor of one layer, e.g. get(3, "sals.basis")."""
        return self.tensors[f"layers.{layer}.{name}"]

    def stack(self, name: str) -> Tensor:
        """The same tensor of all layers -> [n_layer, ...]."""
        return torch.stack([self.get(i, name) for i in range(self.n_layer)])

    def heads(self, layer: int, kv_heads: list[int]) -> Calibration:
        """What the calibration of a layer would be with these KV heads alone: for a method that stores some of them.

        A joint basis of fewer heads comes from the sub-block of K^T K, which basis and eigenvalues hold exactly.
        """
        out = {k: v for k, v in self.tensors.items()}
        pre, idx = f"layers.{layer}.", torch.tensor(kv_heads, dtype=torch.int64)
        n, d = self.get(layer, "channels.qk").shape
        for key, t in self.tensors.items():
            if not key.startswith(pre) or "razor" in key or "whiten" in key or "sals" in key:
                continue
            out[key] = t[idx]
        basis, values = self.get(layer, "sals.basis").double(), self.get(layer, "sals.eigenvalues").double()
        moments = ((basis * values) @ basis.T).view(n, d, n, d)[idx][:, :, idx].reshape(len(kv_heads) * d, -1)
        out[pre + "sals.eigenvalues"], out[pre + "sals.basis"] = (t.float() for t in principal(moments))
        return Calibration(out, self.n_layer, self.meta)

    def save(self, path: Path) -> None:
        """Written under a temporary name, then renamed: a reader finds the old file or the new one."""
        tmp = path.with_name(path.name + ".tmp")
        tensors = {k: (v.short() if ".channels." in k else v).contiguous() for k, v in self.tensors.items()}
        save_file(tensors, tmp, metadata={"calibration": json.dumps(self.meta)})
        tmp.chmod(0o644)  # safetensors writes files for their owner alone
        os.replace(tmp, path)

    @classmethod
    def load(cls, folder: Path, args: ModelArgs) -> Calibration:
        """Read and check the file of a checkpoint's folder; InputError says what is wrong and what to run."""
        path, again = folder / FILE, f"run: python calibrate.py --checkpoint {folder}"
        if not path.is_file():
            raise InputError(f"this method needs a calibration and {folder} has none; {again}")
        try:
            with safe_open(path, framework="pt") as f:
                meta = json.loads((f.metadata() or {}).get("calibration", "{}"))
                tensors = {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118, a safe_open is no dict
        except (SafetensorError, OSError, ValueError) as e:
            raise InputError(f"cannot read {path}: {e}; {again}") from None
        version = meta.get("version") if isinstance(meta, dict) else None
        if version != VERSION:
            raise InputError(f"{path} is of version {version}, expected {VERSION}; {again}")
        for name, shape in shapes(args).items():
            for i in range(args.n_layer):
                t = tensors.get(f"layers.{i}.{name}")
                if t is None or tuple(t.shape) != shape:
                    found = "missing" if t is None else f"of shape {list(t.shape)}, expected {list(shape)}"
                    raise InputError(f"{path}: layers.{i}.{name} is {found}; {again}")
                if t.is_floating_point() and not t.isfinite().all():
                    raise InputError(f"{path}: layers.{i}.{name} holds NaN or infinity; {again}")
                ranking = name.startswith("channels")
                places = torch.arange(shape[-1]).expand(shape)
                if ranking and (t.is_floating_point() or not torch.equal(t.long().sort(-1).values, places)):
                    raise InputError(f"{path}: layers.{i}.{name} is no ranking of the channels; {again}")
        if meta.get("fingerprint") != fingerprint(folder):
            raise InputError(f"{path} was made from another checkpoint than the one beside it; {again}")
        return cls({k: v.long() if ".channels." in k else v.float() for k, v in tensors.items()}, args.n_layer, meta)


class RandomCalibration(Calibration):
    """Random orthogonal bases, rankings and scores, made when asked for: for throughput with random weights alone."""

    def __init__(self, args: ModelArgs, seed: int = 0):
        super().__init__({}, args.n_layer, dict(random=True))
        self.args, self.seed = args, seed

    def get(self, layer: int, name: str) -> Tensor:
        shape = shapes(self.args)[name]
        gen = torch.Generator().manual_seed(self.seed + 1000 * layer + list(shapes(self.args)).index(name))
        t = torch.rand(shape, generator=gen)
        if name.startswith("channels"):
            return t.argsort(-1)
        if name.endswith("basis"):
            return torch.linalg.qr(t - 0.5).Q
        if name.endswith("moments"):
            return torch.eye(shape[0])
        return t.sort(-1, descending=True).values if name.endswith("eigenvalues") else t

    def heads(self, layer: int, kv_heads: list[int]) -> Calibration:
        n, g = len(kv_heads), self.args.n_head // self.args.n_kv_head
        return RandomCalibration(replace(self.args, n_kv_head=n, n_head=n * g), self.seed)


def fingerprint(folder: Path) -> str:
    """Of a checkpoint: its config and, of every weight file, the size, the header and 64 KiB at 16 places.

    Sampled, because hashing the whole of a large checkpoint takes longer than loading it.
    """
    h = hashlib.sha256((folder / "config.json").read_bytes())
    files = sorted(f for f in folder.glob("*.safetensors") if not f.name.startswith("calibration"))
    for file in files:
        size = file.stat().st_size
        h.update(f"{file.name} {size}".encode())
        with open(file, "rb") as f:
            for i in range(17):
                f.seek(size * i // 17)
                h.update(f.read(1 << 16))
    return h.hexdigest()


def principal(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric [..., m, m] -> eigenvalues [..., m] falling, eigenvectors as columns [..., m, m] with fixed signs.

    The largest entry of every eigenvector is positive, so that two runs give the same file.
    """
    values, vectors = torch.linalg.eigh(moments.double())
    values, vectors = values.flip(-1).clamp(min=0), vectors.flip(-1)
    largest = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    return values, vectors * torch.where(largest < 0, -1.0, 1.0)


# ---- one pass ----


class Moments:
    """Float64 sums over tokens of everything the file is made from; `add` takes one sequence of one layer."""

    def __init__(self, args: ModelArgs, device: Any):
        n, d, nd, L = args.n_kv_head, args.head_dim, args.n_kv_head * args.head_dim, args.n_layer
        sizes = dict(k_joint=(nd, nd), k_rot=(n, d, d), q_rot=(n, d, d), v=(n, d, d), k_sum=(n, d), x=(args.dim,) * 2,
                     abs_qk=(n, d), abs_q=(n, d), abs_k=(n, d))  # fmt: skip
        # sums are kept where float64 is fast enough; a sequence's own products are float32 on its device
        self.sums = {k: torch.zeros(L, *s, dtype=torch.float64, device=device) for k, s in sizes.items()}
        self.tokens = 0

    def add(self, layer: int, x: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> None:
        """x [S, dim] the attention's input; q [S, Hq, d], k and v [S, Hkv, d] before rotation; cos, sin [S, 1, d/2]."""
        q, k, v, x = q.float(), k.float(), v.float(), x.float()
        qr, kr = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        groups = qr.unflatten(1, (k.shape[1], -1))  # [S, n, g, d]
        joint = k.flatten(1)
        parts = dict(
            k_joint=joint.T @ joint,
            k_rot=torch.einsum("snd,sne->nde", kr, kr),
            q_rot=torch.einsum("sngd,snge->nde", groups, groups),
            v=torch.einsum("snd,sne->nde", v, v),
            k_sum=kr.sum(0),
            x=x.T @ x,
            abs_qk=(groups * kr[:, :, None]).abs().mean(2).sum(0),
            abs_q=groups.abs().mean(2).sum(0),
            abs_k=kr.abs().sum(0),
        )
        for name, part in parts.items():
            self.sums[name][layer] += part.double()

    def finish(self) -> dict[str, Tensor]:
        """The tensors of the file, but for the head scores."""
        mean = {k: v.cpu() / self.tokens for k, v in self.sums.items()}
        out: dict[str, Tensor] = {}
        for i in range(len(mean["v"])):
            m, pre = {k: v[i] for k, v in mean.items()}, f"layers.{i}."
            centred = m["k_rot"] - m["k_sum"][:, :, None] * m["k_sum"][:, None]
            for name, moments in (("sals.", m["k_joint"]), ("oja.k_", m["k_rot"] + m["q_rot"]), ("oja.v_", m["v"]),
                                  ("pca.", centred)):  # fmt: skip
                out[f"{pre}{name}eigenvalues"], out[f"{pre}{name}basis"] = principal(moments)
            for kind in ("qk", "q", "k"):
                out[f"{pre}channels.{kind}"] = m[f"abs_{kind}"].sort(dim=-1, descending=True, stable=True).indices
            out[pre + "pca.mean"], out[pre + "whiten.moments"] = m["k_sum"], m["x"]
        return out


def layer_inputs(model: Transformer, tokens: Tensor):
    """Teacher forcing of tokens [1, S], layer by layer; yields the layer and its attention's input x [1, S, dim]."""
    x = model.tok_embeddings(tokens)
    tables = model.rope_tables(tokens.shape[1])
    for i, block in enumerate(model.layers):
        yield i, block.attention_norm(x)
        x = block(x, *tables)


@torch.inference_mode()
def add_sequence(model: Transformer, moments: Moments, tokens: Tensor) -> None:
    """tokens [S]: one sequence, all layers."""
    cos, sin = model.rope_tables(len(tokens))
    for i, x in layer_inputs(model, tokens[None]):
        q, k, v = model.layers[i].attention.qkv(x)
        moments.add(i, x[0], q[0], k[0], v[0], cos[0], sin[0])
    moments.tokens += len(tokens)


@torch.inference_mode()
def head_scores(model: Transformer, n_random: int, repeats: int = 4, seed: int = 0, progress: bool = False):
    """Echo score of every query head [n_layer, Hq], and the scores of the places after [n_layer, Hq, AFTER].

    n_random tokens are drawn and repeated; from the second copy on, echo is the attention mass on earlier copies of the
    current token, averaged over positions. The mass on the tokens right after them is the induction score, the first of
    the scores after (RazorAttention, Sec. 3.3). A model may look further: a token two places after the copy can carry
    the one between, moved there by a head that looks one token back.
    """
    args, device = model.args, model.norm.weight.device
    gen = torch.Generator().manual_seed(seed)
    low = min(260, args.vocab_size // 2)  # control pieces and bytes are no words
    tokens = torch.randint(low, args.vocab_size, (n_random,), generator=gen).repeat(repeats).to(device)
    S, g = len(tokens), args.n_head // args.n_kv_head
    cos, sin = model.rope_tables(S)
    mass_at = torch.zeros(1 + AFTER, args.n_layer, args.n_head, dtype=torch.float64)
    layers = layer_inputs(model, tokens[None])
    for i, x in tqdm(layers, total=args.n_layer, desc="head scores", disable=not progress):
        q, k, _ = (t[0] for t in model.layers[i].attention.qkv(x))
        q, k = apply_rope(q, cos[0], sin[0]).float(), apply_rope(k, cos[0], sin[0]).float()
        k = k.transpose(0, 1).repeat_interleave(g, 0)  # [Hq, S, d]
        for first in range(n_random, S, QUERY_BLOCK):
            rows = torch.arange(first, min(first + QUERY_BLOCK, S), device=device)
            logits = q[rows].transpose(0, 1) @ k.transpose(1, 2) * args.head_dim**-0.5  # [Hq, Q, S]
            logits = logits.masked_fill(torch.arange(S, device=device) > rows[:, None], float("-inf"))
            p = logits.softmax(-1)
            for j in range(1, repeats):
                copies = rows - j * n_random
                for place in range(1 + AFTER):
                    # the places after may reach past the query only where a sequence is shorter than they are
                    seen = ((copies >= 0) & (copies + place <= rows)).double()
                    at = (copies + place).clamp(min=0, max=S - 1).expand(len(p), -1)[..., None]
                    mass_at[place, i] += (p.gather(2, at)[..., 0].double() * seen).sum(1).cpu()
    mass_at /= S - n_random
    return mass_at[0], mass_at[1:].permute(1, 2, 0)


def calibrate(model: Transformer, sequences: list[Tensor], n_random: int, progress: bool = False) -> Calibration:
    """In memory, from token sequences [S]: what tests and scripts call."""
    moments = Moments(model.args, model.norm.weight.device)
    for tokens in tqdm(sequences, desc="calibration", disable=not progress):
        add_sequence(model, moments, tokens.to(model.norm.weight.device))
    return assemble(model, moments, n_random, {}, progress)


def assemble(model: Transformer, moments: Moments, n_random: int, meta: dict, progress: bool) -> Calibration:
    out = moments.finish()
    echo, after = head_scores(model, n_random, progress=progress)
    for name, scores in (("echo", echo), ("after", after), ("induction", after[..., 0])):
        out |= {f"layers.{i}.razor.{name}": s.contiguous() for i, s in enumerate(scores)}
    tensors = {k: v if v.dtype == torch.int64 else v.float() for k, v in out.items()}
    return Calibration(tensors, model.args.n_layer, meta)


# ---- the command ----


def default_text(tokenizer: Any) -> np.ndarray:
    """English and Python that is on every machine, without the held-out documents of the evaluations."""
    from scripts.corpus import collect

    docs = [d for d in collect(progress=True) if not d.held_out]
    rng = np.random.default_rng(0)
    picked = [docs[i] for i in rng.permutation(len(docs))]
    ids: list[int] = []
    for d in tqdm(picked, desc="tokens"):
        ids += tokenizer.encode(d.text, bos=True)
        if len(ids) > 4_000_000:
            break
    return np.array(ids)


def read_text(tokenizer: Any, files: list[str]) -> np.ndarray:
    ids: list[int] = []
    for file in files:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except OSError as e:
            raise InputError(f"cannot read {file}: {e.strerror}") from None
        except UnicodeDecodeError:
            raise InputError(f"{file} is not UTF-8 text: convert it first") from None
        ids += tokenizer.encode(text, bos=True)
    return np.array(ids)


def draw(ids: np.ndarray, samples: int, seq_len: int, seed: int) -> np.ndarray:
    """`samples` windows [samples, seq_len] at random places of the text."""
    if len(ids) <= seq_len:
        raise InputError(f"the text has {len(ids)} tokens, --seq-len wants {seq_len}: lower it or give more --data")
    starts = np.random.default_rng(seed).integers(0, len(ids) - seq_len, samples)
    return np.stack([ids[s : s + seq_len] for s in starts])


def load_partial(path: Path, settings: dict, moments: Moments) -> int:
    """Continue an interrupted pass if it had the same settings -> sequences done."""
    try:
        with safe_open(path, framework="pt") as f:
            meta = json.loads((f.metadata() or {}).get("partial", "{}"))
            if not isinstance(meta, dict) or meta.get("settings") != settings:
                return 0
            sums = {name: f.get_tensor(name) for name in moments.sums}  # all of them, before any is taken over
    except (SafetensorError, OSError, ValueError):
        return 0
    for name, total in moments.sums.items():
        total.copy_(sums[name])
    moments.tokens = meta["tokens"]
    return meta["done"]


def save_partial(path: Path, settings: dict, moments: Moments, done: int) -> None:
    tmp = path.with_name(path.name + ".tmp")
    meta = json.dumps(dict(settings=settings, done=done, tokens=moments.tokens))
    save_file({k: v.cpu() for k, v in moments.sums.items()}, tmp, metadata={"partial": meta})
    os.replace(tmp, path)


def main() -> None:
    from generate import DTYPES, TINY, pick_device
    from tokenizer import load_tokenizer

    p = Parser(__doc__)
    a = p.add_argument
    a("--checkpoint", default=str(TINY), help="Hugging Face folder; the result is written into it")
    a("--data", nargs="+", metavar="FILE", help="UTF-8 text files; default: English and Python on this machine")
    a("--samples", type=int, default=64, help="sequences (the papers: 128-512)")
    a("--seq-len", type=int, default=0, help="tokens of a sequence, default: 2048 or the model's context if shorter")
    a(
        "--random-tokens",
        type=int,
        default=0,
        help="random tokens of the head scores, repeated 4 times; default: 2500, or a quarter of a shorter context",
    )
    a("--seed", type=int, default=0)
    a("--device")
    a("--dtype", choices=sorted(DTYPES), default="fp32")
    a("--json", action="store_true", help="print the file's metadata as JSON")  # fmt: skip
    opt = p.parse_args()
    folder = Path(opt.checkpoint)
    model = load_checkpoint(folder, pick_device(opt.device), DTYPES[opt.dtype])
    tokenizer, args = load_tokenizer(folder), model.args
    seq_len = opt.seq_len or min(2048, args.context)
    n_random = opt.random_tokens or min(2500, args.context // 4)
    limits = {"--seq-len": (seq_len, 2, args.context), "--samples": (opt.samples, 1, 1 << 30),
              "--seed": (opt.seed, 0, 1 << 62), "--random-tokens": (n_random, 2, args.context // 4)}  # fmt: skip
    for name, (value, low, high) in limits.items():
        if not low <= value <= high:
            raise InputError(f"{name} {value} is out of range: this model takes {low} to {high}")
    if not os.access(folder, os.W_OK):
        raise InputError(f"cannot write into {folder}: copy the checkpoint to a folder of your own")
    ids = read_text(tokenizer, opt.data) if opt.data else default_text(tokenizer)
    windows = draw(ids, opt.samples, seq_len, opt.seed)
    files = [Path(f).name for f in opt.data] if opt.data else "default"
    digest = hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()
    settings = dict(version=VERSION, fingerprint=fingerprint(folder), data=digest, files=files, samples=opt.samples,
                    seq_len=seq_len, seed=opt.seed, dtype=opt.dtype)  # fmt: skip
    moments, partial = Moments(args, model.norm.weight.device), folder / PARTIAL
    done = load_partial(partial, settings, moments)
    stop: list[int] = []
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, lambda number, frame: stop.append(number))
    saved = time.time()
    for i in tqdm(range(done, opt.samples), initial=done, total=opt.samples, desc="calibration", unit="seq"):
        add_sequence(model, moments, torch.from_numpy(windows[i]).to(model.norm.weight.device))
        if stop or time.time() - saved > SAVE_EVERY:
            save_partial(partial, settings, moments, i + 1)
            saved = time.time()
        if stop:
            raise KeyboardInterrupt
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, signal.default_int_handler)
    meta = dict(tokens=moments.tokens, random_tokens=n_random, **settings)
    calibration = assemble(model, moments, n_random, meta, True)
    calibration.save(folder / FILE)
    for left in (partial, partial.with_name(partial.name + ".tmp")):
        left.unlink(missing_ok=True)
    size = (folder / FILE).stat().st_size
    print(json.dumps(meta) if opt.json else f"{folder / FILE}: {size / 2**20:.1f} MiB from {moments.tokens} tokens")


if __name__ == "__main__":
    run_cli(main)
