"""Ranks: the processes that share one model, started by torchrun, and the collectives that all other code uses.

    torchrun --nproc-per-node 2 generate.py --checkpoint CKPT --prompt "..."

Each rank holds some heads of every layer, some columns of its MLP and some rows of the output head; two all-reduces per
layer complete the activations. With one process torch.distributed is not imported and no collective is called. Sums are
functional collectives, by gloo on CPUs and NCCL on GPUs, so that a decode step stays one compiled graph.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from runtime import errors
from runtime.errors import InputError
from runtime.options import started_by_torchrun

CONNECTING = timedelta(seconds=10)  # torchrun's store runs before any rank does
MEETING = timedelta(seconds=60)  # all ranks import the same; one that dies first, on another machine, is not noticed
TIMEOUT = timedelta(seconds=600)  # a rank may take minutes to load; if one dies, the others end at once
PATIENCE = timedelta(hours=12)  # the timeout if ranks do long work between two collectives
# error texts of collectives after another rank has ended: gloo's, then NCCL's
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
PARENT_DIED = 1  # PR_SET_PDEATHSIG of Linux

Unit = TypeVar("Unit")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Ranks:
    """This process's rank among the processes that share a model."""

    rank: int = 0
    size: int = 1

    def part(self, n: int) -> slice:
        """This rank's share of n rows or columns; the number of ranks must divide n."""
        return slice(self.rank * n // self.size, (self.rank + 1) * n // self.size)

    def heads(self, n: int) -> range:
        """This rank's part of n KV heads: its share or, if n is below the number of ranks, one that others share."""
        part = self.part(n)
        return range(part.start, max(part.stop, part.start + 1))

    def queries(self, n_head: int, n_kv_head: int) -> slice:
        """Which of its KV heads' queries this rank goes on with behind attention, all of them but with more ranks than
        KV heads: then several hold one and attend with all its queries, because methods choose tokens by all."""
        mine, first = self.part(n_head), self.heads(n_kv_head).start * (n_head // n_kv_head)
        return slice(mine.start - first, mine.stop - first)

    def copies(self, n: int) -> int:
        """The number of ranks that hold each of n KV heads."""
        return max(1, self.size // n)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over all ranks, with the same bits on every rank."""
        if self.size == 1:
            return x
        functional: Any = torch.ops._c10d_functional
        return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", _group()))

    def gather(self, x: Tensor) -> Tensor:
        """The concatenation of x [..., n] over all ranks -> [..., size * n]."""
        if self.size == 1:
            return x
        functional: Any = torch.ops._c10d_functional
        parts = functional.all_gather_into_tensor(x.contiguous().unsqueeze(0), self.size, _group())
        return torch.cat(functional.wait_tensor(parts).unbind(0), -1)

    def all(self, thing: Any) -> list[Any]:
        """The objects of all ranks, in order: anything that can be pickled, with tensors on the CPU."""
        if self.size == 1:
            return [thing]
        import torch.distributed as dist

        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, thing)
        return every

    def of_first(self, read: Callable[[], Found]) -> Found | Any:
        """What the first rank reads, on every rank: all share one standard input."""
        return self.all(None if self.rank else read())[0]

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """If a rank fails within, every rank ends, and rank 0 prints one line that says which rank failed and why."""
        error: Exception | None = None
        try:
            yield
        except Exception as e:
            if self.size == 1 or _lost(e):
                raise
            error = e
        if self.size == 1:
            return
        mine = error and (str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}")
        found = [(rank, text) for rank, text in enumerate(self.all(mine)) if text is not None]
        if found:
            rank, text = found[0]
            alike = len({text for _, text in found}) == 1 and len(found) == self.size
            raise InputError(text if alike else f"rank {rank} of {self.size}: {text}") from error

    def in_turns(self, units: Sequence[Unit], work: Callable[[Unit], Found]) -> Iterator[Found]:
        """Yields work(unit) for all units in order, on every rank; each rank computes every size-th of them."""
        for first in range(0, len(units), self.size):
            here, found = units[first : first + self.size], None
            with self.agreed():
                if self.rank < len(here):
                    found = work(here[self.rank])
            yield from self.all(found)[: len(here)]


ONE = Ranks()


def _group() -> str:
    from torch.distributed.distributed_c10d import _get_default_group

    return _get_default_group().group_name


def _lost(e: BaseException) -> bool:
    """Whether a collective has failed, as it does when another rank has ended."""
    return isinstance(e, RuntimeError) and any(text in str(e) for text in LOST)


def _report_errors(ranks: Ranks, stderr: Any) -> None:
    """An unexpected error is printed by the rank it happened on. That a rank has ended is printed once, by rank 0."""

    def report(kind: type[BaseException], e: BaseException, trace: Any) -> None:
        if not _lost(e):
            print(f"rank {ranks.rank} of {ranks.size}:", *traceback.format_exception(e), sep="\n", file=stderr)
        elif ranks.rank == 0:
            print("error: another rank has ended, so this run ends too: torchrun says which one", file=stderr)
        _leave(1)

    sys.excepthook = report


def _leave(code: int) -> None:
    """Ends the process without Python's finalization, in which tensors that gloo's threads still hold may abort it
    (pytorch/pytorch, pull request 179291): torchrun would then take a run that is complete for one that failed."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):  # it is closed, or its reader has gone
            stream.flush()
    os._exit(code)


def _meet(rank: int, size: int) -> Any:
    """The store of this run, once all ranks have joined. Raises RuntimeError with the missing ones."""
    from torch.distributed import rendezvous

    store, _, _ = next(rendezvous("env://", rank, size, timeout=CONNECTING))
    store.set(f"met.{rank}", "")
    try:
        store.wait([f"met.{other}" for other in range(size)], MEETING)
    except RuntimeError:
        missing = [other for other in range(size) if not store.check([f"met.{other}"])]
        raise RuntimeError(f"rank {', '.join(map(str, missing))} did not join within {MEETING.seconds} s, see what "
                           "torchrun prints on its machine and start all again") from None  # fmt: skip
    return store


def start(device: str | None = None, timeout: timedelta = TIMEOUT) -> tuple[Ranks, str | None]:
    """Join the ranks of this run -> this process's Ranks and its device, with several GPUs the one of its local rank.

    With one process it returns `ONE` and the given device. All ranks but the first print nothing from here on. Raises
    InputError if another rank cannot be reached.
    """
    if not started_by_torchrun():
        return ONE, device
    import torch.distributed as dist

    rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    on_gpu = torch.cuda.is_available() if device is None else device.startswith("cuda")
    ranks, stderr = Ranks(rank, size), sys.stderr
    errors.leave = _leave
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DIED, signal.SIGTERM)  # a rank ends with its torchrun, however that ends
    if rank:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115, for as long as the process lives
    if on_gpu:
        if device not in (None, "cuda"):
            raise InputError(f"--device {device}: torchrun gives each process a GPU of its own, leave --device out")
        if local >= torch.cuda.device_count():
            raise InputError(f"{local + 1} processes on a machine with {torch.cuda.device_count()} GPUs: lower "
                             "--nproc-per-node")  # fmt: skip
        device = f"cuda:{local}"
        torch.cuda.set_device(local)
    if not dist.is_initialized():
        try:
            store = _meet(rank, size)
            store.set_timeout(timeout)
            backend = "nccl" if on_gpu else "gloo"
            dist.init_process_group(backend, timeout=timeout, world_size=size, rank=rank, store=store)
        except (RuntimeError, ValueError) as e:
            raise InputError(f"rank {rank} of {size} cannot reach the others: {e}") from None
        atexit.register(dist.destroy_process_group)  # gloo's threads must end before the process does
    _report_errors(ranks, stderr)
    return ranks, device
