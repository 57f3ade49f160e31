"""Timing for the benchmarks: calls in turns, emptied caches, the machine's ceilings, and recorded failures."""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from kernels.backend import version_for
from kernels.linear import dense_linear
from runtime.errors import InputError
from runtime.machine import side_stream

WARM_UP = 3
PROBE_BYTES = dict(cpu=1 << 28, cuda=1 << 30)  # read by the bandwidth measurement

Call = Callable[[], Any]
Name = TypeVar("Name")


# ---- the clock ----


class Clock:
    """Milliseconds of calls that take turns; on a GPU each is captured into a CUDA graph and timed by events."""

    def __init__(self, device: torch.device, cold: bool):
        self.device = device
        self.scratch = torch.ones(flush_bytes(device) // 4, device=device) if cold else None
        self.sink = torch.zeros((), device=device)

    def prepare(self, call: Call) -> Call:
        """Warms up a call (compilation, autotuning) and, on a GPU, captures it."""
        if self.device.type == "cpu":
            for _ in range(WARM_UP):
                call()
            return call
        with side_stream():
            for _ in range(WARM_UP):
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        # keep `call` with the graph, because the graph reads tensors that it holds
        return partial(lambda graph, _: graph.replay(), graph, call)

    def flush(self) -> None:
        if self.scratch is not None:
            torch.sum(self.scratch, 0, out=self.sink)
        elif self.device.type == "cuda":
            torch.cuda._sleep(200_000)  # cycles, in which the host gets ahead, so that no launch is timed

    def rounds(
        self,
        calls: dict[Name, Call],
        n: int,
        into: dict[Name, list[float]] | None = None,
        say: Callable[[int], None] = lambda i: None,
    ) -> dict[Name, list[float]]:
        """n rounds of prepared calls in turn -> milliseconds of each. say(i) is called before round i.

        `into` is filled round by round, so that an interrupted run leaves the same number of times for every call.
        """
        times: dict[Name, list[float]] = {} if into is None else into
        for i in range(n):
            say(i)
            took = (self._cpu_round if self.device.type == "cpu" else self._cuda_round)(calls)
            for name, ms in took.items():
                times.setdefault(name, []).append(ms)
        return times

    def _cpu_round(self, calls: dict[Name, Call]) -> dict[Name, float]:
        out = {}
        for name, call in calls.items():
            self.flush()
            start = time.perf_counter()
            call()
            out[name] = 1e3 * (time.perf_counter() - start)
        return out

    def _cuda_round(self, calls: dict[Name, Call]) -> dict[Name, float]:
        """Enqueues everything before it waits: the device reads the scratch while the host launches."""
        events = {name: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for name in calls}
        for name, call in calls.items():
            self.flush()
            events[name][0].record()
            call()
            events[name][1].record()
        torch.cuda.synchronize()
        return {name: begin.elapsed_time(end) for name, (begin, end) in events.items()}


def flush_bytes(device: torch.device) -> int:
    """The bytes to read until the last-level cache has nothing older left."""
    if device.type == "cuda":
        return 4 * torch.cuda.get_device_properties(device).L2_cache_size
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        number, unit = re.fullmatch(r"(\d+)([KM]?)", file.read_text().strip()).groups()  # type: ignore[union-attr]
        sizes.append(int(number) << {"": 0, "K": 10, "M": 20}[unit])
    return 2 * max([32 << 20, *sizes])


def spread(values: list[float]) -> float:
    """(most - least) / median."""
    median = statistics.median(values)
    return (max(values) - min(values)) / median if median else 0.0


def summary(times: list[float]) -> dict[str, Any]:
    return dict(ms=statistics.median(times), spread=spread(times), each=times)


@torch.inference_mode()
def ceilings(device: torch.device, dtype: torch.dtype, rounds: int = 5) -> dict[str, Any]:
    """The machine's current bytes/s of reading and of copying (bytes read and written both count), and matmul FLOP/s.

    Reading is the fastest of torch's sum and max and, on a CPU, of our product of one row. That product reads from
    several places at once, which gives a core up to a third more than one place. `bandwidth`, from which byte limits
    are computed, is the better of reading and copying.
    """
    clock, gpu = Clock(device, cold=False), device.type == "cuda"
    x = torch.ones(PROBE_BYTES[device.type] // 4, device=device)
    y = torch.empty_like(x)
    n = 8192 if gpu else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    calls: dict[str, Call] = dict(
        sum=x.sum, max=x.max, copy=lambda: y.copy_(x), matmul=lambda: a @ b, floor=clock.sink.zero_
    )
    if version_for(x.device, x.dtype) == "cpp":
        weight = x.view(-1, 8192)
        calls["product"] = lambda: dense_linear.cpp(weight[:1], weight, None)
    raw = clock.rounds({k: clock.prepare(c) for k, c in calls.items()}, rounds)
    ms = {k: statistics.median(t) for k, t in raw.items()}
    reading = min(ms[k] for k in ("sum", "max", "product") if k in ms)
    read, copy = x.nbytes / reading * 1e3, 2 * x.nbytes / ms["copy"] * 1e3
    return dict(bandwidth=max(read, copy), read_bytes_per_s=read, copy_bytes_per_s=copy,
                matmul_flops=2 * n**3 / ms["matmul"] * 1e3, matmul_dtype=str(dtype).removeprefix("torch."),
                floor_ms=ms["floor"], raw_ms=raw)  # fmt: skip


# ---- failures are recorded, not raised ----


def settled(row: dict[str, Any]) -> bool:
    """Whether a row need not be tried again: it was measured, or it crashed the device."""
    return "error" not in row or bool(row.get("lost"))


def end(rows: list[dict[str, Any]]) -> None:
    """Exits with code 1 if there are rows and all of them are errors."""
    if rows and all("error" in r for r in rows):
        raise SystemExit("error: nothing could be measured: every row is an error")


def reason(e: BaseException) -> str:
    """Why something was not measured, in one line."""
    text = " ".join(str(e).split())[:300]
    return text if isinstance(e, InputError) else f"{type(e).__name__}: {text}"


def recover(device: torch.device, lost: Callable[[], object] = lambda: None) -> None:
    """Frees what a row left behind. If the device no longer answers, the run ends after a call of lost(), which records
    the rows at fault with lost=True, so that a resumed run does not try them again."""
    if device.type == "cuda":
        gc.collect()
        try:
            torch.cuda.synchronize()
        except RuntimeError as e:
            lost()
            raise SystemExit(f"error: the device is lost: {reason(e)}") from None
        torch.cuda.empty_cache()
