"""pdserve key as a person runs it: the key for the client, its line for the file, and neither in the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.cli import main
from router.api_keys import KeyFile
from router.tenant import RateLimits


def test_the_printed_key_opens_a_file_with_the_printed_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.jsonl"
    for name in ("alice", "bob"):
        assert main(["key", name, "--requests-per-minute", "60", "--tokens-per-minute", "90000"]) == 0
        printed = capsys.readouterr()
        with path.open("a") as file:  # as >> does
            file.write(printed.out)
        key = next(word for word in printed.err.split() if word.startswith("pd-"))
        assert key not in printed.out
        tenant = KeyFile(path, lambda _: b"").authenticate(f"Bearer {key}")
        assert (tenant.name, tenant.limits) == (name, RateLimits(60, 90000))
    assert len(path.read_text().splitlines()) == 2


def test_what_no_line_could_say_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "two words"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("number", ["0", "1.5", "many"])
def test_a_limit_is_a_number_from_1_up(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["key", "alice", "--requests-per-minute", number])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"'{number}' is not a number from 1 up" in printed.err
