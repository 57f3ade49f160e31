"""Decode steps compiled by inductor: the same tokens, a graph a kind of layer, and what is compiled when."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import engine.llm as E
from engine import compiled, inductor
from engine.decode import Session, make_step
from loading.checkpoint import load_checkpoint, random_transformer
from loading.tokenizer import load_tokenizer
from model import ModelArgs
from runtime.errors import InputError

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "models" / "tiny"


@pytest.fixture(scope="module")
def tiny():
    return load_checkpoint(TINY), load_tokenizer(TINY)


# of each way to store and attend one; the contract compiles all, with a smaller model
@pytest.mark.parametrize("method", [
    "double_sparsity",
    *(pytest.param(m, marks=pytest.mark.slow) for m in ("kivi", "ojakv", "razor")),
])  # fmt: skip
@pytest.mark.cpp
def test_a_compiled_step_gives_the_tokens_of_an_eager_one(tiny, method):
    """With inductor's options of this device, which on a CPU call operators from C++."""
    prompts = [tiny[1].encode(t, bos=True) for t in ("import os\n" * 30, "class Reader:\n    def __init__(self")]
    sampled = E.Sampling(1.0, seed=5, repetition_penalty=1.3)  # noise, and what a penalty counts, are in the graph
    runs = []
    for compile in (False, True):
        llm = E.LLM(TINY, method=method, compile=compile)
        runs.append([[c.tokens for c in llm.generate(prompts, 12, how)] for how in (E.Sampling(), sampled)])
    assert runs[0] == runs[1] and runs[0][0] != runs[0][1]
    steps = [step for step in llm._steps.values() if isinstance(step, compiled.CompiledStep)]
    assert all(step.graphs for step in steps)  # on a CPU no method's graphs need Python between them


@pytest.mark.cpp
def test_a_release_of_torch_that_is_not_known(tiny, monkeypatch):
    """Steps are then torch.compile's own functions: nothing of inductor is replaced, and the tokens are the same."""
    prompts, tokens = [tiny[1].encode("import os\n" * 30, bos=True), [5] * 20], []
    for compile in (False, True):
        with monkeypatch.context() as context:
            context.setattr(inductor, "KNOWN", False)
            context.setattr(inductor, "graph_calls", None)
            llm = E.LLM(TINY, method="0-1:full,2-:self_index", compile=compile)
            tokens.append([c.tokens for c in llm.generate(prompts, 8)])
    assert tokens[0] == tokens[1] and next(iter(llm._steps.values()))[0].graphs is None


@pytest.fixture
def captured(monkeypatch):
    """Steps are captured, as on CUDA, by stand-ins; yields the number of replays. A capture runs nothing."""
    run, recording, replays = compiled.CapturedStep.run, [], []

    class Graph:
        def replay(self):
            replays.append(self)
            self.out.copy_(run(self.step, self.step.parts, *self.inputs))

    @contextlib.contextmanager
    def recorded(graph):
        recording.append(graph)
        yield
        recording.clear()

    def run_or_record(step, parts, *inputs):
        if not recording:
            return run(step, parts, *inputs)
        recording[0].step, recording[0].inputs, recording[0].out = step, inputs, torch.empty_like(inputs[0])
        return recording[0].out

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in dict(CUDAGraph=Graph, graph=recorded, Stream=lambda: stream, current_stream=lambda: stream,
                            stream=lambda s: contextlib.nullcontext(), set_stream=lambda s: None).items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(compiled, "CompiledStep", compiled.CapturedStep)
    monkeypatch.setattr(compiled.CapturedStep, "run", run_or_record)
    traced = lambda function, device: torch.compile(function, fullgraph=True, dynamic=False, backend="eager")  # noqa: E731
    monkeypatch.setattr(compiled, "torch_compile", traced)
    torch._dynamo.reset()
    return replays


@pytest.mark.parametrize("method, speculate", [("h2o,heavy=16,recent=8", None), ("0-1:full,2-:quest,budget=16", 3)])
def test_a_captured_step_gives_the_tokens_of_an_eager_one(tiny, captured, method, speculate):
    """h2o adds to its scores at every call: none is made twice."""
    prompts = [tiny[1].encode(t, bos=True) for t in ("import os\n" * 30, "class Reader:\n    def __init__(self")]
    runs = []
    for compile in (False, True):
        llm = E.LLM(TINY, method=method, compile=compile, speculate=speculate)
        runs.append(
            [[c.tokens for c in llm.generate(prompts, 12, E.Sampling(*how))] for how in ((), (1.0, None, None, 5))]
        )
    assert runs[0] == runs[1] and captured


def test_a_step_whose_compilation_was_interrupted_is_compiled_again(captured, monkeypatch):
    """Compilers must not run inside a capture."""
    llm = E.LLM(TINY, compile=True)
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(compiled.CapturedStep, "run", Mock(side_effect=KeyboardInterrupt))
        llm.generate("import os", 4)
    assert llm.generate("import os", 4)[0].tokens == E.LLM(TINY).generate("import os", 4)[0].tokens
    assert len(captured) == 2  # of three steps


