"""Checks of the contract (cache/base.py) that compare what a method computes with dense attention and with itself.

Each takes a method's name and, if they matter, knobs; the tests also run them on files that they write. The exception
Broken says what was found and what to do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import kernels.backend
from cache.base import Attended, KVMethod
from cache.evicting import Evicting
from cache.spec import layer_methods
from cache.trace import observe
from engine.snapshot import CacheFile, State, check_layouts, identity, save
from kernels.dense_attention import prefill_attention
from kernels.op import OPERATIONS
from runtime.errors import InputError
from scripts.contract.explain import Broken, Ties, file_of
from scripts.contract.harness import (
    TOL,
    Run,
    buffers,
    class_of,
    knob_text,
    methods_of,
    now_doing,
    poison,
    prompt,
    rounding_explains,
    rounds,
    run,
    teacher,
    tiny,
)

EDGES = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 100)  # prompt lengths around the borders of blocks, windows and budgets
RAGGED = (3, 17, 64, 130)
CHUNKED, CHUNKS = (3, 17, 64, 90), (16, 70)  # prompt lengths, and chunk sizes
DEEP, DEEP_RAGGED = 12, (40, 61, 203)  # fewer layers than the 16 from which on skip_layers="auto" skips some
SHAPES = [(g, d) for g in (1, 3, 4, 8) for d in (32, 64, 96, 128)]  # query heads per KV head, head_dim
SHAPES += [(1, 40), (4, 80)]
SAMPLE = [(4, 64), (3, 96)]
LARGE = 2.0**12  # of keys and values that fit in fp16, where their products with queries do not
SCALES = (2.0**-14, 2.0**16)  # of keys and values; even powers, because palu's factors carry their square root
ROUNDED = 2e-2  # tolerance of logits if sums in another order may round a code the other way
SAVED, BEFORE, THEN = (150, 61), 34, 8  # prompt lengths, and decode steps before and after a cache is saved
SIZES = dict(same=(260, 100), unknown=(260, None), larger=(420, 200))  # slots, max_new_tokens
# a cache that is saved, after how many steps, and the cache that goes on
WAYS = [("same", BEFORE, "same"), ("unknown", 0, "larger"), ("same", BEFORE, "larger")]
Knobs = dict[str, Any]


# ---- settings ----


def settings(name: str) -> list[Knobs]:
    """The settings to test a method at: defaults, stress, and stress with budgets as shares of about the same size."""
    cls = class_of(name)
    out: list[Knobs] = [{}]
    if cls.stress:
        kinds = {f.name: re.findall(r"\w+", str(f.type)) for f in dataclasses.fields(cls.Args)}
        tokens = [k for k, x in cls.stress.items() if type(x) is int and {"int", "float"} <= {*kinds.get(k, ())}]
        out.append(dict(cls.stress))
        if tokens:
            shares = {k: min(cls.stress[k] / 100, 1.0) for k in tokens} | dict.fromkeys({"min_tokens"} & {*kinds}, 0)
            out.append(cls.stress | shares)
    return out


def nothing_chosen(name: str) -> list[Knobs]:
    """`stress` with budgets that sinks and recent tokens use up, so that the list of chosen tokens is empty. Returns
    nothing for a method without such knobs."""
    cls = class_of(name)
    given: Knobs = {f.name: f.default for f in dataclasses.fields(cls.Args)} | (cls.stress or {})
    out = []
    if "budget" in given:
        for sinks in {given.get("sinks", 0), 0 if "recent" in given else given.get("sinks", 0)}:
            forced = sinks + given.get("recent", 0)
            more = dict(sinks=sinks, budget=forced) if "sinks" in given else dict(budget=forced)
            out += [(cls.stress or {}) | more] if forced else []
    return out


def at_knobs(knobs: Knobs) -> str:
    return f"at {', '.join(knob_text(knobs))}" if knobs else "at its defaults"


def same(got: Tensor, want: Tensor, what: str, tol: float = TOL, todo: str = "", tokens: bool = True) -> None:
    """Check that logits [B, steps + 1, V] agree to `tol`, and greedy tokens exactly unless `tokens` is False."""

    def first(wrong: Tensor) -> str:
        row, step = wrong.nonzero()[0].tolist()
        return f"row {row}, {f'decode step {step}' if step else 'the prompt'}"

    if got.isnan().any():
        raise Broken(f"{what}: NaN, first in {first(got.isnan().any(-1))}", todo)
    gap = (got - want).abs().amax(-1)
    if gap.max() > tol:
        raise Broken(f"{what}: logits differ by {gap.max():.2e}, first in {first(gap > tol)}", todo)
    other = got.argmax(-1) != want.argmax(-1)
    if tokens and other.any():
        raise Broken(f"{what}: a different token in {first(other)}", todo)


def equal(got: Tensor, want: Tensor, what: str, todo: str) -> None:
    """Check that two tensors are equal bit for bit."""
    if not torch.equal(got, want):
        same(got, want, what, 0.0, todo)


# ---- the checks ----


def check_lossless(name: str, shape: tuple[int, ...] = SAMPLE[0], lengths: Any = EDGES, steps: int = 40) -> None:
    """At its `lossless` knobs the method equals dense attention."""
    model, prompts, knobs = tiny(*shape), [prompt(n) for n in lengths], class_of(name).lossless
    model.setup_cache(name, len(prompts), max(lengths) + steps, **knobs)
    got, fed = run(model, prompts, steps)
    n_head, n_kv_head, head_dim = model.args.n_head, model.args.n_kv_head, model.args.head_dim
    what = f"not dense attention {at_knobs(knobs)} with {n_head} query heads, {n_kv_head} KV heads, head_dim {head_dim}"
    todo = (
        "the newest token attends to itself; slots, lengths and pos are each row's own"
        if knobs
        else "state `lossless`, the knobs at which it equals dense attention (for example dict(budget=1.0))"
    )
    same(got, teacher(model, prompts, fed), what, todo=todo)


def check_stress(name: str) -> str | None:
    """The method's limits bind in these tests, so that they test more than dense attention."""
    cls, model = class_of(name), tiny()

    def binds(knobs: Knobs, lengths: tuple[int, ...], steps: int) -> bool:
        prompts = [prompt(n) for n in lengths]
        model.setup_cache(name, len(prompts), max(lengths) + steps, **knobs)
        got, fed = run(model, prompts, steps)
        return bool((got - teacher(model, prompts, fed)).abs().max() > TOL)

    if cls.stress is not None:
        if binds(cls.stress, (4, 20), 20):
            return None
        raise Broken(
            f"`stress` = {cls.stress} does not bind: with 40 tokens the method still equals dense attention",
            "lower its knobs until tokens are dropped, selected or rounded within 40 tokens",
        )
    if binds({}, RAGGED, 40):
        return "no `stress`: tested only at the defaults"
    if not dataclasses.fields(cls.Args):
        return "dense attention: no limits to test"
    raise Broken(
        f"at its defaults it equals dense attention in all tests here ({max(RAGGED)} + 40 tokens)",
        "state `stress`, knobs under which its limits bind within 40 tokens (for example stress = dict(budget=24)): "
        "otherwise eviction and selection are not tested",
    )


