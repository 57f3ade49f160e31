"""Ranks: the processes that share one model, started by torchrun, and the few collectives that everything else uses.

    torchrun --nproc-per-node 2 generate.py --checkpoint CKPT --prompt "..."

Each rank holds some heads of every layer, some columns of its MLP and some rows of the output head; two sums a layer
make activations whole again. With one process nothing of torch.distributed is imported and no collective is called.
Sums are functional collectives, of gloo on CPUs and of NCCL on GPUs: a decode step stays one compiled graph.
"""

from __future__ import annotations

import atexit
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from errors import InputError

TIMEOUT = timedelta(seconds=600)  # a rank may load for minutes; one that died ends the others at once


@dataclass(frozen=True)
class Ranks:
    """This process among those that share a model."""

    rank: int = 0
    size: int = 1

    def part(self, n: int) -> slice:
        """This rank's share of n rows or columns, which the number of ranks divides."""
        return slice(self.rank * n // self.size, (self.rank + 1) * n // self.size)

    def heads(self, n: int) -> range:
        """This rank's of n KV heads: its share, or where there are fewer than ranks, one that others hold, too."""
        part = self.part(n)
        return range(part.start, max(part.stop, part.start + 1))

    def copies(self, n: int) -> int:
        """On how many ranks each of n KV heads is."""
        return max(1, self.size // n)

    def sum(self, x: Tensor) -> Tensor:
        """x of all ranks, added: the same bits on every rank."""
        if self.size == 1:
            return x
        functional: Any = torch.ops._c10d_functional
        return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", _group()))

    def gather(self, x: Tensor) -> Tensor:
        """x [..., n] of all ranks side by side: [..., size * n]."""
        if self.size == 1:
            return x
        functional: Any = torch.ops._c10d_functional
        parts = functional.all_gather_into_tensor(x.contiguous()[None], self.size, _group())
        return torch.cat(functional.wait_tensor(parts).unbind(0), -1)

    def all(self, thing: Any) -> list[Any]:
        """What each rank has, by rank: anything that can be pickled, tensors on the CPU."""
        if self.size == 1:
            return [thing]
        import torch.distributed as dist

        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, thing)
        return every

    def agree(self, error: BaseException | None) -> None:
        """Where a rank has met bad input, every rank ends with it: the first one's, said by rank 0 alone."""
        if self.size == 1:
            if error:
                raise error
            return
        said = self.all(None if error is None else str(error))
        if found := [(rank, text) for rank, text in enumerate(said) if text is not None]:
            rank, text = found[0]
            alike = len({text for _, text in found}) == 1 and len(found) == self.size
            raise InputError(text if alike else f"rank {rank} of {self.size}: {text}")


ONE = Ranks()


def _group() -> str:
    from torch.distributed.distributed_c10d import _get_default_group

    return _get_default_group().group_name


def started_by_torchrun() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def start(device: str | None = None) -> tuple[Ranks, str | None]:
    """Join the ranks of this run -> who this is, and its device: of several GPUs the one that torchrun gave it.

    One process: `ONE`, and the device as it is. All ranks but the first are silent from here on. InputError where a
    rank cannot be reached.
    """
    if not started_by_torchrun():
        return ONE, device
    import torch.distributed as dist

    rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    on_gpu = torch.cuda.is_available() if device is None else device.startswith("cuda")
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
            dist.init_process_group("nccl" if on_gpu else "gloo", timeout=TIMEOUT)
        except (RuntimeError, ValueError) as e:
            raise InputError(f"rank {rank} of {size} does not reach the others: {e}") from None
        atexit.register(dist.destroy_process_group)  # gloo's threads must end before the process does
    return Ranks(rank, size), device
