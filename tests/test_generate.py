"""The command line and the decode loop: what a user types, what they get, and what they are told when it is wrong."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import engine.llm as E
import generate as G
import model as M
from cache.grammar import method_files
from engine import Chat
from engine.decode import LAG, Batch, Session, make_step
from loading import named as N
from loading.checkpoint import load_checkpoint
from loading.tokenizer import load_tokenizer
from runtime.errors import InputError, run_cli

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "models" / "tiny"


@pytest.fixture(scope="module")
def tiny():
    return load_checkpoint(TINY), load_tokenizer(TINY)


def session(model, method, prompts, n, sampling=None, **knobs):
    sampling = sampling or E.Sampling()
    model.setup_cache(method, len(prompts), max(map(len, prompts)) + n, **knobs)
    return Session(model, make_step(model, sampling, compile=False), sampling)


# ---- the loop ----


def test_greedy_is_teacher_forced_argmax(tiny):
    model, tk = tiny
    prompt = tk.encode("def read(self, size):\n", bos=True)
    result = session(model, "full", [prompt], 24).run([prompt], 24)
    ids = torch.tensor([prompt + result.tokens[0]])
    with torch.inference_mode():
        expected = model(ids)[0, len(prompt) - 1 : -1].argmax(-1).tolist()
    assert result.tokens[0] == expected and result.steps == 23


def test_stop_ids_end_a_row_and_are_not_part_of_it(tiny):
    model, tk = tiny
    prompts = [tk.encode(t, bos=True) for t in ("import os\n", "def f(x):\n    return")]
    free = session(model, "full", prompts, 12).run(prompts, 12).tokens
    stop = free[0][5]
    first = [row.index(stop) if stop in row else 12 for row in free]
    seen = []
    got = session(model, "full", prompts, 12).run(
        prompts, 12, frozenset([stop]), lambda r, t: seen.append((r, t)) or False
    )
    assert got.tokens == [row[:n] for row, n in zip(free, first, strict=True)]
    assert [t for r, t in seen if r == 0] == got.tokens[0]


@pytest.fixture
def lagging(monkeypatch):
    """The GPU's reader on CPU tensors: events and pinned memory replaced, the order of its queue kept."""

    class Event:
        def record(self):
            pass

        synchronize = record

    empty = torch.empty
    monkeypatch.setattr(E.torch.cuda, "Event", Event)
    monkeypatch.setattr(E.torch, "empty", lambda *a, pin_memory=False, **kw: empty(*a, **kw))


def test_a_lagging_reader_yields_the_same_tokens(tiny, lagging):
    model, tk = tiny
    prompt = [tk.encode("import sys\n", bos=True)]
    direct = session(model, "full", prompt, 10).run(prompt, 10).tokens
    s = session(model, "full", prompt, 10)
    s.lag = LAG
    assert s.run(prompt, 10).tokens == direct


# ---- what ends a run early ----


def spoil_logits(monkeypatch, at, value=float("nan"), rows=slice(None)):
    """The decode step number `at` (from 1 on) gives these logits."""
    steps, decode = [], M.Transformer.decode

    def spoilt(self, tokens, pos):
        logits = decode(self, tokens, pos)
        steps.append(0)
        if len(steps) == at:
            logits[rows, 5] = value
        return logits

    monkeypatch.setattr(M.Transformer, "decode", spoilt)


def fail_after(monkeypatch, step, error=InputError):
    maintain = M.Transformer.maintain

    def failing(self, n):
        if n == step:
            raise error("the method cannot go on")
        maintain(self, n)

    monkeypatch.setattr(M.Transformer, "maintain", failing)


@pytest.fixture(scope="module")
def whole(tiny):
    model, tk = tiny
    prompt = [tk.encode("import os", bos=True)]
    return tk, session(model, "full", prompt, 8).run(prompt, 8).tokens[0]


ARGV = ("--prompt", "import os", "--max-new-tokens", "8")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_end_the_text_with_a_line(value, whole, monkeypatch, cli):
    tk, tokens = whole
    spoil_logits(monkeypatch, 3, value)
    code, out, err = cli(G, *ARGV)
    assert code == 2 and out == tk.decode(tokens[:3]) + "\n"
    assert err.startswith("error: logits are NaN or infinite at step 3:") and err.count("\n") == 1
    assert "--method full" in err and "--dtype" not in err  # it is fp32


