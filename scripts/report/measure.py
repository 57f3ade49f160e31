"""Measures the results behind the tables of results/README.md, into results/<machine>/<question>.json.

    python -m scripts.report.measure                       # everything; takes hours on two cores
    python -m scripts.report.measure --only speed attention
    python -m scripts.report.measure --only smollm2 --llama-bench F --gguf SmolLM2-135M-Instruct.Q4_0.gguf
    python -m scripts.report.measure --only weights --llama-bench llama.cpp/build/bin/llama-bench
    python -m scripts.report.measure --only kvpress        # in its own environment: not part of everything
    python -m scripts.report.measure --list                # the commands

Each command writes a part under runs/, and continues an interrupted one of the same commit. A question's file is
written from all of its parts. --limit bounds the time of one command; what it does not reach is left out.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from runtime.errors import InputError, Parser, run_cli
from runtime.machine import ROOT, SMOLLM2_CALIBRATION, check_out, smollm2
from scripts.eval.ladders import HELD
from scripts.report.published import OF_RULER
from scripts.shared.results import commit, machine, write_json

# kvzip, which reads every prompt twice for each of its settings, is a question of its own
WITH_LADDERS = " ".join(m for m in HELD if m != "kvzip")
NEWER = "keydiff expected_attention snapkv,adaptive=True snapkv,value_aware=True rkv turboquant fp8"
OTHERS = f"h2o tova snapkv pyramidkv quest loki sparq kivi-4 kivi-2 hadamard palu-50 hshare {NEWER} kvzip rocket"
METHODS = f"full streaming self_index double_sparsity sals-25 sals-12.5 ojakv razor,window=512 {OTHERS}"
ACCURACY = ("full oracle random streaming self_index double_sparsity double_sparsity,channels=0.5 sals-25 sals-12.5 "
            f"ojakv ojakv-0.8 razor,window=128 {OTHERS} self_index,store_bits=4,budget=512")  # fmt: skip
RULER = "niah_single_1,niah_multikey_2,niah_multikey_3,vt,cwe,fwe"  # those that need no data
LONG = "full self_index double_sparsity sals-12.5 sals-12.5,budget=512"
DECODE = "bench.bench_generate --threads 2 --mode compiled --batch 1"
PUBLISHED = os.path.relpath(smollm2() or "SmolLM2-135M-Instruct.Q4_1.gguf", ROOT)
CALIBRATION = os.path.relpath(SMOLLM2_CALIBRATION, ROOT)
# a published model on RULER: a 16-bit cache, as on a GPU; one thread, so that two runs fit on two cores
RULED = (f"eval.compare --checkpoint {PUBLISHED} --calibration {CALIBRATION} --kv-dtype bf16 --threads 1 "
         "--batch-size 5 --at-once 32")  # fmt: skip
# an answer of 7 digits comes first or not at all; both sides decode in fp32, ours 5 prompts at once
BESIDE = f"eval.compare_kvpress --checkpoint {PUBLISHED} --threads 1 --batch-size 5 --max-new-tokens 16"
FOUND = "--tasks niah_single_1,niah_multikey_1"  # of RULER, what this model can do
FOUND_LONG = "--tasks niah_single_1"  # at 4K it finds a third of the others
OWN = ("full self_index self_index,store_bits=4,budget=512 self_index,store_bits=4,budget=1024 double_sparsity "
       "double_sparsity,channels=0.5 sals-25 sals-12.5 ojakv ojakv-0.8 razor,window=128")  # fmt: skip
LONGER = "full self_index,store_bits=4,budget=512 double_sparsity,channels=0.5 sals-25 ojakv-0.8 razor,window=128"
# ways to reduce a group's queries to one list: sum of products, mean softmax, largest logit; or one list per query
GROUPS = " ".join(f"{m},heads={by}" for m in ("double_sparsity,channels=0.5", "quest", "loki")
                  for by in ("group", "softmax", "max", "query"))  # fmt: skip
GROUPS += "".join(f" self_index,store_bits=4,heads={by}" for by in ("mean", "softmax", "max"))
GROUPS += " sals,score=sum sals,score=softmax"
RESTORE = (f"bench.bench_restore --threads 1 --checkpoint {PUBLISHED} --calibration {CALIBRATION} --kv-dtype bf16 "
           "--length 8000")  # fmt: skip
SHAPES = f"{DECODE} --kv-dtype bf16 --random-init"


def commands(llama_bench: str | None, ggufs: Sequence[str] = ()) -> dict[str, list[str]]:
    """Question -> modules of scripts/ with their arguments."""
    peer = f" --peer llama.cpp:{llama_bench}" if llama_bench else ""
    widths = ("bf16", "int8", "int4")
    return dict(
        speed=[
            f"{DECODE} --synthetic --length 3900 --new 48 --rounds 5 --method {METHODS}",
            f"{SHAPES} llama-3.2-1b --synthetic --weights int4 --length 8192 32768 --new 32 --rounds 3 "
            f"--method {LONG}",
        ],
        speculate=[
            f"{SHAPES} llama-3.2-1b --synthetic --weights {w} --length 8192 32768 --new 64 --rounds 3 --speculate 4 "
            "--acceptance 0.7 0.8 0.9 --method full double_sparsity self_index,keep=full"
            for w in ("int4", "bf16")
        ],
        acceptance=[f"eval.acceptance --threads 1 --lengths {n}" for n in (4096, 8192)],
        attention=["bench.bench_attention --method all sals-12.5,budget=512 self_index-7.5 kivi-2 palu-50 "
                   "--length 8192 32768 --dtype bf16 --threads 2 --rounds 5 --layers 1 --no-stages"],
        weights=[
            f"{SHAPES} {model}{peer} --weights {w} --method full --length {n} --rounds 5 {more}"
            for model, n, more in (("llama-3.2-1b", 128, "--new 48 --synthetic"),
                                   ("qwen2.5-0.5b", 128, "--new 48 --synthetic"),
                                   ("llama-3.2-1b", 512, "--new 16 --warm-up 0"))
            for w in widths
        ],
        smollm2=[
            f"{DECODE}{peer} --checkpoint {file} --calibration {CALIBRATION} --method full self_index sals-25 "
            "--synthetic --length 2048 --new 64 --rounds 3"
            for file in (PUBLISHED, *ggufs)
        ],
        answers=[f"eval.answers --checkpoint {PUBLISHED} --calibration {CALIBRATION} --max-new-tokens 12 --method all "
                 "sals-25 sals-12.5 self_index,store_bits=4,budget=512 double_sparsity,channels=0.5 kivi-4 "
                 "ojakv,rank=0.8"],
        restore=[f"{RESTORE} {more}" for more in ("--synthetic --method all kivi-4 sals-12.5 razor,window=512",
                                                  "--method full self_index")],
        linear=["bench.bench_linear --threads 2 --rows 1 8 512"],
        accuracy=["eval.compare --threads 1 --batch-size 20 --lengths 2048 --tasks needle,key_value,repeats "
                  f"--samples 100 --method {ACCURACY}"],
        equal_bytes=["eval.compare --threads 1 --at-once 24 --batch-size 25 --lengths 1024,2048 --samples 100 "
                     "--kv 1/2,1/4,1/8 --read 1/2,1/4,1/8,1/16"],
        ruler_full=[f"{RULED} --tasks {RULER} --lengths 1024,2048 --samples 10 --method full"],
        ruler_full_long=[f"{RULED} --tasks {RULER} --lengths {n} --samples {samples} --method full"
                         for n, samples in ((4096, 5), (8192, 3))],
        bases=[f"eval.analyze --checkpoint {PUBLISHED} --calibration {CALIBRATION} --only bases --threads 1"],
        ruler_held=[f"{RULED} --lengths 2048 --samples 20 {FOUND} --kv 1/2,1/4,1/8"],
        ruler_read=[f"{RULED} --lengths 2048 --samples 20 {FOUND} --read 1/4,1/8,1/16"],
        ruler_held_4k=[f"{RULED} --batch-size 10 --at-once 48 --lengths 4096 --samples 10 {FOUND_LONG} "
                       f"--kv 1/2,1/4,1/8 --method {WITH_LADDERS}"],
        ruler_read_4k=[f"{RULED} --batch-size 3 --lengths 4096 --samples 10 {FOUND} --read 1/4,1/8,1/16"],
        # ojakv, whose prompts differ from full's, reads them again for every setting: ruler_long has it
        ruler_8k=[f"{RULED} --batch-size 3 --lengths 8192 --samples 10 {FOUND_LONG} "
                  "--kv 1/2,1/4,1/8 --read 1/4,1/8,1/16 --method double_sparsity razor sals self_index"],
        ruler_defaults=[f"{RULED} --lengths 2048 --samples 20 {FOUND} --method {OWN}"],
        ruler_long=[f"{RULED} --lengths 4096 --samples 10 {FOUND_LONG} --method {OWN}",
                    f"{RULED} --lengths 8192 --samples 5 {FOUND_LONG} --method {LONGER}"],
        ruler_known=[f"{RULED} --lengths 2048 --samples 20 {FOUND} --query-in-prompt --kv 1/2,1/4,1/8 "
                     "--method h2o tova snapkv pyramidkv streaming"],
        ruler_newer=[f"{RULED} --lengths 2048 --samples 20 {FOUND} --kv 1/2,1/4,1/8 --method {NEWER}"],
        ruler_kvzip=[f"{RULED} --lengths 2048 --samples 5 {FOUND} --kv 1/2,1/4,1/8 --method kvzip"],
        ruler_groups=[f"{RULED} --lengths 2048 --samples 20 {FOUND} --read 1/4,1/8 --method {GROUPS}"],
        kvpress=[f"{BESIDE} {FOUND} --lengths 2048 --samples 10 --keep 1/2,1/4,1/8 {more}".rstrip()
                 for more in ("", "--query-in-prompt --method full snapkv")],
        kernels=["report.kernel_report --cc 80,89,90,100"],
        addresses=["report.addresses"],
        collectives=["report.collectives"],
        ranks=["report.ranks"],
    )  # fmt: skip


# results that do not depend on a machine's speed
FOLDERS = dict.fromkeys(("kernels", "addresses", "collectives"), "compiled")
FOLDERS |= dict.fromkeys(("answers", "bases", "acceptance", "kvpress"), "published")
FOLDERS |= dict.fromkeys(OF_RULER, "published")
COMPARE = "eval.compare"  # writes a folder
RESUME = (
    "bench.bench_generate",
    "bench.bench_attention",
    COMPARE,
    "eval.answers",
    "eval.acceptance",
    "eval.compare_kvpress",
)


def part(question: str, i: int, command: str, limit: float) -> dict | None:
    """The result of one command, from its file if that is complete and of this commit; None if there is no result."""
    module, *argv = command.split()
    out = ROOT / "runs" / f"{question}-{i}{'' if module == COMPARE else '.json'}"
    path = out / "compare.json" if module == COMPARE else out
    path.parent.mkdir(parents=True, exist_ok=True)
    mark = out.with_suffix(".done")
    key = f"{commit()} {command}"
    if not (mark.exists() and mark.read_text() == key):
        if path.exists() and json.loads(path.read_text()).get("commit") != commit():
            if out.is_dir():
                shutil.rmtree(out)  # with its samples, which --resume would take for this commit's
            else:
                path.unlink()
        argv += ["--out", str(out.relative_to(ROOT))] + ["--resume"] * (module in RESUME)
        status = run([sys.executable, "-m", f"scripts.{module}", *argv], limit)
        if status:
            raise InputError(f"scripts.{module} failed with {status}: see above")
        if status is None:
            print(f"{question}: took more than {limit:g} s, the rest is left out: {command}", file=sys.stderr)
        else:
            mark.write_text(key)
    found = json.loads(path.read_text()) if path.exists() else None
    return None if found and module == COMPARE and "rows" not in found else found  # it has them at its end only


def run(command: list[str], limit: float) -> int | None:
    """The command's exit status; None if it took too long and was interrupted (like by Ctrl-C, so it keeps results)."""
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        return process.wait(limit)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as e:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        if isinstance(e, KeyboardInterrupt):
            raise
        return None


