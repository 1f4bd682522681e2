"""Run by test_bare_image.py in a process of its own: refuse every package that a bare GPU image lacks, then work."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from types import ModuleType
from typing import Any

IMAGE = ["torch", "triton", "numpy", "safetensors", "transformers", "grpcio", "protobuf"]
ROOT = Path(__file__).parent.parent
ABSENT = {
    "ray",
    "fastapi",
    "pydantic",
    "flash_attn",
    "xxhash",
    "gguf",
    "prometheus_client",
    "grpc_health",
    "platformdirs",
}
PACKAGES = ("engine", "kv_transfer")


class ImageFinder:
    """A finder of Python's own, to which what is neither in the image nor required by it is not installed."""

    def __init__(self, finder: Any, hidden: set[str]) -> None:
        self._finder = finder
        self._hidden = hidden

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in self._hidden:
            return None
        found: ModuleSpec | None = self._finder.find_spec(fullname, path, target)
        return found


def hidden_modules() -> set[str]:
    """Some of ABSENT are required by what transformers requires; the engine must do without them all the same."""
    allowed = _with_requirements(IMAGE)
    foreign = {
        module
        for module, distributions in packages_distributions().items()
        if not allowed & {_normalized(name) for name in distributions}
    }
    return foreign - {path.name for path in ROOT.iterdir()} | ABSENT


def _with_requirements(names: list[str]) -> set[str]:
    found: set[str] = set()
    pending = list(names)
    while pending:
        name = _normalized(pending.pop())
        if name in found:
            continue
        found.add(name)
        try:
            lines = requires(name) or []
        except PackageNotFoundError:  # of another platform
            continue
        pending += [re.split(r"[^\w.-]", line)[0] for line in lines if "extra ==" not in line]
    return found


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def require_absent() -> None:
    for absent in ABSENT:
        try:
            importlib.import_module(absent)
        except ModuleNotFoundError:
            continue
        raise AssertionError(f"{absent} was not refused")


def import_everything() -> None:
    """But what reads .gguf files, which needs the library of that name."""
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            if "gguf" not in module:
                importlib.import_module(module)


def import_gpu_check() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    importlib.import_module("gpu_check")


def generate(folder: Path, attention: str) -> list[int]:
    """Some greedy tokens of a tiny random Llama."""
    from common.engine_config import EngineConfig
    from common.sampling import SamplingParams
    from engine.build import build_engine
    from engine.sequence import Sequence as TokenSequence

    config = EngineConfig(folder, "float32", "cpu", attention, num_threads=1, block_size=4, kv_cache_bytes=1 << 16)
    engine = build_engine(config)
    sequence = TokenSequence([5, 6, 7, 8, 9], SamplingParams(max_tokens=4, temperature=0))
    engine.add(sequence)
    while engine.has_work:
        engine.step(Unwatched())
    return sequence.token_ids


class Unwatched:
    def on_scheduled(self, scheduled: object) -> None: ...

    def on_sampled(self, sampled: object) -> None: ...


def save_tiny_model(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from engine.model.hf_config import read_hf_config
    from engine.model.weights import placements

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    torch.manual_seed(0)
    weights = {placed.name: torch.randn(placed.shape) for placed in placements(read_hf_config(folder))}
    save_file(weights, folder / "model.safetensors")


async def transfer() -> None:
    import torch

    from common.identity import Ticket, new_incarnation, new_transfer_id
    from common.kv_layout import KVLayout
    from common.transfer_config import TransferConfig
    from kv_transfer.checksum import CHECKSUM
    from kv_transfer.factory import make_receiver, make_sender
    from kv_transfer.loopback import LoopbackNetwork
    from kv_transfer.transport import KVPiece

    assert CHECKSUM.name == "crc32"
    layout, cpu, network = KVLayout("tiny", 1, 2, 4, "bfloat16", "none"), torch.device("cpu"), LoopbackNetwork()
    source, destination = new_incarnation(), new_incarnation()
    sender = make_sender(TransferConfig(transport="loopback"), layout, source, cpu, network)
    receiver = make_receiver(TransferConfig(transport="loopback"), layout, destination, cpu, network)
    await receiver.open("loopback:1")
    ticket = Ticket(new_transfer_id(), 1, source, destination, num_tokens=5, skip_tokens=0)
    landed: list[KVPiece] = []
    reception = receiver.expect(ticket.transfer_id, 5, 0, lambda piece, release: landed.append(piece))
    outgoing = await sender.open(receiver.destination, ticket)
    data = torch.randn(1, 2, 5, 2, 4).bfloat16()
    outgoing.send(KVPiece(0, 0, data))
    await outgoing.commit(3, timeout_s=10)
    assert (await reception.committed()).first_token == 3
    assert torch.equal(landed[0].data, data)
    reception.close()
    await sender.close()
    await receiver.close()


def main(folder: Path) -> None:
    hidden = hidden_modules()
    sys.meta_path[:] = [ImageFinder(finder, hidden) for finder in sys.meta_path]
    require_absent()
    print("refused")
    import_everything()
    import_gpu_check()
    print("imported")
    save_tiny_model(folder)
    assert generate(folder, "triton") == generate(folder, "cpu") == generate(folder, "torch_reference")
    print("generated")
    asyncio.run(transfer())
    print("transferred")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
