"""Measures the results behind the pages' tables, into results/<machine>/<question>.json.

    python -m scripts.report.measure                       # everything; takes hours on two cores
    python -m scripts.report.measure --only speed attention
    python -m scripts.report.measure --only smollm2 --llama-bench llama.cpp/build/bin/llama-bench --gguf m.Q4_0.gguf
    python -m scripts.report.measure --gpu --within 540    # on a GPU: again until it says that all is measured
    python -m scripts.report.measure --gpu --small         # the same commands on a CPU with toy models, to try them
    python -m scripts.report.measure --only kvpress        # in its own environment: not part of everything
    python -m scripts.report.measure --list                # the commands
    python -m scripts.report.measure --check               # exit with 2 if a result is stale

Each command writes a part under runs/, and continues an interrupted one of the same commit. A question's file is
written from all of its parts. --limit bounds the time of one command, --within that of all; what they do not reach is
left for the next call. Commands are in order of importance.

A result is stale if `measure` has not its command, if the command no longer parses, or if its hot path, the folders
that determine its numbers, changed since its commit. The pages mark stale results.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cache.grammar import parse_spec
from cache.spec import resolve
from runtime.errors import InputError, run_cli
from runtime.machine import ROOT, SMOLLM2_CALIBRATION, check_out, smollm2
from runtime.options import Parser
from scripts.eval.ladders import HELD
from scripts.shared.markdown import Row
from scripts.shared.results import commit, git, machine, write_json

# kvzip, which reads every prompt twice for each of its settings, is a question of its own
WITH_LADDERS = " ".join(m for m in HELD if m != "kvzip")
NEWER = "keydiff expected_attention snapkv,adaptive=True snapkv,value_aware=True rkv turboquant fp8"
NEWEST = "knorm qfilters lagkv,lag=128 compactor triattention attention_matching chunkkv duo"
OTHERS = ("h2o tova snapkv pyramidkv quest loki sparq kivi-4 kivi-2 hadamard palu-50 hshare "
          f"{NEWER} kvzip rocket {NEWEST}")  # fmt: skip
METHODS = f"full streaming self_index double_sparsity sals-25 sals-12.5 ojakv razor,window=512 {OTHERS}"
ACCURACY = ("full oracle random streaming self_index double_sparsity double_sparsity,channels=0.5 sals-25 sals-12.5 "
            f"ojakv ojakv-0.8 razor,window=128 {OTHERS} self_index,store_bits=4,budget=512")  # fmt: skip
RULER = "niah_single_1,niah_multikey_2,niah_multikey_3,vt,cwe,fwe"  # those that need no data
DECODE = "bench.bench_generate --threads 2 --mode compiled --batch 1"
SHAPES = f"{DECODE} --kv-dtype bf16 --random-init llama-3.2-1b --synthetic"
PUBLISHED = os.path.relpath(smollm2() or "SmolLM2-135M-Instruct.Q4_1.gguf", ROOT)
MODEL = f"--checkpoint {PUBLISHED} --calibration {os.path.relpath(SMOLLM2_CALIBRATION, ROOT)}"
# a published model on RULER: a 16-bit cache, as on a GPU; one thread, so that two runs fit on two cores
RULED = f"eval.compare {MODEL} --kv-dtype bf16 --threads 1 --batch-size 5 --at-once 32"
# an answer of 7 digits comes first or not at all; both sides decode in fp32
BESIDE = f"tests.audit.compare_kvpress --checkpoint {PUBLISHED} --threads 1 --max-new-tokens 16"
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


def commands(llama_bench: str | None = None, ggufs: Sequence[str] = ()) -> dict[str, list[str]]:
    """Question -> modules, of scripts/ if no other folder is named, with their arguments."""
    peer = f" --peer llama.cpp:{llama_bench}" if llama_bench else ""
    return dict(
        speed=[f"{DECODE} --synthetic --length 3900 --new 48 --rounds 5 --method {METHODS}",
               f"{SHAPES}{peer} --weights int4 --length 8192 32768 --new 32 --rounds 3 "
               "--method full self_index double_sparsity sals-12.5 sals-12.5,budget=512"],
        attention=["bench.bench_attention --method all sals-12.5,budget=512 self_index-7.5 kivi-2 palu-50 "
                   "--length 8192 32768 --dtype bf16 --threads 2 --rounds 5 --layers 1 --no-stages"],
        smollm2=[f"{DECODE}{peer} {MODEL.replace(PUBLISHED, file)} --method full self_index sals-25 --synthetic "
                 "--length 2048 --new 64 --rounds 3" for file in (PUBLISHED, *ggufs)],
        speculate=[f"{SHAPES} --weights {w} --length 8192 32768 --new 64 --rounds 3 --speculate 4 "
                   "--acceptance 0.7 0.8 0.9 --method full double_sparsity self_index,keep=full"
                   for w in ("int4", "bf16")],
        acceptance=[f"bench.bench_generate --threads 1 --mode eager --batch 1 {MODEL} --texts --length 4096 8192 "
                    "--new 128 --speculate 4 --method full double_sparsity double_sparsity,channels=0.5 "
                    "self_index,keep=full sals-12.5,keep=full"],
        accuracy=["eval.compare --threads 1 --batch-size 20 --lengths 2048 --tasks needle,key_value,repeats "
                  f"--samples 100 --method {ACCURACY}"],
        ruler_full=[f"{RULED} --tasks {RULER} --lengths 1024,2048 --samples 10 --method full"],
        ruler_full_long=[f"{RULED} --tasks {RULER} --lengths {n} --samples {samples} --method full"
                         for n, samples in ((4096, 5), (8192, 3))],
        bases=[f"eval.analyze {MODEL} --only bases --threads 1"],
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
    )  # fmt: skip


LAYER = "bench.bench_attention --device cuda --rounds 20"
END = "bench.bench_generate --device cuda --rounds 3 --new 64 --mode compiled"
LLAMA2, LLAMA3 = "llama-2-7b", "llama-3.1-8b"
MAIN = "full sals-12.5 self_index-7.5 double_sparsity"
ALL = f"{MAIN} razor ojakv-0.6 double_sparsity_offload sals-25 streaming"
SALS = "sals-12.5 sals-25 double_sparsity,budget=0.125"  # Table 6: 1/8 of the tokens for all methods
# every method, and settings that use other kernels or bit widths, or make `maintain` run its kernels; more than 16K
# slots use other selection kernels
ONCE = (f"--no-compile --once --size 2x300 1x17000 --model {LLAMA3} --method all sals-25,recent=16 "
        "sals-12.5,recent=16 sals,score=softmax,recent=16 self_index-7.5 self_index,store_bits=8 self_index-16bit "
        "self_index,tail=8,flush=8 double_sparsity,label_bits=2 double_sparsity,label_bits=16 flexgen "
        "ojakv,update_every=8 ojakv,latent=False razor,window=64,retrieval_method=self_index")  # fmt: skip


def gpu_commands(gpt_fast: str | None = None) -> dict[str, list[str]]:
    """As `commands`, on a GPU: the papers' grids. SALS's Table 7 does not name its shapes: grouped queries, because 64K
    at batch 4 would not fit otherwise."""
    peer = f" --peer gpt-fast:{gpt_fast}" if gpt_fast else ""
    return dict(
        checks=["pytest -q -m 'not slow' --maxfail=20 tests/test_triton_*.py", f"{LAYER} {ONCE}"],
        attention=[f"{LAYER} --model {LLAMA3} --size 8x32768 1x32768 --method {ALL} flexgen",
                   f"{LAYER} --model {LLAMA2} --size 8x4096 --method {SALS} self_index-7.5 full",
                   f"{LAYER} --model {LLAMA3} --size 10x16384 --method self_index-7.5",  # Self-Indexing, Table 4
                   f"{LAYER} --no-stages --model {LLAMA2} --method {SALS} "  # SALS, Table 6
                   "--size 16x4096 16x2048 8x2048 8x1024 16x1024",
                   f"{LAYER} --no-stages --model {LLAMA2} --method double_sparsity "  # Double Sparsity, Fig. 5
                   "--size 32x4096 4x16384 32x16384 4x4096 32x8192 32x2048 4x8192 4x2048",
                   f"{LAYER} --no-stages --model {LLAMA3} --method {MAIN} "
                   "--size 8x4096 8x16384 1x131072 8x65536 8x8192 1x8192 1x4096 8x2048 8x1024"],
        speed=[f"{END}{peer} --synthetic --random-init {LLAMA3} --method {MAIN} sals-25 "  # SALS, Table 7
               "--size 8x32768 8x4096 8x16384 4x65536 8x8192",
               f"{END}{peer} --synthetic --random-init {LLAMA3} --method {MAIN} "
               "--size 1x32768 1x4096 1x16384 1x65536 1x8192",
               f"{END.replace('compiled', 'compiled trees')} --synthetic --random-init {LLAMA3} --size 1x4096 "
               "--method full self_index-7.5",
               f"{END}{peer} --synthetic --random-init {LLAMA2} --method full double_sparsity --size 8x4096",
               f"{END} --rounds 2 --new 16 --synthetic --random-init {LLAMA3} --size 1x65536 8x16384 1x32768 "
               "--method double_sparsity_offload flexgen double_sparsity_offload-sync"],  # Double Sparsity, Fig. 6
        prompt=[f"{END} --rounds 1 --warm-up 0 --random-init {LLAMA3} --size 1x131008 --method {ALL}",
                f"{END} --rounds 2 --prefill --random-init {LLAMA3} --size 1x32768 --method {ALL}",
                f"{END} --rounds 2 --prefill --random-init {LLAMA3} --size 1x8192 1x16384 1x65536 1x49152 "
                "--method self_index-7.5"],  # Self-Indexing, Table 3
    )  # fmt: skip


def small(command: str) -> str:
    """A command of `gpu_commands` on the CPU with toy models."""
    folder = ROOT / "runs" / "small"
    folder.mkdir(parents=True, exist_ok=True)
    for name, heads in ((LLAMA2, 4), (LLAMA3, 2)):
        shapes = dict(model_type="llama", vocab_size=256, hidden_size=128, intermediate_size=128, num_hidden_layers=2,
                      num_attention_heads=4, num_key_value_heads=heads, max_position_embeddings=131072)  # fmt: skip
        (folder / f"{name}.json").write_text(json.dumps(shapes))
        command = command.replace(name, str((folder / f"{name}.json").relative_to(ROOT)))
    sizes = re.findall(r"\b(\d+)x(\d+)\b", command)[:2]
    fewer = " ".join(dict.fromkeys(f"{min(int(b), 2)}x{min(int(n), 512)}" for b, n in sizes))
    command = re.sub(r"--size [\dx ]*\dx\d+", f"--size {fewer}", command).replace("cuda", "cpu")
    command = re.sub("--mode [a-z ]+", "--mode eager ", command).replace("--rounds 20", "--no-compile --rounds 2")
    return command.replace("--new 64", "--new 4").replace("tests/test_triton_*.py", "tests/test_kernels_torch.py")


# ---- stale results ----

STEP = ("kernels", "cache", "kv_methods")
WHOLE = (*STEP, "model.py", "weights", "engine")
HOT = {"bench.bench_attention": STEP, "bench.bench_generate": WHOLE, "eval.analyze": STEP}  # else, what follows
HOT_OF_ANSWERS = (*WHOLE, "loading", "scripts/eval")
# flags that change no number: where the result goes, and where files lie
ASIDE = re.compile(r" --(out|peer|time-limit) \S+| --resume|(?<=[ :])\S*/(?=[^/ ]+\.gguf)|\.Q\w+(?=\.gguf)")


def parts_of(command: str) -> tuple[str, list[str]] | None:
    """The module, as `commands` name it, and the arguments of a recorded command; None if there is no such script."""
    found = re.fullmatch(r"python (?:-m )?((?:scripts|tests)[./][\w./]+?)(?:\.py)?( .*)?", command)
    module = found[1].replace("/", ".") if found else ""
    known = bool(module) and (ROOT / f"{module.replace('.', '/')}.py").is_file()
    return (module.removeprefix("scripts."), shlex.split(found[2] or "")) if found and known else None


def full_name(module: str) -> str:
    return module if module.startswith(("tests.", "pytest")) else f"scripts.{module}"


def check_command(module: str, argv: list[str]) -> None:
    """Raises InputError unless the script's own parser takes the arguments, and its methods and knobs exist."""
    parser = importlib.import_module(full_name(module)).parser()
    opt = parser.parse_args(argv)
    for spec in getattr(opt, "method", None) or ():
        for part in parse_spec(spec) if spec != "all" else ():
            resolve(part.name)


