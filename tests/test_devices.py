"""Which device is used, and what it can do: of cards, systems and drivers that are not here."""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from engine import LLM
from kernels.offload import MAPPED, PORTABLE, host_buffer
from runtime import machine
from runtime.errors import InputError

ROOT = machine.ROOT


@pytest.fixture
def cards(monkeypatch):
    """Two GPUs -> what they are asked for."""
    asked = SimpleNamespace(set=[], capability=(9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", asked.set.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: asked.capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    return asked


@pytest.mark.parametrize("name", ["cuda:1", "cuda", None, "cpu"])
def test_kernels_run_on_the_device_that_is_named(name, cards):
    """Triton launches on the current device, and events and pinned memory are its own."""
    device = machine.pick_device(name)
    assert device.type == ("cpu" if name == "cpu" else "cuda")
    assert cards.set == ([torch.device("cuda:1")] if name == "cuda:1" else [])


@pytest.mark.parametrize("device", ["cuda:1", torch.device("cuda:1")])
def test_a_model_is_loaded_to_a_device_that_was_set(device, cards, monkeypatch):
    class Loads(Exception):
        """The weights would be."""

    def load(reader, where, *_):
        assert cards.set == [where] == [torch.device("cuda:1")]
        raise Loads

    monkeypatch.setattr("engine.llm.load_checkpoint", load)
    with pytest.raises(Loads):
        LLM(device=device)


def test_a_device_that_is_not_there(cards):
    with pytest.raises(InputError, match="2 CUDA devices are visible"):
        machine.pick_device("cuda:2")
    assert not cards.set


@pytest.mark.parametrize("capability, bf16", [((7, 0), False), ((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_bf16_is_for_cards_that_have_it(capability, bf16, cards):
    """torch says that older ones support it, which emulate it."""
    cards.capability = capability
    device = torch.device("cuda")
    assert machine.pick_dtype(None, device) == (torch.bfloat16 if bf16 else torch.float32)
    assert machine.pick_dtype("fp16", device) == torch.float16
    if bf16:
        assert machine.pick_dtype("bf16", device) == torch.bfloat16
    else:
        with pytest.raises(InputError, match="use --dtype fp16 or fp32"):
            machine.pick_dtype("bf16", device)


def test_host_memory_is_pinned_as_counted(monkeypatch):
    """Each buffer once, in pages of its own, on the device it is for; released with the tensor."""
    pinned, current = {}, []

    def register(at, nbytes, flags):
        assert flags == PORTABLE | MAPPED and at % mmap.PAGESIZE == 0, "a page of two buffers cannot be pinned twice"
        assert at not in pinned
        pinned[at] = (nbytes, current[-1])
        return 0

    @contextlib.contextmanager
    def on(device):
        current.append(device)
        yield
        current.pop()

    driver = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=pinned.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None if code == 0 else pytest.fail(str(code)))
    monkeypatch.setattr(torch.cuda, "device", on)
    kept = []  # torch keeps what it makes a tensor of
    monkeypatch.setattr(torch, "as_tensor", lambda x, device: kept.append(x) or x.host)
    device = torch.device("cuda:1")
    sizes = [(3, 2, 1000, 32), (2, 1, 5, 8)]
    buffers = [host_buffer(size, torch.bfloat16, device) for size in sizes]
    assert [x.shape for x in buffers] == sizes and all(x.dtype == torch.bfloat16 and not x.any() for x in buffers)
    assert sorted(pinned.values()) == sorted((x.nbytes, device) for x in buffers)
    for mapped, x in zip(kept, buffers, strict=True):
        x.fill_(1)
        interface = mapped.__cuda_array_interface__
        assert interface["data"] == (x.data_ptr(), False) and interface["shape"] == (x.nbytes,)
    kept.pop(), buffers.pop()
    del mapped, x
    gc.collect()
    assert list(pinned.values()) == [(buffers[0].nbytes, device)] and buffers[0].all()
    kept.clear()
    gc.collect()
    assert not pinned


def in_process(code):
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "KV_FAST_BACKEND")}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_system_that_does_not_tell_memory():
    """Windows: Python has no `resource` there, `os` no `sysconf`, and there is no /proc."""
    code = """
import json, os, sys, pathlib
sys.modules["resource"] = None
import torch, generate
from runtime import machine
def read_text(path, *args, **kwargs):
    raise FileNotFoundError(path)
pathlib.Path.read_text = read_text
del os.sysconf
cpu = torch.device("cpu")
machine.require_memory(2**40, cpu, "x", "y")
print(json.dumps(machine.peak_memory(cpu)))
"""
    assert in_process(code) == 0


@pytest.mark.slow
def test_kernels_on_rocm():
    """Its compiler knows neither TF32 nor a limit to registers."""
    code = """
import json, torch
torch.version.hip = {hip!r}
from kernels import tiles
from tests.audit import launches
found = launches.recorded(["llama-3.1-8b"], ["sparq"], [], ["1x12288"]).seen.values()
print(json.dumps([tiles._PRECISION.value, sorted({{x for e in found for x in e["options"]}})]))
"""
    assert in_process(code.format(hip="6.4")) == ["ieee", ["enable_fp_fusion", "num_stages", "num_warps"]]
    assert in_process(code.format(hip=None)) == ["tf32x3", ["enable_fp_fusion", "maxnreg", "num_stages", "num_warps"]]


# ---- threads ----


@pytest.mark.parametrize("others, threads", [(0.0, 4), (0.4, 4), (0.6, 3), (1.0, 3), (2.7, 1), (4.0, 1), (9.0, 1)])
def test_threads_leave_the_cores_that_others_use(others, threads, monkeypatch):
    """Beside one busy core, two threads on two cores were 4.5 times slower than alone, one thread 1.6 times."""
    was, clock, used = torch.get_num_threads(), [100.0], [50.0]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: range(4), raising=False)
    monkeypatch.setattr(machine.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(machine.SpareCores, "busy", staticmethod(lambda: used[0]))
    torch.set_num_threads(4)
    try:
        cores = machine.SpareCores()
        for busy, want in ((others, threads), (0.0, 4)):
            clock[0], used[0] = clock[0] + 2, used[0] + 2 * busy
            cores.adapt()
            assert torch.get_num_threads() == want
        clock[0], used[0] = clock[0] + 0.1, used[0] + 0.4
        cores.adapt()
        assert torch.get_num_threads() == 4  # too soon to tell
        machine.set_threads(4)  # chosen by the user
        cores = machine.SpareCores()
        clock[0], used[0] = clock[0] + 2, used[0] + 8
        cores.adapt()
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(was)


def test_the_time_of_other_processes_is_read():
    busy = machine.SpareCores.busy()
    assert busy is None or busy > -1
    assert sys.platform != "linux" or busy is not None
