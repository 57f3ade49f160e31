"""The analyses behind the methods, from their papers' own figures, on any checkpoint.

    python scripts/analyze.py --out results/analysis.json --plots results
    python scripts/analyze.py --checkpoint CKPT --only spectra,heads --samples 16 --seq-len 4096 --plots /tmp

spectra   eigenvalues and Rank(90) of keys before and after rotation (SALS, Fig. 4)
overlap   attention mass that tokens chosen by latent scores cover (SALS, Sec. 3.2, Fig. 2)
recall    how many of the oracle's tokens latent scores find, by the coordinates scored with (SALS, Sec. 4.3)
channels  outlier channels of the calibration against those of the text at hand (Double Sparsity, Fig. 9)
adjacent  inputs of adjacent layers, and tokens chosen by a predicted query (Double Sparsity, Sec. 5.2)
shift     a basis from prose on code, before and after Oja's update (OjaKV, Table 1)
heads     induction and echo scores, and the KV heads they protect (RazorAttention, Sec. 3.3)
signs     entropy of key signs, and tokens found by sign codes (Self-Indexing KVCache, eq. 5-8)

The text is the held-out split of scripts/corpus.py, as much code as prose. Bases, channels and head scores come from
the checkpoint's calibration.safetensors; without one they are made in memory from a little text of the training split.
A model of wide keys needs more tokens (--samples x --seq-len) than channels (KV heads x head_dim) for its spectra.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from calibrate import FILE, Calibration, calibrate, draw, principal  # noqa: E402
from errors import InputError, Parser, run_cli  # noqa: E402
from generate import DTYPES, TINY, pick_device  # noqa: E402
from kernels.lowrank import oja_step, orthonormalize  # noqa: E402
from kernels.select import snapkv_scores  # noqa: E402
from kernels.sign_codes import codebook, lut_score, pack_codes, sign_codes, sign_patterns  # noqa: E402
from kv_methods.base import budget_tokens  # noqa: E402
from kv_methods.razor import protected_heads  # noqa: E402
from model import Block, Transformer, apply_rope, load_checkpoint  # noqa: E402
from scripts.corpus import collect  # noqa: E402
from scripts.results import record, write_json  # noqa: E402
from tokenizer import load_tokenizer  # noqa: E402

QUERIES = 64  # of a sequence, spread over its second half: what selection is judged by
MIN_LENGTH = 64  # tokens: half of it is a prompt, whose last 32 queries choose its important tokens
SALS_BUDGET, SALS_RANKS = 0.125, (1.0, 0.25, 0.125, 0.0625)  # r = 25 % is scored with r* = 12.5 %, 12.5 % with 6.25 %
FRACTIONS = tuple(2.0**-i for i in range(5, -1, -1))  # r* of n*d, for recall
RATIOS = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)  # channels of d, Double Sparsity Fig. 9
LABELS, LABEL_BUDGET = 0.25, 0.0625  # double_sparsity's defaults
OJA_RANKS, ETA, IMPORTANT = (0.6, 0.8), 0.1, 0.05  # ojakv's presets and defaults
INDUCTION, ECHO = 0.14, 0.01  # razor's defaults
SIGN_BUDGETS = (0.02, 0.0375, 0.075, 0.15, 0.3)  # of the prompt, around the paper's 7.5 %
RANDOM_TOKENS = 512  # of the head scores, where no calibration file holds them

Series = dict[str, Any]
Table = tuple[list[str], list[list[Any]]]


# ---- measures ----


def rank_at(eigenvalues: Tensor, percent: float) -> Tensor:
    """Rank(v): how many of the largest eigenvalues [..., m] hold v % of their sum -> [...] (SALS, App. A)."""
    values = eigenvalues.sort(-1, descending=True).values
    held = values.cumsum(-1) / values.sum(-1, keepdim=True)
    return (held < percent / 100 - 1e-12).sum(-1) + 1


def covariance(x: Tensor, centred: bool = True) -> Tensor:
    """x [S, ..., m] over S tokens -> [..., m, m] in fp64."""
    x = x.double()
    if centred:
        x = x - x.mean(0)
    return torch.einsum("s...i,s...j->...ij", x, x) / len(x)


def attention_mass(q: Tensor, k: Tensor, at: Tensor) -> Tensor:
    """Causal softmax attention of q [Q, Hq, D] at positions at [Q] over k [S, n, D], both rotated -> [Q, n, g, S]."""
    logits = torch.einsum("qngd,snd->qngs", q.unflatten(1, (k.shape[1], -1)), k) * k.shape[-1] ** -0.5
    future = torch.arange(len(k), device=k.device) > at[:, None]
    return logits.masked_fill(future[:, None, None], float("-inf")).softmax(-1)


def top(scores: Tensor, count: Tensor) -> Tensor:
    """The count [...] highest of scores [..., S] -> bool [..., S]."""
    idx = scores.topk(int(count.max()), dim=-1).indices
    kept = (torch.arange(idx.shape[-1], device=idx.device) < count[..., None]).expand_as(idx)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, idx, kept)


def recall(chosen: Tensor, truth: Tensor) -> float:
    """Share of the tokens of truth [..., S] that are among the chosen ones, mean."""
    return ((chosen & truth).sum(-1) / truth.sum(-1)).mean().item()


def covered(mass: Tensor, chosen: Tensor) -> float:
    """Overlap score: share of the attention mass [..., S] on the chosen tokens, mean (SALS, Sec. 3.2)."""
    return ((mass * chosen).sum(-1) / mass.sum(-1)).mean().item()


def residual_energy(x: Tensor, u: Tensor) -> float:
    """RER = |X - X U U^T|^2 / |X|^2 of x [n, S, d] under u [n, d, r], mean over the n heads (OjaKV, Sec. 4)."""
    rest = x - x @ u @ u.mT
    return (rest.square().sum((1, 2)) / x.square().sum((1, 2))).mean().item()


def subspace_overlap(u: Tensor, w: Tensor) -> float:
    """SO = Tr(U^T W W^T U) / r of bases [n, d, r], mean over the n heads (OjaKV, Sec. 4)."""
    return ((u.mT @ w).square().sum((1, 2)) / u.shape[-1]).mean().item()


def sign_entropy(x: Tensor) -> Tensor:
    """Entropy in bits of the signs of x [S, ...] over S tokens -> [...]; zero counts as positive, as in the codes."""
    p = (x >= 0).double().mean(0)
    return -(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p)) / math.log(2)


# ---- what they are measured on ----


@dataclass
class Capture:
    """One sequence of S tokens in one layer; fp32 but for the inputs."""

    before: Tensor | None  # [S, dim] what enters the layer before this one
    x: Tensor  # [S, dim] what enters this layer, before its norm
    q: Tensor  # [S, Hq, D]
    k: Tensor  # [S, n, D]
    v: Tensor  # [S, n, D]
    q_rot: Tensor
    k_rot: Tensor

    @cached_property
    def at(self) -> Tensor:
        """[Q] positions of the queries that selection is judged by."""
        S = len(self.k)
        return torch.linspace(S // 2, S - 1, min(QUERIES, S - S // 2), device=self.k.device).long()

    @cached_property
    def mass(self) -> Tensor:
        """[Q, n, g, S] true attention of those queries."""
        return attention_mass(self.q_rot[self.at], self.k_rot, self.at)

    def past(self, scores: Tensor) -> Tensor:
        """Scores [Q, ..., S] of tokens that a query cannot see become -inf."""
        future = torch.arange(len(self.k), device=self.k.device) > self.at[:, None]
        return scores.masked_fill(future.view(len(self.at), *[1] * (scores.dim() - 2), -1), float("-inf"))

    def latent_scores(self, basis: Tensor, rank: int) -> Tensor:
        """Before rotation, group and heads summed, over the first `rank` coordinates: [Q, S] (SALS, Sec. 4.3)."""
        n = self.k.shape[1]
        q = self.q[self.at].unflatten(1, (n, -1)).sum(2).flatten(1) @ basis[:, :rank]
        return self.past(q @ (self.k.flatten(1) @ basis[:, :rank]).T)


@dataclass
class Layer:
    index: int
    block: Block
    calib: Calibration | None
    rope: tuple[Tensor, Tensor]  # cos, sin [S, 1, D/2]
    text: dict[str, list[Capture]]

    @property
    def held_out(self) -> list[Capture]:
        return self.text["code"] + self.text["prose"]

    def get(self, name: str) -> Tensor:
        """A tensor of this layer's calibration."""
        assert self.calib is not None
        return self.calib.get(self.index, name).to(self.block.attention.wqkv.weight.device)