@pytest.mark.parametrize("flags, tried", [("--dtype fp16", "--dtype"), ("--kv-dtype fp16", "--kv-dtype"),
                                          ("--dtype fp16 --kv-dtype fp32", "--dtype")])  # fmt: skip
def test_what_to_try_fits_the_dtype_that_overflowed(flags, tried, monkeypatch, cli):
    spoil_logits(monkeypatch, 1, float("inf"))
    _, _, err = cli(G, *ARGV, *flags.split())
    assert err.endswith(f"fp16 holds no number above 65504; try {tried} bf16 or fp32\n"), err


def test_batches_before_a_failure_are_kept(whole, monkeypatch, cli):
    spoil_logits(monkeypatch, 10)  # the third step of the second batch
    code, out, err = cli(G, "--prompt", "import os", "import os", "--batch-size", "1", *ARGV[2:], "--json")
    assert code == 2 and json.loads(out)["tokens"] == [whole[1], whole[1][:3]] and "at step 3" in err


def test_a_row_that_is_done_may_be_anything(tiny, monkeypatch):
    model, tk = tiny
    prompts = [tk.encode(t, bos=True) for t in ("import os", "def f(x):\n    return")]
    free = session(model, "full", prompts, 8).run(prompts, 8).tokens
    spoil_logits(monkeypatch, 5, rows=slice(0, 1))
    stop = frozenset([free[0][2]])
    assert session(model, "full", prompts, 8).run(prompts, 8, stop).tokens[1] == [t for t in free[1] if t not in stop]


def test_ctrl_c_prints_what_there_is_and_exits_130(whole, monkeypatch, cli):
    fail_after(monkeypatch, 4, KeyboardInterrupt)
    code, out, err = cli(G, "--prompt", "import os", "import os", "--batch-size", "1", *ARGV[2:], "--json")
    assert code == 130 and json.loads(out)["tokens"] == [whole[1][:4]] and err == "interrupted\n"


def test_a_prompt_whose_logits_are_nan_is_one_line(monkeypatch, cli):
    monkeypatch.setattr(M.Transformer, "prefill", lambda self, t, n: torch.full((1, 512), float("nan")))
    code, out, err = cli(G, *ARGV)
    assert code == 2 and not out.strip() and "at step 0" in err and err.count("\n") == 1


def test_a_lagging_reader_hands_over_what_is_in_flight(tiny, whole, lagging, monkeypatch):
    model, tk = tiny
    prompt = [tk.encode("import os", bos=True)]
    for spoil in (lambda: fail_after(monkeypatch, 4), lambda: spoil_logits(monkeypatch, 4)):
        with monkeypatch.context() as monkeypatch:
            spoil()
            s, result = session(model, "full", prompt, 8), Batch.of(prompt)
            s.lag = LAG
            with pytest.raises(InputError):
                s.run(prompt, 8, batch=result)
            assert result.tokens[0] == whole[1][:4]


def test_a_conversation_goes_on_after_a_turn_that_failed(monkeypatch):
    llm = E.LLM(TINY)
    turns = ("import os", "def f", "class A")
    talk = llm.conversation()
    want = [talk.say(turns[0], 5, None).tokens, talk.say(turns[2], 5, None).tokens]
    talk = llm.conversation()
    got = [talk.say(turns[0], 5, None).tokens]
    with monkeypatch.context() as m:
        spoil_logits(m, 6)
        with pytest.raises(InputError, match="NaN"):
            talk.say(turns[1], 5, None)
    assert [*got, talk.say(turns[2], 5, None).tokens] == want


def test_a_conversation_whose_first_turn_failed_is_a_new_one(monkeypatch):
    """Its noise, too, comes from the first turn that stays."""
    llm = E.LLM(TINY)
    want = llm.conversation(E.Sampling(1.0, seed=3)).say("import os", 8, None).tokens
    talk = llm.conversation(E.Sampling(1.0, seed=3))
    with monkeypatch.context() as m:
        spoil_logits(m, 3)
        with pytest.raises(InputError, match="NaN"):
            talk.say("def f", 8, None)
    assert talk.say("import os", 8, None).tokens == want


