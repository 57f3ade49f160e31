"""Caches that outlive a process. That every method and preset goes on as if it had never been saved is a check of the
contract (`saved`); here are compositions, what cannot be carried over, the file, sessions and the command line."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import generate
from cache.calibration import fingerprint, write_tensors
from cache.spec import layer_methods, method_class
from engine import LLM, Chat, Sampling, snapshot
from engine.llm import LEAST
from engine.snapshot import CacheFile, State, buffers_of, identity
from kernels import native
from runtime.errors import InputError
from runtime.machine import ROOT, TINY
from scripts.contract.checks import BEFORE, SAVED, check_saved
from scripts.contract.harness import poison, prompt, tiny

COMPOSED = ["razor,retrieval_method=self_index:tail=16:flush=6", "razor,retrieval_method=expected_attention",
            "0:hshare,budget=96,1-:hshare,budget=128", "0:full,1-:ojakv", "0:full,1-:kvzip", "snapkv,adaptive=True",
            "pyramidkv,adaptive=True,value_aware=True", "self_index,store_bits=16", "sals,budget=p0.9",
            "kivi,packed=before,residual=32", "streaming,positions=cache,recent=16"]  # fmt: skip
# of each kind of store, at knobs at which budgets, rings and what `maintain` does come into play
KINDS = ("full", "self_index stress", "ojakv stress", "h2o stress", "razor stress", "kivi stress")
AFTER = 40  # steps


def knobs_of(spec: str) -> tuple[str, dict]:
    name = spec.removesuffix(" stress")
    return (name, dict(method_class(name).stress)) if name != spec else (name, {})


def set_up(spec: str, size: int, new: int | None, rows: int = 2, windows: tuple[int, ...] = ()):
    """The model with an empty cache, in which whatever is not written must not be read."""
    name, knobs = knobs_of(spec)
    model = tiny(head_dim=64, windows=windows)
    model.setup_cache(name, rows, size, new, **knobs)
    poison(model)
    model.reset_cache()
    return model


def read(model, lengths=SAVED) -> torch.Tensor:
    """Ragged prompts -> lengths [B]."""
    rows = [prompt(n, i) for i, n in enumerate(lengths)]
    tokens = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
    for row, p in zip(tokens, rows, strict=True):
        row[: len(p)] = p
    model.prefill(tokens, torch.tensor(lengths))
    return torch.tensor(lengths)


@torch.inference_mode()
def go_on(model, pos: torch.Tensor, first: int, steps: int) -> torch.Tensor:
    """Decode steps number `first` to `first + steps` -> logits [steps, B, V]."""
    out, feed = [], torch.stack([prompt(200, 7), prompt(200, 8)])[: len(pos)]
    for step in range(first, first + steps):
        out.append(model.decode(feed[:, step].contiguous(), pos + step).clone())
        model.maintain(step + 1)
    return torch.stack(out) if out else torch.empty(0)


def write(file: Path, model, spec: str, lengths, step: int) -> None:
    name, knobs = knobs_of(spec)
    rows = [prompt(n, i).tolist() for i, n in enumerate(lengths)]
    state = State(rows, torch.zeros(len(rows), step, dtype=torch.int64), torch.zeros(len(rows)), None)
    layers = layer_methods(name, model.args.n_layer, knobs)
    snapshot.save(file, model.cache, state, identity(model, name, layers, "tiny", None))


def load(file: Path, model, lengths) -> None:
    CacheFile(file).fill(model.cache)
    model.cache[0].rope.set_prompt(torch.tensor(lengths))


@pytest.mark.parametrize("spec", COMPOSED)
def test_restored_is_never_saved(spec):
    check_saved(spec, {})


@pytest.mark.parametrize("before, after", [(0, 4), (4, 0)])
def test_restored_with_other_drafts(tmp_path, before, after, spec="sals stress"):
    """A ring of more slots, for tokens that may be taken back, has its tokens elsewhere. In the first layer, equal
    tokens tie, and products of torch round by the slot: without C++, all are chosen."""
    name, knobs = knobs_of(spec)
    knobs |= {} if native.available() else dict(budget=300)
    model, want = tiny(head_dim=64), None
    for drafts in (before, after):
        model.setup_cache(name, 2, 260, 100, drafts=drafts, **knobs, keep="full")
        poison(model)
        model.reset_cache()
        if want is None:
            pos = read(model)
            go_on(model, pos, 0, BEFORE)
            write(tmp_path / "a", model, spec, SAVED, BEFORE)
            want = go_on(model, pos, BEFORE, AFTER)
    load(tmp_path / "a", model, SAVED)
    got = go_on(model, pos, BEFORE, AFTER)
    assert got.isfinite().all() and torch.equal(got, want)


# All that a larger cache has elsewhere, or has and a smaller one has not: found by the test above at shorter prompts.
ELSEWHERE = {
    "ojakv": ((30,), 50, None, "OjaKV lays out k differently in 200: save with --max-seq-len 200"),  # 64 exempt tokens
    "self_index": ((40,), 50, 10, "SelfIndex lays out book differently in 200"),  # all of a prompt are sinks
}


@pytest.mark.parametrize("spec", ELSEWHERE)
def test_what_cannot_be_carried_over_is_told(tmp_path, spec):
    lengths, size, new, says = ELSEWHERE[spec]
    model = set_up(spec, size, new, rows=1)
    read(model, lengths)
    write(tmp_path / "a", model, spec, lengths, 0)
    model = set_up(spec, 200, None, rows=1)
    with pytest.raises(InputError, match=says):
        load(tmp_path / "a", model, lengths)


def test_a_file_of_an_older_version_is_refused(tmp_path):
    """Version 0.3 wrote no layout of adaptive heads and no units."""
    model = set_up("h2o stress", 260, 100)
    read(model)
    write(tmp_path / "a", model, "h2o stress", SAVED, 0)
    file = CacheFile(tmp_path / "a")
    text = json.dumps(file.meta | dict(version=1))
    write_tensors(tmp_path / "a", file.tensors, {"cache": text, "checksum": snapshot.digest(text, file.tensors)})
    with pytest.raises(InputError, match="is of version 1, expected 2: save it again"):
        CacheFile(tmp_path / "a")


@pytest.mark.parametrize("spec", KINDS)
def test_a_file_is_as_large_as_what_is_filled(tmp_path, spec):
    """What was written is what is the same in a cache that held something else before."""
    lengths, step, caches = (1500,), 40, []
    for fill in (3, 5):
        model = set_up(spec, lengths[0] + 500, None, rows=1)
        for m in model.cache.modules():
            for b in buffers_of(m).values():
                b.fill_(fill)
        model.reset_cache()
        go_on(model, read(model, lengths), 0, step)
        caches.append({f"{n}.{k}": b for n, m in model.cache.named_modules() for k, b in buffers_of(m).items()})
    written = sum(int((x == caches[1][name]).sum()) * x.element_size() for name, x in caches[0].items())
    write(tmp_path / "a", model, spec, lengths, step)
    header = int.from_bytes((tmp_path / "a").read_bytes()[:8], "little")
    size = os.path.getsize(tmp_path / "a") - header
    assert size <= 1.02 * written + 4 * (lengths[0] + step) + 64, (size, written)


# ---- LLM ----


@pytest.fixture(scope="module")
def llm():
    return LLM(TINY)


def tokens_of(n, seed=0):
    return torch.randint(300, 1900, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("method", ("full", "self_index", "expected_attention"))
def test_every_question_is_answered_as_if_alone(llm, tmp_path, method):
    prompts, file = [tokens_of(290), tokens_of(133, 1)], tmp_path / "a"
    questions = [tokens_of(9, 2), tokens_of(3, 3), []]
    llm.use(method)
    said = [c.tokens for c in llm.generate(prompts, 10, questions=questions, save=file)]
    assert said == [c.tokens for q in questions for c in llm.generate(prompts, 10, Sampling(), questions=[q])]
    assert said[:2] == [c.tokens for c in llm.generate(prompts, 10, questions=questions[:1])]
    assert said == [c.tokens for c in llm.generate(None, 10, questions=questions, load=file)]
    assert llm.generate(None, 10, questions=questions[:1], load=file)[1].prompt_tokens == 142


def test_sampling_and_penalty_go_on(llm, tmp_path):
    """From a file in the middle of a text: the noise of its place, and a penalty on what was said before."""
    draw = Sampling(temperature=0.9, seed=5, repetition_penalty=1.3)
    llm.use("full")
    session = llm.read([tokens_of(60)], 40, draw)
    assert llm.model.cache[0].shape.max_seq_len == LEAST + 40  # in a smaller one, sinks might lie elsewhere
    whole = [row[0] for row in session.tokens(30)]
    session = llm.read([tokens_of(60)], 40, draw)
    begun = [row[0] for row in session.tokens(12)]  # the last is drawn, not fed
    llm.save(tmp_path / "a")
    session = llm.restore(tmp_path / "a", 40, draw)
    assert session.decoded == 11 and begun[:-1] + [row[0] for row in session.tokens(19)] == whole
    # after a prompt, the next token is drawn from its logits by whatever sampling
    llm.read([tokens_of(60)], 40)
    llm.save(tmp_path / "b")
    assert [row[0] for row in llm.restore(tmp_path / "b", 40, draw).tokens(30)] == whole


def test_a_conversation_can_be_saved_and_fed(llm, tmp_path):
    talk = llm.use("self_index,tail=16,flush=6").conversation()
    talk.say("import os\n", 20)
    llm.save(tmp_path / "a")
    want = talk.say("def f(x):\n", 12).tokens
    session = llm.restore(tmp_path / "a", 60)
    assert session.prompts[0] + snapshot.state_of(session).fed[0].tolist() == talk.tokens[: int(session.pos[0])]
    session.feed(llm.tokenizer.encode("\ndef f(x):\n", bos=False))
    assert [row[0] for row in session.tokens(len(want))] == want


ANOTHER = """
import json, sys, torch
from engine import LLM
out, llm = {}, LLM()
for file, spec, knobs in json.loads(sys.argv[1]):
    session = llm.use(spec, **knobs).restore(file, 60)
    out[file] = [row for row in session.tokens(30)]