def mean(rows: list[Series]) -> Series:
    """Of dictionaries with the same keys, number by number."""
    return {k: float(np.mean([r[k] for r in rows])) for k in rows[0]}


@torch.inference_mode()
def go_through(model: Transformer, text: dict[str, Tensor], calib: Calibration | None, names: list[str]) -> Series:
    """Teacher forcing of text {kind: [N, S]}, all of it layer by layer, so that memory holds one layer's keys."""
    some = next(iter(text.values()))
    cos, sin = model.rope_tables(some.shape[1])
    device = model.norm.weight.device
    inputs = {kind: model.tok_embeddings(tokens.to(device)) for kind, tokens in text.items()}  # [N, S, dim]
    before: dict[str, Tensor] = {}
    out: Series = {name: [] for name in names}
    for i, block in enumerate(tqdm(model.layers, desc="layers")):
        captures: dict[str, list[Capture]] = {kind: [] for kind in text}
        for kind, xs in inputs.items():
            for row, x in enumerate(xs):
                q, k, v = (t.float() for t in block.attention.qkv(block.attention_norm(x)))
                rotated = apply_rope(q, cos[0], sin[0]), apply_rope(k, cos[0], sin[0])
                captures[kind].append(Capture(before[kind][row] if before else None, x, q, k, v, *rotated))
        layer = Layer(i, block, calib, (cos[0], sin[0]), captures)
        for name in tqdm(names, desc=f"layer {i}", leave=False):
            out[name].append(ANALYSES[name].measure(layer))
        before = inputs
        inputs = {kind: torch.cat([block(x[None], cos, sin) for x in xs]) for kind, xs in inputs.items()}
    return out


# ---- spectra: SALS, Appendix A ----


