"""Measures the results behind the pages' tables, into results/<machine>/<question>.json.

    python -m scripts.report.measure                       # everything; takes hours on two cores
    python -m scripts.report.measure --only bytes known --jobs 2    # questions of accuracy: two commands at a time
    python -m scripts.report.measure --only speed --llama-bench llama.cpp/build/bin/llama-bench
    python -m scripts.report.measure --gpu --within 540    # on a GPU: again until it says that all is measured
    python -m scripts.report.measure --gpu --small         # the same commands on a CPU with toy models, to try them
    python -m scripts.report.measure --only kvpress        # in its own environment: not part of everything
    python -m scripts.report.measure --list                # the commands
    python -m scripts.report.measure --check               # exit with 2 if a result is stale

Each command writes a part under runs/, and continues an interrupted one. A question's file is written from all of its
parts. --limit bounds the time of one command, --within that of all; what they and Ctrl-C do not reach is left for the
next call. Questions are in order of importance. Accuracy, in results/accuracy/, may be measured on several machines.

A result is kept, and continued, while its hot path, the files that determine its numbers (scripts/shared/results.py),
is unchanged since its commit, or since one that scripts/report/verify.py found to give the same numbers. Otherwise, or
if `measure` no longer has its command, it is stale; the pages mark that.
"""

from __future__ import annotations

import contextlib
import functools
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from runtime.errors import InputError, run_cli
from runtime.machine import ROOT, SMOLLM2_CALIBRATION, check_out, smollm2
from runtime.options import Parser
from scripts.eval.ladders import HELD, READ
from scripts.shared.markdown import Row
from scripts.shared.results import changed, commit, machine, write_json

# methods that keep, drop or code tokens; oracle and random are the controls
HELD_ALL = " ".join(m for m in HELD if m != "attention_matching") + " snapkv,chunk_length=10,kernel=1"
PAPERS = ("self_index self_index,store_bits=4,budget=512 double_sparsity double_sparsity,channels=0.5 sals-25 "
          "sals-12.5 ojakv ojakv-0.8 razor,window=128")  # fmt: skip
SLOW = "h2o kvzip attention_matching"  # they read a prompt again, keep all of its weights or fit each head
OTHERS = ("oracle random streaming tova snapkv pyramidkv snapkv,adaptive=True snapkv,value_aware=True chunkkv keydiff "
          "expected_attention rkv knorm qfilters lagkv,lag=128 compactor triattention duo quest loki sparq hshare "
          "rocket skip_softmax kivi-4 kivi-2 hadamard turboquant fp8 palu-50")  # fmt: skip
EVERY = f"full {PAPERS} {OTHERS}"
DECODING = ("streaming,recent=636 h2o,heavy=320,recent=320 tova,budget=640 snapkv,budget=256,decode_budget=320 "
            "rkv,budget=512 triattention,budget=512")  # they evict while they decode; 640 slots each # fmt: skip
EVICTORS = "streaming h2o tova snapkv snapkv,chunk_length=10,kernel=1 pyramidkv keydiff expected_attention rkv knorm"
PUBLISHED = os.path.relpath(smollm2() or "SmolLM2-135M-Instruct.Q4_1.gguf", ROOT)
MODEL = f"--checkpoint {PUBLISHED} --calibration {os.path.relpath(SMOLLM2_CALIBRATION, ROOT)}"
# A 16-bit cache, as on a GPU, and one thread, so that two commands can run side by side on two cores. An answer of 7
# digits comes first or not at all, so more than 32 tokens are not asked for. A part has all methods and some of the
# samples: however many parts there are, all cells of a table have the same ones.
ASKED = f"eval.compare {MODEL} --kv-dtype bf16 --threads 1 --max-new-tokens 32"
FOUND = "--tasks niah_single_1,niah_multikey_1"  # of RULER, what this model can do
FOUND_LONG = "--tasks niah_single_1"  # from 4K on it finds a third of the others
LADDERS = "--kv 1/2,1/4,1/8 --read 1/4,1/8,1/16 --batch-size 5"
BESIDE = f"tests.audit.compare_kvpress {MODEL} --threads 1 --max-new-tokens 16"
DECODE = "bench.bench_generate --threads 2 --synthetic"
STEP = "bench.bench_attention --dtype bf16 --threads 2 --rounds 5 --layers 1 --no-stages"
SHAPES = f"{DECODE} --kv-dtype bf16 --random-init llama-3.2-1b"


def parts(line: str, n: int) -> list[str]:
    return [f"{line} --part {i}/{n}" for i in range(1, n + 1)]


def predicted(text: str, length: int, methods: str, decoded: int = 256, windows: int = 4, recall: int = 4) -> str:
    return (f"eval.perplexity {MODEL} --kv-dtype bf16 --threads 1 --decoded {decoded} --windows {windows} "
            f"--batch-size 2 --recall {recall} --text {text} --length {length} --method {methods}")  # fmt: skip


