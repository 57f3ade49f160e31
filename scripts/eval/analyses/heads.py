"""Induction and echo scores, and the KV heads they protect (RazorAttention, Section 3.3)."""

from __future__ import annotations

from typing import Any

import numpy as np

from kv_methods.razor import protected_heads
from scripts.eval.analyses.axes import integer_axis
from scripts.eval.analyses.capture import Analysis, Layer, Series, Table

INDUCTION, ECHO = 0.14, 0.01  # razor's defaults


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


ANALYSIS = Analysis("highest induction and echo score of the query heads", heads, heads_table, heads_plot, ("razor",))