def spectra(layer: Layer) -> Series:
    """Of K^T K, which Section 4.2 calls the covariance; Rank(90) also of what is left without the mean key."""
    out: Series = {}
    for name in ("before", "after"):
        k = torch.cat([c.k if name == "before" else c.k_rot for c in layer.held_out])  # [tokens, n, d]
        joint = torch.linalg.eigvalsh(covariance(k.flatten(1), centred=False)).flip(-1).clamp(min=0)
        m, d = len(joint), k.shape[-1]
        index = sorted({round(x) for x in np.geomspace(1, m, 48)})  # enough of them for a plot, whatever the width
        out[name] = dict(
            rank90=int(rank_at(joint, 90)),
            rank90_centred=int(rank_at(torch.linalg.eigvalsh(covariance(k.flatten(1))), 90)),
            rank90_heads=rank_at(torch.linalg.eigvalsh(covariance(k, centred=False)), 90).tolist(),
            index=index,
            eigenvalues=[(joint[j - 1] / joint.sum()).item() for j in index],
        )
        out |= dict(width=m, head_dim=d)
    return out


def spectra_table(rows: list[Series]) -> Table:
    body: list[list[Any]] = []
    for i, r in enumerate(rows):
        pair = r["before"], r["after"]
        body.append([i, *(p["rank90"] for p in pair), *(p["rank90_centred"] for p in pair),
                     *(float(np.mean(p["rank90_heads"])) for p in pair)])  # fmt: skip
    body.append(["mean", *np.mean([b[1:] for b in body], 0).tolist()])
    return ["layer", *(f"{kind} {x}" for kind in ("joint", "centred", "head") for x in ("before", "after"))], body