def check_poison(name: str, knobs: Knobs, lengths: Any = (1, 7, 40), device: Any = "cpu") -> None:
    """Slots that were not filled are never read, also in a cache larger than the batch."""
    model, prompts = tiny(device=device), [prompt(n).to(device) for n in lengths]
    model.setup_cache(name, len(prompts) + 1, 128, **knobs)
    want, fed = run(model, prompts)
    if want.isnan().any():
        same(want, want, at_knobs(knobs), todo="a softmax over nothing, or a division by 0")
    model.setup_cache(name, len(prompts) + 1, 128, **knobs)
    poison(model)
    model.reset_cache()
    equal(
        run(model, prompts, feed=fed)[0], want, f"slots that were not filled are read {at_knobs(knobs)}",
        "they hold NaN here, what an earlier prompt left in use: give the right count or stop, and mask values too, "
        "as 0 * NaN is NaN",
    )  # fmt: skip


def check_ragged(
    name: str, knobs: Knobs, shape: Any = (2, 32), lengths: Any = RAGGED, steps: int = 40, n_layer: int = 2
) -> None:
    """A row of a ragged batch equals the row alone, up to rounding that codes and selections may amplify."""
    model, prompts = tiny(*shape, n_layer=n_layer), [prompt(n) for n in lengths]
    T = max(lengths) + steps
    model.setup_cache(name, len(prompts), T, **knobs)
    got, fed = run(model, prompts, steps)
    model.setup_cache(name, 1, T, **knobs)
    for row, p in enumerate(prompts):
        model.reset_cache()
        fed_row = fed[row : row + 1]
        want = run(model, [p], steps, fed_row)[0]
        if (got[row] - want[0]).abs().max() > TOL and rounding_explains(model, p, fed_row, want[0], got[row]):
            continue
        try:
            same(
                got[row : row + 1],
                want,
                f"{at_knobs(knobs)} row {row} of prompts of {lengths} tokens differs from that row alone",
            )
        except Broken as e:
            todo = _why_ragged(model, p, fed_row, want, max(lengths) - len(p))
            raise Broken(e.what.replace(" row 0,", ""), todo) from None