def test_a_conversation_reads_its_text_again_after_ctrl_c(monkeypatch):
    """In a step, some layers may hold the token already: fed again, they would hold it twice."""
    talk, calls, step = E.LLM(TINY, method="h2o", heavy=12, recent=6).conversation(), [], M.layer_step

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 33:  # in the sixth of six layers' steps
            raise KeyboardInterrupt
        return step(*args)

    with monkeypatch.context() as m:
        m.setattr(M, "layer_step", interrupted)
        turn = talk.say("import os\nimport sys", 12, None)
    assert turn.batch.interrupted and len(turn.tokens) == 6
    with pytest.raises(InputError, match="nothing in the cache to save"):
        talk.llm.save("never")
    got = talk.say("def f(x):", 5, None).tokens
    assert got == E.LLM(TINY, method="h2o", heavy=12, recent=6).generate([talk.tokens[:-5]], 5)[0].tokens


def test_a_conversation_goes_on_where_a_method_has_no_slots_left():
    """It reads its text again, and holds more for a turn that needs more."""
    knobs = dict(method="snapkv", budget=24, recent=8, decode_slots=16)
    talk = E.LLM(TINY, **knobs).conversation()
    for new in (10, 10, 10, 30, 10):
        got = talk.say("import os", new, None).tokens
    assert len(got) == 10
    assert got == E.LLM(TINY, **knobs).generate([talk.tokens[:-10]], 10)[0].tokens
    assert len(E.LLM(TINY, max_seq_len=80, **knobs).generate([[5] * 10], 30)[0].tokens) == 30
    within = "razor,retrieval_method=snapkv:budget=24:recent=8:decode_slots=16"
    assert len(E.LLM(TINY, within, max_seq_len=80).generate([[5] * 10], 30)[0].tokens) == 30


def test_a_conversation_of_a_method_that_evicts_again_reads_no_turn_twice():
    talk = E.LLM(TINY, method="snapkv", budget=24, recent=8, decode_budget=32, decode_every=16).conversation()
    assert [talk.say("import os", 60, None).batch.read < 10 for _ in range(3)] == [True] * 3


def test_max_seq_len_is_one_cache_for_all_lengths():
    llm = E.LLM(TINY, max_seq_len=80)
    first = llm.generate([[5] * 10], 5)[0]
    cache = llm.model.cache
    assert llm.generate([[5] * 60], 20) and llm.model.cache is cache
    assert "".join(llm.stream([5] * 10, 5)) == first.text and llm.conversation().size == 80
    with pytest.raises(InputError, match="61 prompt tokens and --max-new-tokens 20 exceed --max-seq-len of 80"):
        llm.generate([[5] * 61], 20)
    with pytest.raises(InputError, match="--max-seq-len 5000 is above 4096"):
        E.LLM(TINY, max_seq_len=5000)


def test_capacities_are_rounded_up_by_at_most_half():
    sizes = [E.round_up(n) for n in range(257, 40_000)]
    assert all(n <= size <= 1.5 * n + 255 for n, size in enumerate(sizes, 257)) and len(set(sizes)) == 14
    assert sizes == [E.round_up(n) for n in sizes]


# ---- the command line ----


def test_text_streams_to_stdout_and_the_summary_to_stderr(cli):
    code, out, err = cli(G, "--prompt", "import os", "--max-new-tokens", "12")
    assert code == 0 and out.strip()
    for word in ("prefill:", "decode:", "KV cache (full)", "1.000 of full", "peak memory"):
        assert word in err


def test_json_object(cli):
    argv = "--max-new-tokens 5 --json --method self_index --sinks 4"
    code, out, err = cli(G, "--prompt", "import os", "def f", *argv.split())
    data = json.loads(out)
    assert code == 0 and not err
    assert set(data) >= {
        "method", "text", "tokens", "prompt_tokens", "prefill_s", "decode_tokens_per_s", "kv_bytes", "kv_bytes_full",
        "peak_memory_bytes", "device", "versions",
    }  # fmt: skip
    assert len(data["text"]) == len(data["tokens"]) == 2 and all(len(t) == 5 for t in data["tokens"])
    tk = load_tokenizer(TINY)
    assert data["text"] == [tk.decode(t) for t in data["tokens"]]
    assert data["kv_bytes"] > 0 and data["decode_tokens_per_s"] > 0


