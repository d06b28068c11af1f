"""Ceilings (AGENTS_API 10.2) at the door of a real server, with real CLIs, and the arithmetic behind them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from conftest import HOSTED, Core, connect, service
from model_endpoint import ModelEndpoint

from core.budget import BadPrices, Budget, Ceilings, Price, load_prices
from core.egress import usage_shape

Doc = dict[str, Any]
PRICES = {"m": {"input": 1000.0, "cached": 100.0, "output": 2000.0}}  # dollars per million: 18 tokens are 2 cents


@pytest.fixture(scope="module")
def priced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Core]:
    """A server that knows what the model `m` costs."""
    path = tmp_path_factory.mktemp("prices") / "prices.json"
    path.write_text(json.dumps(PRICES))
    with service("core", "serve", "--prices", str(path)) as running:
        yield connect(running)


def session(
    core: Core, bundle: Doc | None, *, limits: Doc | None = None, spend: Doc | None = None, text: str = "go"
) -> Any:
    """A codex session, or one of `shell` without a bundle, with ceilings."""
    extension: Doc = ({"model_provider": bundle} if bundle else {}) | ({"limits": limits} if limits else {})
    body: Doc = {"x_agents_core": extension} | ({"spend_control": spend} if spend else {})
    agent: Doc = {"model": "m"} if bundle else {"x_agents_core": {"harness": "shell"}}
    return core.sessions.create(agent=agent, environment=HOSTED, input=text, extra_body=body)


def budget_failure(core: Core, session_id: str, number: int = 1) -> tuple[str, str]:
    turn = core.turn(session_id, number)
    failure = turn.to_dict()["x_agents_core"]["failure"]
    assert (turn.status, failure["class"]) == ("failed", "budget")
    return turn.error.code, failure["reason"]


def test_a_harness_that_would_go_on_is_ended_by_its_calls(core: Core, model: ModelEndpoint) -> None:
    """The policy asks for one command after the other; the third call is refused, and so is every later turn."""
    model.scripts["calls"] = "echo again"
    made = session(core, model.bundle("codex", "runs_on", "calls"), limits={"max_calls": 2})
    assert budget_failure(core, made.id) == ("session_budget_exceeded", "budget_calls")
    assert len(model.requests["calls"]) == 2
    core.say(made.id, "and now?")
    assert budget_failure(core, made.id, 2) == ("session_budget_exceeded", "budget_calls")
    assert len(model.requests["calls"]) == 2
    assert made.to_dict()["x_agents_core"]["limits"] == {"max_calls": 2}


@pytest.mark.parametrize("behaviour", ["runs_on", "runs_on_untold"])
def test_tokens_count_also_where_the_provider_tells_none(core: Core, model: ModelEndpoint, behaviour: str) -> None:
    label = f"tokens-{behaviour}"
    model.scripts[label] = "echo again"
    made = session(core, model.bundle("codex", behaviour, label), limits={"max_total_tokens": 19})
    assert budget_failure(core, made.id) == ("session_budget_exceeded", "budget_tokens")
    assert len(model.requests[label]) == (2 if behaviour == "runs_on" else 1)


def test_seconds_kill_the_turn_and_name_themselves(core: Core) -> None:
    made = session(core, None, limits={"max_turn_seconds": 1}, text="trap '' TERM; sleep 60")
    turn = core.turn(made.id)
    assert turn.error.code == "session_budget_exceeded" and "1 seconds" in turn.error.message
    assert turn.completed_at - turn.started_at < 10


def test_cents_are_spent_and_read_back(priced: Core, model: ModelEndpoint) -> None:
    model.scripts["cents"] = "echo again"
    made = session(priced, model.bundle("codex", "runs_on", "cents"), spend={"limit": 3})
    assert made.to_dict()["spend_control"] == {"limit": 3, "consumed": 0}
    assert budget_failure(priced, made.id) == ("session_budget_exceeded", "budget_cost")
    assert len(model.requests["cents"]) == 2
    assert priced.sessions.retrieve(made.id).to_dict()["spend_control"] == {"limit": 3, "consumed": 4}


def test_a_limit_without_a_price_is_refused(core: Core, model: ModelEndpoint) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        session(core, model.bundle("codex", "ok", "unpriced"), spend={"limit": 50})
    assert (caught.value.code, caught.value.param) == ("unsupported_or_invalid_configuration", "spend_control.limit")


@pytest.mark.parametrize(
    "limits", [{"max_calls": 0}, {"max_calls": -1}, {"max_calls": 1.5}, {"calls": 1}, {"max_calls": True}]
)
def test_odd_limits_are_refused(core: Core, limits: Doc) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        session(core, None, limits=limits)
    assert str(caught.value.param).startswith("x_agents_core.limits.")


def test_a_call_is_let_through_until_the_ceiling_is_reached() -> None:
    budget = Budget(Ceilings(max_total_tokens=10))
    assert budget.check() is None
    budget.add(usage_shape(6, 0, 3, 0), 0)
    assert budget.check() is None
    budget.add(None, 5)  # five bytes are two tokens
    spent = budget.check()
    assert budget.exhausted.is_set() and spent is not None and (spent.reason, spent.limit) == ("budget_tokens", 10)
    assert budget.calls == 2


def test_cached_tokens_have_their_own_price() -> None:
    assert Price(10, 1, 100).cents(usage_shape(1000, 400, 10, 0)) == pytest.approx(
        (600 * 10 + 400 * 1 + 10 * 100) / 1e4
    )


@pytest.mark.parametrize(
    "text", ["", "[]", '{"m": 1}', '{"m": {"input": 1}}', '{"m": {"input": "x", "cached": 1, "output": 1}}']
)
def test_a_price_file_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prices.json"
    path.write_text(text)
    with pytest.raises(BadPrices, match=r"prices\.json"):
        load_prices(path)
