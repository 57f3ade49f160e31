"""What CUDA tensors do in the engine, without a GPU: their shapes, dtypes and devices are computed, numbers are not.

Tensors are fake ones on `cuda`, or on `meta` where torch is built without CUDA and could not index those. What else
only a GPU would tell fails here: a tensor on the CPU in a decode step (a copy, which no CUDA graph can capture), a
number that comes to the host, an operator that is not taken or whose fake version promises another layout than the real
one gives, a kernel that is launched with arguments it does not take. No kernel runs.
"""

from __future__ import annotations

import contextlib
import inspect
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cache.calibration import RandomCalibration
from cache.evicting import Evicting
from cache.grammar import method_files, parse_spec
from cache.spec import knob_names, presets, resolve
from engine import Sampling
from engine.compiled import layer_group
from kernels import backend, offload, splits
from kv_methods import double_sparsity_offload, ojakv
from kv_methods.razor import Razor
from model import ModelArgs, Transformer

METHODS = sorted(method_files())
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "meta"
GREEDY = Sampling()
ARGS = dict(dim=64, n_layer=2, n_head=6, n_kv_head=2, head_dim=32, ffn_dim=96, vocab_size=96, max_seq_len=1024)
B, S, T, STEPS = 2, 40, 60, 4
KNOBS = dict(
    budget=24, sinks=4, recent=16, tail=4, flush=2, window=16, n_start=5, n_recent=5, update_every=3, query_window=8
)
# settings that take other kernels, or other forms of them, than the methods' own
SETTINGS = [
    *METHODS, *presets(), "double_sparsity,label_bits=2", "double_sparsity,label_bits=16", "ojakv,energy=0.9",
    "ojakv,rule=column", "double_sparsity_offload,label_bits=16", "razor,retrieval_method=self_index-no-sinks",
    "razor,retrieval_method=double_sparsity_offload", "sals,score=softmax", "sals,value_bits=16", "sals,budget=1.0",
    "sals,budget=p0.9", "quest,budget=p0.9", "loki,budget=p0.9", "quest,heads=query",
    "self_index,budget=0.2", "self_index,store_bits=4", "self_index,store_bits=8", "streaming,positions=cache",
]  # fmt: skip
# the operators that a step of a method takes
LABELS = {"store_labels", "label_score", "budget_select"}
FETCH = {"fetch_rows", "await_rows", "packed_gather_attention"}
STEP = dict(
    full={"decode_attention"},
    streaming={"decode_attention"},
    oracle={"head_scores", "budget_select", "gather_attention"},
    random={"budget_select", "gather_attention"},
    double_sparsity=LABELS | {"gather_attention"},
    hadamard={"quantized_append", "quantized_attention"},
    kivi={"quantized_append", "quantized_attention"},
    fp8={"quantized_append", "quantized_attention"},
    turboquant={"quantized_append", "quantized_attention"},
    double_sparsity_offload=LABELS | FETCH,
    ojakv={"lowrank_attention"},
    palu={"group_attention"},
    razor={"mixed_decode", "decode_attention", "rotate_append"},  # `full` in a layer whose heads keep all tokens
    sals={"latent_append", "head_scores", "budget_select", "latent_attention"},
    self_index={"lut_score", "budget_select", "packed_gather_attention"},
    quest={"page_score", "budget_select", "gather_attention"},
    sparq={"channel_score", "budget_select", "gather_attention"},
    loki={"head_scores", "budget_select", "gather_attention"},
    hshare=LABELS | {"gather_attention"},
    rkv={"decode_attention"},
    rocket={"channel_score", "budget_select", "gather_attention"},
)
# one launch rotates q and k and stores k and v; where a method's own `append` does that, it rotates alone
for _name in STEP.keys() - {"sals", "palu"}:
    STEP[_name] |= {"rotate_append" if _name in ("full", "oracle", "random") else "rotate_token"}
PROMPT = dict(
    double_sparsity={"store_labels"}, sals={"project", "quantize"}, self_index={"key_range", "encode_keys", "quantize"}
)
# operators with a version in torch: taken whether kernels are wanted or not
BOTH = (
    FETCH - {"packed_gather_attention"}
    | {"packed_attention", "replace_token", "decode_attention", "lowrank_attention", "half_params"}
    | {"quantized_append", "group_attention"}
)