def test_batch_size_repeats_one_prompt_and_splits_many(cli):
    one = json.loads(cli(G, "--prompt", "import", "--batch-size", "3", "--max-new-tokens", "4", "--json")[1])
    assert len(one["tokens"]) == 3 and len({tuple(t) for t in one["tokens"]}) == 1
    argv = ["--prompt", "a", "import os", "def f", "--batch-size", "2", "--max-new-tokens", "4", "--json"]
    many = json.loads(cli(G, *argv)[1])
    assert many["prompt_tokens"] == [len(load_tokenizer(TINY).encode(t)) for t in ("a", "import os", "def f")]


WINDOWS = b"\xef\xbb\xbfimport os\r\nimport sys\r\n"  # a byte order mark, and CRLF


def test_a_flag_given_twice_has_the_values_of_both(cli):
    argv = ["--prompt", "a", "--prompt", "import os", "def f", "--stop", "x", "--stop", "y"]
    opt = G.parse_args(argv)
    assert opt.prompt == ["a", "import os", "def f"] and opt.stop == ["x", "y"] and G.parse_args([]).prompt == []
    assert len(json.loads(cli(G, *argv, "--max-new-tokens", "2", "--json")[1])["text"]) == 3


def test_text_from_windows_is_the_same_text(tmp_path, cli):
    """In a file, on standard input, and as turns."""
    runs = []
    for text in (WINDOWS, b"import os\nimport sys\n"):
        (tmp_path / "p.txt").write_bytes(text)
        argv = ("--max-new-tokens", "6", "--json")
        for given in (["--prompt-file", str(tmp_path / "p.txt")], ["--prompt", "-"], ["--interactive"]):
            out = json.loads(cli(G, *given, *argv, stdin=text)[1])
            runs.append((out["tokens"], out["prompt_tokens"]))
    assert runs[0] == runs[1] == runs[3] == runs[4] and runs[2] == runs[5] and len(runs[2][0]) == 2


def test_a_turn_that_is_not_utf8_is_a_line(cli):
    argv = ("--interactive", "--max-new-tokens", "4", "--json")
    code, out, err = cli(G, *argv, stdin=b"caf\xe9\nimport os\n")
    assert code == 0 and len(json.loads(out)["tokens"]) == 1
    assert err == "error: the line is not UTF-8: invalid continuation byte at byte 3\n"


def test_tokens_without_an_embedding_are_a_line(tiny):
    """A tokenizer may have more tokens than the model: pads and others that were added later."""
    llm = E.LLM(TINY)
    for call in (
        lambda: llm.generate([[1, 2048]], 4),
        lambda: llm.generate([[-1]], 4),
        lambda: llm.generate([[1, 5]], 4, questions=[[2048]]),
        lambda: list(llm.stream([2048], 4)),
    ):
        with pytest.raises(InputError, match=r"the text has token (2048|-1), the model embeds 2048 \(vocab_size"):
            call()


def test_interactive_turns_continue_the_same_cache(tiny, cli):
    model, tk = tiny
    argv = ["--interactive", "--max-new-tokens", "5", "--json"]
    code, out, _ = cli(G, *argv, stdin=b"import os\nThe code\n/exit\n")
    first, second = json.loads(out)["tokens"]
    ids = tk.encode("import os", bos=True)
    for turn, answer in (("", first), ("\nThe code", second)):
        ids = ids + tk.encode(turn, bos=False)
        for token in answer:
            with torch.inference_mode():
                assert token == model(torch.tensor([ids]))[0, -1].argmax().item()
            ids.append(token)
    assert code == 0 and len(first) == len(second) == 5