@functools.cache
def known_commands() -> frozenset[str]:
    every = [*commands().values(), *gpu_commands().values()]
    return frozenset(ASIDE.sub("", f"{line} ").strip() for lines in every for line in lines)


@functools.cache
def changed(since: str, folders: tuple[str, ...]) -> list[str]:
    """Those of the folders that differ from a commit."""
    return [f for f in folders if git("diff", "--name-only", since, "--", f)]


def stale(run: Row) -> str:
    """Why the result of one command is stale; empty if it is not."""
    parts = parts_of(run["command"])
    if parts is None:
        return "its command no longer exists"
    module, argv = parts
    try:
        check_command(module, argv)
    except InputError as e:
        return f"its command no longer parses: {e}".partition(" (")[0]
    if ASIDE.sub("", f"{module} {shlex.join(argv)} ").strip() not in known_commands():
        return "measure has another command"
    try:
        different = changed(run["commit"].removesuffix("+dirty"), HOT.get(module, HOT_OF_ANSWERS))
    except (OSError, subprocess.CalledProcessError):
        return f"commit {run['commit']} is not in this clone"
    return f"{', '.join(different)} changed since" if different else ""


def check(root: Path = ROOT) -> tuple[list[str], int]:
    """A line for every stale result file, and the number of files."""
    files = sorted((root / "results").glob("*/*.json"))
    found = []
    for file in files:
        why = list(dict.fromkeys(filter(None, map(stale, json.loads(file.read_text())["runs"]))))
        found += [f"{file.relative_to(root)}: {'; '.join(why)}"] if why else []
    return found, len(files)


