"""What the papers report and the shipped model does not show, from results/analysis.json and results/methods*.json."""

from __future__ import annotations

import json
from typing import Any

from runtime import ROOT
from scripts.report.tables.accuracy import TASKS
from scripts.report.tables.markdown import NONE, percent, table
from scripts.shared.results import method_rows

TOKENS = 2048


def by_layer(layers: list[dict[str, Any]], *keys: str) -> str:
    """One number of every layer that has it."""
    out = []
    for layer in layers:
        value: Any = layer
        for key in keys:
            value = value.get(key, {})
        if value != {}:
            out.append(f"{value:.2f}" if value < 10 else f"{value:.0f}")
    return ", ".join(out)


def claims() -> str:
    path = ROOT / "results" / "analysis.json"
    rows = {r["method"]: r for r in method_rows() if r["seq_len"] == TOKENS}
    if not path.is_file() or not rows:
        return NONE
    found = json.loads(path.read_text())["analyses"]
    overlap, shift = found["overlap"]["layers"], found["shift"]["layers"]

    razors = [rows[name] for name in ("razor", "razor-no-echo", "razor-no-compensation")]
    tasks = [t for t in TASKS if all(t in r for r in razors)]

    def cells(name: str) -> str:
        return " / ".join(percent(rows[name][t]) for t in tasks)

    return table(
        ["paper", "what it reports", "here"],
        [
            [
                "SALS, Fig. 2",
                "tokens chosen by latent scores cover more than 0.9 of the attention mass in most layers",
                "an eighth of the tokens by latents of a quarter covers, layer by layer, "
                f"{by_layer(overlap, 'latent 0.25')}; by all coordinates before rotation "
                f"{by_layer(overlap, 'latent 1')}; the best eighth {by_layer(overlap, 'oracle')}: "
                "in this model the loss is of scoring without rotation, not of rank",
            ],
            [
                "OjaKV, Table 1",
                "a basis from other text leaves a multiple of the residual energy",
                f"keys at rank 0.6, a basis from prose on code: {by_layer(shift, 'keys, 0.6', 'rer_static')}; "
                f"a basis from code: {by_layer(shift, 'keys, 0.6', 'rer_in_domain')}: "
                "prose and code are no shift to this model",
            ],
            [
                "RazorAttention, Fig. 7, 8",
                "echo heads and the compensation token matter",
                f"{', '.join(tasks)} at {TOKENS} tokens: razor {cells('razor')}, without echo heads "
                f"{cells('razor-no-echo')}, without compensation {cells('razor-no-compensation')}",
            ],
        ],
    )