def test_a_step_that_cannot_be_captured(tiny, captured, monkeypatch):
    def graph(graph):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    with pytest.raises(
        InputError, match=r"cannot be captured .* \(operation not .* capturing\): run with --no-compile"
    ):
        E.LLM(TINY, compile=True).generate("import os", 4)


@pytest.mark.slow
def test_compiled_steps_of_several_caches_do_not_mix(tiny):
    """A step checks its arguments alone: it must never be handed the cache of another."""
    prompt = tiny[1].encode("import os\n" * 20, bos=True)
    specs, tokens = ("full", "streaming,recent=64", "full", "self_index,budget=96"), {}
    for compile in (False, True):
        llms = [E.LLM(TINY, method=m, compile=compile) for m in specs]
        tokens[compile] = [llm.generate([prompt], 16)[0].tokens for _ in range(2) for llm in llms]
        tokens[compile] += [llms[0].use(m).generate([prompt] * 2, 16)[1].tokens for m in specs[1:]]
    assert tokens[True] == tokens[False]


@pytest.mark.parametrize("method, kinds", [("full", 1), ("0-1:full,2-:self_index", 2), ("random", 1)])
def test_layers_of_a_kind_share_a_graph(compiled_inputs, method, kinds):
    """What a layer's code reads decides: the number that the control `random` hashes is a buffer."""
    llm = E.LLM(TINY, method=method, compile=True)
    llm.session(1, 64, 32, 32, E.Sampling())
    assert len(compiled_inputs) == kinds + 2  # with the embedding and the choice of a token


def test_layers_of_many_kinds_go_by_groups(tiny, monkeypatch):
    monkeypatch.setattr(compiled, "KINDS", 2), monkeypatch.setattr(compiled, "GROUP", 3)
    for kinds, sizes in (([0] * 6, [1] * 6), ([0, 1, 0, 1, 0, 1], [1] * 6), ([0, 1, 2, 3, 4, 5], [1, 1, 1, 3])):
        tiny[0].setup_cache("full", 1, 64)
        layers, graphs = compiled.Layers(tiny[0]), {}
        numbers = {id(part[1]): kind for part, kind in zip(layers.parts, kinds, strict=True)}

        def compile(call, *args, numbers=numbers, graphs=graphs):
            few = call.fixed[0] if isinstance(call.fixed[0], list) else []
            return graphs.setdefault(tuple(numbers[id(method)] for _, method, _ in few), object())

        monkeypatch.setattr(compiled.CompiledCall, "compile", compile)
        with compiled.tqdm(disable=True) as bar:
            layers.compile(torch.zeros(1), torch.zeros(1), bar)
        assert [len(call.fixed[0]) for call in layers.calls[1:]] == sizes
        assert [id(p[1]) for call in layers.calls[1:] for p in call.fixed[0]] == [id(p[1]) for p in layers.parts]


def test_what_is_compiled_is_said(compiled_inputs, capsys):
    E.LLM(TINY, method="streaming", compile=True).session(2, 64, 32, 32, E.Sampling())
    assert capsys.readouterr().err.endswith("compiling the decode step: streaming, 2 rows of 64 tokens\n")


def test_warm_up_compiles_all_that_decoding_runs(compiled_inputs):
    """Neither the first real step nor the last batch of a run, which may be smaller, adds to a static graph."""
    args = ModelArgs(dim=32, n_layer=1, n_head=2, n_kv_head=1, head_dim=32, ffn_dim=32, vocab_size=16, max_seq_len=64)
    model, sampling = random_transformer(args, "cpu", torch.float32), E.Sampling()
    for graphs, batch in ((3, 3), (6, 2)):  # of the embedding, a layer, and the choice of a token
        model.setup_cache("full", batch, 16)
        s = Session(model, make_step(model, sampling, compile=True), sampling)
        s.warm_up(batch)
        assert len(compiled_inputs) == graphs
        s.run([[1, 2]] * batch, 4)
        assert len(compiled_inputs) == graphs
    # a size that may change would be a number
    assert all(isinstance(x, torch.Tensor) for inputs in compiled_inputs for x in inputs)


def test_further_turns_of_a_compiled_conversation_compile_nothing(compiled_inputs):
    talk = E.LLM(TINY, compile=True).conversation()
    assert len(compiled_inputs) == 3  # by the warm-up
    for turn in ("import os", "def f", "class A"):
        assert talk.say(turn, 3).tokens
        assert len(compiled_inputs) == 3, turn