def spectra_plot(plt: Any, rows: list[Series]) -> Any:
    fig, axes = plt.subplots(1, 3, figsize=(13, 4.8))
    at, kinds = range(len(rows)), (("before", "C0"), ("after", "C1"))
    for i, style in zip(sorted({0, len(rows) // 2, len(rows) - 1}), ("-", "--", ":"), strict=False):
        for name, color in kinds:
            r = rows[i][name]
            axes[0].plot(r["index"], r["eigenvalues"], style, color=color, label=f"layer {i}, {name} rotation")
    for name, color in kinds:
        axes[1].plot(at, [r[name]["rank90"] for r in rows], "o-", color=color, label=f"{name} rotation")
        centred = [r[name]["rank90_centred"] for r in rows]
        axes[1].plot(at, centred, "--", color=color, lw=1, label=f"{name} rotation, centred")
        heads = [r[name]["rank90_heads"] for r in rows]
        axes[2].plot(at, [np.mean(h) for h in heads], "o-", color=color, label=f"{name} rotation, mean of heads")
        axes[2].fill_between(at, [min(h) for h in heads], [max(h) for h in heads], color=color, alpha=0.15, lw=0)
    width, d = rows[0]["width"], rows[0]["head_dim"]
    axes[0].set(xscale="log", yscale="log", xlabel="component", ylabel="share of the energy",
                title="Eigenvalues, all heads jointly")  # fmt: skip
    axes[0].set_ylim(bottom=1e-7)
    axes[1].set(xlabel="layer", ylabel=f"Rank(90), of {width}", title="All heads jointly", ylim=0)
    axes[2].set(xlabel="layer", ylabel=f"Rank(90), of {d}", title="Per KV head (bands: least to most)", ylim=0)
    return fig


# ---- overlap and recall: SALS, Sections 3.2 and 4.3 ----


def overlap(layer: Layer) -> Series:
    """Every query head's attention on the layer's one set of tokens."""
    basis, rows = layer.get("sals.basis"), []
    for c in layer.held_out:
        count = budget_tokens(SALS_BUDGET, c.at + 1)
        scores = {"oracle": c.mass.mean((1, 2))}
        scores |= {f"latent {s:g}": c.latent_scores(basis, max(1, round(s * len(basis)))) for s in SALS_RANKS}
        scores["newest"] = c.past(torch.arange(len(c.k), device=c.k.device).float().expand(len(c.at), -1))
        rows.append({name: covered(c.mass, top(s, count)[:, None, None]) for name, s in scores.items()})
    return mean(rows)


def overlap_table(rows: list[Series]) -> Table:
    return ["layer", *rows[0]], [*([i, *r.values()] for i, r in enumerate(rows)), ["mean", *mean(rows).values()]]


def overlap_plot(plt: Any, rows: list[Series]) -> Any:
    fig, ax = plt.subplots(figsize=(8, 5.5))
    shade = plt.get_cmap("viridis")
    notes = {1.0: "only rotation left out", 0.125: "sals-25", 0.0625: "sals-12.5"}
    lines = [("oracle", "chosen by true mass", "k", "-")]
    for j, s in enumerate(SALS_RANKS):
        note = f" ({notes[s]})" if s in notes else ""
        lines.append((f"latent {s:g}", f"latent scores, r* = {fraction(s)} n·d{note}", shade(j / len(SALS_RANKS)), "-"))
    lines.append(("newest", "the newest tokens", "0.5", "--"))
    for key, label, color, style in lines:
        ax.plot(range(len(rows)), [r[key] for r in rows], style, marker="o", ms=4, color=color, label=label)
    ax.axhline(SALS_BUDGET, color="0.5", ls=":", label="at random")
    ax.set(xlabel="layer", ylabel="share of the attention mass", ylim=(0, 1.02),
           title=f"Mass on {fraction(SALS_BUDGET)} of the tokens, one set a layer")  # fmt: skip
    return fig


def recalls(layer: Layer) -> Series:
    """The oracle: the layer's tokens by their mass, mean of all heads."""
    basis, rows = layer.get("sals.basis"), []
    for c in layer.held_out:
        count = budget_tokens(SALS_BUDGET, c.at + 1)
        truth = top(c.mass.mean((1, 2)), count)
        rows.append({f"{f:.4g}": recall(top(c.latent_scores(basis, max(1, round(f * len(basis)))), count), truth)
                     for f in FRACTIONS})  # fmt: skip
    return mean(rows)


def recalls_plot(plt: Any, rows: list[Series]) -> Any:
    fig, ax = plt.subplots(figsize=(7, 5.2))
    shade = plt.get_cmap("viridis")
    for i, r in enumerate(rows):
        label = f"layer {i}" if len(rows) <= 8 or i in (0, len(rows) - 1) else None
        ax.plot(FRACTIONS, list(r.values()), color=shade(i / len(rows)), lw=1.2, label=label)
    ax.plot(FRACTIONS, list(mean(rows).values()), "o-", color="k", lw=2, label="mean")
    ax.axhline(SALS_BUDGET, color="0.5", ls=":", label="at random")
    ax.set(xlabel="coordinates scored with, r* / (n·d)", ylabel="recall of the oracle's tokens", ylim=(0, 1.02),
           title=f"Top {fraction(SALS_BUDGET)} of the tokens: by latent score against by true mass")  # fmt: skip
    fraction_axis(ax, FRACTIONS)
    return fig


# ---- channels and adjacent layers: Double Sparsity, Appendix A and Section 5.2 ----


def channels(layer: Layer) -> Series:
    """Online per sequence: as calibrated, on this text alone. Per query: this query on the keys it sees."""
    offline = layer.get("channels.qk").argsort(-1)  # [n, d] the rank of every channel
    rows = []
    for c in layer.held_out:
        n, d = c.k.shape[1:]
        groups = c.q_rot.unflatten(1, (n, -1)).abs().mean(2)  # [S, n, d], mean over the group
        seen = c.k_rot.abs().cumsum(0)[c.at]
        online = dict(sequence=(groups * c.k_rot.abs()).sum(0)[None], query=groups[c.at] * seen)
        row = {}
        for ratio in RATIOS:
            r = max(1, round(ratio * d))
            for name, weight in online.items():
                ranks = weight.argsort(dim=-1, descending=True, stable=True).argsort(-1)
                row[f"{name} {ratio:g}"] = ((ranks < r) & (offline < r)).sum(-1).div(r).float().mean().item()
        rows.append(row)
    return mean(rows)


def channels_table(rows: list[Series]) -> Table:
    body = []
    for ratio in RATIOS:
        each = [r[f"sequence {ratio:g}"] for r in rows]
        queries = float(np.mean([r[f"query {ratio:g}"] for r in rows]))
        body.append([f"{ratio:g}", float(np.mean(each)), min(each), queries, ratio])
    return ["channels / d", "per sequence", "least layer", "per query", "chance"], body


def channels_plot(plt: Any, rows: list[Series]) -> Any:
    fig, ax = plt.subplots(figsize=(7, 5.2))
    for name, color, label in (("sequence", "C0", "channels of a sequence"), ("query", "C1", "channels of a query")):
        each = np.array([[r[f"{name} {ratio:g}"] for ratio in RATIOS] for r in rows])
        ax.plot(RATIOS, each.mean(0), "o-", color=color, label=label)
        ax.fill_between(RATIOS, each.min(0), each.max(0), color=color, alpha=0.15, lw=0)
    ax.plot(RATIOS, RATIOS, ":", color="0.5", label="chance")
    ax.plot([0.25], [0.95], "k*", ms=10, label="the paper's 0.95, Llama-2-7B")
    ax.set(xlabel="channels / head_dim", ylabel="overlap with the calibrated channels", ylim=(0, 1.02),
           title="Outlier channels by |q k| (bands: least to most of the layers)")  # fmt: skip
    fraction_axis(ax, (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1))
    return fig


def adjacent(layer: Layer) -> Series:
    """Tokens of the layer by labels, exact ones: what is judged is the query. Nothing for the first layer."""
    if layer.index == 0:
        return {}
    cos, sin = layer.rope
    rows = []
    for c in layer.held_out:
        assert c.before is not None
        n, d = c.k.shape[1:]
        channel = layer.get("channels.qk")[:, : max(1, round(LABELS * d))]  # [n, r]
        labels = c.k_rot.gather(2, channel.expand(len(c.k), -1, -1))
        predicted = apply_rope(layer.block.predicted_query(c.before[c.at]).float(), cos[c.at], sin[c.at])
        count = budget_tokens(LABEL_BUDGET, c.at + 1)[:, None].expand(-1, n)
        chosen = []
        for q in (predicted, c.q_rot[c.at]):
            q = q.unflatten(1, (n, -1)).sum(2).gather(2, channel.expand(len(q), -1, -1))  # [Q, n, r]
            chosen.append(top(c.past(torch.einsum("qnr,snr->qns", q, labels)), count))
        row = dict(cosine=F.cosine_similarity(c.before.float(), c.x.float(), dim=-1).mean().item())
        row |= dict(hit_rate=recall(*chosen))
        for name, tokens in (("mass_predicted", chosen[0]), ("mass_true", chosen[1]), ("mass_oracle", None)):
            tokens = top(c.mass.mean(2), count) if tokens is None else tokens
            row[name] = covered(c.mass, tokens[:, :, None])
        rows.append(row)
    return mean(rows)


def adjacent_table(rows: list[Series]) -> Table:
    if len(rows) < 2:
        return ["layers"], []
    body = [[f"{i} -> {i + 1}", *r.values()] for i, r in enumerate(rows[1:])]
    return ["layers", *rows[-1]], [*body, ["mean", *mean(rows[1:]).values()]]


def adjacent_plot(plt: Any, rows: list[Series]) -> Any:
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 5), sharey=True)
    at = range(1, len(rows))
    for ax, key, label, color in (
        (left, "cosine", "cosine of the two layers' inputs", "C0"),
        (left, "hit_rate", "tokens hit by the predicted query", "C1"),
        (right, "mass_oracle", "by true mass", "k"),
        (right, "mass_true", "by labels, true query", "C0"),
        (right, "mass_predicted", "by labels, predicted query", "C1"),
    ):
        ax.plot(at, [r[key] for r in rows[1:]], "o-", color=color, label=label)
    left.axhline(LABEL_BUDGET, color="0.5", ls=":", label="hits at random")
    right.axhline(LABEL_BUDGET, color="0.5", ls=":", label="at random")
    left.set(ylabel="similarity or share", ylim=(0, 1.02), title="Layer against the layer before")
    right.set(ylabel="share of the attention mass", title=f"Mass on {fraction(LABEL_BUDGET)} of the tokens")
    for ax in (left, right):
        ax.set(xlabel="layer whose query is predicted")
    return fig


# ---- shift: OjaKV, Section 4 ----


def shift(layer: Layer) -> Series:
    """Every sequence of code adapts the bases of prose with its first half, and is measured as a whole.

    keys: PCA of keys alone, before and after, as in the paper's table; keys (q and k): the method's basis of keys and
    queries together, whose residual is larger than that of keys alone also where nothing has shifted.
    """

    def heads(x: Tensor) -> Tensor:
        return x.transpose(0, 1)

    def basis(moments: Tensor) -> Tensor:
        return principal(moments)[1].float()

    def moments(c: Capture) -> dict[str, Tensor]:
        k = covariance(c.k_rot, centred=False)
        q = covariance(c.q_rot.unflatten(1, (c.k.shape[1], -1)).transpose(1, 2).flatten(0, 1), centred=False)
        g = c.q.shape[1] // c.k.shape[1]
        return {"keys": k, "keys (q and k)": k + g * q, "values": covariance(c.v, centred=False)}

    sums = [moments(c) for c in layer.text["calibration"]]
    out: Series = {}
    for name in sums[0]:
        static = basis(torch.stack([s[name] for s in sums]).sum(0))  # [n, d, d]
        d = static.shape[-1]
        for rank in OJA_RANKS:
            u, rows = static[..., : max(1, round(rank * d))], []
            home = [residual_energy(heads(c.v if name == "values" else c.k_rot), u) for c in layer.text["prose"]]
            for c in layer.text["code"]:
                x = heads(c.v if name == "values" else c.k_rot)
                best = basis(moments(c)["values" if name == "values" else "keys"])[..., : u.shape[-1]]
                adapted = orthonormalize(oja_step(u[None], x[None, :, important(c)], ETA))[0]
                row = {
                    f"rer_{key}": residual_energy(x, w)
                    for key, w in dict(static=u, adapted=adapted, oracle=best).items()
                }
                rows.append(row | dict(so_static=subspace_overlap(u, best), so_adapted=subspace_overlap(adapted, best)))
            out[f"{name}, {rank}"] = dict(rer_in_domain=float(np.mean(home))) | mean(rows)
    return out


def important(c: Capture) -> Tensor:
    """Tokens of the first half with the most attention of its last 32 queries, one set per layer (Sec. 5.2)."""
    P = len(c.k) // 2
    q, k = (t[:P].transpose(0, 1)[None] for t in (c.q_rot, c.k_rot))
    scores = snapkv_scores(q, k, torch.tensor([P], device=k.device), pool=1).sum(1)[0]
    return scores.topk(math.ceil(IMPORTANT * P)).indices


def shift_table(rows: list[Series]) -> Table:
    body = [[name, *mean([r[name] for r in rows]).values()] for name in rows[0]]
    return ["basis, rank", *next(iter(rows[0].values()))], body


def shift_plot(plt: Any, rows: list[Series]) -> Any:
    fig, axes = plt.subplots(2, len(OJA_RANKS), figsize=(11, 8), sharey="row")
    energy = (("rer_in_domain", "static, on prose", "0.75"), ("rer_static", "static, on code", "C0"),
              ("rer_adapted", "adapted, on code", "C1"), ("rer_oracle", "best for each sequence", "C2"))  # fmt: skip
    overlaps = (("so_static", "static, on code", "C0"), ("so_adapted", "adapted, on code", "C1"))
    for column, rank in enumerate(OJA_RANKS):
        names = [n for n in rows[0] if n.endswith(f", {rank}")]
        for ax, bars in zip(axes[:, column], (energy, overlaps), strict=True):
            width = 0.8 / len(bars)
            for j, (key, label, color) in enumerate(bars):
                height = [float(np.mean([r[n][key] for r in rows])) for n in names]
                at = np.arange(len(names)) + (j - (len(bars) - 1) / 2) * width
                drawn = ax.bar(at, height, width, color=color, label=label if column == 0 else None)
                ax.bar_label(drawn, [f"{h:.3f}".lstrip("0") for h in height], fontsize=8)
            ax.set_xticks(range(len(names)), [n.rpartition(",")[0] for n in names])
        axes[0, column].set(title=f"Basis from prose, rank {rank} of head_dim")
    axes[0, 0].set(ylabel="residual energy ratio")
    axes[1, 0].set(ylabel="overlap with the best basis", ylim=(0, 1.1))
    return fig


# ---- heads: RazorAttention, Section 3.3 ----


def heads(layer: Layer) -> Series:
    assert layer.calib is not None
    n = layer.block.attention.n_kv_head
    induction, echo = layer.calib.stack("razor.induction"), layer.calib.stack("razor.echo")  # [L, Hq]
    after, i = layer.calib.stack("razor.after"), layer.index  # [L, Hq, places]
    best, place = after.max(-1)
    kept = [protected_heads(s, echo, INDUCTION, ECHO, n)[i].nonzero().flatten().tolist() for s in (induction, best)]
    return dict(kv_heads=n, induction=induction[i].tolist(), echo=echo[i].tolist(), best_place=best[i].tolist(),
                place=(place[i] + 1).tolist(), protected=kept[0], protected_by_best_place=kept[1])  # fmt: skip


def heads_table(rows: list[Series]) -> Table:
    body = []
    for i, r in enumerate(rows):
        ind, best, echo = (np.array(r[key]) for key in ("induction", "best_place", "echo"))
        h = int(best.argmax())
        body.append([i, ind.max(), int(ind.argmax()), best.max(), f"{h}, place {r['place'][h]}", echo.max(),
                     int(echo.argmax()), str(r["protected"]), str(r["protected_by_best_place"])])  # fmt: skip
    total, top = sum(r["kv_heads"] for r in rows), [max(b[j] for b in body) for j in (1, 3, 5)]
    shares = [f"{sum(len(r[key]) for r in rows)} of {total}" for key in ("protected", "protected_by_best_place")]
    body.append(["all", top[0], "", top[1], "", top[2], "", *shares])
    head = ["layer", "induction", "by head", "1 to 4 places after", "by head", "echo", "by head"]
    return [*head, "protected KV heads", "by the best place"], body


def heads_plot(plt: Any, rows: list[Series]) -> Any:
    n_head = len(rows[0]["induction"])
    group = n_head // rows[0]["kv_heads"]
    size = (1.5 + 3 * max(3.0, 0.2 * n_head), 1.6 + max(2.0, 0.25 * len(rows)))
    fig, axes = plt.subplots(1, 3, figsize=size)
    titles = dict(induction="Induction score", best_place="Best of 1 to 4 places after", echo="Echo score")
    for ax, (key, title) in zip(axes, titles.items(), strict=True):
        image = ax.imshow([r[key] for r in rows], cmap="viridis", vmin=0, vmax=1, aspect="auto")
        for i, r in enumerate(rows):
            for h in r["protected_by_best_place" if key == "best_place" else "protected"]:
                ax.add_patch(plt.Rectangle((h * group - 0.5, i - 0.5), group, 1, fill=False, ec="tab:red", lw=1.8))
        ax.set(xlabel="query head", ylabel="layer", title=title)
        for axis in (ax.xaxis, ax.yaxis):
            integer_axis(axis)
    fig.colorbar(image, ax=axes, label="attention mass")
    share, wider = (sum(len(r[key]) for r in rows) for key in ("protected", "protected_by_best_place"))
    total = sum(r["kv_heads"] for r in rows)
    kept = f"{share} ({wider} in the middle) of {total}"
    fig.suptitle(f"red: the {kept} KV heads protected at {INDUCTION:.0%} + {ECHO:.0%}",
                 fontsize=10)  # fmt: skip
    return fig


# ---- signs: Self-Indexing KVCache ----


def signs(layer: Layer) -> Series:
    """Codes of the first half are scored by the queries of the second half, per KV head."""
    d = layer.held_out[0].k.shape[-1]
    if d % 8:
        raise InputError(
            f"signs: codes are stored in bytes of 8 channels, this model has {d} a head: leave it out of --only"
        )
    rows: list[Series] = []
    entropies: dict[str, list[Tensor]] = dict(before=[], after=[])
    for c in layer.held_out:
        P, n = len(c.k) // 2, c.k.shape[1]
        k = c.k_rot[:P].transpose(0, 1)[None]  # [1, n, P, d]
        x = k - k.mean(2, keepdim=True)
        for name, keys in (("before", k), ("after", x)):
            entropies[name].append(sign_entropy(keys[0].transpose(0, 1)))
        q = c.q_rot[c.at].unflatten(1, (n, -1)).mean(2)  # [Q, n, d]
        codes, valid = sign_codes(x), torch.ones(1, P, dtype=torch.bool, device=k.device)
        patterns = sign_patterns(k.device).expand(1, n, d // 4, 16, 4)

        def look_up(book: Tensor, codes: Tensor, q: Tensor = q) -> Tensor:
            return lut_score(q, book.expand(len(q), -1, -1, -1, -1), pack_codes(codes).expand(len(q), -1, -1, -1))

        scores = {
            "exact": q.transpose(0, 1) @ k[0].mT,
            "codebook": look_up(codebook(x, codes, valid), codes).transpose(0, 1),
            "signs": look_up(patterns, codes).transpose(0, 1),
            "signs, not centred": look_up(patterns, sign_codes(k)).transpose(0, 1),
        }  # [n, Q, P]
        mass = c.mass[..., :P].sum(2).transpose(0, 1)
        row: Series = {}
        for budget in SIGN_BUDGETS:
            count = budget_tokens(budget, torch.full(mass.shape[:2], P, device=k.device))
            truth = top(mass, count)
            row |= {f"{name} {budget:g}": recall(top(s, count), truth) for name, s in scores.items()}
        rows.append(row)
    out: Series = {"recall": mean(rows)}
    for name, parts in entropies.items():
        e = torch.stack(parts).flatten()
        low, high = e.quantile(torch.tensor([0.05, 0.95], dtype=e.dtype, device=e.device)).tolist()
        out[f"entropy_{name}"] = dict(mean=e.mean().item(), low=low, high=high, least=e.min().item())
    return out


SIGN_SCORES = ("exact", "codebook", "signs", "signs, not centred")


def signs_table(rows: list[Series]) -> Table:
    body = [
        [i, *(r[f"entropy_{x}"][y] for x in ("before", "after") for y in ("mean", "low")),
         *(r["recall"][f"{s} 0.075"] for s in SIGN_SCORES)]
        for i, r in enumerate(rows)
    ]  # fmt: skip
    body.append(["mean", *np.mean([b[1:] for b in body], 0).tolist()])
    return ["layer", "bits before", "lowest 5 %", "bits after", "lowest 5 %", *(f"R {s}" for s in SIGN_SCORES)], body


def signs_plot(plt: Any, rows: list[Series]) -> Any:
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 5))
    at = range(len(rows))
    for name, color in (("before", "C0"), ("after", "C1")):
        e = [r[f"entropy_{name}"] for r in rows]
        left.plot(at, [x["mean"] for x in e], "o-", color=color, label=f"{name} centring")
        left.fill_between(at, [x["low"] for x in e], [x["high"] for x in e], color=color, alpha=0.15, lw=0)
    left.set(xlabel="layer", ylabel="bits per sign", ylim=(0, 1.05),
             title="Sign entropy per channel (bands: 5 to 95 %)")  # fmt: skip
    labels = ("exact q·k, group mean", "codebook look-up", "signs alone", "signs alone, not centred")
    for key, label, color in zip(SIGN_SCORES, labels, ("k", "C0", "C1", "C3"), strict=True):
        each = [float(np.mean([r["recall"][f"{key} {b:g}"] for r in rows])) for b in SIGN_BUDGETS]
        right.plot(SIGN_BUDGETS, each, "o-", color=color, label=label)
    right.plot(SIGN_BUDGETS, SIGN_BUDGETS, ":", color="0.5", label="at random")
    right.set(xlabel="k / prompt tokens", ylabel="recall of the oracle's tokens", ylim=(0, 1.02),
              title="Recall@k, mean of the layers")  # fmt: skip
    fraction_axis(right, SIGN_BUDGETS)
    return fig


