"""Writes a page that shows what methods attend to: the text, shaded by the attention of each layer and head.

    python -m scripts.eval.view --checkpoint m.gguf --calibration FILE --method sals-25 --out view.html
    python -m scripts.eval.view --transformers NAME --method quest    # a model of transformers
    python -m scripts.eval.view --prompt-file notes.txt --question "Who ...?" --chat --method self_index quest

The page is one self-contained HTML file: open it in a browser. All methods are fed the tokens that `full` generates, so
that their steps can be compared; the page also shows the token each method would have generated. The text is
compressed before the question is known, and the question comes through decode, unless --query-in-prompt is given. A
slider selects the step, and menus the layer and the head (all: the mean). Grey tokens are those that the method did not
attend to in the step; `recall` is full's attention mass on the tokens that it did attend to.
"""

from __future__ import annotations

import argparse
import base64
import html
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from cache.trace import Step, observe
from engine import LLM, Chat
from engine.decode import pad
from runtime.errors import InputError, run_cli
from runtime.hub import add_checkpoint
from runtime.machine import ROOT, read_text, written
from runtime.options import Parser, add_calibration
from scripts.shared.options import check_out_of

TEMPLATE = Path(__file__).with_name("view.html")
MOST = 2**16  # tokens of a text: the page holds positions in 16 bits
PLACES = 96  # the most tokens shaded per step, layer and head: those with the largest weights


def parse_args() -> argparse.Namespace:
    p = Parser(__doc__)
    a = p.add_argument
    add_checkpoint(p)
    add_calibration(p)
    a("--method", nargs="+", default=["self_index"], help="methods, as generate.py takes them; full is always added")
    a("--prompt-file", default=str(ROOT / "examples" / "needle.txt"), metavar="F", help="UTF-8 text")
    a("--question", default="", help="asked after the text, in the same turn of a chat")
    a("--chat", action="store_true", help="wrap the text and the question in the chat template")
    a("--query-in-prompt", action="store_true", help="the question is known when the text is compressed")
    a("--steps", type=int, default=16, metavar="N", help="tokens of the answer (default: 16)")
    a("--json", action="store_true", help="print each method's tokens and recall as JSON")
    a("--out", default="view.html", metavar="FILE", help="the page (default: view.html)")
    opt = p.parse_args()
    if not 1 <= opt.steps <= 256:
        raise InputError(f"--steps {opt.steps}: give 1 to 256, every step adds to the page")
    if opt.query_in_prompt and not opt.question:
        raise InputError("--query-in-prompt says when the question is read: add --question")
    check_out_of(opt)
    return opt


class Recording:
    """What one method attended to in each of n steps of a model of L layers and H query heads over T tokens."""

    def __init__(self, n: int, L: int, H: int, Hkv: int, T: int):
        self.group, self.T = H // Hkv, T
        self.mass = torch.zeros(n, L, H, T)  # attention weights by position
        self.seen = torch.zeros(n, L, Hkv, T, dtype=torch.bool)  # whether a position was attended to
        self.said: list[int] = []  # the tokens the method would have generated

    def put(self, step: int, part: Step) -> None:
        """Adds a layer's attention in a step, of all its KV heads or some."""
        kv = list(range(self.seen.shape[2])) if part.heads is None else part.heads
        query = [h * self.group + i for h in kv for i in range(self.group)]
        self.mass[step, part.layer, query] = part.mass(self.T)[0]
        for h, at in zip(kv, part.position[0], strict=True):
            self.seen[step, part.layer, h, at[(at >= 0) & (at < self.T)]] = True

    def packed(self, full: Recording) -> dict[str, Any]:
        """The arrays that the page reads; layer L and head H, after the others, are means over all."""
        by_head = torch.cat([self.mass, self.mass.mean(2, keepdim=True)], 2)
        every = torch.cat([by_head, by_head.mean(1, keepdim=True)], 1)  # [n, L + 1, H + 1, T]
        weight, place = every.topk(min(PLACES, self.T), -1)
        recall = torch.where(self.seen.repeat_interleave(self.group, 2), full.mass, 0).sum(-1)
        return dict(
            # the square root resolves small weights in 8 bits
            weight=encode((weight.clamp(0, 1).sqrt() * 255).round().to(torch.uint8)),
            place=encode(place.to(torch.uint16)),
            seen=encode(pack_bits(self.seen)),
            recall=[[[round(x, 3) for x in layer] for layer in step] for step in recall.tolist()],
        )


def encode(x: Tensor) -> str:
    return base64.b64encode(x.contiguous().numpy().tobytes()).decode()


