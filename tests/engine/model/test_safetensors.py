"""Loading Hugging Face folders: whole, sharded, and broken in every way a download can be."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import ModelError
from engine.model.weights import LoadedModel, load_model

CPU = torch.device("cpu")
NOBODY = 65534


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(folder, dtype, CPU)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, edit: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


@contextmanager
def as_ordinary_user() -> Iterator[None]:
    """Root may read everything, whatever a file's mode."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)


def test_a_sharded_folder_gives_the_same_model_as_a_single_file(tiny_llama: Any, tmp_path: Path) -> None:
    tiny_llama.model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    whole, sharded = load(tiny_llama.folder), load(tmp_path / "shards")
    assert whole.fingerprint == sharded.fingerprint
    for (name, ours), (_, theirs) in zip(whole.model.named_parameters(), sharded.model.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_weights_are_cast_to_the_dtype_asked_for_whatever_they_are_stored_as(tiny_llama: Any) -> None:
    def to_half(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()})

    edit_tensors(tiny_llama.folder, to_half)
    embedding = tiny_llama.model.get_input_embeddings().weight
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        loaded = load(tiny_llama.folder, dtype)
        assert {parameter.dtype for parameter in loaded.model.parameters()} == {dtype}
        assert torch.equal(loaded.model.embed_tokens.weight, embedding.to(torch.bfloat16).to(dtype))


def test_the_fingerprint_does_not_depend_on_the_dtype_computed_in(tiny_llama: Any) -> None:
    assert load(tiny_llama.folder).fingerprint == load(tiny_llama.folder, torch.bfloat16).fingerprint


def test_the_fingerprint_changes_with_any_weight_and_with_the_config(tiny_llama: Any) -> None:
    fingerprints = {load(tiny_llama.folder).fingerprint}
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"):
        edit_tensors(tiny_llama.folder, lambda tensors, name=name: tensors[name].mul_(1.01))
        fingerprints.add(load(tiny_llama.folder).fingerprint)
    edit_json(tiny_llama.folder / "config.json", rms_norm_eps=1e-5)
    fingerprints.add(load(tiny_llama.folder).fingerprint)
    assert len(fingerprints) == 5
    assert all(len(bytes.fromhex(fingerprint)) == 32 for fingerprint in fingerprints)


@pytest.mark.parametrize("fraction", [0.0, 0.00005, 0.01, 0.5, 0.999])
def test_a_truncated_weight_file_is_named(tiny_llama: Any, fraction: float) -> None:
    path = tiny_llama.folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * fraction)])
    with pytest.raises(ModelError, match=r"model\.safetensors is corrupt or truncated .* fetch the model again"):
        load(tiny_llama.folder)


def test_a_weight_file_that_this_user_may_not_read_is_not_called_corrupt(tiny_llama: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(tiny_llama.folder, folder, dirs_exist_ok=True)
        folder.chmod(0o755)
        (folder / "model.safetensors").chmod(0)
        with as_ordinary_user(), pytest.raises(ModelError, match=r"safetensors cannot be read: Permission denied"):
            load(folder)


def test_a_missing_tensor_is_named(tiny_llama: Any) -> None:
    edit_tensors(tiny_llama.folder, lambda tensors: tensors.pop("model.layers.2.mlp.down_proj.weight"))
    with pytest.raises(ModelError, match=r"has no tensor model\.layers\.2\.mlp\.down_proj\.weight"):
        load(tiny_llama.folder)


def test_a_config_that_does_not_fit_the_weights_names_the_tensor_and_both_shapes(tiny_llama: Any) -> None:
    edit_json(tiny_llama.folder / "config.json", vocab_size=10**12)
    with pytest.raises(ModelError, match=r"model\.embed_tokens\.weight has shape \[151, 48\] .* \[1000000000000, 48\]"):
        load(tiny_llama.folder)


def test_an_integer_tensor_is_refused(tiny_llama: Any) -> None:
    edit_tensors(tiny_llama.folder, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.int8)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is stored as I8; supported are F32, F16, BF16"):
        load(tiny_llama.folder)


def test_weights_that_are_not_finite_are_refused_by_name(tiny_llama: Any) -> None:
    edit_tensors(tiny_llama.folder, lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))
    with pytest.raises(ModelError, match=r"model\.norm\.weight .* not finite"):
        load(tiny_llama.folder)


def test_a_shard_that_the_index_names_but_the_folder_lacks_is_named(tiny_llama: Any, tmp_path: Path) -> None:
    tiny_llama.model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    victim = sorted((tmp_path / "shards").glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ModelError, match=f"{victim.name} is missing"):
        load(tmp_path / "shards")


@pytest.mark.parametrize("content", ["", "[]", '{"weight_map": {}}', '{"weight_map": 3}', "{"])
def test_a_broken_index_is_a_model_error(tiny_llama: Any, content: str) -> None:
    (tiny_llama.folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        load(tiny_llama.folder)


def test_a_folder_without_weights_says_which_format_is_wanted(tiny_llama: Any) -> None:
    (tiny_llama.folder / "model.safetensors").rename(tiny_llama.folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no \*\.safetensors file"):
        load(tiny_llama.folder)


def test_a_path_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither a Hugging Face folder nor a \.gguf file"):
        load(tmp_path / "nothing")
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load(tmp_path)
