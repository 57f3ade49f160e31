"""`bench_generate.py --texts`: the share of each method's drafts that exact attention accepts, on five texts.

Prose and code are held-out text of this machine, to be continued; question is a text and, in a chat, a question that it
answers; list is numbered names, to be continued; chat is a question about the whole text. Decoding is greedy. `apart`
is the first token that differs from full's text, if any, and `gap` the difference of full's logits of the two there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from engine import LLM, Chat
from runtime.machine import ROOT, read_text
from scripts.eval.evaluation import held_out

TEXT, QUESTION = ROOT / "examples" / "observatory.txt", "Where is the spare key to the observatory hidden?"
KINDS = ("prose", "code", "question", "list", "chat")


def prompts(llm: LLM, checkpoint: Path, length: int) -> dict[str, list[int]]:
    """Prompts of about `length` tokens, by kind."""
    tk, parts = llm.tokenizer, held_out(checkpoint)
    prose, code = (parts[kind][:length].tolist() for kind in ("prose", "code"))
    names = "".join(f"{i}. {name}\n" for i, name in enumerate(sorted(sys.stdlib_module_names) * 40, 1))
    text = tk.decode(tk.encode(read_text(TEXT).strip(), bos=False)[: length - 100])
    about = tk.decode(prose[: length - 120]) + "\n\nWhat is this text about? Answer in a few sentences."
    return dict(prose=prose, code=code, question=llm.encode(f"{text}\n\n{QUESTION}", Chat()),
                list=llm.encode(names[: 6 * length])[:length], chat=llm.encode(about, Chat()))  # fmt: skip


def gap(llm: LLM, text: list[int], a: int, b: int) -> float:
    """The difference between full's logits of two tokens after a text."""
    llm.model.setup_cache("full", 1, len(text) + 1)
    logits = llm.model.prefill(torch.tensor([text]), torch.tensor([len(text)]))[0]
    return (logits[a] - logits[b]).abs().item()


def accepted(
    llm: LLM, checkpoint: Path, length: int, new: int, n: int, specs: list[str], done: set, say: Callable[[str], Any]
) -> Iterator[dict[str, Any]]:
    """A row per text and method that is not in `done`: with n drafts a round, those kept, and where the text is not
    full's."""
    for kind, prompt in prompts(llm, checkpoint, length - new - n).items():
        todo = [m for m in specs if m != "full" and (m, length, kind) not in done]
        if not todo:
            continue
        llm.speculate = 0
        (full,) = llm.use("full").generate([prompt], new)
        for method in todo:
            say(f"{method}, {kind}, {length} tokens")
            llm.speculate = n
            (said,) = llm.use(method).generate([prompt], new)
            d, pairs = said.batch.drafts, list(zip(full.tokens, said.tokens, strict=False))
            apart = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            row = dict(method=method, length=length, text=kind, prompt_tokens=len(prompt), drafted=d.drafted,
                       kept=d.kept, checks=d.checks, tokens=len(said.tokens), apart=apart)  # fmt: skip
            yield row | ({} if apart is None else dict(gap=gap(llm, prompt + full.tokens[:apart], *pairs[apart])))


def line(row: dict[str, Any]) -> str:
    share, tokens = row["kept"] / max(row["drafted"], 1), (row["kept"] + row["checks"]) / max(row["checks"], 1)
    same = "full's text" if row["apart"] is None else f"apart at {row['apart']}, logits {row['gap']:.1e}"
    return f"{row['method']:32s} {row['length']:6d} {row['text']:9s} {share:5.0%}  {tokens:.2f} tokens a check  {same}"
