"""Repeats the analyses of the methods' papers on any checkpoint.

    python -m scripts.eval.analyze --out analysis.json --plots .
    python -m scripts.eval.analyze --checkpoint CKPT --only bases,heads --samples 16 --seq-len 4096 --plots /tmp

bases     how much low-rank keys change the attention, by the data of the basis (OjaKV, SALS: what causes a loss)
shift     a basis from prose on code, before and after Oja's update (OjaKV, Table 1)
heads     induction and echo scores, and the KV heads they protect (RazorAttention, Sec. 3.3)

The text is the held-out split of runtime/corpus.py, half code and half prose. Bases and head scores come from the
checkpoint's calibration, or from --calibration. Without one they are measured in memory on a little text of the
training split.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from cache.calibration import Calibration, beside
from cache.spec import all_statistics
from calibrate import calibrate, draw
from kernels.rope import apply_rope
from loading.checkpoint import load_checkpoint
from loading.config import args_from_hf
from loading.tokenizer import load_tokenizer
from model import Transformer
from runtime.corpus import collect
from runtime.errors import InputError, run_cli
from runtime.machine import DTYPES, TINY, pick_device, set_threads
from runtime.options import Parser, add_calibration, add_weights
from scripts.eval.analyses import ANALYSES
from scripts.eval.analyses.capture import Analysis, Capture, Layer, Series, Table
from scripts.shared.options import add_run, check_out_of
from scripts.shared.results import check_out, record, save_figure, write_json
from weights import (
    WeightFormat,
    open_checkpoint,
)

MIN_LENGTH = 64  # tokens: half of them are a prompt, whose last 32 queries choose its important tokens
RANDOM_TOKENS = 512  # for the head scores, if there is no calibration file


@torch.inference_mode()
def go_through(model: Transformer, text: dict[str, Tensor], calib: Calibration | None, names: list[str]) -> Series:
    """Runs all text {kind: [N, S]} layer by layer, teacher-forced, so that memory holds one layer's keys."""
    some = next(iter(text.values()))
    device = model.norm.weight.device
    inputs = {kind: model.embed(tokens.to(device)) for kind, tokens in text.items()}  # [N, S, dim]
    out: Series = {name: [] for name in names}
    for i, block in enumerate(tqdm(model.layers, desc="layers")):
        cos, sin = model.rope_tables(some.shape[1], i)
        captures: dict[str, list[Capture]] = {kind: [] for kind in text}
        for kind, xs in inputs.items():
            for x in xs:
                q, k, v = (t.float() for t in block.attention.qkv(block.attention_norm(x)))
                rotated = apply_rope(q, cos[0], sin[0]), apply_rope(k, cos[0], sin[0])
                captures[kind].append(Capture(q, k, v, *rotated))
        layer = Layer(i, block, calib, captures)
        for name in tqdm(names, desc=f"layer {i}", leave=False):
            out[name].append(ANALYSES[name].measure(layer))
        attend = block.attention.uncached(cos, sin)
        inputs = {kind: torch.cat([block(x[None], attend) for x in xs]) for kind, xs in inputs.items()}
    return out


def draw_plot(path: Path, analysis: Analysis, table: Table) -> None:
    """The columns of numbers over the first one: shares, and others."""
    from matplotlib.figure import Figure

    head, body = table
    rows = [row for row in body if row[0] not in ("mean", "all")]
    columns = {name: [row[j] for row in rows] for j, name in enumerate(head) if j}
    numbers = {n: x for n, x in columns.items() if all(isinstance(v, int | float) for v in x)}
    shares = {n for n, x in numbers.items() if min(x) >= 0 and max(x) <= 1}
    panels = [p for p in (shares, numbers.keys() - shares) if p]
    fig = Figure(figsize=(6.5 * len(panels), 5), layout="constrained")
    for ax, names in zip(fig.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for i, name in enumerate(n for n in numbers if n in names):
            ax.plot([str(row[0]) for row in rows], numbers[name], "osD^vP*X"[i % 8] + "-", ms=4, lw=1, label=name)
        ax.set(xlabel=head[0], ylim=(0, 1.02) if names == shares else (0, None))
        ax.tick_params("x", labelsize=7, rotation=0 if len(rows) < 16 else 90)
        ax.legend(fontsize=8, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))
        ax.grid(alpha=0.3)
    fig.suptitle(analysis.what, fontsize=10)
    save_figure(fig, path)


def show_table(name: str, what: str, table: Table) -> None:
    head, body = table
    cells = [head, *([f"{x:.3f}" if isinstance(x, float) else str(x) for x in row] for row in body)]
    widths = [max(len(row[j]) for row in cells) for j in range(len(head))]
    print(f"\n{name}: {what}")
    for row in cells:
        print("  " + "  ".join(x.rjust(w) for x, w in zip(row, widths, strict=True)))


