"""calibration.safetensors: the methods' statistics of a model, and the pass that measures them.

The file lies in a checkpoint's folder, or beside a GGUF file: m.gguf has m.calibration.safetensors. It holds a tensor
`layers.{i}.{name}.{part}` for every layer and part of a statistic: fp32, or integers if it ranks channels; bases, which
are most of its bytes, may be fp16. Sums are kept in fp64 and take O(width^2) memory, not O(tokens).
"""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from cache.statistic import REPEATS, RepeatedTokens, Sizes, Statistic, Tokens, is_ranking, unique
from runtime.errors import InputError, warn_once
from runtime.machine import check_fetched, written

FILE, VERSION = "calibration.safetensors", 3
# fields of ModelArgs that keys do not depend on, or that a GGUF file lacks
NOT_OF_KEYS = ("vocab_size", "max_seq_len", "tie_embeddings", "windows", "dtype", "eos_ids", "ranks")
# fields that older files' hashes hold; any other counts where it is not at its default
ALWAYS = {"dim", "n_layer", "n_head", "n_kv_head", "head_dim", "ffn_dim", "norm_eps", "rope", "qkv_bias", "o_bias",
          "mlp_bias", "qk_norm", "theta", "type", "factor", "low_freq_factor", "high_freq_factor",
          "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
          "truncate"}  # fmt: skip
KINDS = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16")  # dtypes that a file may have, by safetensors' names


# ---- one pass ----


class Sums:
    """Float64 sums of what statistics measure, named `layers.{i}.{name}.{part}`, and the number of tokens in them."""

    def __init__(self, statistics: Iterable[Statistic]):
        self.statistics, self.sums, self.tokens = list(statistics), dict[str, Tensor](), 0

    @torch.inference_mode()
    def measure(self, t: Tokens) -> dict[str, Tensor]:
        """The terms that one sequence adds in one layer."""
        return {f"layers.{t.layer}.{s.name}.{part}": value.double()
                for s in self.statistics for part, value in s._step("measure", t, t.layer).items()}  # fmt: skip

    @torch.inference_mode()
    def put(self, measured: dict[str, Tensor]) -> None:
        for key, value in measured.items():
            if key in self.sums:
                self.sums[key] += value
            else:
                self.sums[key] = value.clone()

    def add(self, layers: Iterable[Tokens]) -> None:
        """Add one sequence, layer after layer."""
        S = 0
        for t in layers:
            S = len(t.x)
            self.put(self.measure(t))
        self.tokens += S

    def finish(self, n_layer: int) -> dict[str, Tensor]:
        """The tensors of the file, in fp32."""
        out: dict[str, Tensor] = {}
        for s in self.statistics:
            if not self.tokens:
                raise InputError(f"{s} is measured on text, but none was given")
            count = self.tokens // REPEATS if isinstance(s, RepeatedTokens) else self.tokens  # queries, or tokens
            for i in range(n_layer):
                pre = f"layers.{i}.{s.name}."
                mean = {k.removeprefix(pre): t.cpu() / count for k, t in self.sums.items() if k.startswith(pre)}
                for part, t in s._step("finish", mean, i).items():
                    out[pre + part] = t.float() if t.is_floating_point() else t.long()
        return out


LayerTokens = Callable[[Tensor], Iterator[Tokens]]  # teacher forcing of tokens [1, S] on the CPU, layer by layer


def repeated_tokens(args: Sizes, n_random: int, vocabulary: Sequence[int] | None = None) -> Tensor:
    """[REPEATS * n_random] tokens for RepeatedTokens: random ids, repeated. vocabulary: ids to draw from, None: all."""
    ids = torch.tensor([i for i in vocabulary or range(args.vocab_size) if i < args.vocab_size])
    drawn = torch.randint(len(ids), (n_random,), generator=torch.Generator().manual_seed(0))
    return ids[drawn].repeat(REPEATS)


def collect(
    args: Sizes,
    layer_tokens: LayerTokens,
    sequences: Sequence[Tensor],
    statistics: Iterable[Statistic],
    n_random: int,
    progress: bool = False,
    vocabulary: Sequence[int] | None = None,
) -> Calibration:
    """Measure in memory: on sequences of tokens [S], and on n_random repeated tokens for RepeatedTokens."""
    statistics = unique(statistics)
    sums = Sums(s for s in statistics if not isinstance(s, RepeatedTokens))
    for tokens in tqdm(sequences if sums.statistics else (), desc="calibration", disable=not progress):
        sums.add(layer_tokens(tokens[None]))
    repeated = Sums(s for s in statistics if isinstance(s, RepeatedTokens))
    if repeated.statistics:
        layers = layer_tokens(repeated_tokens(args, n_random, vocabulary)[None])
        repeated.add(tqdm(layers, total=args.n_layer, desc="random tokens", disable=not progress))
    return Calibration(sums.finish(args.n_layer) | repeated.finish(args.n_layer), args.n_layer, args=args)


