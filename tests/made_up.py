"""Result files with made-up numbers, of the commands' own methods, to try the pages' tables, figures and claims on."""

import json

import numpy as np

from scripts.eval.ladders import HELD, READ
from scripts.report.measure import DECODING, EVERY, PAPERS, SLOW

RUN = dict(device="A CPU, 1 threads", commit="abc1234", date="2026-11-27", command="python -m scripts.eval.compare")
TASKS = ("niah_single_1", "niah_multikey_1-style")


def skill(method, share):
    return 0.85 if method in ("full", "oracle") else 0.0 if method == "random" else min(0.85, 0.3 + share)


def answered(rng, spec, n, share, tasks, samples):
    row = dict(method=spec, seq_len=n, query_in_prompt=False, kv_share=share, read_share=share, knobs={})
    for task in tasks:
        each = (rng.random(samples) < skill(spec.partition(",")[0], share)).astype(float).tolist()
        row |= {task: float(np.mean(each)), f"{task}_each": each, f"{task}_tokens": [n - 90, n]}
    return row


def compared(rng, lengths, samples, specs=(), part="1/1"):
    """A run of ladders, or of specs as they are."""
    run = RUN | dict(settings=dict(part=part), rows=[], cells=[], missing=[])
    for n in lengths:
        tasks = TASKS[: 1 + (n == 2048)]
        run["rows"].append(answered(rng, "full", n, 1.0, tasks, samples))
        run["rows"] += [answered(rng, s, n, 0.4, tasks, samples) for s in specs]
        for axis, ladder, shares in (("kv", HELD, (2, 4, 8)), ("read", READ, (4, 8, 16))):
            for method in () if specs else ladder:
                for share in shares:
                    cell = dict(axis=axis, target=f"1/{share}", method=method, seq_len=n)
                    cell["spec"] = f"{method},{axis}={share},of={part[0]}"  # as budgets of parts differ
                    run["cells"].append(cell)
                    run["rows"].append(answered(rng, cell["spec"], n, 1 / share, tasks, samples))
    return run


def predicted(rng, n, methods=EVERY):
    rows = []
    for i, method in enumerate(methods.split()):
        kl = 256 * 0.01 * i * rng.random(4)
        sums = dict(nll=(800 + kl).tolist(), kl=kl.tolist(), same=[200.0] * 4, tokens=[256.0] * 4)
        rows.append(dict(method=method, seq_len=n, windows=sums, recall=0.9, read_share=0.02 * (i + 1), kv_share=0.5))
    return RUN | dict(rows=rows)


def timed(**fields):
    """full, and others that are twice as fast."""
    common = dict(batch=1, length=4000, mode="compiled", spread=0.02, tokens_per_s=10.0, times_full=1.0) | fields
    rows = [common | dict(method="full", run="full", times_llama_cpp=2.0)]
    others = f"{PAPERS} skip_softmax kivi-4 hadamard turboquant fp8 0-1:full,2-28:sals-25,29:full"
    rows += [common | dict(method=m, run=m, tokens_per_s=20.0, times_full=2.0) for m in others.split()]
    peers = [{k: v for k, v in common.items() if k != "mode"} | dict(run=p, tokens_per_s=5.0, times_full=0.5) for p in
             ("llama.cpp Q4_0", "transformers dynamic")]  # fmt: skip
    return RUN | dict(rows=rows + peers)


def write(folder, samples=20):
    """results/ with a file of every question."""
    rng = np.random.default_rng(1)
    pair = dict(setting="alike", ours="snapkv", theirs="SnapKVPress", common=1.0, a_ours=[1, 0], a_theirs=[1, 0])
    pairs = [pair | dict(method="snapkv")]
    pairs += [pair | dict(method=m, a_ours=[0, 0]) for m in ("knorm", "qfilters")]  # they evict at every step
    layer = dict(model="llama-3.1-8b", batch=1, length=32768, times_dense=2.0, times_dense_spread=0.1, limit_share=0.5)
    files = dict(
        bytes=[compared(rng, (2048,), samples, part=f"{i}/2") for i in (1, 2)] + [compared(rng, (4096,), samples)],
        known=[compared(rng, (2048,), 2 * samples)],
        defaults=[compared(rng, (4096,), samples, PAPERS.split())],
        long=[compared(rng, (8192,), samples, PAPERS.split())],
        distances=[*(predicted(rng, 2048, f"{EVERY} {SLOW}") for _ in "ab"), predicted(rng, 4096),
                   predicted(rng, 2256, f"full {DECODING}")],
        kvpress=[RUN | dict(rows=pairs)],
        speed=[timed(model="SmolLM2-135M-Instruct.Q4_1.gguf", mode=mode) for mode in ("eager", "compiled")]
        + [timed(model="llama-3.2-1b", weights="int4", length=8192)],
        attention=[RUN | dict(rows=[layer | dict(method=m, operator=dict(ms=1.0)) for m in
                                    ("full", "sals-12.5", "double_sparsity", "self_index")])],
        speculate=[RUN | dict(rows=[dict(method="quest", chance=0.9, times_full=0.7)])],
        restore=[RUN | dict(rows=[dict(method="full", restore_s=[0.5], prefill_s=[50.0])])],
    )  # fmt: skip
    for question, runs in files.items():
        (folder / "a").mkdir(exist_ok=True)
        (folder / "a" / f"{question}.json").write_text(json.dumps(dict(runs=runs)))