# ---- all of them ----


@dataclass(frozen=True)
class Analysis:
    what: str  # printed above its table
    measure: Callable[[Layer], Series]
    table: Callable[[list[Series]], Table]
    plot: Callable[[Any, list[Series]], Any]
    calibrated: bool = False


ANALYSES = {
    "spectra": Analysis("Rank(90) of keys before and after rotation", spectra, spectra_table, spectra_plot),
    "overlap": Analysis("share of the attention mass on 1/8 of the tokens, by what chooses them; latent: share of n*d",
                        overlap, overlap_table, overlap_plot, True),
    "recall": Analysis("share of the oracle's 1/8 of the tokens that latent scores find, by r* / (n*d)",
                       recalls, overlap_table, recalls_plot, True),
    "channels": Analysis("overlap of calibrated outlier channels with those of a sequence and of a query",
                         channels, channels_table, channels_plot, True),
    "adjacent": Analysis("inputs of adjacent layers; 1/16 of the tokens by predicted and true queries, and their mass",
                         adjacent, adjacent_table, adjacent_plot, True),
    "shift": Analysis("residual energy ratio (rer) and subspace overlap (so) on code of a basis from prose",
                      shift, shift_table, shift_plot),
    "heads": Analysis("highest induction and echo score of the query heads", heads, heads_table, heads_plot, True),
    "signs": Analysis("sign entropy before and after centring; recall (R) of the oracle's 7.5 % of the prompt",
                      signs, signs_table, signs_plot),
}  # fmt: skip


