"""The file of API keys: what it may hold, whom it lets in, and that a change counts without a restart."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pytest

from common.errors import ConfigError, Unauthorized
from router.api_keys import CHECK_EVERY_S, KeyFile, new_key, parse_keys
from router.tenant import RateLimits, cache_salt

HASH = sha256(b"pd-secret").hexdigest()


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def salt_of(name: str) -> bytes:
    return cache_salt(b"secret", name)


def line(name: str = "alice", key: str = "pd-secret", **limits: int) -> str:
    return json.dumps({"name": name, "sha256": sha256(key.encode()).hexdigest(), **limits})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys.jsonl"
    path.write_text("# who may call\n\n" + line(requests_per_minute=60) + "\n" + line("bob", "pd-other") + "\n")
    return path


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def keys(path: Path, clock: Clock) -> KeyFile:
    return KeyFile(path, salt_of, clock)


def test_a_key_stands_for_a_name_its_limits_and_its_salt(keys: KeyFile) -> None:
    alice, bob = keys.authenticate("Bearer pd-secret"), keys.authenticate("bearer  pd-other ")
    assert (alice.name, alice.limits) == ("alice", RateLimits(requests_per_minute=60))
    assert (bob.name, bob.limits) == ("bob", RateLimits())
    assert alice.cache_salt != bob.cache_salt
    assert len(alice.cache_salt) == 16


@pytest.mark.parametrize(
    ("authorization", "message"),
    [
        (None, "no API key"),
        ("", "no API key"),
        ("Bearer", "no API key"),
        ("Bearer  ", "no API key"),
        ("pd-secret", "no API key"),
        ("Basic pd-secret", "no API key"),
        ("Bearer pd-secre", "not known"),
        ("Bearer pd-secret pd-other", "not known"),
        (f"Bearer {HASH}", "not known"),
        ("Bearer \udcff", "not known"),
        ("Bearer " + "x" * 100_000, "not known"),
    ],
)
def test_whoever_has_no_valid_key_is_unauthorized(keys: KeyFile, authorization: str | None, message: str) -> None:
    with pytest.raises(Unauthorized, match=message):
        keys.authenticate(authorization)


def test_a_new_key_opens_a_file_with_its_line(path: Path) -> None:
    made, other = new_key("carol", RateLimits(5, 1000)), new_key("carol", RateLimits(5, 1000))
    assert made.key not in made.line
    assert made.key != other.key
    path.write_text(made.line + "\n" + other.line + "\n")
    keys = KeyFile(path, salt_of)
    assert keys.authenticate(f"Bearer {made.key}") == keys.authenticate(f"Bearer {other.key}")
    assert keys.authenticate(f"Bearer {made.key}").limits == RateLimits(5, 1000)


@pytest.mark.parametrize("name", ["", "with space", "a" * 65, "tab\t", "new\nline", "ä"])
def test_a_name_that_the_file_could_not_hold_gets_no_key(name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        new_key(name, RateLimits())


def test_a_change_counts_within_a_second_and_without_a_restart(path: Path, keys: KeyFile, clock: Clock) -> None:
    path.write_text(line("carol", "pd-new", tokens_per_minute=5) + "\n")
    assert keys.authenticate("Bearer pd-secret").name == "alice"  # not looked at on every request
    clock.now_s += CHECK_EVERY_S
    assert keys.authenticate("Bearer pd-new").limits == RateLimits(tokens_per_minute=5)
    with pytest.raises(Unauthorized):
        keys.authenticate("Bearer pd-secret")


def test_a_bad_file_keeps_the_old_keys_and_is_complained_of_once(
    path: Path, keys: KeyFile, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    good = path.read_text()
    with caplog.at_level(logging.INFO):
        path.write_text(good + '{"name": "carol"}\n')
        for _ in range(3):
            clock.now_s += CHECK_EVERY_S
            assert keys.authenticate("Bearer pd-secret").name == "alice"
        path.unlink()
        for _ in range(3):
            clock.now_s += CHECK_EVERY_S
            assert keys.authenticate("Bearer pd-other").name == "bob"
        path.write_text(good + line("carol", "pd-new"))
        clock.now_s += CHECK_EVERY_S
        assert keys.authenticate("Bearer pd-new").name == "carol"
    levels = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in levels] == ["ERROR", "ERROR", "INFO"]
    assert "line 5: sha256: Field required" in levels[0][1]
    assert "cannot read" in levels[1][1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "line 1: Invalid JSON"),
        ("\n[]", "line 2: "),
        (line() + "\n" + line("bob"), "line 2: this hash stands there twice"),
        (line() + "\n" + line("alice", "pd-2", tokens_per_minute=5), "line 2: alice has other limits"),
        (line("a b"), "name"),
        ('{"name": "a", "sha256": "pd-secret"}', "sha256"),
        (line(requests_per_minute=0), "requests_per_minute"),
        (line(request_per_minute=5), "request_per_minute"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_keys(text)
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError, match=r"router\.api_keys_file"):
        KeyFile(tmp_path / "keys", salt_of)


def test_a_file_that_is_not_there_or_no_text_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("absent", "binary"):
        with pytest.raises(ConfigError, match=f"cannot read {tmp_path / name}"):
            KeyFile(tmp_path / name, salt_of)


def test_salts_agree_between_routers_with_one_secret_and_only_then() -> None:
    assert cache_salt(b"one", "alice") == cache_salt(b"one", "alice")
    assert len({cache_salt(secret, name) for secret in (b"one", b"two") for name in ("alice", "bob")}) == 4