# ---- measuring ----

# results that do not depend on a machine's speed
SHARED = ("bases", "acceptance", "kvpress")
COMPARE = "eval.compare"  # writes a folder
LEAST = 30  # seconds; with fewer left nothing is begun
TIMED = ("bench.bench_generate", "bench.bench_attention")  # stop by themselves
RESUME = (*TIMED, COMPARE, "tests.audit.compare_kvpress")


def part(question: str, i: int, command: str, limit: float) -> Row | None:
    """The result of one command, from its file if that is complete and of this commit; None if there is no result."""
    module, *argv = shlex.split(command)
    out = ROOT / "runs" / f"{question}-{i}{'' if module == COMPARE else '.json'}"
    path = out / "compare.json" if module == COMPARE else out
    path.parent.mkdir(parents=True, exist_ok=True)
    mark = out.with_suffix(".done")
    key = f"{commit()} {command}"
    done = mark.exists() and mark.read_text() == key
    if not done and limit >= LEAST:
        if path.exists() and json.loads(path.read_text()).get("commit") != commit():
            if out.is_dir():
                shutil.rmtree(out)  # with its samples, which --resume would take for this commit's
            else:
                path.unlink()
        if module == "pytest":
            files = sorted(str(f) for a in argv for f in ROOT.glob(a) if "/" in a)
            argv = [a for a in argv if "/" not in a] + files
        else:
            argv += ["--out", str(out.relative_to(ROOT))] + ["--resume"] * (module in RESUME)
            argv += ["--time-limit", f"{max(1, limit - 25):.0f}"] * (module in TIMED)
        status = run([sys.executable, "-m", full_name(module), *argv], limit)
        if status:
            raise InputError(f"{question}: {full_name(module)} failed with {status}: see above")
        late = status is None or (path.exists() and "stopped" in json.loads(path.read_text()))
        if late:
            print(f"{question}: the time is up, the rest is left out: {command}", file=sys.stderr)
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


