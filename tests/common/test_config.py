from __future__ import annotations

from pathlib import Path

import pytest

from common.config import Role, ServeConfig, load_config
from common.errors import ConfigError

ROOT = Path(__file__).parents[2]


def written(folder: Path, text: str) -> Path:
    path = folder / "serve.yaml"
    path.write_text(text)
    return path


def test_the_shipped_config_is_valid_and_says_what_the_defaults_are() -> None:
    assert load_config(ROOT / "serve.yaml") == ServeConfig()


@pytest.mark.parametrize("text", ["", "prefill:\n  # replicas: 3\nrouter:\n"])
def test_an_empty_file_or_section_means_the_defaults(tmp_path: Path, text: str) -> None:
    assert load_config(written(tmp_path, text)) == ServeConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {sauce: x}", "unknown key `model.sauce`"),
        ("modell: {}", "unknown key `modell`"),
        ("router: {http_port: 70000}", "`router.http_port` is 70000"),
        ("prefill: {replicas: -1}", "`prefill.replicas` is -1"),
        ("transfer: {transport: pigeon}", "`transfer.transport` is 'pigeon'"),
        ("decode: {kv_cache_gib: lots}", "`decode.kv_cache_gib` is 'lots'"),
        ("decode: {gpu_memory_fraction: 1.0}", "`decode.gpu_memory_fraction` is 1.0"),
        ("model: {quantization: int4}", "`model.quantization` is 'int4'"),
        ("modell:", "unknown key `modell`"),
        ("router: {http_port: 1}\nrouter: {grpc_port: 2}", "`router` is there twice"),
        ("router: {http_port: 1, http_port: 2}", "`http_port` is there twice"),
        ("router: &router {http_port: *router}", "`router.http_port` is"),
        ("? [a, b]\n: 1", "not valid YAML"),
        ("telemetry: {otlp_endpoint: collector}", "`telemetry.otlp_endpoint` is 'collector'"),
        ("- a\n- b", "must hold sections"),
        ("model: [unclosed", "not valid YAML"),
    ],
)
def test_a_mistake_is_named_with_its_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(written(tmp_path, text))
    assert message in str(raised.value)
    assert "serve.yaml" in str(raised.value)


def test_every_mistake_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.sauce.*router\.http_port"):
        load_config(written(tmp_path, "model: {sauce: x}\nrouter: {http_port: -1}"))


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "nowhere.yaml")


def test_an_engine_gets_its_own_pools_settings() -> None:
    config = ServeConfig.model_validate(
        {"model": {"dtype": "bfloat16", "quantization": "int8"}, "decode": {"kv_cache_gib": 0.5, "block_size": 8}}
    )
    engine = config.engine(Role.DECODE, Path("m"))
    assert (engine.kv_cache_bytes, engine.block_size, engine.dtype) == (1 << 29, 8, "bfloat16")
    assert engine.quantization == config.engine(Role.PREFILL, Path("m")).quantization == "int8"
    assert config.engine(Role.PREFILL, Path("m")).block_size is None
    assert config.engine(Role.PREFILL, Path("m")).kv_cache_bytes is None


@pytest.mark.parametrize(("source", "name"), [("a/b/My.gguf", "My"), ("org/model", "model"), ("folder/", "folder")])
def test_the_served_name_comes_from_the_source(source: str, name: str) -> None:
    assert ServeConfig.model_validate({"model": {"source": source}}).model.served_name == name


# ---------------------------------------------------------------- the secret


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "[::1]", "::1", "localhost"])
def test_on_loopback_a_worker_needs_no_secret(host: str) -> None:
    assert ServeConfig.model_validate({"decode": {"host": host}}).kv_transfer().secret == b""


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.5", "::", "node-7"])
def test_a_worker_that_others_can_reach_needs_a_secret_and_is_told_how_to_make_one(role: Role, host: str) -> None:
    config = ServeConfig.model_validate({role: {"host": host}})
    with pytest.raises(ConfigError, match=rf"{role}\.host is {host}.*Set security\.secret_file .*openssl rand -hex 32"):
        config.kv_transfer()


def test_with_a_secret_a_worker_may_listen_anywhere(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef\n")
    security = {"secret_file": tmp_path / "secret"}
    config = ServeConfig.model_validate({"decode": {"host": "0.0.0.0"}, "security": security})
    assert config.kv_transfer().secret == b"0123456789abcdef"


def test_a_secret_that_could_be_guessed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("  hunter2 \n")
    config = ServeConfig.model_validate({"security": {"secret_file": tmp_path / "secret"}})
    with pytest.raises(ConfigError, match="holds 7 bytes; a secret needs 16"):
        config.kv_transfer()
