"""bench_placement: what it reports, and which systems it compares."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

import bench_placement
from common.config import Role, ServeConfig
from placementbench.figures import Figure, as_json, report_table
from placementbench.systems import CONFIGURATIONS, Configuration, plan_for

FIGURES = [
    Figure("auto", "highest rate at 90 % attainment", 2.5, "req/s", at_least=1.2),
    Figure("colocated", "highest rate at 90 % attainment", 2.0, "req/s"),
    Figure("auto", "goodput at 3 × the rate, of the peak", 0.8, "", at_least=0.9),
]


def test_figures_have_names_for_programs_and_say_whether_their_goals_hold() -> None:
    goals = {each["name"]: (each["goal"], each["holds"]) for each in as_json(FIGURES)}
    assert goals == {
        "auto.highest_rate_at_90_percent_attainment": (">= 1.2", True),
        "colocated.highest_rate_at_90_percent_attainment": (None, None),
        "auto.goodput_at_3_x_the_rate_of_the_peak": (">= 0.9", False),
    }


def test_the_table_has_a_row_for_each_figure_and_marks_what_is_missing() -> None:
    text = io.StringIO()
    Console(file=text, width=100).print(report_table(FIGURES))
    lines = [line for line in text.getvalue().splitlines() if "rate" in line]
    assert lines[0].split()[-4:] == ["2.50", "2.00", ">=", "1.2"]
    assert lines[1].split() == [
        "goodput",
        "at",
        "3",
        "×",
        "the",
        "rate,",
        "of",
        "the",
        "peak",
        "0.80",
        "–",
        ">=",
        "0.9",
    ]


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_every_configuration_has_two_workers(configuration: Configuration) -> None:
    config = plan_for(configuration, ServeConfig(), max_ttft_s=3.0).config
    replicas = {role: config.pool(role).replicas for role in Role}
    assert sum(replicas.values()) == 2
    assert replicas[Role.COLOCATED] == (2 if configuration == "colocated" else 0)
    assert config.slo.ttft_s == 3.0
    if configuration != "colocated":
        assert config.router.disaggregation == configuration


def test_a_trace_without_a_fitting_request_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, result = tmp_path / "trace.csv", tmp_path / "result.json"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,5000,44\n", encoding="utf-8")
    assert bench_placement.main(["--trace", str(trace), "--json", str(result)]) == 2
    assert "has no request of" in capsys.readouterr().err
    assert not result.exists() or json.loads(result.read_text()) == []
