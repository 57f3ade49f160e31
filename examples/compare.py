"""One prompt, several KV-cache methods side by side: what each answers, and what its cache takes.

python examples/compare.py
python examples/compare.py --checkpoint CKPT --prompt-file book.txt --method full self_index,budget=160 sals-25
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from engine import LLM  # noqa: E402
from errors import Parser, run_cli  # noqa: E402
from runtime import TINY, add_calibration, read_text  # noqa: E402


def main() -> None:
    p = Parser(__doc__)
    p.add_argument("--checkpoint", default=TINY, metavar="DIR", help="Hugging Face folder or GGUF file")
    add_calibration(p)
    p.add_argument("--method", nargs="+", default=["full", "self_index"], help="methods, as generate.py takes them")
    p.add_argument("--prompt-file", default=Path(__file__).parent / "needle.txt", metavar="F", help="UTF-8 text")
    p.add_argument("--max-new-tokens", type=int, default=8, metavar="N")
    opt = p.parse_args()
    prompt, llm = read_text(opt.prompt_file), LLM(opt.checkpoint, calibration=opt.calibration)
    for method in opt.method:
        llm.use(method)  # a wrong name is told before any work is done
    print(f"a prompt of {len(llm.encode(prompt))} tokens, which ends in: ...{prompt[-60:]!r}\n")
    print(f"{'method':24} {'answer':24} {'KV cache':>10} {'of full':>8} {'prefill':>9} {'decode':>14}")
    for method in opt.method:
        llm.use(method).generate([llm.encode(prompt)[-64:]], 2)  # what is loaded at first use is not this method's time
        (c,) = llm.use(method).generate([prompt], opt.max_new_tokens)
        print(
            f"{method:24} {c.text.strip()[:24]!r:24} {c.kv_bytes / 2**20:6.2f} MiB {c.kv_bytes / c.kv_bytes_full:8.3f}"
            f" {c.batch.prefill_s:7.2f} s {c.decode_tokens_per_s:7.1f} tokens/s",
            flush=True,
        )


if __name__ == "__main__":
    run_cli(main)
