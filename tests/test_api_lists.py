"""Lists: every element once, whatever the page size; limits, orders and cursors as each family documents them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from conftest import Core
from model_endpoint import ModelEndpoint

COUNT = 250


@dataclass
class Long:
    """A session with more items than two pages of any size hold."""

    session_id: str
    turn_id: str


@pytest.fixture(scope="module")
def long(core: Core, model: ModelEndpoint) -> Long:
    session = core.agent("codex", model.bundle("codex", "many", "lists"))
    turn = core.turn(session.id)
    assert turn.status == "completed"
    return Long(session.id, turn.id)


@pytest.mark.parametrize("limit", [None, 1, 7, 100])
@pytest.mark.parametrize("of_turn", [False, True])
def test_the_pager_sees_every_item_once(core: Core, long: Long, limit: int | None, of_turn: bool) -> None:
    sized = {} if limit is None else {"limit": limit}

    def ids(order: str) -> list[str]:
        if of_turn:
            listed = core.sessions.turns.items.list(long.turn_id, session_id=long.session_id, order=order, **sized)
        else:
            listed = core.sessions.items.list(long.session_id, order=order, **sized)
        return [item.id for item in listed]

    ascending = ids("asc")
    assert len(set(ascending)) == len(ascending) == COUNT + 1 and all(ascending)
    if limit != 1:
        assert ids("desc") == ascending[::-1]


def test_the_async_pager_sees_every_item_once(core: Core, long: Long) -> None:
    async def ids() -> list[str]:
        async with openai.AsyncOpenAI(base_url=core.url, api_key=core.key) as client:
            sessions: Any = client.beta.agents.sessions
            return [item.id async for item in sessions.items.list(long.session_id, limit=33)]

    assert len(set(asyncio.run(ids()))) == COUNT + 1


def test_the_envelope_of_a_page(core: Core, long: Long) -> None:
    page = core.raw.get(f"/agents/sessions/{long.session_id}/items").json()
    assert (page["object"], len(page["data"]), page["has_more"]) == ("list", 20, True)
    assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
    whole = core.raw.get(f"/agents/sessions/{long.session_id}/items?order=asc&limit=100").json()
    rest = core.raw.get(
        f"/agents/sessions/{long.session_id}/items?order=asc&after={whole['last_id']}&limit=1000"
    ).json()
    assert rest["data"][0]["id"] not in {item["id"] for item in whole["data"]} and len(rest["data"]) == 100
    last = core.raw.get(f"/agents/sessions/{long.session_id}/items?after={whole['first_id']}").json()
    assert last == {"object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None}


def test_a_page_that_ends_exactly_has_no_more(core: Core) -> None:
    session, _ = core.run("true")
    page = core.raw.get(f"/agents/sessions/{session.id}/items?limit=2").json()
    assert len(page["data"]) == 2 and page["has_more"] is False


def test_sessions_stay_in_order_while_new_ones_arrive(core: Core) -> None:
    run = {"run": str(uuid.uuid4())}
    made = [core.shell(None, metadata=run).id for _ in range(30)]
    seen = []
    for session in core.sessions.list(metadata=run, limit=7):
        seen.append(session.id)
        core.shell(None, metadata=run)
    assert seen == made[::-1]
    ascending = [session.id for session in core.sessions.list(metadata=run, limit=100, order="asc")]
    assert ascending[:30] == made and len(ascending) == 60


def test_turns_page_like_the_rest(core: Core) -> None:
    session = core.shell(None)
    made = []
    for number in range(1, 5):
        core.say(session.id, "true")
        made.append(core.turn(session.id, number).id)
    assert [turn.id for turn in core.sessions.turns.list(session.id, limit=1)] == made[::-1]
    assert [turn.id for turn in core.sessions.turns.list(session.id, limit=3, order="asc")] == made


# ── limits, orders, cursors ───────────────────────────────────────────────────────────────────────

Family = tuple[str, bool, int, str]  # path, whether it clamps limits, status and message of an unknown cursor
ITEM = "Invalid session item ID in `after`"
FAMILIES: dict[str, Family] = {
    "sessions": ("/agents/sessions", True, 404, "Resource not found."),
    "items": ("/agents/sessions/{s}/items", True, 400, ITEM),
    "items of a turn": ("/agents/sessions/{s}/turns/{t}/items", True, 400, ITEM),
    "turns": ("/agents/sessions/{s}/turns", False, 404, "Resource not found."),
    "artifacts": ("/agents/sessions/{s}/artifacts", False, 400, "after is not a valid artifact ID"),
}
Get = Callable[[str], tuple[int, str]]


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES.keys())
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.param
    return found


@pytest.fixture
def get(core: Core, long: Long, family: Family) -> Get:
    def ask(query: str) -> tuple[int, str]:
        response = core.raw.get(f"{family[0].format(s=long.session_id, t=long.turn_id)}?{query}")
        return response.status_code, response.json().get("error", {}).get("message", "")

    return ask


@pytest.mark.parametrize("limit", ["0", "101", "99999999999"])
def test_limits_out_of_range(get: Get, family: Family, limit: str) -> None:
    expected = (200, "") if family[1] else (400, "limit must be between 1 and 100")
    assert get(f"limit={limit}") == expected


@pytest.mark.parametrize("limit", ["-1", "ten", "", "1.0", "+1", "%201", "0x10", "١"])
def test_limits_that_are_no_numbers(get: Get, limit: str) -> None:
    assert get(f"limit={limit}") == (400, "Failed to deserialize query string: limit: invalid digit found in string")


@pytest.mark.parametrize("order", ["", "ASC", "up"])
def test_orders_that_are_none(get: Get, order: str) -> None:
    assert get(f"order={order}")[0] == 400


@pytest.mark.parametrize("key", ["limit", "order", "after"])
def test_a_key_given_twice(get: Get, key: str) -> None:
    status, message = get(f"{key}=x&{key}=x&limit=0&order=up" if key == "after" else f"{key}=x&{key}=y")
    assert status == 400 and message.endswith(f"duplicate field `{key}`")


@pytest.mark.parametrize("after", ["x", "", "00000000-0000-0000-0000-000000000000", "%00", "'", "é"])
def test_an_unknown_cursor(get: Get, family: Family, after: str) -> None:
    assert get(f"after={after}") == family[2:]


def test_a_foreign_cursor_is_unknown(core: Core, get: Get, family: Family) -> None:
    other, turn = core.run("mkdir -p outputs; touch outputs/a")
    (artifact,) = core.sessions.artifacts.list(other.id)
    items = [item.id for item in core.sessions.items.list(other.id)]
    foreign = [turn.id, artifact.id, *items] + ([] if "{s}" not in family[0] else [other.id])
    assert {get(f"after={cursor}") for cursor in foreign} == {family[2:]}


def test_a_deleted_session_is_no_cursor(core: Core) -> None:
    session = core.shell(None)
    assert core.raw.get(f"/agents/sessions?after={session.id}").status_code == 200
    core.sessions.delete(session.id)
    assert core.raw.get(f"/agents/sessions?after={session.id}").status_code == 404


def test_unknown_keys_of_a_query_are_ignored(get: Get) -> None:
    assert get("colour=blue&colour=red&include=all") == (200, "")


def test_precedence_of_complaints(get: Get) -> None:
    assert get("order=up&limit=ten&after=x&after=y")[1].endswith("duplicate field `after`")
    assert get("after=x&order=up&limit=ten")[1].endswith("invalid digit found in string")
    assert get("after=x&order=up")[1] == "order must be asc or desc"


@pytest.mark.parametrize("query, found", [("", 2), ("?environment_id={e}", 2), ("?environment_id=other", 0)])
def test_artifacts_of_an_environment(core: Core, query: str, found: int) -> None:
    session, _ = core.run("mkdir -p outputs; touch outputs/a outputs/b")
    path = f"/agents/sessions/{session.id}/artifacts" + query.format(e=session.environment.id)
    assert len(core.raw.get(path).json()["data"]) == found


def test_an_answer_waits_for_no_acknowledgement(core: Core) -> None:
    """Without TCP_NODELAY each answer takes 40 ms."""

    def seconds() -> float:
        return core.raw.get("/agents/sessions?limit=1").elapsed.total_seconds()

    assert sorted(seconds() for _ in range(21))[10] < 0.03
