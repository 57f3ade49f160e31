"""The contract of kv_methods/base.py, for every method that kv_methods finds: a new file is tested by being there.

Each `check_*` takes a method's name, so that the tests below can also run them on files written on the spot, good ones
and ones that break the contract in one place.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

from calibrate import calibrate
from errors import InputError
from kv_methods import make_args, method_class, method_files, presets
from kv_methods.base import CacheShape
from model import ModelArgs, Rope, Transformer, random_transformer

METHODS = sorted(method_files())
VOCAB, TOL = 96, 1e-4
# Knobs that make a method work hard on short contexts, as far as it has them: the names are common to all methods.
SMALL = dict(budget=24, sinks=4, recent=16, tail=16, flush=6, window=16, exempt=5, update_every=6, query_window=8)
FRACTION = SMALL | dict(budget=0.15)
EDGES = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 100)  # prompts around the borders of blocks, windows and budgets
SHAPES = [(g, d) for g in (1, 3, 4, 8) for d in (32, 64, 96, 128)]
SAMPLE = [(4, 64), (3, 96)]
every_method = pytest.mark.parametrize("name", METHODS)


def matrix(sample, full, **kw):
    """Parametrize values: the sample always, the rest of `full` with the slow tests."""
    return [*sample, *(pytest.param(x, marks=pytest.mark.slow) for x in full if x not in sample)]


shapes = pytest.mark.parametrize("shape", matrix(SAMPLE, SHAPES), ids=lambda s: f"g{s[0]}-d{s[1]}")


# ---- a tiny model, and runs of it ----


@functools.lru_cache(4)
def tiny(
    g: int = 2, head_dim: int = 32, n_kv_head: int = 2, windows: tuple = (), dtype=torch.float32, device="cpu"
) -> Transformer:
    """Two layers of random weights, large enough that attention is far from uniform."""
    args = ModelArgs(dim=64, n_layer=2, n_head=g * n_kv_head, n_kv_head=n_kv_head, head_dim=head_dim, ffn_dim=96,
                     vocab_size=VOCAB, max_seq_len=1024, windows=windows)  # fmt: skip
    model = random_transformer(args, "cpu", dtype, seed=1).to(device)  # the same weights everywhere
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p *= 1.3 / (0.02 * p.shape[1] ** 0.5)
    sequences = [prompt(200, seed).to(device) for seed in (11, 12)]
    model.calibration = calibrate(model, sequences, 40)
    return model


def prompt(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(1000 * seed + n))


def small(name: str, knobs=SMALL) -> dict:
    fields = {f.name for f in dataclasses.fields(method_class(name).Args)}
    return {k: v for k, v in knobs.items() if k in fields}


def settings(name: str) -> list[dict]:
    """Defaults, and small budgets as a number and as a share; methods without such knobs have the defaults alone."""
    out: list[dict] = [{}]
    for knobs in (small(name), small(name, FRACTION)):
        if knobs not in out:
            out.append(knobs)
    return out


@torch.inference_mode()
def run(model, prompts, steps=40, feed=None, decode=None):
    """Prefill right-padded prompts, decode `feed` [B, steps] or greedily -> logits [B, steps + 1, V], tokens fed."""
    lengths = torch.tensor([len(p) for p in prompts], device=prompts[0].device)
    # padding is no token 0 but anything: it must not matter
    tokens = torch.randint(VOCAB, (len(prompts), int(lengths.max())), device=prompts[0].device)
    for row, p in enumerate(prompts):
        tokens[row, : len(p)] = p
    logits, fed = [model.prefill(tokens, lengths)], []
    for step in range(steps):
        fed.append(logits[-1].argmax(-1) if feed is None else feed[:, step].contiguous())
        logits.append((decode or model.decode)(fed[-1], lengths + step).clone())
        model.maintain(step + 1)
    return torch.stack(logits, 1), torch.stack(fed, 1) if fed else torch.empty(len(prompts), 0, dtype=torch.int64)


@torch.inference_mode()
def teacher(model, prompts, fed):
    """What `run` should give a lossless cache: logits without any cache, row by row."""
    rows = [model(torch.cat((p, f))[None])[0, len(p) - 1 :] for p, f in zip(prompts, fed, strict=True)]
    return torch.stack(rows)


def same(got, want, what, tol=TOL):
    """Logits agree to `tol`, and greedy tokens exactly."""
    assert not got.isnan().any(), f"{what}: NaN"
    gap = (got - want).abs().amax(-1)
    assert gap.max() <= tol, (
        f"{what}: differ by {gap.max():.2e}, first at (row, step) {(gap > tol).nonzero()[0].tolist()}"
    )
    assert torch.equal(got.argmax(-1), want.argmax(-1)), f"{what}: other tokens"


def rounds(model) -> bool:
    """Whether the cache holds codes. Then a value on a rounding border may fall to either side."""
    return any(b.dtype in (torch.uint8, torch.int8, torch.float16) for b in cache_buffers(model).values())


@torch.no_grad()
def sensitivity(model, p, fed, want, tries=8):
    """How far noise of a few float32 roundings in the embeddings moves the logits of one prompt in the same cache."""
    w, off = model.tok_embeddings.weight, []
    clean = w.clone()
    for _ in range(tries):
        w.copy_(clean * (1 + 3e-7 * torch.randn_like(w)))
        model.reset_cache()
        off.append((run(model, [p], fed.shape[1], fed)[0] - want).abs().max())
    w.copy_(clean)
    return max(off)


def cache_buffers(model):
    return dict(model.cache.named_buffers())


# ---- the checks ----


def check_lossless(name, shape=(4, 64), lengths=EDGES, steps=40):
    model, prompts = tiny(*shape), [prompt(n) for n in lengths]
    T = max(lengths) + steps
    model.setup_cache("full", len(prompts), T)
    want, fed = run(model, prompts, steps)
    same(want, teacher(model, prompts, fed), "full against teacher forcing")
    model.setup_cache(name, len(prompts), T, **method_class(name).lossless)
    same(run(model, prompts, steps, fed)[0], want, f"{name} at {method_class(name).lossless}")


def check_compiled(name, knobs, backend, steps=200):
    torch._dynamo.reset()
    model, prompts, feed = tiny(), [prompt(n) for n in (5, 40)], None
    if backend == "inductor":
        # The first layer gives a repeated token the score of its copy. Which of the two is taken then hangs on the last
        # bit: inductor sums in another order. So no token comes twice.
        tokens = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))
        prompts, feed, steps = [tokens[:5], tokens[-40:]], torch.stack((tokens[5:45], tokens[:40])), 40
    counter = CompileCounterWithBackend(backend)
    model.setup_cache(name, 2, 40 + steps, **knobs)
    want, fed = run(model, prompts, steps, feed)
    model.reset_cache()
    at = {k: b.data_ptr() for k, b in cache_buffers(model).items()}
    decode = torch.compile(model.decode, fullgraph=True, backend=counter)
    with torch._dynamo.config.patch(error_on_recompile=True):
        got = run(model, prompts, steps, fed, decode)[0]
        model.reset_cache()  # a second conversation runs the same graph
        again = run(model, [prompt(9), prompt(3)], 5, decode=decode)[0]
    assert counter.frame_count == 1, f"{name}: compiled {counter.frame_count} graphs"
    # inductor sums in another order, and so may put a value on a rounding border to its other side
    tol = 2e-2 if backend == "inductor" and rounds(model) else TOL
    same(got, want, f"{name} compiled", tol)
    assert at == {k: b.data_ptr() for k, b in cache_buffers(model).items()}, f"{name}: a buffer moved"
    model.reset_cache()
    same(again, run(model, [prompt(9), prompt(3)], 5)[0], f"{name} compiled, second prompt", tol)


def check_no_copies(name, knobs, T=333):
    """The code that inductor makes of a step allocates nothing of the shape of a cache: it writes in place."""
    torch._dynamo.reset()
    model = tiny()
    model.setup_cache(name, 2, T, **knobs)
    run(model, [prompt(n) for n in (50, 9)], 1)
    method, a = model.cache[-1], model.args
    q, k, v = (torch.randn(2, n, a.head_dim) for n in (a.n_head, a.n_kv_head, a.n_kv_head))
    with torch.inference_mode():
        step = torch.compile(method.decode, fullgraph=True, dynamic=False)
        code = "".join(run_and_get_code(step, q, k, v, torch.tensor([51, 10]))[1])
    made = {tuple(map(int, x.split(", "))) for x in re.findall(r"empty_strided_cpu\(\((\d+(?:, \d+)+)\)", code)}
    caches = {tuple(b.shape) for b in method.buffers() if b.dim() > 2 and max(b.shape[1:]) > 100}
    assert caches and not made & caches, f"{name}: a step copies buffers of {made & caches}"


def poison(model):
    """Fill every buffer that prompts write with what must not be read."""
    constants = {id(b) for m in model.cache.modules() for b in [getattr(m, c) for c in getattr(m, "constants", ())]}
    for b in cache_buffers(model).values():
        if id(b) in constants:
            continue
        if b.is_floating_point():
            b.fill_(float("nan"))
        elif b.dtype == torch.uint8:
            b.fill_(255)


def check_poison(name, knobs, lengths=(1, 7, 40), device="cpu"):
    """A cache larger than the batch, too: the rows that are not used stay poisoned."""
    model, prompts = tiny(device=device), [prompt(n).to(device) for n in lengths]
    model.setup_cache(name, len(prompts) + 1, 128, **knobs)
    want, fed = run(model, prompts)
    model.setup_cache(name, len(prompts) + 1, 128, **knobs)
    poison(model)
    model.reset_cache()
    assert not want.isnan().any(), f"{name} {knobs}: NaN with nothing poisoned"
    assert torch.equal(run(model, prompts, feed=fed)[0], want), f"{name} reads slots that were not filled"


def check_ragged(name, knobs, shape=(2, 32), lengths=(3, 17, 64, 130), steps=40):
    model, prompts = tiny(*shape), [prompt(n) for n in lengths]
    T = max(lengths) + steps
    model.setup_cache(name, len(prompts), T, **knobs)
    got, fed = run(model, prompts, steps)
    model.setup_cache(name, 1, T, **knobs)
    for row, p in enumerate(prompts):
        model.reset_cache()
        want = run(model, [p], steps, fed[row : row + 1])[0]
        off = (got[row] - want[0]).abs().max()
        if rounds(model) and off > TOL and off <= 3 * sensitivity(model, p, fed[row : row + 1], want):
            continue
        same(got[row : row + 1], want, f"{name} {knobs}: row of {len(p)} tokens in a batch")


def check_nbytes(name, knobs):
    """Measured = allocated = the card's formula, also where nothing is allocated."""
    model = tiny()
    model.setup_cache(name, 3, 77, **knobs)
    for layer, method in enumerate(model.cache):
        sizes = {k: b.untyped_storage().nbytes() for k, b in method.named_buffers()}
        assert model.cache_nbytes()[layer] == method.nbytes() == sizes, "a buffer is a view, or is not reported"
        assert sum(sizes.values()) == method.card_nbytes()
    build = meta_method(name, model.args, 3, 77, torch.float32, knobs, model.calibration)
    assert build.nbytes() == model.cache[0].nbytes() and build.card_nbytes() == model.cache[0].card_nbytes()
    llama = ModelArgs.from_name("llama-3.1-8b")
    for batch, T in ((1, 4096), (8, 32768)):
        method = meta_method(name, llama, batch, T, torch.bfloat16, knobs)
        assert sum(method.nbytes().values()) == method.card_nbytes() > 0