print(json.dumps(out))
"""


@pytest.mark.slow
def test_another_process_goes_on(llm, tmp_path, specs=KINDS[:2]):
    todo, want = [], {}
    for i, spec in enumerate(specs):
        (name, knobs), file = knobs_of(spec), str(tmp_path / str(i))
        llm.use(name, **knobs)
        session = llm.read([tokens_of(270), tokens_of(131, 1)], 60)
        begun = list(session.tokens(31))
        llm.save(file)
        session = llm.read([tokens_of(270), tokens_of(131, 1)], 60, further=30)
        want[file] = list(session.tokens(60))[30:]
        assert begun[-1] == want[file][0]
        todo.append((file, name, knobs))
    done = subprocess.run([sys.executable, "-c", ANOTHER, json.dumps(todo)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert [spec for spec, (file, *_) in zip(specs, todo, strict=True) if got[file] != want[file]] == []


def test_a_chat_is_one_turn_of_prompt_and_question(tmp_path):
    """As the template writes it: the prompt is read in the middle of the turn, in which the question follows."""
    folder = shutil.copytree(TINY, tmp_path / "chat", ignore=shutil.ignore_patterns("*.json", "README.md"))
    shutil.copy(TINY / "config.json", folder)
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}{% if think %}Hm.{% endif %}so"
    (folder / "tokenizer_config.json").write_text(json.dumps(config | dict(chat_template=template)))
    llm, how = LLM(folder), Chat(variables=dict(think=True))
    got = llm.generate(
        "import os\n", 3, questions=["", "Why?"], chat=Chat("Be brief.", dict(think=True)), save=tmp_path / "a"
    )
    session, saved = llm.model.cache.owner, CacheFile(tmp_path / "a")
    read = session.prompts[0] + snapshot.state_of(session).fed[0, : -len(got[1].tokens) + 1].tolist()
    assert llm.tokenizer.decode(read) == "system: Be brief.;user: import os\nWhy?;Hm.so"
    assert llm.tokenizer.decode(saved.state.prompts[0]) == "system: Be brief.;user: import os\n"
    assert [c.tokens for c in llm.generate(None, 3, questions=["", "Why?"], chat=how, load=saved)] == [
        c.tokens for c in got
    ]
    with pytest.raises(InputError, match=r"was saved with a chat template: add --chat"):
        llm.generate(None, 6, questions=["Why?"], load=tmp_path / "a")


def test_caches_of_several_processes_are_refused():
    several = SimpleNamespace(args=SimpleNamespace(ranks=SimpleNamespace(size=2)))
    with pytest.raises(InputError, match="a cache of 2 processes cannot be saved or loaded: use one process"):
        identity(several, "full", [], "models/tiny", None)


# ---- the command line ----

KEYS = "self_index,budget=80"


@pytest.fixture(scope="module")
def files(llm, tmp_path_factory):
    """A folder of caches, `a` is whole."""
    folder = tmp_path_factory.mktemp("caches")
    llm.use("self_index", budget=80).generate("import os\n" * 40, 2, save=folder / "a")
    data, at = bytearray((folder / "a").read_bytes()), 8 + int.from_bytes((folder / "a").read_bytes()[:8], "little")
    (folder / "cut").write_bytes(data[:-1])
    (folder / "cut in its header").write_bytes(data[: at // 2])
    (folder / "empty").write_bytes(b"")
    (folder / "text").write_text("no cache")
    for i, byte in enumerate((at, (at + len(data)) // 2, len(data) - 1, data.index(b'step\\": 0') + 8)):
        changed = data.copy()
        changed[byte] ^= 1
        (folder / f"changed {i}").write_bytes(changed)
    meta = CacheFile(folder / "a")
    few = {k: t for k, t in meta.tensors.items() if k != "text.prompts"}
    for name, tensors, more in (("version", meta.tensors, dict(version=99)), ("no tokens", few, {})):
        text = json.dumps(meta.meta | more)
        write_tensors(folder / name, tensors, {"cache": text, "checksum": snapshot.digest(text, tensors)})
    shutil.copytree(TINY, folder / "other", ignore=shutil.ignore_patterns("calib*"))
    weights = load_file(TINY / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] += 1
    save_file(weights, folder / "other" / "model.safetensors", {"format": "pt"})
    llm.use("sals").generate("import os\n", 2, save=folder / "sals")
    with safe_open(TINY / "calibration.safetensors", "pt") as f:
        tensors, about = {k: f.get_tensor(k) for k in f.keys()}, f.metadata()  # noqa: SIM118
    save_file(tensors | {"layers.0.mine.x": torch.ones(1)}, folder / "calibration.safetensors", about)
    return folder


@pytest.mark.parametrize("method", ["full", "sals"])
def test_a_cache_of_an_older_version_is_loaded(tmp_path, monkeypatch, method):
    """Whose fingerprints of weights and calibration are other ones."""
    older = functools.partial(fingerprint, version=1)
    with monkeypatch.context() as m:
        m.setattr(snapshot, "fingerprint", lambda path, version=2: older(path))
        llm = LLM(compile=False).use(method)
        llm.read([list(range(300, 330))], 4)
        llm.save(tmp_path / "a")
    assert not str(CacheFile(tmp_path / "a").meta["weights"][0]).startswith("2-")
    LLM(compile=False).use(method).restore(tmp_path / "a", 4)


LOAD = {
    "no file": (["none"], "there is no file {}/none: generate.py --save-cache"),
    "cut": (["cut"], "cannot read {}/cut: "),
    "text": (["text"], "cannot read {}/text: "),
    "no cache": (["calibration.safetensors"], "is no saved cache: name a file that --save-cache wrote"),
    "a byte in the middle": (["changed 1"], "is damaged"),
    "a number": (["changed 3"], "is damaged"),
    "version": (["version"], "is of version 99, expected 2: save it again"),
    "method": (
        ["a", "--method", "sals"],
        "was saved with --method self_index, budget=80, not sals (layer 0 is "
        "self_index there and sals here): give the same",
    ),  # fmt: skip
    "knob": (["a", "--method", "self_index"], "(layer 0 has budget=80 there and budget=160 here)"),
    "weights": (["a", "--method", KEYS, "--checkpoint", "{}/other"], "was saved with the weights of "),
    "dtype": (["a", "--method", KEYS, "--dtype", "bf16"], "computed in fp32, this run is in bf16: give --dtype fp32"),
    "calibration": (
        ["sals", "--method", "sals", "--calibration", "{}/calibration.safetensors"],
        "was saved with another calibration",
    ),  # fmt: skip
    "a knob alone": (["a", "--budget", "64"], "takes the method and the knobs that its file names: drop budget"),
    "a prompt": (["a", "--prompt", "x"], "--load-cache brings its prompt: drop --prompt"),
    "chat": (["a", "--method", KEYS, "--chat"], "chat template"),
    "interactive": (["a", "--interactive"], "drop --batch-size and --interactive"),
    "no room": (["a", "--method", KEYS, "--max-seq-len", "100"], "exceeds --max-seq-len of 100"),
    "no new tokens": (["a", "--method", KEYS, "--max-new-tokens", "0"], "--max-new-tokens 0 is below 1"),
    "no tokens": (["no tokens"], "has no text.prompts: save it again"),
    "kv dtype": (
        ["a", "--method", KEYS, "--kv-dtype", "bf16"],
        "held in fp32, this run is in bf16: give --kv-dtype fp32",
    ),
    "format": (["a", "--method", KEYS, "--weights", "int8"], "models/tiny --weights int8: give the"),
}


@pytest.mark.parametrize("name", LOAD)
def test_what_cannot_be_loaded_is_one_line_and_exit_code_2(files, name, refused):
    argv, says = LOAD[name]
    argv = [x.replace("{}", str(files)) for x in argv]
    assert says.replace("{}", str(files)) in refused(generate, "--load-cache", files / argv[0], *argv[1:])


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--prompt", "a", "--save-cache", "/no/such/a"], "--save-cache: cannot write /no/such/a: the folder"),
        (["--save-cache", "{}/b"], "no prompt: give --prompt"),
        (["--prompt", "a", "--question", "b", "--question", "c", "--batch-size", "2"], "drop --batch-size"),
        (["--prompt", "a", "--question", "b", "--chat"], "no chat template"),
        (["--prompt", "a", "--save-cache", "{}/b", "--question", "b " * 5000], "exceeds the model's context of 4096"),
    ],
)
def test_what_cannot_be_saved_or_asked(tmp_path, argv, says, refused):
    assert says in refused(generate, *(x.replace("{}", str(tmp_path)) for x in argv))
    assert not [*tmp_path.iterdir()]


def test_a_method_that_does_not_say_how_tokens_lie_is_not_saved(tmp_path, monkeypatch, refused):
    """Refused before the prompt is read."""
    (tmp_path / "unsaid.py").write_text("""