def test_stop_strings_and_a_penalty_from_the_command_line(cli):
    argv = ["--prompt", "import os\n", "--max-new-tokens", "24", "--json", "--repetition-penalty", "1.3"]
    free = json.loads(cli(G, *argv)[1])["text"][0]
    stop = [free[5:8], "not there"]
    assert json.loads(cli(G, *argv, "--stop", *stop)[1])["text"][0] == free[: free.find(stop[0])]
    assert free == E.LLM().generate("import os\n", 24, E.Sampling(repetition_penalty=1.3))[0].text


def test_turns_before_ctrl_c_are_printed(cli, monkeypatch):
    fail_after(monkeypatch, 5, KeyboardInterrupt)  # while the second turn is read
    argv = ["--interactive", "--max-new-tokens", "4", "--json"]
    code, out, err = cli(G, *argv, stdin=b"import os\nThe code is here\n")
    assert code == 130 and len(json.loads(out)["tokens"]) == 1 and err.endswith("interrupted\n")


def test_standard_input_that_is_closed(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    for argv in (["--prompt", "-"], ["--interactive"]):
        with pytest.raises(InputError, match="standard input is closed: give --prompt"):
            G.main(argv)


def test_interactive_reset_starts_over(cli):
    argv = ["--interactive", "--max-new-tokens", "4", "--json", "--method", "self_index"]
    stdin = b"import os\nmore\n/reset\nimport os\n"
    tokens = json.loads(cli(G, *argv, stdin=stdin)[1])["tokens"]
    assert tokens[0] == tokens[2]


def test_a_terminal_is_prompted_beside_the_output(cli, monkeypatch):
    class Terminal(io.BytesIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Terminal(b"import os\n")))
    code, out, err = cli(G, "--interactive", "--max-new-tokens", "2", "--json")
    assert code == 0 and len(json.loads(out)["tokens"]) == 1 and err.endswith("> > ")