def pack_bits(x: Tensor) -> Tensor:
    """bool [..., T] -> uint8 [..., ceil(T / 8)], the lowest bit first."""
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (x * torch.tensor([1 << i for i in range(8)])).sum(-1).to(torch.uint8)


@torch.inference_mode()
def run(llm: LLM, method: str, prompt: list[int], fed: list[int], question: int, steps: int) -> Recording:
    """Prefills the prompt, then feeds the tokens of `fed`, which begin with the question's, one at a time; where `fed`
    ends, the method's own next token is appended. Records `steps` steps, from the question's last token on."""
    model, a = llm.use(method).model, llm.model.args
    begin = max(question - 1, 0)
    T = len(prompt) + begin + steps
    model.setup_cache(method, 1, T, T - len(prompt))
    logits = model.prefill(*pad([prompt], model.device))
    recording = Recording(steps, a.n_layer, a.n_head, a.n_kv_head, T)
    for i in tqdm(range(begin + steps), desc=method, leave=False):
        if i == len(fed):
            fed.append(int(logits.argmax()))
        with observe(model) as trace:
            logits = model.decode(*torch.tensor([[fed[i]], [len(prompt) + i]], device=model.device))
        model.maintain(i + 1)
        if i >= begin:
            recording.said.append(int(logits.argmax()))
            for part in trace:
                recording.put(i - begin, part)
    return recording


def pieces(llm: LLM, ids: list[int]) -> list[str]:
    """The text of each token; a special token's name. A letter made of several tokens is the text of the last one."""
    stream, added = llm.tokenizer.stream(), llm.tokenizer.added
    return [stream.put(i) or (added[i].content if i in added else "") for i in ids]


def make_page(data: dict[str, Any]) -> str:
    # a "</script>" in the text must not end the script element
    inside = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    title = html.escape(f"{data['model']}: {', '.join(data['methods'])}")
    return TEMPLATE.read_text(encoding="utf-8").replace("{{title}}", title).replace("{{data}}", inside)


def main() -> None:
    opt = parse_args()
    llm = LLM(opt.checkpoint, calibration=opt.calibration, transformers=bool(opt.transformers))
    methods = list(dict.fromkeys(["full", *opt.method]))
    for method in methods:
        llm.use(method)  # reports a wrong name before any work is done
    text, chat = read_text(opt.prompt_file), Chat() if opt.chat else None
    ids = llm.encode(f"{text.strip()}\n\n{opt.question}" if opt.question else text, chat)
    shared = len(ids)
    if opt.question and not opt.query_in_prompt:  # the part that does not depend on the question
        other = llm.encode(f"{text.strip()}\n\n.", chat)
        pairs = enumerate(zip(ids, other, strict=False))
        shared = next((i for i, (x, y) in pairs if x != y), min(len(ids), len(other)))
    llm.capacity(len(ids), opt.steps)  # reports a text that does not fit before any work is done
    if len(ids) + opt.steps > MOST:
        raise InputError(f"the text has {len(ids)} tokens: with --steps, a page holds {MOST}")
    prompt, fed = ids[:shared], ids[shared:]
    question = len(fed)
    recordings = {method: run(llm, method, prompt, fed, question, opt.steps) for method in methods}
    a, size = llm.model.args, len(prompt) + len(fed)
    data = dict(
        model=Path(opt.transformers or opt.checkpoint).name, prompt_tokens=len(prompt), first=size - opt.steps,
        steps=opt.steps, layers=a.n_layer, heads=a.n_head, kv_heads=a.n_kv_head, tokens=size, places=min(PLACES, size),
        text=pieces(llm, prompt + fed), methods={},
    )  # fmt: skip
    for method, recording in recordings.items():
        said = [llm.tokenizer.decode([i]) for i in recording.said]
        data["methods"][method] = dict(said=said, **recording.packed(recordings["full"]))
    with written(opt.out) as tmp:
        tmp.write_text(make_page(data), encoding="utf-8")
    if opt.json:
        rows = [dict(method=name, said="".join(m["said"]), recall=round(float(torch.tensor(m["recall"]).mean()), 4))
                for name, m in data["methods"].items()]  # fmt: skip
        print(json.dumps(dict(out=opt.out, prompt_tokens=len(prompt), rows=rows), ensure_ascii=False))
        return
    print(f"{opt.out}: {len(prompt)} tokens, {opt.steps} steps, {', '.join(methods)}; open it in a browser")


if __name__ == "__main__":
    run_cli(main)