def fraction(x: float) -> str:
    """1/8 for 0.125, and what is no power of two as it is."""
    return f"1/{1 / x:g}" if x < 1 and math.log2(x).is_integer() else f"{x:g}"


def integer_axis(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def fraction_axis(ax: Any, values: tuple[float, ...]) -> None:
    """A logarithmic x axis with a tick at each value."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(values, [fraction(v) for v in values])
    ax.minorticks_off()


def draw_plot(path: Path, analysis: Analysis, rows: list[Series]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig = analysis.plot(plt, rows)
    fig.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)  # makes room for the legends below the axes
    for ax in fig.axes:
        if ax.get_legend_handles_labels()[0]:
            ax.legend(frameon=False, fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))
        if not ax.images and ax.get_label() != "<colorbar>":
            ax.spines[["top", "right"]].set_visible(False)
        if ax.get_xlabel().startswith("layer"):
            integer_axis(ax.xaxis)
    tmp = path.with_suffix(".tmp.png")
    fig.savefig(tmp, dpi=110)
    tmp.replace(path)
    plt.close(fig)


def show_table(name: str, what: str, table: Table) -> None:
    head, body = table
    cells = [head, *([f"{x:.3f}" if isinstance(x, float) else str(x) for x in row] for row in body)]
    widths = [max(len(row[j]) for row in cells) for j in range(len(head))]
    print(f"\n{name}: {what}")
    for row in cells:
        print("  " + "  ".join(x.rjust(w) for x, w in zip(row, widths, strict=True)))


def rounded(x: Any) -> Any:
    """Four significant digits of every float of a result."""
    if isinstance(x, dict):
        return {k: rounded(v) for k, v in x.items()}
    if isinstance(x, list):
        return [rounded(v) for v in x]
    return float(f"{x:.4g}") if isinstance(x, float) else x


# ---- the command ----


def windows(tk: Any, docs: list, kinds: tuple[str, ...], samples: int, seq_len: int) -> Tensor:
    """Random windows of the documents of these kinds [samples, seq_len]."""
    ids = np.array([i for d in docs if d.kind in kinds for i in tk.encode(d.text, bos=True)])
    return torch.from_numpy(draw(ids, samples, seq_len, seed=0))


def prepare(
    model: Transformer, checkpoint: Path, names: list[str], samples: int, seq_len: int
) -> tuple[Calibration | None, dict[str, Tensor], str | None]:
    """The calibration where an analysis asks for one, the text by kind [samples, seq_len], and what calibrated."""
    tk, held_out = load_tokenizer(checkpoint), [d for d in collect(only_held_out=True) if d.held_out]
    text = {kind: windows(tk, held_out, (kind,), samples, seq_len) for kind in ("code", "prose")}
    calibrated = any(ANALYSES[n].calibrated for n in names)
    in_file = (checkpoint / FILE).is_file()
    train = []
    if "shift" in names or (calibrated and not in_file):  # the standard library is enough here, and read in seconds
        train = [d for d in collect(packages=()) if not d.held_out]
    if "shift" in names:
        text["calibration"] = windows(tk, train, ("prose",), 2 * samples, seq_len)
    if not calibrated:
        return None, text, None
    if in_file:
        return Calibration.load(checkpoint, model.args), text, FILE
    rows = windows(tk, train, ("code", "prose"), 4 * samples, seq_len)
    print(f"{checkpoint} has no {FILE}: one is made in memory from {rows.numel()} tokens", file=sys.stderr)
    calib = calibrate(model, list(rows), min(RANDOM_TOKENS, model.args.context // 4), progress=True)
    return calib, text, f"in memory, {rows.numel()} tokens"


def main(argv: list[str] | None = None) -> None:
    p = Parser(__doc__)
    a = p.add_argument
    a("--checkpoint", default=str(TINY), help="Hugging Face folder")
    a("--only", default=",".join(ANALYSES), metavar="NAME,NAME", help="default: all of them")
    a("--samples", type=int, default=4, help="sequences of held-out code, and as many of prose")
    a("--seq-len", type=int, default=0, help="tokens of a sequence, default: 1024 or the model's context if shorter")
    a("--out", help="result file, e.g. results/analysis.json")
    a("--plots", metavar="FOLDER", help="draw FOLDER/analysis_NAME.png")
    a("--device")
    a("--dtype", choices=sorted(DTYPES), default="fp32")
    a("--threads", type=int, default=0, help="CPU threads, 0: all")
    a("--json", action="store_true", help="print the result object instead of tables")
    opt = p.parse_args(argv)
    if opt.threads:
        torch.set_num_threads(opt.threads)
    names = list(dict.fromkeys(opt.only.split(",")))
    if unknown := [n for n in names if n not in ANALYSES]:
        raise InputError(f"unknown analysis {unknown[0]!r} in --only: use {', '.join(ANALYSES)}")
    for flag, folder in (("--plots", Path(opt.plots or ".")), ("--out", Path(opt.out or ".").parent)):
        if not folder.is_dir():  # said before minutes of work
            raise InputError(f"{flag}: the folder {folder} does not exist")
    if opt.plots and importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plots needs matplotlib: pip install -r requirements-dev.txt")
    checkpoint, device = Path(opt.checkpoint), pick_device(opt.device)
    model = load_checkpoint(checkpoint, device, DTYPES[opt.dtype])
    # a sliding window would hide tokens that every measure here takes for visible
    longest = min([model.args.context, *(w for w in model.args.windows if w)])
    seq_len = opt.seq_len or min(1024, longest)
    for flag, value, low, high in (("--samples", opt.samples, 1, 1 << 20), ("--seq-len", seq_len, MIN_LENGTH, longest)):
        if not low <= value <= high:
            raise InputError(f"{flag} {value} is out of range: this model takes {low} to {high}")
    calib, text, source = prepare(model, checkpoint, names, opt.samples, seq_len)
    found = go_through(model, text, calib, names)
    data = record(device, checkpoint=checkpoint.name, samples=opt.samples, seq_len=seq_len, calibration=source,
                  analyses={n: dict(what=ANALYSES[n].what, layers=rounded(found[n])) for n in names})  # fmt: skip
    if opt.out:
        write_json(opt.out, data)
    if opt.plots:
        for name in tqdm(names, desc="plots"):
            draw_plot(Path(opt.plots) / f"analysis_{name}.png", ANALYSES[name], found[name])
    if opt.json:
        print(json.dumps(data))
        return
    for name in names:
        show_table(name, ANALYSES[name].what, ANALYSES[name].table(found[name]))


if __name__ == "__main__":
    run_cli(main)