def test_a_compiled_step_serves_other_seeds_and_lengths(compiled_inputs):
    """It is compiled for a capacity, which is rounded up. For another way of sampling that alone is compiled, and what
    is kept is bounded."""
    llm = E.LLM(TINY, compile=True)
    for n, new, seed in ((10, 5, 0), (200, 100, 1), (256, 256, 2)):
        llm.generate([[5] * n], new, E.Sampling(0.8, seed=seed))
        assert len(compiled_inputs) == 3
    llm.generate([[5] * 257], 5, E.Sampling(0.8))
    assert len(compiled_inputs) == 6
    for i in range(6):
        llm.generate([[5] * 300], 2, E.Sampling(0.8 + i / 10))
    assert len(compiled_inputs) == 11 and len(llm._steps) == E.STEPS


@pytest.mark.slow
def test_a_compiled_call_looks_its_tensors_up_once():
    """And each time, if it changes what Python remembers; of each layer it gets the layer's own."""

    class Held(torch.nn.Module):
        def __init__(self, number):
            super().__init__()
            self.bias, self.calls, self.number = torch.full((2,), number), torch.zeros(3), 7

    def plain(held, tokens, pos):
        return tokens * 10 + pos + held.bias * held.number

    def remembers(held, tokens, pos):
        held.calls = held.calls + 1
        return tokens + pos

    held, tokens, pos = [Held(100), Held(200), Held(300)], torch.tensor([3, 5]), torch.tensor([2, 1])
    held[2].number = 8  # a kind of its own
    for function, graphs, lookups in ((plain, 2, 1), (remembers, 1, 3)):
        asked, step = [], compiled.torch_compile(function, torch.device("cpu"))
        counted = [
            compiled.CompiledCall(lambda *x, step=step, asked=asked: asked.append(0) or step(*x), h) for h in held
        ]
        with torch.inference_mode(), inductor.compiling():
            for i in range(3):
                for call in counted:
                    assert torch.equal(call(tokens + i, pos), function(*call.fixed, tokens + i, pos))
            assert torch.equal(counted[0](pos, tokens), function(held[0], pos, tokens))
        assert len(asked) == 3 * lookups + (lookups == 3)
        assert len({call.graph for call in counted}) == graphs
    assert held[0].calls[0] == 8 and held[1].calls[0] == 6  # both the compiled step and the plain function counted


@pytest.mark.slow
def test_a_step_looks_again_for_another_batch_and_not_for_other_threads(tiny, monkeypatch):
    model, threads = tiny[0], torch.get_num_threads()
    model.setup_cache("full", 3, 64)
    step = make_step(model, E.Sampling(), compile=True)
    asked, look_up = [], step.look_up
    step.look_up = lambda *x: asked.append(0) or look_up(*x)
    pos = torch.arange(3)
    for batch, lookups in ((2, 1), (3, 2), (2, 3)):
        for _ in range(2):
            want = model.decode(pos[:batch], pos[:batch] + 7).argmax(-1)
            assert torch.equal(step(pos[:batch], pos[:batch] + 7, pos[:batch] + 1), want)
        assert len(asked) == lookups
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    step(pos[:2], pos[:2] + 7, pos[:2] + 1)
    assert len(asked) == 3
    step.head(torch.zeros(2, model.args.dim), pos[:2], pos[:2])  # the same tensor twice
    other = make_step(model, E.Sampling(repetition_penalty=2.0), compile=True, like=step)
    seen = torch.zeros(3, model.args.vocab_size, dtype=torch.bool)
    for batch, f, given in ((3, other, [seen]), (2, step, [])):  # which share their layers
        want = model.decode(pos[:batch], pos[:batch] + 9).argmax(-1)
        assert torch.equal(f(pos[:batch], pos[:batch] + 9, pos[:batch] + 1, *given), want)
    assert other.layers is step.layers and len(asked) == 4
    model.cache[0].k.transpose_(2, 3)
    with pytest.raises(RuntimeError, match="must be contiguous"):  # what a graph raises
        step(pos[:2], pos[:2] + 10, pos[:2] + 1)


@pytest.mark.slow
def test_the_next_run_compiles_nothing(tmp_path):
    """It finds everything in inductor's cache on disk, for another prompt, too, and nothing for another processor."""
    code = """
import json, sys
import torch, engine as E
from torch._dynamo.utils import counters
llm = E.LLM(method="self_index", compile=True)
llm.generate([[5] * int(sys.argv[1])], int(sys.argv[2]), E.Sampling(0.8, seed=int(sys.argv[1])))
print(json.dumps(dict(counters["aot_autograd"])))
"""
    env, found = os.environ | dict(TORCHINDUCTOR_CACHE_DIR=str(tmp_path)), []
    for *given, isa in (("200", "3", {}), ("20", "5", {}), ("20", "5", {"ATEN_CPU_CAPABILITY": "default"})):
        command = [sys.executable, "-c", code, *given]
        done = subprocess.run(command, cwd=ROOT, env=env | isa, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        counted = json.loads(done.stdout)
        found.append((counted.get("autograd_cache_miss", 0), counted.get("autograd_cache_hit", 0)))
    assert found == [(3, 0), (0, 3), (3, 0)]
