"""The OpenAPI document tells the truth: schemathesis draws requests from it and holds each answer against it."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from common.errors import error_types
from router.openapi import REFUSALS

load_all_checks()
# What fits a model's context, or is in its vocabulary, no schema can say; a request beyond it is a 400 all the same.
UNKNOWABLE = "positive_data_acceptance"
EVERY_CHECK = [check for check in CHECKS.get_all() if check.__name__ != UNKNOWABLE]
ASKED_FOR = {"not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"}

COMPLETIONS, CHAT = ("POST", "/v1/completions"), ("POST", "/v1/chat/completions")
READING = [("GET", "/v1/models"), ("GET", "/v1/models/{name}"), ("GET", "/health"), ("GET", "/metrics")]
BOUNDED = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), database=None)


@pytest.fixture
def document(app: FastAPI) -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", app)


def test_every_operation_is_tried_with_every_check_that_matters(document: Any) -> None:
    found = [result.ok() for result in document.get_all_operations()]
    assert [(operation.method.upper(), operation.path) for operation in found] == [COMPLETIONS, CHAT, *READING]
    assert {check.__name__ for check in EVERY_CHECK} >= ASKED_FOR


def test_every_kind_of_refusal_is_declared() -> None:
    assert {kind.http_status for kind in error_types().values()} <= set(REFUSALS)


def hold_against_the_document(document: Any, method: str, path: str, mode: GenerationMode) -> None:
    @BOUNDED
    @given(document[path][method].as_strategy(generation_mode=mode))
    def hold(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=EVERY_CHECK)

    hold()


@pytest.mark.parametrize(("method", "path"), READING)
def test_what_is_read_is_as_declared(document: Any, method: str, path: str) -> None:
    hold_against_the_document(document, method, path, GenerationMode.POSITIVE)


@pytest.mark.parametrize(("method", "path"), [COMPLETIONS, CHAT])
def test_requests_that_fit_the_schema_are_answered_as_declared(
    document: Any, pipeline: Any, method: str, path: str
) -> None:
    hold_against_the_document(document, method, path, GenerationMode.POSITIVE)
    assert pipeline.requests  # some of them were served, and did not ask for another model


@pytest.mark.parametrize(("method", "path"), [COMPLETIONS, CHAT])
def test_requests_that_do_not_fit_the_schema_are_refused_as_declared(
    document: Any, pipeline: Any, method: str, path: str
) -> None:
    hold_against_the_document(document, method, path, GenerationMode.NEGATIVE)
    assert not pipeline.requests