def meta_method(name, args, batch, T, dtype, knobs, calib=None):
    cls, shape = method_class(name), CacheShape.of(args, 0, batch, T, dtype, "cpu").on("meta")
    return cls(make_args(cls, knobs), shape, 0, Rope(args, batch, 1, shape.device), calib)


def check_traffic(name, knobs):
    for args, T in ((tiny().args, 128), (ModelArgs.from_name("llama-3.1-8b"), 8192)):
        method = meta_method(name, args, 2, T, torch.bfloat16, knobs)
        read = [method.traffic(pos) for pos in range(0, T, max(1, T // 200))] + [method.traffic(T - 1)]
        assert read[0] > 0 and read == sorted(read), f"{name}: traffic falls along the text"
        assert read[-1] <= 1.05 * sum(method.nbytes().values()), f"{name}: reads more than there is"


def check_reset(name, knobs):
    """The same prompt gives the same tokens after another, longer one, and after generate.py's warm-up steps."""
    model, prompts = tiny(), [prompt(6), prompt(33)]
    model.setup_cache(name, 2, 160, **knobs)
    want, fed = run(model, prompts)
    model.reset_cache()
    run(model, [prompt(100, seed=1), prompt(90, seed=1)], 50)
    model.reset_cache()
    assert torch.equal(run(model, prompts, feed=fed)[0], want), f"{name} {knobs}: the prompt before leaks"
    model.reset_cache()
    with torch.inference_mode():
        for _ in range(3):
            model.decode(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    model.reset_cache()
    assert torch.equal(run(model, prompts, feed=fed)[0], want), f"{name} {knobs}: warm-up leaks"


def check_second_turn(name, knobs, lossless, device="cpu"):
    """A turn that comes later through decode continues the cache: what was decoded before it, greedily, stays."""
    model, prompts = tiny(device=device), [prompt(n).to(device) for n in (12, 45)]
    turn = torch.stack((prompt(25), prompt(25, seed=2))).to(device)
    model.setup_cache(name, 2, 128, **knobs)
    first, answer = run(model, prompts, 20)
    lengths, got = torch.tensor([12, 45], device=device) + 20, []
    with torch.inference_mode():
        for i in range(25):
            got.append(model.decode(turn[:, i], lengths + i))
            model.maintain(21 + i)
    fed = torch.cat((answer, turn), 1)
    got = torch.cat((first, torch.stack(got, 1)), 1)
    if lossless:
        same(got, teacher(model, prompts, fed), f"{name} second turn against teacher forcing")
    model.setup_cache(name, 2, 128, **knobs)
    assert torch.equal(run(model, prompts, 45, fed)[0], got), f"{name}: a turn that is fed at once differs"


def check_window(name):
    """Layer 0 slides over 20 tokens, layer 1 sees everything."""
    model, prompts = tiny(windows=(20, None)), [prompt(n) for n in (5, 19, 20, 21, 70)]
    cls = method_class(name)
    if not cls.supports_window:
        with pytest.raises(InputError, match="window"):
            model.setup_cache(name, 5, 128, **cls.lossless)
        model.setup_cache(name, 1, 20, **cls.lossless)  # a context within the window needs no window
        got, fed = run(model, prompts[:1], 15)
        return same(got, teacher(model, prompts[:1], fed), f"{name} within the window")
    model.setup_cache(name, 5, 128, **cls.lossless)
    got, fed = run(model, prompts)
    same(got, teacher(model, prompts, fed), f"{name} with a sliding window")
    poison(model)
    model.reset_cache()
    assert torch.equal(run(model, prompts, feed=fed)[0], got)


def checks(name):
    """All of them once, quickly."""
    check_lossless(name)
    check_window(name)
    for knobs in settings(name):
        check_poison(name, knobs)
        check_ragged(name, knobs)
        check_nbytes(name, knobs)
        check_traffic(name, knobs)
        check_reset(name, knobs)
        check_second_turn(name, knobs, False)
    check_compiled(name, settings(name)[-1], "eager")


# ---- every method ----


@every_method
@shapes
def test_lossless_limit_is_dense_attention(name, shape):
    check_lossless(name, shape)


@pytest.mark.parametrize("name", matrix(["razor"], METHODS))
def test_a_compiled_step_copies_no_cache(name):
    """Found in razor: a slot that is read before it is written was a copy of the whole cache, at every step."""
    check_no_copies(name, dict(window=120) if name == "razor" else {})


@every_method
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_lossless_limit_at_random_shapes(name, seed):
    gen = torch.Generator().manual_seed(seed)

    def pick(*choice):
        return choice[int(torch.randint(len(choice), (1,), generator=gen))]

    lengths = tuple(torch.randint(1, 300, (6,), generator=gen).tolist())
    check_lossless(name, (pick(1, 3, 4, 8), pick(32, 64, 96, 128), pick(1, 2, 3)), lengths)


@every_method
def test_compiled_is_eager_with_one_graph(name):
    check_compiled(name, small(name), "aot_eager")


# One method by inductor in every run, the one with most in its graph; the rest when asked for.
@pytest.mark.parametrize("name", matrix(["self_index"], METHODS))
def test_compiled_by_inductor_is_eager(name):
    check_compiled(name, small(name), "inductor")


@every_method
def test_unfilled_slots_are_never_read(name):
    for knobs in [*settings(name), method_class(name).lossless]:
        check_poison(name, knobs)


@every_method
def test_row_of_a_ragged_batch_is_the_row_alone(name):
    for knobs in settings(name):
        check_ragged(name, knobs)


@every_method
@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"g{s[0]}-d{s[1]}")
def test_ragged_rows_at_all_shapes(name, shape):
    for knobs in settings(name):
        check_ragged(name, knobs, shape, (1, 33, 65, 150))


@every_method
def test_nbytes_is_the_buffers_and_the_card(name):
    for knobs in settings(name):
        check_nbytes(name, knobs)


@every_method
def test_traffic_grows_and_stays_below_the_cache(name):
    for knobs in settings(name):
        check_traffic(name, knobs)


@every_method
def test_reset_forgets(name):
    for knobs in settings(name):
        check_reset(name, knobs)


@every_method
def test_second_turn_continues_the_cache(name):
    check_second_turn(name, method_class(name).lossless, True)
    for knobs in settings(name):
        check_second_turn(name, knobs, False)


@every_method
def test_sliding_window_is_honoured_or_refused(name):
    check_window(name)


@pytest.mark.slow
@pytest.mark.parametrize("preset", sorted(presets()))
def test_presets_keep_the_contract(preset):
    name, knobs = presets()[preset]
    for check in (check_poison, check_ragged, check_nbytes, check_traffic, check_reset):
        check(name, knobs)


# ---- a file that did not exist before ----

TOY = '''
"""Dense attention in 30 lines: what a user's own file looks like."""
import torch
from kernels.dense_attention import masked_attention
from kv_methods.base import KVMethod


class Toy(KVMethod):
    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        self.buffer("k", shape.kv), self.buffer("v", shape.kv)
        self.buffer("seen", (shape.max_batch,), torch.int64)

    def compress(self, q, k, v, lengths):
        B, H, S, D = k.shape
        self.k[:B, :, :S], self.v[:B, :, :S] = k, v
        self.seen[:B] = lengths

    def append(self, k, v, pos):
        row = torch.arange(len(pos))
        self.k[row, :, pos], self.v[row, :, pos] = k, v
        self.seen[: len(pos)] += 1

    def attend(self, q, idx, count, pos):
        B, t = len(pos), torch.arange(self.k.shape[2])
        mask = t < self.seen[:B, None]
        return masked_attention(q, self.k[:B], self.v[:B], mask[:, None])

    def reset(self):
        self.seen.zero_()

    def card_nbytes(self):
        s = self.shape
        return 2 * s.max_batch * s.n_kv_head * s.max_seq_len * s.head_dim * s.dtype.itemsize + 8 * s.max_batch

    def traffic(self, pos):
        s = self.shape
        return 2 * s.max_batch * s.n_kv_head * (pos + 1) * s.head_dim * s.dtype.itemsize
'''


def test_a_new_file_is_found_and_checked(tmp_path):
    """In a process of its own: `pytest` with the folder in KV_FAST_METHODS runs the contract on the new file."""
    (tmp_path / "toy_new.py").write_text(TOY)
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, "-p", "no:cacheprovider", "-k", "toy_new and not inductor",
         "-m", "not slow"], cwd=root, env=os.environ | {"KV_FAST_METHODS": str(tmp_path)}, text=True,
        capture_output=True)  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert int(done.stdout.split(" passed")[0].split()[-1]) >= 9, done.stdout


BROKEN = {
    "reads_unfilled": ("t < self.seen[:B, None]", "t < self.seen[:B, None] + 1", "check_poison"),
    "forgets_the_newest": ("t < self.seen[:B, None]", "t < self.seen[:B, None] - 1", "check_lossless"),
    "ignores_lengths": ("self.seen[:B] = lengths", "self.seen[:B] = lengths.max()", "check_ragged"),
    "wrong_row": ("self.k[row, :, pos], self", "self.k[0, :, pos], self", "check_ragged"),
    "moves_a_buffer": ("self.seen[: len(pos)] += 1", "self.seen = self.seen + 1", "check_compiled"),
    "branches_on_data": ("B, t = len(pos)", "q = q * 1 if pos.max() > 50 else q\n        B, t = len(pos)",
                         "check_compiled"),
    "counts_in_python": ("self.seen[: len(pos)] += 1", "self.n = getattr(self, 'n', 0) + 1\n"
                         "        self.seen[: len(pos)] += 1 if self.n else 2", "check_compiled"),
    "forgets_to_reset": ("self.seen[:B] = lengths", "self.seen[:B] += lengths", "check_reset"),
    "wrong_card": ("+ 8 * s.max_batch", "", "check_nbytes"),
    "lies_about_the_window": ("class Toy(KVMethod):", "class Toy(KVMethod):\n    supports_window = True",
                              "check_window"),
    "reads_too_much": ("(pos + 1)", "3 * s.max_seq_len", "check_traffic"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_the_checks_catch(fault, tmp_path, monkeypatch):
    old, new, check = BROKEN[fault]
    assert TOY.count(old) == 1
    source = TOY.replace(old, new)
    if fault == "forgets_to_reset":
        source = source.replace("self.seen.zero_()", "pass")
    (tmp_path / f"toy_{fault}.py").write_text(source)
    monkeypatch.setenv("KV_FAST_METHODS", str(tmp_path))
    name, extra = f"toy_{fault}", {"check_second_turn": (False,)}.get(check, ())
    knobs = () if check in ("check_lossless", "check_window") else ({},)
    backend = ("eager", 20) if check == "check_compiled" else ()
    with pytest.raises((AssertionError, torch._dynamo.exc.TorchDynamoException, RuntimeError, IndexError)):
        globals()[check](name, *knobs, *extra, *backend)


def test_the_toy_passes_all_checks(tmp_path, monkeypatch):
    (tmp_path / "toy_good.py").write_text(TOY)
    monkeypatch.setenv("KV_FAST_METHODS", str(tmp_path))
    assert "toy_good" in method_files() and len(TOY.strip().splitlines()) < 45
    checks("toy_good")