def check_deep(name: str) -> str | None:
    """Ragged rows equal the row alone through many layers, at `stress`.

    A prompt's last hidden state must be the same bit for bit: in layers that round, sums in another order would change
    the text.
    """
    knobs = class_of(name).stress or {}
    check_ragged(name, knobs, lengths=DEEP_RAGGED, steps=12, n_layer=DEEP)
    model, prompts, T = tiny(n_layer=DEEP), [prompt(n) for n in DEEP_RAGGED], max(DEEP_RAGGED)
    x = torch.randn(len(prompts) * T, model.args.dim)
    with torch.inference_mode():
        products = model.layers[0].attention.wqkv, model.layers[0].feed_forward  # with other inputs of the same sizes
        if not all(torch.equal(f(x)[:n], f(x[:n])) for f in products for n in DEEP_RAGGED):
            return "prompts compared only up to rounding: here, sums of products depend on their sizes"
    # without the output head: its product may use other kernels for three rows than for one
    with mock.patch.object(model, "logits", lambda x: x):
        model.setup_cache(name, len(prompts), T, **knobs)
        got = run(model, prompts, 0)[0]
        model.setup_cache(name, 1, T, **knobs)
        for row, p in enumerate(prompts):
            model.reset_cache()
            what = f"{at_knobs(knobs)} row {row} of {DEEP_RAGGED} tokens, {DEEP} layers, differs from that row alone"
            todo = "attend to each row's own length (`prefill_attention` takes lengths), and sum over no padding"
            equal(got[row : row + 1], run(model, [p], 0)[0], what, todo)
    return None


def _why_ragged(model: Any, p: Tensor, fed: Tensor, want: Tensor, pad: int) -> str:
    """Advice on a ragged row: whether padding makes the difference and, if so, whether a choice among ties does."""
    model.reset_cache()
    padded = run(model, [p], fed.shape[1], fed, pad=pad)[0]
    if (padded - want).abs().max() <= TOL:
        return (
            "alone it is right however far it is padded, so something is taken from another row: index by each row's "
            "own scores, lengths and pos, never by row 0 or by the longest"
        )
    model.reset_cache()
    with Ties(file_of(type(model.cache[0]))) as ties:
        run(model, [p], 0, pad=pad)
    if ties.found:
        return (
            f"padding alone changes it, and {ties.found[0]} chooses among equal scores: ties must be stable under "
            "padding, use sort(stable=True) and take its first"
        )
    return "padding alone changes it: what stands at or after lengths [B] must not be scored, kept or averaged"