class OnDevice(TorchDispatchMode):
    """Fails where a tensor is on any other device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, out)):
            if isinstance(x, torch.Tensor):
                assert x.device.type == DEVICE, f"{func} in a step: a tensor on {x.device}"
        return out


class Operators(TorchDispatchMode):
    """Notes our operators, and runs what is registered for CUDA beside the fake version: both must give one layout."""

    def __init__(self):
        super().__init__()
        self.called: set[str] = set()
        self.launched: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace == "kv_fast":
            self.called.add(func._opname)
            rest = [kwargs.get(a.name, a.default_value) for a in func._schema.arguments[len(args) :]]
            kernel = torch.library.get_kernel(func, "CUDA")
            with OnDevice():
                real = kernel.call_boxed(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *args, *rest)
            assert layouts(real) == layouts(out), f"{func} gives {layouts(real)}, its fake version {layouts(out)}"
        return out

    def launch(self, kernel, grid):
        """In place of a launch: what Triton would refuse."""
        name, parameters = kernel.fn.__name__, inspect.signature(kernel.fn).parameters

        def check(*args, **kwargs):
            options = kwargs.keys() - parameters
            assert options <= {"num_warps", "num_stages", "enable_fp_fusion"}, f"{name}: {options}"
            given = inspect.signature(kernel.fn).bind(*args, **{k: x for k, x in kwargs.items() if k not in options})
            leaves = [(n, x) for n, xs in given.arguments.items() for x in tree_leaves(xs)]  # strides: a tuple
            for argument, x in leaves:
                on_device = isinstance(x, torch.Tensor) and x.device.type == DEVICE
                assert on_device or isinstance(x, int | float | None), f"{name}: {argument} is {x!r}"
            for size, most in zip(grid, (2**31 - 1, 65535, 65535), strict=False):
                assert isinstance(size, int) and 0 < size <= most, f"{name}: a grid of {grid}"
            self.launched.add(name)

        return check


def layouts(tree):
    return [
        (tuple(x.shape), x.stride(), x.dtype, x.device.type) for x in tree_leaves(tree) if isinstance(x, torch.Tensor)
    ]


def really(f):
    """f without fake tensors."""

    def call(*args, **kwargs):
        with torch.utils._python_dispatch._disable_current_modes(), unset_fake_temporarily():
            return f(*args, **kwargs)

    return call


@pytest.fixture
def gpu(monkeypatch):
    """Tensors are fake, launches are checked, and what the engine asks of a card is answered."""
    monkeypatch.setattr("kernels.backend.BACKEND", "" if CUDA else "triton")
    operators = Operators()
    monkeypatch.setattr(
        backend.triton.KernelInterface, "__getitem__", lambda kernel, grid: operators.launch(kernel, grid)
    )
    splits.multiprocessors.cache_clear()
    if not torch.cuda.is_available():
        card = SimpleNamespace(multi_processor_count=splits.ASSUMED_SMS, major=9, minor=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
        monkeypatch.setattr("runtime.machine.available_memory", lambda device: 80 << 30)
    # streams and addresses are of real things
    stream = SimpleNamespace(wait_stream=lambda stream: None, wait_event=lambda event: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(offload, "_side_stream", lambda device: stream)
    monkeypatch.setattr(offload, "_arrival", lambda device, address: SimpleNamespace(record=lambda stream: None))
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda self: 0)
    mapped = lambda size, dtype, device: torch.zeros(size, dtype=dtype, device=device)  # noqa: E731
    monkeypatch.setattr(double_sparsity_offload, "host_buffer", mapped)
    # what a calibration says decides about shapes: it is real
    for owner, name in (
        (RandomCalibration, "get"), (RandomCalibration, "stack"), (ojakv, "rank_of"), (Evicting, "all_kept"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, really(getattr(owner, name)))
    heads = really(lambda method, mask=Razor._protected: mask(method).nonzero().flatten().tolist())
    path = "nonzero.return_value.flatten.return_value.tolist.return_value"
    monkeypatch.setattr(Razor, "_protected", lambda method: MagicMock(**{path: heads(method)}))
    if not CUDA:  # on `meta`, a cache is asked for its size alone, and has no angles; nor is torch.tensor faked there
        rotary = ModelArgs.rotary
        monkeypatch.setattr(ModelArgs, "rotary", lambda args, batch, n, *rest: rotary(args, batch, T, *rest))
        new = torch.tensor
        monkeypatch.setattr(torch, "tensor", lambda *args, device=None, **kw: new(*args, **kw).to(device))
    with FakeTensorMode(allow_non_fake_inputs=True), operators, torch.inference_mode():
        yield operators
    splits.multiprocessors.cache_clear()


def model_with(setting, dtype, **args):
    """A model whose cache is set up, and the name of the method."""
    model = Transformer(ModelArgs(**ARGS | args)).eval()
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                p = torch.empty_like(p, dtype=dtype, device=DEVICE)
                module._parameters[name] = torch.nn.Parameter(p, requires_grad=False)
    (part,) = parse_spec(setting)
    spec, knobs = part.name, part.knobs
    cls = resolve(spec)[0]
    method, few = cls.__module__.rpartition(".")[2], {k: x for k, x in KNOBS.items() if k in knob_names(cls)}
    model.setup_cache(spec, B + 1, T, **few | presets().get(spec, ("", {}))[1] | knobs)
    assert {b.device.type for b in model.cache.buffers()} == {DEVICE}
    return model, method


def conversation(model, operators, sampling=GREEDY):
    """A prompt, and steps with maintenance between them; again after a reset -> operators of prompt and steps."""
    for n in (STEPS, 1):
        operators.called = prompt = set()
        tokens, lengths = torch.zeros(B, S, dtype=torch.int64, device=DEVICE), torch.full((B,), S, device=DEVICE)
        logits, steps = model.prefill(tokens, lengths), set()
        for i in range(n):
            V = model.args.vocab_size
            assert layouts(logits) == [((B, V), (V, 1), model.norm.weight.dtype, DEVICE)]
            pos, operators.called = lengths + i, steps
            with OnDevice():
                logits = model.decode(sampling.draw(logits, pos, lengths), pos)
            operators.called = set()
            model.maintain(i + 1)
        model.reset_cache()
    return prompt, steps


def ids(x):
    return x if isinstance(x, str) else str(x).removeprefix("torch.")


PAIRS = [*((s, torch.bfloat16) for s in SETTINGS), *((m, torch.float32) for m in METHODS)]


@pytest.mark.parametrize("setting, dtype", PAIRS, ids=ids)
def test_kernels_are_taken(setting, dtype, gpu):
    """Every method takes its own operators and no others; every preset and setting some, on the device."""
    model, method = model_with(setting, dtype)
    prompt, steps = conversation(model, gpu)
    wanted = STEP.get(setting)
    assert steps == wanted or (wanted is None and steps)
    assert prompt >= PROMPT.get(setting, set()) and (gpu.launched or method == "palu")


@pytest.mark.skipif(not CUDA, reason="a tensor on `meta` takes the CPU's versions")
@pytest.mark.parametrize("method", METHODS)
def test_without_kernels(method, gpu, monkeypatch):
    """KV_FAST_BACKEND=torch: what kernels are compared with on a GPU does not come back to the host either."""
    monkeypatch.setattr("kernels.backend.BACKEND", "torch")
    prompt, steps = conversation(model_with(method, torch.bfloat16)[0], gpu)
    assert prompt | steps <= BOTH and not gpu.launched


@pytest.mark.parametrize("setting", ["full", "streaming", "streaming,positions=cache"])
def test_windows_norms_and_sampling(setting, gpu):
    """The other branches of the model and of the draw."""
    windows = (None, 24)
    model, _ = model_with(setting, torch.bfloat16, windows=windows, qk_norm=True, qkv_bias=True, o_bias=True)
    conversation(model, gpu, Sampling(temperature=0.8, top_k=20, top_p=0.9))


@pytest.mark.parametrize("method", METHODS)
def test_layers_are_one_graph(method, gpu):
    """Traced whole, and again to functional operations, as inductor gets it: all on the device."""
    model, _ = model_with(method, torch.bfloat16)
    torch._dynamo.reset()
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return lambda *args: faked(graph, *args)

    def faked(graph, *args):
        with args[0].fake_mode:
            return graph(*args)

    step = torch.compile(layer_group, fullgraph=True, dynamic=False, backend=aot_autograd(fw_compiler=keep))
    x, pos = torch.zeros(B, model.args.dim, dtype=torch.bfloat16, device=DEVICE), torch.full((B,), S, device=DEVICE)
    with torch.utils._python_dispatch._disable_current_modes(), model.once as once:  # the compiler has its own modes
        out = step(model.decode_parts(), x, pos, once)
    assert layouts(out) == layouts(x)
    (graph,) = graphs
    assert {x[3] for node in graph.graph.nodes for x in layouts(node.meta.get("val"))} == {DEVICE}
    # an operator that writes in place is an argument of the node that stands for it
    used = [x for node in graph.graph.nodes for x in (node.target, *node.args)]
    taken = {x._opname for x in used if isinstance(x, torch._ops.OpOverload) and x.namespace == "kv_fast"}
    assert taken >= STEP.get(method, set())
