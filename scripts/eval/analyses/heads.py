"""Induction and echo scores, and the KV heads they protect (RazorAttention, Section 3.3)."""

from __future__ import annotations

import numpy as np

from kv_methods.razor import protected_heads
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
        body.append([i, ind.max(), str(ind.argmax()), best.max(), f"{h}, place {r['place'][h]}", echo.max(),
                     str(echo.argmax()), str(r["protected"]), str(r["protected_by_best_place"])])  # fmt: skip
    total, top = sum(r["kv_heads"] for r in rows), [max(b[j] for b in body) for j in (1, 3, 5)]
    shares = [f"{sum(len(r[key]) for r in rows)} of {total}" for key in ("protected", "protected_by_best_place")]
    body.append(["all", top[0], "", top[1], "", top[2], "", *shares])
    head = ["layer", "induction", "by head", "1 to 4 places after", "by head", "echo", "by head"]
    return [*head, "protected KV heads", "by the best place"], body


ANALYSIS = Analysis("highest induction and echo score of the query heads", heads, heads_table, ("razor",))