def main() -> None:
    p = Parser(__doc__)
    a = p.add_argument
    a("--only", nargs="+", choices=list(commands(None)), default=[], help="questions")
    a(
        "--llama-bench",
        metavar="F",
        help="llama.cpp's llama-bench, for `weights` and `smollm2` (scripts/bench/llama_cpp.py says how to build it)",
    )
    a("--gguf", nargs="+", default=[], metavar="F", help="for `smollm2`: other quantizations of it")
    a("--machine", default=machine(), help="the folder's name (default: %(default)s)")
    a("--limit", type=float, default=3600, metavar="S", help="seconds for each command (default: %(default)g)")
    a("--list", action="store_true", help="print the commands, run nothing")
    a("--json", action="store_true", help="print the names of the files as JSON")
    opt = p.parse_args()
    every = commands(opt.llama_bench, opt.gguf)
    only = opt.only or [q for q in every if opt.list or q != "kvpress"]
    todo = {q: lines for q, lines in every.items() if q in only}
    if opt.list:
        print("\n".join(f"{q}: python -m scripts.{line}" for q, lines in todo.items() for line in lines))
        return
    if "weights" in todo and not opt.llama_bench:
        raise InputError("weights are compared to llama.cpp: give --llama-bench, or leave them out with --only")
    if commit().endswith("+dirty"):
        raise InputError("tracked files have changes, but results need a clean commit: commit first")
    written = []
    for question, lines in todo.items():
        folder = ROOT / "results" / FOLDERS.get(question, opt.machine)
        folder.mkdir(exist_ok=True)
        out = folder / f"{question}.json"
        check_out(out, "measure")
        runs = [run for i, line in enumerate(lines) if (run := part(question, i, line, opt.limit))]
        if runs:
            write_json(out, dict(runs=runs))
            written.append(str(Path(out).relative_to(ROOT)))
    print(json.dumps(written) if opt.json else "\n".join(written))


if __name__ == "__main__":
    run_cli(main)