# ---- the file ----


class Calibration:
    """The tensors of a calibration file, in fp32 (rankings int64) on the CPU, with its metadata."""

    path: Path | None = None  # the file it was read from, if it is one
    files: Sequence[Path] = ()  # the files that it was joined of
    checkpoint: Path | None = None  # the checkpoint it was read for
    args: Any  # the model's ModelArgs; None: shapes cannot be checked

    def __init__(
        self,
        tensors: dict[str, Tensor],
        n_layer: int,
        meta: dict[str, Any] | None = None,
        args: Sizes | None = None,
    ):
        self.tensors, self.n_layer, self.meta, self.args = tensors, n_layer, meta or {}, args

    def get(self, layer: int, name: str) -> Tensor:
        """One tensor of one layer, e.g. get(3, "sals.basis"). Raises InputError if there is none."""
        if f"layers.{layer}.{name}" not in self.tensors:
            raise InputError(f"{self._where()} has no {name} of layer {layer}; {self._again()}")
        return self.tensors[f"layers.{layer}.{name}"]

    def stack(self, name: str) -> Tensor:
        """One tensor of all layers, stacked -> [n_layer, ...]."""
        return torch.stack([self.get(i, name) for i in range(self.n_layer)])

    def require(self, statistics: Iterable[Statistic]) -> Calibration:
        """Returns itself if it holds these statistics completely and in the model's shapes. Otherwise raises InputError
        that says what is wrong and what to run."""
        for s in unique(statistics):
            again = self._again(s.spec)
            was = self.meta.get("statistics", {}).get(s.name, {}).get("code")  # older files do not say
            if was and s.code and was != s.code:
                warn_once(f"{self._where()}: {s.name!r} was measured by other code than {s.file} has now: {again}")
            if not self.parts(0, s.name):
                raise InputError(f"{self._where()} has no {s.name!r}, which this method needs; {again}")
            for part, want in s.layout(self.args).items() if self.args else ():
                for i in range(self.n_layer):
                    key, t = f"layers.{i}.{s.name}.{part}", self.tensors.get(f"layers.{i}.{s.name}.{part}")
                    if t is None or t.shape != want.shape:
                        found = "missing" if t is None else f"of shape {[*t.shape]}, expected {[*want.shape]}"
                        raise InputError(f"{self._where()}: {key} is {found}; {again}")
                    if t.is_floating_point() != want.is_floating_point():
                        kind = "is a ranking" if want.is_floating_point() else "is not a ranking of the channels"
                        raise InputError(f"{self._where()}: {key} {kind}; {again}")
        return self

    @property
    def names(self) -> set[str]:
        """The statistics of which it has tensors."""
        return {name for key in self.tensors for name in key.split(".")[2:3]}

    def parts(self, layer: int, statistic: str) -> dict[str, Tensor]:
        """The tensors of one statistic in one layer, by part."""
        pre = f"layers.{layer}.{statistic}."
        return {key.removeprefix(pre): t for key, t in self.tensors.items() if key.startswith(pre)}

    def heads(self, layer: int, kv_heads: list[int], n_kv_head: int, statistics: Iterable[Statistic]) -> Calibration:
        """The calibration of a method that stores only some of a layer's n_kv_head KV heads: statistics of these heads.

        It holds no other statistics of this layer, because those would be of other heads.
        """
        out = {k: t for k, t in self.tensors.items() if not k.startswith(f"layers.{layer}.")}
        for s in statistics:
            taken = s.take_heads(self.parts(layer, s.name), kv_heads, n_kv_head)
            out |= {f"layers.{layer}.{s.name}.{part}": t for part, t in taken.items()}
        return Calibration(out, self.n_layer, self.meta)

    def save(self, path: Path, bases: torch.dtype = torch.float32) -> None:
        """Write the file under a temporary name, then rename it, so that readers find the old file or the new one.

        bases: the dtype of parts whose name ends in `basis`. Their entries are at most 1, so fp16 neither overflows nor
        is coarser than 2^-12.
        """
        dtypes = {k: bases if k.endswith("basis") else torch.float32 for k in self.tensors}
        kept = {k: t.to(dtypes[k] if t.is_floating_point() else ranking_dtype(t)) for k, t in self.tensors.items()}
        write_tensors(path, kept, {"calibration": json.dumps(self.meta)})

    @classmethod
    def load(cls, checkpoint: Path, args: Sizes, file: Path | None = None) -> Calibration:
        """Read the calibration of a checkpoint (folder or GGUF file). An InputError says what is wrong and what to run.

        file: one that the user named; None: the checkpoint's own. It must be of the same model, in any bits; if the
        weights differ, a warning says so unless the user named the file. Every tensor is checked to be finite or a
        ranking of channels, even if no method declares it; `require` checks that the needed ones exist and have the
        right shapes.
        """
        path, again = file or beside(checkpoint), f"run: {command(checkpoint, file)}"
        if not path.is_file():
            if file is not None:
                raise InputError(f"--calibration {file}: there is no such file; to make it, {again}")
            raise InputError(f"this method needs a calibration and {checkpoint} has none; {again}, or name that of the "
                             "same model in other bits with --calibration")  # fmt: skip
        try:
            check_fetched(path)
        except InputError as e:
            raise InputError(f"{e}, or {again}") from None
        try:
            with safe_open(path, framework="pt") as f:
                meta = json.loads((f.metadata() or {}).get("calibration", "{}"))
                for name in f.keys():  # noqa: SIM118, a safe_open is no dict
                    if (kind := f.get_slice(name).get_dtype()) not in KINDS:
                        raise InputError(f"{path}: {name} is {kind}, expected one of {', '.join(KINDS)}; {again}")
                tensors = {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118
        except InputError:
            raise
        except (SafetensorError, OSError, ValueError, RecursionError) as e:
            raise InputError(f"cannot read {path}: {e}; {again}") from None
        whole = isinstance(meta, dict) and isinstance(meta.get("statistics", {}), dict)
        version = meta.get("version") if whole else None
        if file is not None and not meta:
            raise InputError(f"--calibration {file} is not a calibration: name one, or run: {command(checkpoint)}")
        if version != VERSION:
            raise InputError(f"{path} has version {version}, expected {VERSION}; {again}")
        for key, t in tensors.items():
            if not t.float().isfinite().all():
                raise InputError(f"{path}: {key} holds NaN or infinity; {again}")
            if not is_ranking(t):
                raise InputError(f"{path}: {key} is not a ranking of the channels; {again}")
        if meta.get("model", of_model(args)) != of_model(args):
            # not over this file
            raise InputError(f"{path} was made for another model than {checkpoint}; run: {command(checkpoint)}")
        if file is None and not is_of(meta.get("fingerprint"), checkpoint):
            print(f"warning: {path} was measured on other weights than those of {checkpoint}: right if they are this "
                  f"model in other bits (--calibration {path} says so), else {again}", file=sys.stderr)  # fmt: skip
        out = cls({k: t.float() if t.is_floating_point() else t.long() for k, t in tensors.items()}, args.n_layer, meta)
        out.args, out.path, out.checkpoint = args, path, checkpoint
        return out

    @classmethod
    def joined(cls, checkpoint: Path, args: Sizes, files: Sequence[Path]) -> Calibration:
        """Read one or more files that the user named. Raises InputError if two have a statistic that differs."""
        each = [cls.load(checkpoint, args, file) for file in files]
        if len(each) == 1:
            return each[0]
        out = cls({}, args.n_layer, each[0].meta, args)
        for c in each:
            for name in c.names & out.names:
                new, old = ({k: t for k, t in x.tensors.items() if k.split(".")[2:3] == [name]} for x in (c, out))
                if new.keys() != old.keys() or not all(torch.equal(new[k], old[k]) for k in new):
                    raise InputError(f"--calibration: {c.path} has another {name} than the files before it: leave a "
                                     "file out, or measure only what it adds (calibrate.py --method)")  # fmt: skip
            out.tensors |= c.tensors
        out.files, out.checkpoint = files, checkpoint
        return out

    def _where(self) -> str:
        return str(self.path or " and ".join(map(str, self.files)) or "this calibration")

    def _again(self, method: str | None = None) -> str:
        named = self.checkpoint and self.path != beside(self.checkpoint)
        run = command(self.checkpoint or Path("DIR"), self.path if named else None)
        return f"run: {run}" + (f" --method {method}" if method else "")


class RandomCalibration(Calibration):
    """Random tensors of the right shapes, made on demand, to measure throughput with random weights."""

    def __init__(self, args: Any, statistics: Iterable[Statistic] = (), seed: int = 0):
        super().__init__({}, args.n_layer, dict(random=True), args)
        self.statistics, self.seed = unique(statistics), seed

    @cached_property
    def layouts(self) -> dict[str, Tensor]:
        return {f"{s.name}.{part}": t for s in self.statistics for part, t in s.layout(self.args).items()}

    def require(self, statistics: Iterable[Statistic]) -> Calibration:
        return RandomCalibration(self.args, statistics, self.seed)

    def get(self, layer: int, name: str) -> Tensor:
        like = self.layouts[name]
        gen = torch.Generator().manual_seed(self.seed + 1000 * layer + zlib.crc32(name.encode()))
        t = torch.rand(like.shape, generator=gen)
        if not like.is_floating_point():
            return t.argsort(-1)
        if name.endswith("basis"):
            return torch.linalg.qr(t - 0.5).Q
        if name.endswith("moments"):
            return torch.eye(like.shape[-1]).expand(like.shape)
        return t.sort(-1, descending=True).values if name.endswith("eigenvalues") else t

    def parts(self, layer: int, statistic: str) -> dict[str, Tensor]:
        names = [name for name in self.layouts if name.startswith(f"{statistic}.")]
        return {name.partition(".")[2]: self.get(layer, name) for name in names}


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file under another name, then rename it. Raises InputError if it cannot be written."""
    try:
        with written(path) as tmp:
            save_file({k: t.cpu().contiguous() for k, t in tensors.items()}, tmp, metadata=metadata)
    except (SafetensorError, OSError) as e:
        raise InputError(f"cannot write {path}: {e}") from None


def ranking_dtype(t: Tensor) -> torch.dtype:
    return torch.int16 if t.shape[-1] <= 1 << 15 else torch.int32


def beside(checkpoint: Path) -> Path:
    """The default path of the calibration of a folder or a GGUF file."""
    return checkpoint / FILE if checkpoint.is_dir() else checkpoint.with_suffix(f".{FILE}")


def command(checkpoint: Path, file: Path | None = None) -> str:
    """The command that makes a calibration."""
    return f"python calibrate.py --checkpoint {checkpoint}" + (f" --calibration {file}" if file else "")


def of_model(args: Any) -> str:
    """A hash of the model's sizes and numerics, the same for every checkpoint that a calibration fits."""

    def counted(of: Any) -> dict[str, Any]:
        usual = asdict(type(of)())
        return {k: v for k, v in asdict(of).items() if k in ALWAYS or (k not in NOT_OF_KEYS and v != usual[k])}

    sizes = counted(args) | dict(rope=counted(args.rope))
    return hashlib.sha256(json.dumps(sizes, sort_keys=True).encode()).hexdigest()


def fingerprint(checkpoint: Path, version: int = 2) -> str:
    """A hash of a checkpoint: its config and, for every weight file, the size, 64 KiB at 17 places and 4 KiB of every
    16, or of more in a file above 32 MiB, at 2,048 places. Version 1, in files of v0.4 and before: without the latter.

    It samples, because hashing all of a large checkpoint takes longer than loading it: whole matrices that differ are
    seen, single numbers may not be. A GGUF file is one file.
    """
    if checkpoint.is_dir():
        h = hashlib.sha256((checkpoint / "config.json").read_bytes())
        files = sorted(f for f in checkpoint.glob("*.safetensors") if not f.name.startswith("calibration"))
    else:
        h, files = hashlib.sha256(), [checkpoint]
    for file in files:
        size = file.stat().st_size
        h.update(f"{file.name if checkpoint.is_dir() else ''} {size}".encode())
        with open(file, "rb") as f:
            for places, part in [(17, 1 << 16), (min(2048, -(-size // (1 << 14))), 1 << 12)][:version]:
                for i in range(places):
                    f.seek(size * i // places)
                    h.update(f.read(part))
    return h.hexdigest() if version == 1 else f"{version}-{h.hexdigest()}"


def is_of(found: str | None, checkpoint: Path) -> bool:
    """Whether a `fingerprint`, of this version or an older one, is the checkpoint's."""
    return found is not None and found == fingerprint(checkpoint, 2 if found.startswith("2-") else 1)