def check_reset(name: str, knobs: Knobs) -> None:
    """A prompt gives the same tokens after another, longer prompt, and after warm-up steps without a prompt."""
    model, prompts = tiny(), [prompt(6), prompt(33)]
    model.setup_cache(name, 2, 160, **knobs)
    want, fed = run(model, prompts)
    model.reset_cache()
    run(model, [prompt(100, seed=1), prompt(90, seed=1)], 50)
    model.reset_cache()
    todo = "reset() empties what compress() does not overwrite, its Python attributes too"
    equal(run(model, prompts, feed=fed)[0], want, f"the prompt before leaks {at_knobs(knobs)}", todo)
    model.reset_cache()
    with torch.inference_mode():
        for _ in range(3):
            now_doing("a warm-up step at position 0, before any prompt")
            model.decode(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    model.reset_cache()
    equal(
        run(model, prompts, feed=fed)[0], want, f"warm-up leaks {at_knobs(knobs)}",
        f"decode is called before any prompt (warm-up): buffers must be valid then. {todo}",
    )  # fmt: skip


def check_kernels(name: str, knobs: Knobs) -> str:
    """With Triton, interpreted on a CPU, logits are those of torch. Prompts are short: a program takes milliseconds."""
    model, prompts, runs = tiny(), [prompt(3), prompt(37)], dict[str, Run]()
    for backend in ("torch", "triton"):
        with mock.patch.object(kernels.backend, "BACKEND", backend):
            model.setup_cache(name, 3, 64, **knobs)
            poison(model)
            model.reset_cache()
            runs[backend] = run(model, prompts, 2, runs["torch"][1] if runs else None)
    got, want = runs["triton"][0], runs["torch"][0]
    same(got, want, f"kernels against torch {at_knobs(knobs)}", ROUNDED if rounds(model) else TOL)
    return ", ".join(name for name, operation in OPERATIONS.items() if "triton" in operation.versions)


def check_store(name: str, knobs: Knobs) -> str | None:
    """A prompt's output is exact and `store_prompt` stores what `prefill` does, unless `exact_prefill` is False."""
    model, prompts = tiny(), [prompt(9), prompt(60)]
    model.setup_cache(name, 2, 90, **knobs)
    want, fed = run(model, prompts, 20)
    if not all(m.exact_prefill for m in model.cache):
        return "its attention within prompts is not exact"
    todo = "exact_prefill = False, unless every token of a prompt attends exactly to all before it"
    what = f"a prompt's output is not exact {at_knobs(knobs)}"
    same(want[:, :1], teacher(model, prompts, fed[:, :0]), what, todo=todo)
    model.setup_cache(name, 2, 90, **knobs)

    def store_alone(method: KVMethod) -> None:
        def prefill(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, start: int | None = None) -> Tensor:
            q_rot, k_rot = method.rope.rotate_prompt(q), method.rope.rotate_prompt(k)
            method.store_prompt(q, k, q_rot, k_rot, v, lengths)
            return prefill_attention(q_rot, k_rot, v, method.shape.window, lengths)

        method.prefill = prefill  # type: ignore[method-assign]

    for method in model.cache:
        store_alone(method)
    todo = "a `prefill` of its own needs a `store_prompt` that stores the same"
    tol = ROUNDED if rounds(model) else TOL
    what = f"`store_prompt` and `prefill` store different things {at_knobs(knobs)}"
    same(run(model, prompts, 20, fed)[0], want, what, tol, todo)
    return None


def check_chunks(name: str, knobs: Knobs) -> str | None:
    """A prompt in chunks gives what it gives at once, up to rounding, also in a ragged batch; or chunks are refused.

    If the method evicts while reading, a row of a batch equals the row alone.
    """
    model, prompts, steps = tiny(), [prompt(n) for n in CHUNKED], 20
    model.setup_cache(name, len(prompts), max(CHUNKED) + steps, **knobs)
    methods = methods_of(model)
    want, fed = run(model, prompts, steps)
    if not all(m.takes_chunks for m in model.cache):
        try:
            run(model, prompts, 0, chunk=CHUNKS[0])
        except InputError:
            return "refused"
        raise Broken("it says takes_chunks = False but accepts chunks", "leave it out, or prefill with the model's own")
    evicts = any(isinstance(m, Evicting) and m.evicts_while_reading for m in methods)
    for chunk in CHUNKS:
        model.reset_cache()
        got, what = run(model, prompts, steps, fed, chunk=chunk)[0], f"{at_knobs(knobs)} in chunks of {chunk} tokens"
        for row, p in enumerate(prompts):
            if evicts:
                model.reset_cache()
                want = run(model, [p], steps, fed[row : row + 1], chunk=chunk)[0].expand_as(got)
            if (got[row] - want[row]).abs().max() > TOL:
                model.reset_cache()
                alone = chunk if evicts else None
                if rounding_explains(model, p, fed[row : row + 1], want[row], got[row], alone):
                    continue
            todo = "a start is the position of the first token that is given; k and v hold all so far"
            one = slice(row, row + 1)
            same(got[one], want[one], f"{what} a prompt of {len(p)} differs from {'it alone' if evicts else 'whole'}",
                 todo=todo)  # fmt: skip
    return "evicts while reading: compared with each row alone" if evicts else None


def check_second_turn(name: str, knobs: Knobs) -> None:
    """A second turn, fed through decode, continues the cache: earlier decoded tokens stay. knobs: lossless ones."""
    model, prompts = tiny(), [prompt(n) for n in (12, 45)]
    model.setup_cache(name, 2, 128, **knobs)
    answer = run(model, prompts, 20)[1]
    fed = torch.cat((answer, torch.stack((prompt(25), prompt(25, seed=2)))), 1)
    model.reset_cache()
    got = run(model, prompts, 45, fed)[0]
    same(got, teacher(model, prompts, fed), f"a second turn is not dense attention {at_knobs(knobs)}")


def check_window(name: str) -> str | None:
    """A model's sliding window is honoured or refused. Layer 0 slides over 20 tokens and is not given to a method that
    refuses; layer 1 sees everything."""
    model, prompts = tiny(windows=(20, None)), [prompt(n) for n in (5, 19, 20, 21, 70)]
    cls = class_of(name)
    if not cls.supports_window:
        with_window = "it says supports_window = False but accepts a model with a sliding window of 20 in every layer"
        slides = tiny(windows=(20, 20))
        try:
            slides.setup_cache(name, 5, 128, **cls.lossless)
            raise Broken(with_window, "call super().__init__, which refuses it")
        except InputError as e:
            if "window" not in str(e):
                raise Broken(
                    f"{with_window}, apart from: {e}", "call super().__init__ first, which refuses it"
                ) from None
        slides.setup_cache(name, 1, 20, **cls.lossless)  # a context within the window needs no window
        got, fed = run(slides, prompts[:1], 15)
        same(got, teacher(slides, prompts[:1], fed), "not dense attention in a context within the window")
    with contextlib.redirect_stderr(io.StringIO()):  # the note that layer 0 keeps its window with full
        model.setup_cache(name, 5, 128, **cls.lossless)
    got, fed = run(model, prompts)
    todo = "attend only from pos - shape.window + 1 on, or leave out supports_window = True: it is refused then"
    same(got, teacher(model, prompts, fed), "a sliding window of 20 is not honoured", todo=todo)
    poison(model)
    model.reset_cache()
    equal(run(model, prompts, feed=fed)[0], got, "with a sliding window, slots that were not filled are read", todo)
    return "honoured" if cls.supports_window else "refused"


def check_sizes(name: str, knobs: Knobs) -> None:
    """Neither a longer max_seq_len nor a known max_new_tokens changes the output; the latter takes no more bytes."""
    model, prompts, steps = tiny(), [prompt(9), prompt(60)], 30
    model.setup_cache(name, 2, 90, **knobs)
    allocated = sum(b.nbytes for b in buffers(model).values())
    want, fed = run(model, prompts, steps)
    tol = ROUNDED if rounds(model) else TOL
    todo = "a share of the length is of the current length, never of max_seq_len; max_new_tokens may only save slots"
    for T, new in ((90, steps), (150, None)):
        model.setup_cache(name, 2, T, max_new_tokens=new, **knobs)
        got = run(model, prompts, steps, fed)[0]
        what = f"max_seq_len={T}" if new is None else f"max_new_tokens={new}"
        same(got, want, f"{at_knobs(knobs)} {what} changes the output", tol, todo)
        if new is not None and (bytes_now := sum(b.nbytes for b in buffers(model).values())) > allocated:
            raise Broken(f"{at_knobs(knobs)} {what} takes {bytes_now} bytes, and {allocated} without it", todo)


@torch.inference_mode()
def check_saved(name: str, knobs: Knobs, ways: Any = WAYS) -> str | None:
    """A cache that was saved to a file goes on bit for bit as one that was not, at its size and at a larger one."""
    model, rows, lengths = tiny(head_dim=64), [prompt(n, i) for i, n in enumerate(SAVED)], torch.tensor(SAVED)
    layers = layer_methods(name, model.args.n_layer, knobs)
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    feed, want = torch.stack([prompt(200, 7), prompt(200, 8)]), dict[str, list[Tensor]]()

    def set_up(size: str) -> None:
        model.setup_cache(name, len(rows), *SIZES[size], **knobs)
        poison(model)
        model.reset_cache()

    def step(i: int) -> Tensor:
        now_doing(f"decode step {i + 1} after prompts of {SAVED} tokens")
        logits = model.decode(feed[:, i].contiguous(), lengths + i).clone()
        model.maintain(i + 1)
        return logits

    with tempfile.TemporaryDirectory() as folder:
        for size in {size: None for size, _, _ in ways}:
            set_up(size)
            try:
                check_layouts(model.cache)
            except InputError as e:
                return str(e)
            want[size] = [model.prefill(tokens, lengths)]
            for i in range(THEN + max(n for saved, n, _ in ways if size == saved)):
                if (size, i) in [way[:2] for way in ways]:
                    state = State([x.tolist() for x in rows], feed[:, :i], feed[:, i], None)
                    save(Path(folder, f"{size} {i}"), model.cache, state, identity(model, name, layers, "tiny", None))
                want[size].append(step(i))
        for size, n, into in ways:
            set_up(into)
            now_doing(f"restoring a cache made for {SIZES[size]} tokens in one for {SIZES[into]}")
            CacheFile(Path(folder, f"{size} {n}")).fill(model.cache)
            for rope in {m.rope for m in model.cache}:
                rope.set_prompt(lengths)
            whole = torch.stack(want[size][: 1 + n + THEN], 1)
            got = torch.cat((whole[:, : 1 + n], torch.stack([step(i) for i in range(n, n + THEN)], 1)), 1)
            for row, p in enumerate(rows):  # sums over slots may be made in another order where there are more slots
                off, fed = (got[row] - whole[row]).abs().max(), feed[row : row + 1, : n + THEN]
                if size != into and off > TOL and rounding_explains(model, p, fed, whole[row], got[row]):
                    got[row] = whole[row]
            same(got[:, 1 + n :], whole[:, 1 + n :],
                 f"{at_knobs(knobs)} saved after {n} steps in a cache for {SIZES[size]} tokens and restored in one "
                 f"for {SIZES[into]}, it differs from one never saved", 0.0 if size == into else TOL,
                 "slots that depend on max_seq_len or max_new_tokens are told in `layout` and converted in `carry`; "
                 "what a step needs is in buffers, or in attributes that are numbers")  # fmt: skip
    return None


def check_attended(name: str, knobs: Knobs, tol: float = TOL) -> str | None:
    """`attended` reports what `attend` computes, and the softmax weights sum to 1."""
    model, prompts, steps = tiny(), [prompt(n) for n in (5, 33, 90)], 40
    model.setup_cache(name, 4, 140, **knobs)
    methods = methods_of(model)
    if any(type(m).attended is KVMethod.attended for m in methods):
        return "not observable: it does not define `attended`"
    wrong: list[str] = []

    def watch(method: KVMethod) -> None:
        attended, attend = method.attended, method.attend
        expected: list[Tensor] = []

        def tell(q: Tensor, idx: Tensor | None, count: Tensor | None, pos: Tensor) -> Attended:
            a = attended(q, idx, count, pos)
            expected[:] = [a.output()]
            p = a.position
            if (p > pos[:, None, None]).any():
                wrong.append(f"a position after that of the newest token, {p.max()}, at pos {pos.tolist()}")
            ranked = p.sort(-1).values
            if ((ranked[..., 1:] == ranked[..., :-1]) & (ranked[..., 1:] >= 0)).any():
                wrong.append(f"a position twice, at pos {pos.tolist()}")
            if not torch.allclose(total := a.weights().sum(-1), torch.ones(()), atol=1e-4):
                wrong.append(f"weights that sum to {total.min():.4f} to {total.max():.4f}, at pos {pos.tolist()}")
            return a

        def compare(q: Tensor, idx: Tensor | None, count: Tensor | None, pos: Tensor) -> Tensor:
            y = attend(q, idx, count, pos)
            if expected:
                gap = (expected.pop().float() - y.float()).abs().max()
                if not gap <= tol:
                    wrong.append(f"an output that differs from that of `attend` by {gap:.2e}, at pos {pos.tolist()}")
            return y

        method.attended, method.attend = tell, compare  # type: ignore[method-assign]

    for method in methods:
        watch(method)
    with observe(model) as trace:
        run(model, prompts, steps)
    if len(trace) < steps * len(model.cache):
        wrong.append(
            f"{len(trace)} steps of {steps * len(model.cache)}: a `decode` of its own must call self.trace.step"
        )
    if wrong:
        raise Broken(
            f"{at_knobs(knobs)} `attended` reports {wrong[0]}",
            "give the positions, keys, values and tokens attended to",
        )
    return None


def check_nothing_chosen(name: str) -> str | None:
    """With a budget that sinks and recent tokens use up, no other token is read: an empty list differs from None."""
    every = nothing_chosen(name)
    for knobs in every:
        for check in (check_attended, check_poison, check_ragged):
            check(name, knobs)
    return None if every else "no budget of tokens beside sinks or recent ones"


def check_size(name: str, knobs: Knobs) -> None:
    """Values times c multiply the output by c, and keys times c with queries over c leave it."""
    prompts, runs, fed = [prompt(9), prompt(40)], [], None
    for size in (1.0, *SCALES):
        keys = 1.0 if "weighs queries" in class_of(name).deviates else size
        model = tiny(sizes=(1 / keys, keys, size))
        model.setup_cache(name, 2, 60, **knobs)
        got, fed = run(model, prompts, 12, fed)
        runs.append(got)
    for got, size in zip(runs[1:], SCALES, strict=True):
        same(
            got, runs[0], f"{at_knobs(knobs)} keys and values times {size:g} change more than their scale", TOL,
            "scales in fp16 and small constants are relative to a head's size: units = \"kv\" (base.py) divides by it",
        )  # fmt: skip


def check_half(name: str, knobs: Knobs) -> None:
    """The method runs in bfloat16, and with large keys and values in a cache of float16."""
    prompts = [prompt(9), prompt(50)]
    for model, kv_dtype in ((tiny(dtype=torch.bfloat16), None), (tiny(sizes=(1.0, LARGE, LARGE)), torch.float16)):
        with mock.patch.object(model, "kv_dtype", kv_dtype):
            model.setup_cache(name, 2, 80, **knobs)
            got = run(model, prompts, 30 if kv_dtype is None else 8)[0]
        if got.dtype != model.dtype or not got.isfinite().all():
            kind = "bfloat16" if kv_dtype is None else f"a cache of float16, keys and values times {LARGE:g},"
            raise Broken(
                f"{at_knobs(knobs)} in {kind} it gives {got.dtype}, NaN: {bool(got.isnan().any())}",
                "compute logits in float32 and scale them before they are rounded",
            )
