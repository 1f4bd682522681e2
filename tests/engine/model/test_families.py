"""What the families say of weight names, against what transformers saves and what the gguf library maps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map
from safetensors.torch import load_file

from engine.model.config import ExpertsConfig
from engine.model.families.catalog import FAMILIES
from engine.model.gguf_weights import NAMES
from engine.model.hf_config import read_hf_config, read_hf_family
from engine.model.names import numbers_in, translate
from engine.model.placements import placements

ARCHITECTURES = {name: architecture for architecture, name in MODEL_ARCH_NAMES.items()}


def test_every_file_that_transformers_saves_is_used_to_the_last_weight(oracle: Any) -> None:
    names = read_hf_family(oracle.folder).hf_names
    wanted = [translate(placement.name, names) for placement in placements(read_hf_config(oracle.folder))]
    assert len(set(wanted)) == len(wanted)
    assert set(wanted) == set(load_file(oracle.folder / "model.safetensors"))


def test_placements_fill_every_row_of_every_parameter_once(oracle: Any) -> None:
    rows: dict[str, list[int]] = {}
    for placement in placements(read_hf_config(oracle.folder)):
        filled = rows.setdefault(placement.parameter, [])
        filled += range(placement.row, placement.row + placement.shape[0])
    for parameter, filled in rows.items():
        assert sorted(filled) == list(range(len(filled))), parameter


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.gguf_architecture], ids=lambda f: str(f.gguf_architecture))
def test_gguf_names_are_the_gguf_librarys(family: Any) -> None:
    architecture: MODEL_ARCH = ARCHITECTURES[family.gguf_architecture]
    library = get_tensor_name_map(architecture, 3)
    for pattern, ours in NAMES.items():
        theirs = library.get_name(pattern.replace("experts.{}", "experts").format(2))
        if theirs is not None:  # else this architecture has no such part
            assert ours.format(2) == theirs


def test_files_are_recognised_by_one_family_each() -> None:
    for key in ("hf_architecture", "gguf_architecture"):
        named = [name for family in FAMILIES if (name := getattr(family, key)) is not None]
        assert len(set(named)) == len(named)


def test_a_name_is_translated_with_its_layer_and_its_expert() -> None:
    table = {"a.{}.b.{}.c": "x{}.y{}", "a.{}.w1": "z.{}"}
    assert translate("a.12.b.3.c.weight", table) == "x12.y3.weight"
    assert translate("a.7.w1.bias", table) == "z.7.bias"
    assert translate("a.7.w2.weight", table) == "a.7.w2.weight"
    assert numbers_in("a.12.b3.4.weight") == [12, 4]


def test_what_an_expert_config_leaves_dense_has_the_weights_of_a_plain_mlp(tiny_llama: Any) -> None:
    plain = read_hf_config(tiny_llama.folder)
    mixed = replace(plain, experts=ExpertsConfig(2, 1, 16, True, dense_layers=(0, 2)))
    of_layer = [[p for p in placements(mixed) if p.name.startswith(f"model.layers.{i}.mlp")] for i in range(3)]
    assert of_layer[0] == [p for p in placements(plain) if p.name.startswith("model.layers.0.mlp")]
    assert [len(found) for found in of_layer] == [3, 1 + 2 * 3, 3]