def rounded(x: Any) -> Any:
    """Rounds every float of a result to four significant digits."""
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
    model: Transformer, tk: Any, names: list[str], samples: int, seq_len: int
) -> tuple[Calibration | None, dict[str, Tensor], str | None]:
    """The calibration if an analysis needs one, the text by kind [samples, seq_len], and the calibration's source."""
    held_out = [d for d in collect(only_held_out=True) if d.held_out]
    text = {kind: windows(tk, held_out, (kind,), samples, seq_len) for kind in ("code", "prose")}
    methods = sorted({m for n in names for m in ANALYSES[n].reads})
    own = beside(model.folder) if model.folder else None
    known = model.calibration is not None or (own is not None and own.is_file())
    train = []
    if "shift" in names or (methods and not known):  # the standard library is enough, and takes seconds to read
        train = [d for d in collect(packages=()) if not d.held_out]
    if "shift" in names:
        text["calibration"] = windows(tk, train, ("prose",), 2 * samples, seq_len)
    if not methods:
        return None, text, None
    if known:
        calib = model.find_calibration().require(all_statistics(methods))
        return calib, text, " ".join(f.name for f in calib.files or filter(None, [calib.path])) or None
    rows = windows(tk, train, ("code", "prose"), 4 * samples, seq_len)
    print(f"{own} does not exist: calibrating in memory on {rows.numel()} tokens", file=sys.stderr)
    random_tokens = min(RANDOM_TOKENS, model.args.context // 4)
    calib = calibrate(model, list(rows), random_tokens, all_statistics(methods), True, tk.text_ids)
    return calib, text, f"in memory, {rows.numel()} tokens"


def parser() -> Parser:
    p = Parser(__doc__)
    a = p.add_argument
    a("--checkpoint", default=str(TINY), help="Hugging Face folder or GGUF file")
    a("--only", default=",".join(ANALYSES), metavar="NAME,NAME", help="analyses to run; default: all")
    a("--samples", type=int, default=4, help="sequences of held-out code, and as many of prose; default: 4")
    a("--seq-len", type=int, help="tokens of a sequence; default: 1024, or the model's context if shorter")
    a("--plots", metavar="FOLDER", help="draw FOLDER/analysis_NAME.png")
    a("--dtype", choices=sorted(DTYPES), default="fp32", help="dtype of the computation; default: fp32")
    add_weights(p)
    add_calibration(p)
    add_run(p, resume=False)
    return p


def main(argv: list[str] | None = None) -> None:
    opt = parser().parse_args(argv)
    set_threads(opt.threads)
    kind = WeightFormat.parse(opt.weights, opt.head)
    names = list(dict.fromkeys(opt.only.split(",")))
    if unknown := [n for n in names if n not in ANALYSES]:
        raise InputError(f"unknown analysis {unknown[0]!r} in --only: use {', '.join(ANALYSES)}")
    check_out_of(opt)  # reports bad paths before minutes of work
    if opt.plots and importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plots needs matplotlib: pip install -r requirements-dev.txt")
    if opt.plots:
        with contextlib.suppress(OSError):  # of which the check tells
            Path(opt.plots).mkdir(exist_ok=True)
        check_out(Path(opt.plots) / "analysis.png", "--plots")
    reader, device = open_checkpoint(opt.checkpoint), pick_device(opt.device)
    args = args_from_hf(reader.config)
    # every measure here assumes that all earlier tokens are visible, so texts must fit a sliding window
    longest = min([args.context, *(w for w in args.windows if w)])
    seq_len = min(1024, longest) if opt.seq_len is None else opt.seq_len
    for flag, value, low, high in (("--samples", opt.samples, 1, 1 << 20), ("--seq-len", seq_len, MIN_LENGTH, longest)):
        if not low <= value <= high:
            raise InputError(f"{flag} {value} is out of range: this model takes {low} to {high}")
    model = load_checkpoint(reader, device, DTYPES[opt.dtype], kind)
    model.use_calibration(opt.calibration)
    calib, text, source = prepare(model, load_tokenizer(reader.tokenizer), names, opt.samples, seq_len)
    found = go_through(model, text, calib, names)
    weights = {} if kind is None else dict(weights=opt.weights, head=opt.head)
    layers = {n: dict(what=ANALYSES[n].what, layers=rounded(found[n])) for n in names}
    data = record(device, checkpoint=Path(opt.checkpoint).name, **weights, samples=opt.samples, seq_len=seq_len,
                  calibration=source, analyses=layers)  # fmt: skip
    if opt.out:
        write_json(opt.out, data)
    if opt.plots:
        for name in tqdm(names, desc="plots"):
            draw_plot(Path(opt.plots) / f"analysis_{name}.png", ANALYSES[name], ANALYSES[name].table(found[name]))
    if opt.json:
        print(json.dumps(data))
        return
    for name in names:
        show_table(name, ANALYSES[name].what, ANALYSES[name].table(found[name]))


if __name__ == "__main__":
    run_cli(main)
