"""Our side of bench_generate.py: a method in one of the modes, which is opened, run and closed like a peer."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cache.spec import layer_methods
from engine import speculation
from engine.compiled import Step, compiler_options, eager_step
from engine.decode import Session, make_step
from engine.sampling import Sampling
from engine.snapshot import CacheFile, identity, resume, save, state_of
from engine.speculation import Speculator, tokens_a_round
from model import Transformer
from runtime.machine import synchronize
from scripts.bench.layer import fill_layers
from scripts.bench.peer_runs import Run, Work

MODES = ("eager", "compiled", "trees")


def make_mode(model: Transformer, sampling: Sampling, mode: str) -> Step:
    """trees: the whole step as one function, which inductor captures."""
    if mode != "trees":
        return make_step(model, sampling, mode == "compiled")
    options = compiler_options(model.device) | {"triton.cudagraphs": True}
    return torch.compile(eager_step(model, sampling.draw), fullgraph=True, dynamic=False, options=options)


class Ours(Run):
    def __init__(self, work: Work, method: str, mode: str):
        self.work, self.method, self.mode, self.name = work, method, mode, f"{method} {mode}"
        self.opening = "setting up" if mode == "eager" else "compiling"
        self.sampling, self.info = Sampling(), dict[str, Any]()

    def open(self) -> None:
        w = self.work
        if w.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(w.device)
        size = w.length + w.new
        w.model.setup_cache(self.method, w.batch, size, w.new)
        self.cache: Any = w.model.cache
        model, sampling = w.model, self.sampling
        self.step = make_mode(model, sampling, self.mode)
        Session(model, self.step, sampling).warm_up(w.batch)
        self.info = dict(kv_bytes=model.kv_bytes(), kv_bytes_full=model.kv_bytes_full(w.batch, size))

    @torch.inference_mode()
    def __call__(self) -> dict[str, float]:
        """Fills the cache, or runs the prompt and a first step, timed separately; then decodes up to `new` tokens."""
        w = self.work
        session = self._session()
        times = {} if w.synthetic else self._prompt(session)
        if w.synthetic:
            self._fill(session)
        before = session.decoded
        took = self._timed(lambda: sum(1 for _ in session.rows(w.new + w.synthetic)))
        self.info["traffic"] = self._traffic()  # after steps: what some methods read depends on attention
        return times | dict(step=took / max(1, session.decoded - before))

    def _traffic(self) -> float:
        """Bytes of a cache that a token in the middle of the reply reads."""
        return sum(m.traffic(self.work.length + self.work.new // 2) for m in self.cache)

    def _session(self) -> Session:
        self.work.model.cache = self.cache
        self.work.model.reset_cache()
        return self._made(self.work.model, self.step, self.sampling)

    _made: Any = Session

    def _prompt(self, session: Session) -> dict[str, float]:
        w = self.work
        prefill = self._timed(lambda: session.prefill(w.tokens.tolist()))
        return dict(prefill=prefill, second_token=prefill + self._timed(lambda: session.advance(session.next)))

    def _timed(self, call: Callable[[], object]) -> float:
        synchronize(self.work.device)
        start = time.perf_counter()
        call()
        synchronize(self.work.device)
        return time.perf_counter() - start

    def _fill(self, session: Session) -> None:
        w = self.work
        fill_layers(w.model, *w.random_kv())
        # tensors made outside of inference mode would cause a recompilation, so make new ones here
        tokens, pos = torch.tensor(w.tokens[:, -1].tolist()), torch.full((w.batch,), w.length)
        session.begin(tokens.to(w.device), pos.to(w.device))

    def close(self) -> None:
        if self.work.device.type == "cuda":
            self.info["peak_memory_bytes"] = torch.cuda.max_memory_allocated(self.work.device)
        self.cache = self.work.model.cache = self.step = None  # type: ignore[assignment]


class Enforced(Speculator):
    """Makes each draft right with a given chance, whatever was drawn, because drafts of random weights agree on
    nothing. The number of right drafts is spread evenly over rounds, so that a few rounds have the mean of many."""

    chance = 1.0
    rounds = 0

    def check(self, tokens: Tensor, pos: Tensor, *given: Tensor) -> Tensor:
        chosen, drafts = super().check(tokens, pos, *given), tokens[:, 1:]
        self.rounds += 1
        u = (0.5 + 0.618033988749895 * self.rounds) % 1  # evenly in (0, 1): k drafts are right where u < chance^k
        k = sum(u < self.chance ** (i + 1) for i in range(drafts.shape[1]))
        right = torch.arange(drafts.shape[1], device=drafts.device) < k
        return torch.cat((torch.where(right, drafts, (drafts + 1) % self.model.args.vocab_size), chosen[:, -1:]), 1)


class Drafting(Ours):
    """Drafts by a method, checked by exact attention; a share `chance` of the drafts is right. like: a run that differs
    only in its chance, whose cache and compiled steps are shared."""

    def __init__(self, work: Work, method: str, mode: str, drafts: int, chance: float, like: Drafting | None = None):
        super().__init__(work, method, mode)
        self.drafts, self.chance, self.like = drafts, chance, like
        self.name = f"{method} {mode}, {drafts} drafts at {chance:g}"

    def open(self) -> None:
        w, model = self.work, self.work.model
        if self.like is not None:
            self.cache, self.step, self.speculator = self.like.cache, self.like.step, self.like.speculator
        else:
            model.setup_cache(self.method, w.batch, w.length + w.new, w.new, drafts=self.drafts)
            self.cache = model.cache
            self.step = make_step(model, self.sampling, self.mode == "compiled")
            self.speculator = Enforced(model, self.sampling.draw, self.drafts, self.mode == "compiled")
            self._session().warm_up(w.batch)
        self.info = dict(kv_bytes=model.kv_bytes(), kv_bytes_full=model.kv_bytes_full(w.batch, w.length + w.new),
                         drafts=self.drafts, chance=self.chance, passes=(self.drafts + 1) / self._tokens)  # fmt: skip

    @property
    def _tokens(self) -> float:
        return tokens_a_round(self.drafts, self.chance)

    def _traffic(self) -> float:
        full = self.work.model.kv_bytes_full(self.work.batch, self.work.length + self.work.new // 2 + 1)
        return (self.drafts * super()._traffic() + full) / self._tokens

    def _session(self) -> Session:
        self.speculator.chance, self.speculator.rounds = self.chance, 0
        return super()._session()

    def _made(self, *args: Any) -> Session:
        return speculation.Speculating(self.speculator, *args)


class Restoring(Ours):
    """Times a prompt's cache as a file: writing it, and restoring it into an empty cache. The file was just written, so
    it is read from the page cache."""

    def __init__(self, work: Work, method: str):
        super().__init__(work, method, "eager")
        self.name = f"{method} restore"

    def open(self) -> None:
        super().open()
        self.folder = tempfile.TemporaryDirectory(prefix="kv-fast-")
        self.file = Path(self.folder.name) / "cache"

    @torch.inference_mode()
    def __call__(self) -> dict[str, float]:
        w = self.work
        session = self._session()
        times = {} if w.synthetic else dict(prefill=self._timed(lambda: session.prefill(w.tokens.tolist())))
        if w.synthetic:
            self._fill(session)
            session.prompts = w.tokens.tolist()
        of = identity(w.model, self.method, layer_methods(self.method, w.model.args.n_layer), "", None)
        times["save"] = self._timed(lambda: save(self.file, w.model.cache, state_of(session), of))
        self.info |= dict(file_bytes=self.file.stat().st_size)

        def restore() -> None:
            session, saved = self._session(), CacheFile(self.file)
            saved.fill(w.model.cache)
            resume(session, saved.state)

        return times | dict(restore=self._timed(restore))

    def close(self) -> None:
        super().close()
        self.folder.cleanup()


class Prefill(Ours):
    """Times the prompt and one step."""

    def __init__(self, work: Work, method: str):
        super().__init__(work, method, "eager")
        self.name = f"{method} prefill"

    @torch.inference_mode()
    def __call__(self) -> dict[str, float]:
        return self._prompt(self._session())
