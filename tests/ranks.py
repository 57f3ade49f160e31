"""Run by torchrun, or alone: greedy tokens and logits of a ragged batch under some methods. argv: a JSON object.

dict(out, specs, steps, compile: a backend of torch.compile; checkpoint, calibration and prompts (texts) or rows
(tokens), or random: sizes; weights). Each rank writes OUT.RANK: spec -> (tokens, logits), or the line of an InputError.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch

from loading.checkpoint import load_checkpoint, random_transformer
from loading.tokenizer import load_tokenizer
from model import ModelArgs
from runtime import parallel
from runtime.errors import InputError, run_cli
from weights import WeightFormat

RAGGED = (50, 23, 71)


def decoded(model, spec, tokens, lengths, steps, compile):
    model.setup_cache(spec, len(lengths), tokens.shape[1] + steps, steps)
    logits, pos, said = [model.prefill(tokens.clone(), lengths)], lengths.clone(), []
    step = model.decode
    if compile:
        torch._dynamo.reset()  # what was compiled for another method is no recompilation
        torch._dynamo.config.error_on_recompile = True
        step = torch.compile(step, fullgraph=True, dynamic=False, backend=compile)
    for i in range(steps):
        said.append(logits[-1].argmax(-1).tolist())
        logits.append(step(logits[-1].argmax(-1), pos))
        pos = pos + 1
        model.maintain(i + 1)
    return said, torch.stack(logits).clone()


def main(job):
    torch.set_num_threads(1)
    ranks, device = parallel.start("cpu")
    kind = WeightFormat.parse(job.get("weights"), None)
    if "random" in job:
        model = random_transformer(ModelArgs(**job["random"], ranks=ranks), device, torch.float32, 0, kind)
        gen = torch.Generator().manual_seed(1)
        rows = [torch.randint(3, model.args.vocab_size, (n,), generator=gen).tolist() for n in RAGGED]
    else:
        model = load_checkpoint(job["checkpoint"], device, torch.float32, kind, ranks)
        model.use_calibration(job.get("calibration"))
        rows = job.get("rows") or [load_tokenizer(job["checkpoint"]).encode(text) for text in job["prompts"]]
    lengths = torch.tensor([len(r) for r in rows])
    tokens = torch.tensor([r + [0] * (int(lengths.max()) - len(r)) for r in rows])
    out = {}
    for spec in job["specs"]:
        try:
            out[spec] = decoded(model, spec, tokens, lengths, job["steps"], job.get("compile"))
        except InputError as e:
            out[spec] = str(e)
    torch.save(out, f"{job['out']}.{ranks.rank}")


if __name__ == "__main__":
    run_cli(lambda: main(json.loads(sys.argv[1])))