def parser() -> Parser:
    p = Parser(__doc__)
    a = p.add_argument
    a("--only", nargs="+", default=[], metavar="QUESTION", help="questions; --list prints them")
    a("--gpu", action="store_true", help="the questions of a GPU")
    a("--small", action="store_true", help="with --gpu: toy models on the CPU; writes no results")
    a("--gpt-fast", metavar="PATH", help="with --gpu: a checkout of gpt-fast, to measure beside it")
    a("--llama-bench", metavar="F", help="llama.cpp's llama-bench (scripts/bench/llama_cpp.py says how to build it)")
    a("--gguf", nargs="+", default=[], metavar="F", help="for `smollm2`: other quantizations of it")
    a("--machine", help="the folder's name; default: the processor's family, or the card's name")
    a("--limit", type=float, default=3600, metavar="S", help="seconds for each command (default: %(default)g)")
    a("--within", type=float, default=float("inf"), metavar="S", help="seconds for all commands")
    a("--list", action="store_true", help="print the commands, run nothing")
    a("--check", action="store_true", help="name the stale results, run nothing")
    a("--json", action="store_true", help="print the names of the files as JSON")
    return p


def folder_name(gpu: bool) -> str:
    if not gpu:
        return machine()
    import torch

    if not torch.cuda.is_available():
        raise InputError("torch finds no GPU: --small tries the commands on a CPU")
    words = re.findall(r"[a-z]*\d+[a-z]*", torch.cuda.get_device_name().lower())
    return words[0] if words else "gpu"


