"""Tables and plot of speculation: what was measured, and when it pays by bytes."""

from __future__ import annotations

import functools
from typing import Any

import torch

from engine.speculation import tokens_a_round
from model import ModelArgs, Transformer
from scripts.report.markdown import NONE, Row, percent, runs, sources, table
from scripts.report.speed import decoded, rate, width

DRAWN = ("llama-3.1-8b", ("double_sparsity", "self_index,keep=full"))  # the model and the methods of the plot
Bytes = tuple[float, float, float]  # read by a step: of weights, of full's cache, of the method's cache


def gain(read: Bytes, n: int, acceptance: float) -> float:
    """Speed over full's if only bytes take time, with n drafts and one check per round."""
    weights, full, draft = read
    return (weights + full) * tokens_a_round(n, acceptance) / (n * (weights + draft) + weights + full)


@functools.cache
def read_bytes(name: str, method: str, batch: int, length: int) -> Bytes:
    """The bytes of weights and caches in bf16, computed on the meta device."""
    with torch.device("meta"):
        model = Transformer(ModelArgs.from_name(name)).to(torch.bfloat16)
    unread = 0 if model.args.tie_embeddings else model.tok_embeddings.weight.nbytes
    weights = sum(p.nbytes for p in model.parameters()) - unread
    model.setup_cache(method, batch, length)
    return weights, model.kv_bytes_full(batch, length), sum(m.traffic(length - 1) for m in model.cache)


def measured() -> str:
    """speculate.json: tokens/s of full, and the ratios of the method alone and of drafts with a given acceptance."""
    found: dict[tuple[str, ...], dict[str, Row]] = {}
    chances: set[float] = set()
    for run, r in decoded("speculate"):
        if "method" in r:
            at = run["machine"], f"{run['model']}, {width(run)}", f"{r['length']:,}"
            chance = r.get("chance")
            chances |= set() if chance is None else {chance}
            key = (*at, r["method"], str(r.get("drafts", ""))) if chance is not None else (*at, r["method"], "")
            found.setdefault(key, {})["alone" if chance is None else f"{chance:g}"] = r
    if not found:
        return NONE
    columns = [f"{c:g}" for c in sorted(chances)]
    rows = []
    for (machine, model, length, method, drafts), by in found.items():
        if not drafts:
            continue
        full = found[machine, model, length, "full", ""]["alone"]
        alone = found.get((machine, model, length, method, ""), {}).get("alone")
        cells = [f"{by[c]['times_full']:.2f} ({percent(by[c]['limit_share'])})" if c in by else "-" for c in columns]
        rows.append([machine, model, length, rate(full["tokens_per_s"]), f"`{method}`",
                     f"{alone['times_full']:.2f}" if alone else "-", drafts, *cells])  # fmt: skip
    head = ["machine", "model, weights", "tokens", "full, tokens/s", "drafts by", "alone", "drafts"]
    return table([*head, *(f"{percent(float(c))} right" for c in columns)], rows)


def accepted() -> str:
    """acceptance.json: the share of right drafts and the tokens per check on the published model, by text."""
    by: dict[tuple[int, str], dict[str, Row]] = {}
    every = list(runs("acceptance"))
    for r in (r for run in every for r in run["rows"]):
        by.setdefault((r["length"], r["method"]), {})[r["text"]] = r
    if not by:
        return ""
    kinds, rows = list(next(iter(by.values()))), []
    for (length, method), of in by.items():
        drafted, kept, checks = (sum(r[k] for r in of.values()) for k in ("drafted", "kept", "checks"))
        apart = [r for r in of.values() if r["apart"] is not None]
        same = f"{len(of) - len(apart)} of {len(of)}"
        if apart:
            same += f", else logits {max(r['gap'] for r in apart):.0e} apart"
        each = [percent(of[k]["kept"] / of[k]["drafted"]) if k in of else "-" for k in kinds]
        tokens = f"{(kept + checks) / checks:.2f}"
        rows.append([f"{length:,}", f"`{method}`", *each, percent(kept / drafted), tokens, same])
    n = every[0]["settings"]["speculate"]
    return table(["tokens", "drafts by", *kinds, "all", f"tokens a check, of {n + 1}", "full's text"], rows)


def speculation() -> str:
    parts = [measured(), accepted(), sources("speculate", "acceptance", root="../results/")]
    return "\n\n".join(filter(None, parts))


def plot() -> Any:
    """The gain over context, with a line per number of drafts and a panel per method and batch."""
    import matplotlib.pyplot as plt

    name, methods = DRAWN
    lengths = [2**i for i in range(10, 18)]
    panels = [(m, batch) for m in methods for batch in (1, 8)]
    fig, axes = plt.subplots(1, len(panels), figsize=(14, 3.6), sharey=True)
    for ax, (method, batch) in zip(axes, panels, strict=True):
        for i, n in enumerate((1, 2, 4, 8)):
            for acceptance, style in ((0.9, "-"), (0.7, ":")):
                ys = [gain(read_bytes(name, method, batch, T), n, acceptance) for T in lengths]
                ax.plot(lengths, ys, style, color=f"C{i}", label=f"drafts: {n}, {100 * acceptance:.0f} % right")
        ax.axhline(1, color="black", linewidth=1, linestyle="--")
        ax.set_xscale("log", base=2)
        ax.set_xticks(lengths, [f"{T // 1024}K" for T in lengths], fontsize=8)
        ax.set_title(f"{method}, batch {batch}", fontsize=10)
        ax.set_xlabel("tokens in the cache")
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("tokens/s, times full, by bytes")
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="lower center", ncols=4, frameon=False, fontsize=8)
    fig.tight_layout(rect=(0, 0.11, 1, 1))
    return fig