from cache.base import KVMethod
from kv_methods.full import Full

class Unsaid(Full):
    layout = KVMethod.layout
    prefill = None
""")
    monkeypatch.setenv("KV_FAST_METHODS", str(tmp_path))
    said = refused(generate, "--method", "unsaid", "--prompt", "a", "--save-cache", tmp_path / "a")
    assert "error: Unsaid does not say how tokens lie in its buffer k, so it cannot be saved or loaded" in said
    assert not (tmp_path / "a").exists()


def test_the_command_line_saves_loads_and_asks(cli, llm, tmp_path):
    file, asked = tmp_path / "a", ["def f", "class A"]
    llm.use("self_index", budget=80)
    want = [c.text for c in llm.generate("import os\n", 6, questions=asked)]
    both = "--question", asked[0], "--question", asked[1]
    code, out, err = cli(generate, "--method", KEYS, "--prompt", "import os\n", *both, "--max-new-tokens", 6)
    assert code == 0 and out == "--- 1 ---\n" + want[0] + "\n--- 2 ---\n" + want[1] + "\n" and "prefill" in err
    code, out, _ = cli(generate, "--method", KEYS, "--prompt", "import os\n", "--save-cache", file,
                       "--max-new-tokens", 1)  # fmt: skip
    assert code == 0 and file.is_file() and [*tmp_path.iterdir()] == [file]
    code, out, _ = cli(generate, "--load-cache", file, *both, "--max-new-tokens", 6, "--json")  # the file's method
    assert code == 0 and json.loads(out)["text"] == want
    code, out, _ = cli(generate, "--method", KEYS, "--load-cache", file, *both[:2], "--max-new-tokens", 6)
    assert (code, out) == (0, want[0] + "\n")
    assert json.loads(cli(generate, "--load-cache", file, *both, "--max-new-tokens", 6, "--json")[1])[
        "prefill_tokens"
    ] == sum(len(llm.tokenizer.encode_after(None, q, True)) for q in asked)
    # a flag is of all layers that have the knob, one in the text of its own
    spec = ("--method", "0-2:tova,budget=20,3-:streaming", "--recent", 7)
    want = cli(generate, *spec, "--prompt", "import os\n", "--save-cache", file, "--max-new-tokens", 4)[1]
    assert cli(generate, "--load-cache", file, "--max-new-tokens", 4)[:2] == (0, want)