def commands(llama_bench: str | None = None) -> dict[str, list[str]]:
    """Question -> modules, of scripts/ if no other folder is named, with their arguments. A command of accuracy takes
    about half an hour of one core."""
    peer = f" --peer transformers{f' llama.cpp:{llama_bench}' if llama_bench else ''}"
    held_4k = HELD_ALL.replace("h2o ", "")  # of all methods it alone takes minutes for each prompt of 4K
    timed = f"{EVERY} h2o kvzip"  # attention_matching takes minutes for each prompt
    filled = " ".join(m for m in timed.split() if m not in ("compactor", "rkv"))  # in less than minutes
    # of niah_multikey_1 full finds 4 of 10 at 2K in two parts: too few to count, so the others do not ask it
    both, single = (parts(f"{ASKED} --lengths 2048 --samples 40 {tasks} {LADDERS} --at-once 60 --method {HELD_ALL} "
                          f"{' '.join(m for m in READ if m not in HELD)}", 8)
                    for tasks in (FOUND, FOUND_LONG))  # fmt: skip
    return dict(
        # every method at one length, for the README
        defaults=parts(f"{ASKED} --lengths 4096 --samples 20 {FOUND_LONG} --batch-size 2 --at-once 96 --method full "
                       f"{PAPERS}", 2),
        distances=[predicted(text, n, f"{EVERY}{f' {SLOW}' if n == 2048 else ''}")
                   for n in (4096, 2048) for text in ("prose", "code")]
        + [predicted(text, 2256, f"full {DECODING}", 2000, 2, 32) for text in ("prose", "code")],
        bytes=[*both[:2], *single[2:],
               *parts(f"{ASKED} --lengths 4096 --samples 20 {FOUND_LONG} {LADDERS} --at-once 30 --method {held_4k} "
                      f"{' '.join(m for m in READ if m not in HELD)}", 4)],
        known=parts(f"{ASKED} --lengths 2048 --samples 40 {FOUND} --batch-size 10 --at-once 24 --query-in-prompt "
                    f"--kv 1/2,1/4,1/8 --method {EVICTORS}", 4),
        long=parts(f"{ASKED} --lengths 8192 --samples 10 {FOUND_LONG} --batch-size 1 --method full "
                   "self_index,store_bits=4,budget=512 double_sparsity,channels=0.5 sals-25 ojakv-0.8 razor,window=128",
                   2),
        kvpress=[f"{BESIDE} {FOUND_LONG} --lengths 2048 --samples 10 --keep 1/4 {more}".rstrip()
                 for more in ("", "--query-in-prompt")],
        attention=[f"{STEP} --size 1x8192 1x32768 --method {filled} sals-12.5,budget=512 self_index-7.5",
                   f"{STEP} --size 8x8192 8x32768 --method full {PAPERS} snapkv quest hshare hadamard kivi-4"],
        # at 4K what generate.py does by itself: eager at first, compiled from the second run on
        speed=[*(f"{DECODE} {MODEL} --batch 1 --length 4000 --new 48 --rounds 5 --mode {mode} --method {timed} "
                 "0-1:full,2-28:sals-25,29:full" for mode in ("eager", "compiled")),
               f"{SHAPES}{peer} --weights int4 --mode compiled --size 1x8192 --new 32 --rounds 3 --method {filled}",
               f"{SHAPES}{peer} --weights int4 --mode compiled --size 1x32768 --new 32 --rounds 3 --method full "
               "self_index double_sparsity sals-12.5 sals-12.5,budget=512 razor snapkv quest",
               f"{SHAPES} --weights int4 --mode compiled --size 8x8192 --new 32 --rounds 3 --method full self_index "
               "double_sparsity sals-12.5 razor snapkv",
               f"{SHAPES} --weights int4 --mode compiled --size 8x32768 --new 16 --rounds 3 --method full self_index "
               "sals-12.5 snapkv"],
        speculate=[f"{SHAPES} --weights int4 --mode compiled --batch 1 --length 8192 32768 --new 64 --rounds 3 "
                   "--speculate 4 --acceptance 0.7 0.8 0.9 --method full double_sparsity self_index,keep=full"],
        restore=[f"bench.bench_generate {MODEL} --threads 2 --restore --size 1x8000 --rounds 3 "
                 "--method full self_index"],
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
        prompt=[f"{END} --rounds 1 --random-init {LLAMA3} --size 1x131008 --method {ALL}",
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

# flags that change no number: where the result goes, what else is measured, and where files lie
ASIDE = re.compile(r" --(out|time-limit) \S+| --peer( (?!-)\S+)+| --resume|(?<=[ :])\S*/(?=[^/ ]+\.gguf)")


def plain(command: str) -> str:
    """A command, recorded or not, as `commands` has it, without flags that change no number."""
    module, _, rest = re.sub(r"^python (-m )?", "", command).partition(" ")
    module = module.removesuffix(".py").replace("/", ".").removeprefix("scripts.")
    return ASIDE.sub("", f"{module} {rest} ").strip()


def full_name(module: str) -> str:
    return module if module.startswith(("tests.", "pytest")) else f"scripts.{module}"


@functools.cache
def known_commands() -> frozenset[str]:
    every = [*commands().values(), *gpu_commands().values()]
    return frozenset(plain(line) for lines in every for line in lines)


def stale(run: Row) -> str:
    """Why the result of one command is stale; empty if it is not."""
    if plain(run["command"]) not in known_commands():
        return "measure has another command"
    files = changed(run.get("same_as", run["commit"]), run["command"], "gpu" in run)
    return f"{', '.join(files[:3])}{f' and {len(files) - 3} more' if files[3:] else ''} changed since" if files else ""


def check() -> tuple[list[str], int]:
    """A line for every stale result file, and the number of files."""
    files = sorted((ROOT / "results").glob("*/*.json"))
    found = []
    for file in files:
        why = list(dict.fromkeys(filter(None, map(stale, json.loads(file.read_text())["runs"]))))
        found += [f"{file.relative_to(ROOT)}: {'; '.join(why)}"] if why else []
    return found, len(files)


# ---- measuring ----

COMPARE = "eval.compare"  # writes a folder
ACCURACY = (COMPARE, "eval.perplexity", "tests.audit.compare_kvpress")  # do not depend on a machine's speed
TIMED = ("bench.bench_generate", "bench.bench_attention")  # stop by themselves
LEAST = 30  # seconds; with fewer left nothing is begun
RUNNING: list[subprocess.Popen] = []


def part(name: str, command: str, limit: float, committed: Sequence[Row] = (), log: bool = False) -> Row | None:
    """The result of one command: one that is there, of this command and with an unchanged hot path, or a new one, which
    goes on where such a one was interrupted. None if there is no result yet."""
    module, *argv = shlex.split(command)
    out = ROOT / "runs" / f"{name}{'' if module == COMPARE else '.json'}"
    path = out / "compare.json" if module == COMPARE else out
    path.parent.mkdir(parents=True, exist_ok=True)
    mark = out.with_suffix(".mark")
    key = f"{commit()} {command}" if module == "pytest" else command
    known = json.loads(mark.read_text()) if mark.exists() else {}
    before = json.loads(path.read_text()) if path.exists() else None
    if known.get("command") != key or (before and changed(before["commit"], before["command"], "gpu" in before)):
        known = dict(command=key, seconds=0.0, done=False)
        shutil.rmtree(out) if out.is_dir() else out.unlink(missing_ok=True)  # --resume would go on with it
    own = (r for r in committed if plain(r["command"]) == plain(command) and not r.get("partial"))
    valid = (r for r in own if not stale(r))
    if not known["done"] and (there := next(valid, None)):
        return there
    if not known["done"] and limit >= LEAST:
        mark.write_text(json.dumps(known))
        if module == "pytest":
            files = sorted(str(f) for a in argv for f in ROOT.glob(a) if "/" in a)
            argv = [a for a in argv if "/" not in a] + files
        else:
            argv += ["--out", str(out.relative_to(ROOT)), "--resume"]
            argv += ["--time-limit", f"{max(1, limit - 25):.0f}"] * (module in TIMED)
        begin = time.monotonic()
        try:
            status = run([sys.executable, "-m", full_name(module), *argv], limit, log and mark.with_suffix(".log"))
        finally:
            known["seconds"] += time.monotonic() - begin
            mark.write_text(json.dumps(known))
        if status:
            raise InputError(f"{name}: {full_name(module)} failed with {status}: see above, or runs/{name}.log")
        if status is None or (path.exists() and "stopped" in json.loads(path.read_text())):
            print(f"{name}: the time is up, the rest is left out: {command}", file=sys.stderr)
        else:
            known["done"] = True
            mark.write_text(json.dumps(known))
            print(f"{name}: {known['seconds'] / 60:.1f} minutes", file=sys.stderr)
    found = json.loads(path.read_text()) if path.exists() else None
    whole = known["done"] or module not in ACCURACY  # all cells of a table have the same samples
    if not found or not whole or (not known["done"] and not found.get("rows")):
        return None
    partial = {} if known["done"] else dict(partial=True)  # to be gone on with
    return {k: v for k, v in found.items() if k != "parts"} | dict(seconds=round(known["seconds"])) | partial


def run(command: list[str], limit: float, log: Path | bool = False) -> int | None:
    """The command's exit status; None if it took too long and was interrupted (like by Ctrl-C, so it keeps results).
    log: a file to which its output goes."""
    with open(log, "a") if log else contextlib.nullcontext() as file:
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=file, stderr=file)
        RUNNING.append(process)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            interrupt(process)
            return None
        finally:
            RUNNING.remove(process)


def interrupt(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def parser() -> Parser:
    p = Parser(__doc__)
    a = p.add_argument
    a("--only", nargs="+", default=[], metavar="QUESTION", help="questions; --list prints them")
    a("--gpu", action="store_true", help="the questions of a GPU")
    a("--small", action="store_true", help="with --gpu: toy models on the CPU; writes no results")
    a("--gpt-fast", metavar="PATH", help="with --gpu: a checkout of gpt-fast, to measure beside it")
    a("--llama-bench", metavar="F", help="llama.cpp's llama-bench (scripts/bench/llama_cpp.py says how to build it)")
    a("--machine", help="the folder's name; default: the processor's family, or the card's name")
    a("--jobs", type=int, default=1, metavar="N", help="commands at a time, of a core each: not for those of speed")
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
    every = gpu_commands(opt.gpt_fast) if opt.gpu else commands(opt.llama_bench)
    if unknown := set(opt.only) - {*every}:
        raise InputError(f"no question {min(unknown)!r}: use {', '.join(every)}")
    if (opt.small or opt.gpt_fast) and not opt.gpu:
        raise InputError(f"{'--small' if opt.small else '--gpt-fast'} is for the commands of --gpu: add it")
    if opt.llama_bench and opt.gpu:
        raise InputError("--llama-bench is for the commands of a CPU: drop it or --gpu")
    if opt.gpt_fast and not (Path(opt.gpt_fast) / "generate.py").is_file():
        raise InputError(f"--gpt-fast {opt.gpt_fast} is no checkout of gpt-fast")
    only = opt.only or [q for q in every if opt.list or q != "kvpress"]
    todo = {q: [small(c) if opt.small else c for c in lines] for q, lines in every.items() if q in only}
    if opt.list:
        named = {q: [f"python -m {full_name(line)}" for line in lines] for q, lines in todo.items()}
        text = (f"{q}: {line}" for q, lines in named.items() for line in lines)
        print(json.dumps(named) if opt.json else "\n".join(text))
        return
    timed = [q for q, lines in todo.items() if not lines[0].startswith(ACCURACY)]
    if opt.jobs != 1 and (timed or opt.jobs < 1):
        others = " ".join(q for q, lines in every.items() if lines[0].startswith(ACCURACY))
        raise InputError(f"--jobs {opt.jobs} would disturb the times of {', '.join(timed)}: give --only {others}")
    if commit().endswith("+dirty") and not opt.small:
        raise InputError("tracked files have changes, but results need a clean commit: commit first")
    name, folder = opt.machine or ("small" if opt.small else folder_name(opt.gpu)), "runs" if opt.small else "results"
    outs = {q: ROOT / folder / (name if q in timed else "accuracy") / f"{q}.json" for q in todo}
    for out in outs.values():
        out.parent.mkdir(parents=True, exist_ok=True)
        check_out(out, "measure")
    found, failed = {(q, i): None for q, lines in todo.items() for i in range(len(lines))}, []

    def attempt(q: str, i: int) -> None:
        left = min(opt.limit, opt.within - (time.monotonic() - begin))
        committed = json.loads(outs[q].read_text())["runs"] if outs[q].is_file() and not opt.small else ()
        try:
            found[q, i] = part(f"{f'{name}-{q}' if opt.gpu else q}-{i}", todo[q][i], left, committed, opt.jobs > 1)
        except InputError as e:  # the others go on
            failed.append(str(e))

    try:
        with ThreadPoolExecutor(opt.jobs) as pool:
            work = [pool.submit(attempt, *at) for at in found]
            try:
                for each in work:
                    each.result()
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in [*RUNNING]:
                    interrupt(process)
                opt.within = 0  # what was not reached may be there from before
                for at in found:
                    attempt(*at)
                raise
    finally:
        written = []
        for q, out in outs.items():
            if q != "checks" and (runs := [found[q, i] for i in range(len(todo[q])) if found[q, i]]):
                write_json(out, dict(runs=runs))
                written.append(str(out.relative_to(ROOT)))
    print(json.dumps(written) if opt.json else "\n".join(written))
    if failed:
        raise InputError("; ".join(failed))
    if opt.within - (time.monotonic() - begin) < LEAST:
        print("the time is up: call it again for the rest", file=sys.stderr)


if __name__ == "__main__":
    run_cli(main)