def test_a_character_that_the_output_cannot_hold_is_escaped(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(SystemExit) as e:
        run_cli(lambda: print("a \u2192 b"))
    assert not e.value.code and out.buffer.getvalue() == b"a \\u2192 b\n"


def test_profile_writes_a_trace(tmp_path, cli):
    trace = tmp_path / "t.json"
    assert cli(G, "--prompt", "a", "--max-new-tokens", "3", "--profile", str(trace))[0] == 0
    assert json.loads(trace.read_text())["traceEvents"]


def test_list_methods_names_every_file_knob_and_paper(monkeypatch, tmp_path, cli):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, out, _ = cli(G, "--list-methods")
    assert code == 0 and all(f"{name}: " in out for name in method_files())
    assert "budget=160" in out and "Xiao et al. 2024" in out
    (tmp_path / "torch.py").write_text("raise RuntimeError('imported')")
    command = [sys.executable, ROOT / "generate.py"]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    again = subprocess.run([*command, "--list-methods"], env=env, capture_output=True, text=True)
    assert again.stdout == out, again.stderr
    wrong = subprocess.run([*command, "--method", "0-1:full,2-:slas-12.5"], env=env, capture_output=True, text=True)
    assert wrong.returncode == 2 and "unknown method 'slas-12.5': did you mean sals" in wrong.stderr
    (tmp_path / "mine.py").write_text("def")  # another list: torch is needed, and here it breaks
    env["KV_FAST_METHODS"] = str(tmp_path)
    assert "imported" in subprocess.run([*command, "--list-methods"], env=env, capture_output=True, text=True).stderr


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("silent, shown", [(0, True), (60, False)])
def test_a_bar_counts_the_tokens_read_on_a_terminal(tiny, chunk, silent, shown, monkeypatch):
    model, counts = tiny[0], []
    monkeypatch.setattr(M, "SILENT", silent)
    monkeypatch.setattr(sys, "stderr", Terminal())
    update = M.tqdm.update
    monkeypatch.setattr(M.tqdm, "update", lambda bar, n: (update(bar, n), counts.append(bar.n))[0])
    model.setup_cache("full", 2, 24)
    model.prefill(torch.ones(2, 12, dtype=torch.int64), torch.tensor([12, 7]), chunk)
    said, step = sys.stderr.getvalue(), len(model.layers)
    assert ("prompt: " in said) == shown and ("24" in said) == shown
    assert counts[-1] == 24 and counts == sorted(counts) and len(counts) == step * (1 if chunk is None else 3)
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # a pipe
    model.reset_cache()
    model.prefill(torch.ones(2, 12, dtype=torch.int64), torch.tensor([12, 7]), chunk)
    assert not sys.stderr.getvalue()


@pytest.mark.parametrize(
    "argv", [["generate.py"], ["calibrate.py"], ["-m", "scripts.contract"], ["-m", "scripts.eval.compare"]]
)
def test_without_the_environment_one_line_says_what_to_do(argv):
    done = subprocess.run([sys.executable, "-S", *argv], cwd=ROOT, capture_output=True, text=True)  # -S: no packages
    said = "run .venv/bin/python" if (ROOT / ".venv").exists() else "run `make demo`"
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and f"has no PyTorch: {said}" in done.stderr


@pytest.mark.parametrize("argv", [["--list-methods"], ["--prompt", "a", "--max-new-tokens", "2"]])
def test_an_output_that_cannot_be_written_is_one_line(argv):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "generate.py", *argv], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2 and "error: the output cannot be written: No space left" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.parametrize("argv", [["generate.py", "--prompt", "a"], ["-m", "scripts.eval.compare"]])
def test_an_interrupt_while_torch_is_imported_is_one_line(argv, tmp_path):
    """By a torch that is interrupted itself."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    env = os.environ | dict(PYTHONPATH=f"{tmp_path}")
    done = subprocess.run([sys.executable, *argv], cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_random_init_needs_no_checkpoint(monkeypatch, cli):
    small = dict(dim=32, n_layer=2, n_head=2, n_kv_head=1, head_dim=32, ffn_dim=32, vocab_size=300, rope=dict())
    monkeypatch.setitem(N.NAMED, "small", small)
    code, out, _ = cli(G, "--random-init", "small", "--prompt", "hello", "--max-new-tokens", "3", "--json")
    data = json.loads(out)
    assert code == 0 and data["prompt_tokens"] == [5] and len(data["tokens"][0]) == 3
    asked = ("--question", "one", "--question", "two", "--max-new-tokens", "3", "--json")
    code, out, _ = cli(G, "--random-init", "small", "--prompt", "hello", *asked)
    assert code == 0 and json.loads(out)["prompt_tokens"] == [8, 8] and json.loads(out)["prefill_tokens"] == 11


BAD = {
    "empty prompt": (["--prompt", ""], "empty"),
    "no prompt": ([], "no prompt"),
    "unknown method": (["--prompt", "a", "--method", "nope"], "unknown method 'nope'"),
    "unknown knob": (["--prompt", "a", "--method-arg", "colour=red"], "no knob 'colour'"),
    "missing checkpoint": (["--prompt", "a", "--checkpoint", "/no/such"], "/no/such not found"),
    "unknown flag": (["--bogus"], "--bogus"),
    "too many new tokens": (["--prompt", "a", "--max-new-tokens", "1000000"], "--max-new-tokens"),
    "temperature": (["--prompt", "a", "--temperature", "-1"], "--temperature"),
    "a batch that does not fit": (["--prompt", "a", "--batch-size", "1000000"], "GiB are free"),
    "a batch that no list holds": (["--prompt", "a", "--batch-size", "9" * 23], "999 is above 1000000"),
    "temperature nan": (["--prompt", "a", "--temperature", "nan"], "--temperature nan is no number"),
    "min-p": (["--prompt", "a", "--min-p", "2"], "--min-p 2.0 is above 1"),
    "top-k of the likeliest": (["--prompt", "a", "--top-k", "5"], "--top-k is for sampling"),
    "a trace over a prompt": (["--prompt-file", __file__, "--profile", __file__], "is a file that this run reads"),
    "repetition penalty": (["--prompt", "a", "--repetition-penalty", "0"], "--repetition-penalty 0.0 is below"),
    "stop string": (["--prompt", "a", "--stop", ""], "--stop is ['']: give a text"),
    "knob nan": (["--prompt", "a", "--method", "ojakv,eta_decode=nan"], "eta_decode=nan is out of range"),
    "knob of 5000 digits": (["--prompt", "a", "--method", "streaming,sinks=" + "1" * 5000], "sinks='111"),
    "unknown name": (["--prompt", "a", "--random-init", "gpt-5"], "unknown model name 'gpt-5'"),
    "both sources": (["--prompt", "a", "--random-init", "x", "--checkpoint", "y"], "not both"),
    "device": (["--prompt", "a", "--device", "abacus"], "--device abacus"),
    "dtype": (["--prompt", "a", "--dtype", "int1"], "--dtype"),
    "interactive with a prompt": (["--interactive", "--prompt", "a"], "--interactive"),
    "profile of a conversation": (["--interactive", "--profile", "x"], "--profile writes a trace of one run"),
    "a trace over a cache": (["--prompt", "a", "--save-cache", "/no/x", "--profile", "/no/./x"], "name one file"),
    "no chat template": (["--chat", "--prompt", "a"], "chat template"),
    "no chat template for a conversation": (["--chat", "--interactive"], "no chat template"),
    "system without chat": (["--system", "Be brief.", "--prompt", "a"], "for the chat template: add --chat"),
    "variable without chat": (["--chat-arg", "think=false", "--prompt", "a"], "for the chat template: add --chat"),
    "variable without a value": (["--chat", "--chat-arg", "think", "--prompt", "a"], "--chat-arg 'think' is not of"),
    "profile at a folder": (["--prompt", "a", "--profile", "/tmp"], "--profile: cannot write /tmp: it is a folder"),
    "profile at a device": (["--prompt", "a", "--profile", "/dev/null"], "it is no ordinary file; name another one"),
    "profile of a long name": (["--prompt", "a", "--profile", "/tmp/" + "x" * 300], "name too long"),
    "weights that do not fit": (["--prompt", "a", "--random-init", "llama-3.3-70b"], "the model needs"),
    "missing file": (["--prompt-file", "/no/such.txt"], "/no/such.txt"),
    "temperature that fp32 rounds to 0": (
        ["--prompt", "a", "--temperature", "1e-300"],
        "--temperature 1e-300 is below",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_exit_code_2(name, refused, monkeypatch):
    argv, says = BAD[name]
    monkeypatch.setattr("runtime.machine.available_memory", lambda device: 16 << 30)  # on any machine
    assert says in refused(G, *argv)


def test_system_message_and_template_variables(tmp_path, cli):
    """They reach the template, from the command line and the library, in one turn and in a conversation."""
    folder = tmp_path / "chat"
    shutil.copytree(TINY, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}{{ 'hm' if think else 'so' }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config | dict(chat_template=template)))
    llm, asked = E.LLM(folder), Chat("Be brief.", dict(think=True))
    want = "system: Be brief.;user: import os;hm"
    assert llm.tokenizer.decode(llm.encode("import os", asked)) == want
    assert llm.tokenizer.decode(llm.encode("import os", Chat())) == "user: import os;so"
    tokens = llm.generate("import os", 4, chat=asked)[0].tokens
    assert tokens == llm.generate([llm.encode("import os", asked)], 4)[0].tokens
    talk = llm.conversation(chat=asked)
    for _ in range(2):  # from the start, after the second
        assert talk.say("import os", 4).tokens == tokens
        talk.forget()
    given = ["--checkpoint", str(folder), "--chat", "--system", "Be brief.", "--chat-arg", "think=true", "--json"]
    for argv, stdin in ((["--prompt", "import os"], None), (["--interactive"], b"import os\n")):
        code, out, _ = cli(G, *given, *argv, "--max-new-tokens", "4", stdin=stdin)
        assert code == 0 and json.loads(out)["tokens"] == [tokens]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_cuda_without_a_gpu(refused):
    assert refused(G, "--prompt", "a", "--device", "cuda")


def test_prompt_file_that_is_not_utf8(tmp_path, refused):
    f = tmp_path / "latin.txt"
    f.write_bytes(b"caf\xe9")
    assert "UTF-8" in refused(G, "--prompt-file", f) and "UTF-8" in refused(G, "--prompt", "-", stdin=b"\xff")


def test_a_real_process_exits_2_without_a_traceback():
    argv = [sys.executable, "generate.py", "--method", "nope", "--prompt", "a"]
    r = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert r.returncode == 2 and r.stderr.startswith("error: ") and "Traceback" not in r.stderr