def main() -> None:
    opt, begin = parser().parse_args(), time.monotonic()
    if opt.check:
        found, n = check()
        print(json.dumps(found) if opt.json else "\n".join(found))
        if found:
            raise InputError(f"{len(found)} of {n} result files are stale: measure them again, or delete them")
        return
    every = gpu_commands(opt.gpt_fast) if opt.gpu else commands(opt.llama_bench, opt.gguf)
    if unknown := set(opt.only) - {*every}:
        raise InputError(f"no question {min(unknown)!r}: use {', '.join(every)}")
    if opt.small and not opt.gpu:
        raise InputError("--small is for the commands of --gpu: add it")
    if opt.gpt_fast and not (Path(opt.gpt_fast) / "generate.py").is_file():
        raise InputError(f"--gpt-fast {opt.gpt_fast} is no checkout of gpt-fast")
    only = opt.only or [q for q in every if opt.list or q != "kvpress"]
    todo = {q: [small(c) if opt.small else c for c in lines] for q, lines in every.items() if q in only}
    if opt.list:
        print("\n".join(f"{q}: python -m {full_name(line)}" for q, lines in todo.items() for line in lines))
        return
    if commit().endswith("+dirty") and not opt.small:
        raise InputError("tracked files have changes, but results need a clean commit: commit first")
    name = opt.machine or ("small" if opt.small else folder_name(opt.gpu))
    written, failed, late = [], [], False
    for question, lines in todo.items():
        shared = question in SHARED or question.startswith("ruler")
        out = (
            (ROOT / "runs" if opt.small else ROOT / "results") / ("published" if shared else name) / f"{question}.json"
        )
        out.parent.mkdir(parents=True, exist_ok=True)
        check_out(out, "measure")
        runs = []
        for i, line in enumerate(lines):
            left = min(opt.limit, opt.within - (time.monotonic() - begin))
            late = late or left < LEAST
            try:
                found = part(f"{name}-{question}" if opt.gpu else question, i, line, left)
            except InputError as e:  # the others go on
                failed.append(str(e))
                continue
            runs += [found] if found and question != "checks" else []
        if runs:
            write_json(out, dict(runs=runs))
            written.append(str(Path(out).relative_to(ROOT)))
    print(json.dumps(written) if opt.json else "\n".join(written))
    if failed:
        raise InputError("; ".join(failed))
    if late:
        print("the time is up: call it again for the rest", file=sys.stderr)


if __name__ == "__main__":
    run_cli(main)
