"""What the dialects share: strict reading of JSON bodies, writing of JSON and of server-sent events.

Members a dialect does not know are accepted and not used; a member it does know has the right type
or the request is refused, and the message says where.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from gateway import strict
from gateway.call import Refused, digest

T = TypeVar("T")

_REQUIRED: Any = object()

_JSON_NAMES = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
}


def read_json(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; 400 when it is anything else."""
    try:
        value = strict.loads(body)
    except ValueError as error:
        raise Refused(400, f"the body is not valid JSON: {error}", "invalid_json") from None
    if not isinstance(value, dict):
        raise Refused(400, "the body must be a JSON object", "invalid_json")
    return value


def digest_of(body: bytes, value: Any) -> str:
    """SHA-256 of a body with members sorted at every level, and numbers as written: 1.0 and 1.00 differ.

    Members in another order are the same request. A number counts beside its value only where it has another form than
    its shortest.
    """
    numbers = [] if strict.as_written(value, body) else sorted(filter(_is_odd, _numbers_in(body)))
    return digest([value, *numbers] if numbers else value)


def _numbers_in(body: bytes) -> list[str]:
    found: list[str] = []
    json.loads(body, parse_float=found.append, parse_int=found.append)
    return found


def _is_odd(number: str) -> bool:
    return not strict.as_written(json.loads(number), number.encode())


def member(of: Mapping[str, Any], name: str, kind: type[T] | tuple[type[T], ...], default: Any = _REQUIRED) -> Any:
    """`of[name]`, checked to be of `kind`; null and absence give `default`, or 400 when there is none."""
    value = of.get(name)
    if value is None:
        if default is _REQUIRED:
            raise Refused(400, f"{name!r} is missing", "missing_member")
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(dict.fromkeys(_JSON_NAMES[k] for k in kinds))
        raise Refused(400, f"{name!r} must be {wanted}", "wrong_type")
    return value


def objects(of: Mapping[str, Any], name: str, default: Any = _REQUIRED) -> list[dict[str, Any]]:
    """`of[name]`, checked to be an array of objects."""
    values: list[dict[str, Any]] = member(of, name, list, default)
    if not all(isinstance(value, dict) for value in values):
        raise Refused(400, f"{name!r} must be an array of objects", "wrong_type")
    return values


def text_of(content: str | list[Any] | None) -> str:
    """The text of a content member: a string, or the text parts of a list."""
    if isinstance(content, str):
        return content
    parts = [part.get("text") for part in content or () if isinstance(part, dict)]
    return "".join(part for part in parts if isinstance(part, str))


def dump(value: Any) -> str:
    """Compact JSON in ASCII, so that lone surrogates survive the way back."""
    return json.dumps(value, separators=(",", ":"))


def event(name: str, data: Mapping[str, Any]) -> str:
    """One server-sent event; its data repeats its name as `type`, as both event dialects do."""
    return f"event: {name}\ndata: {dump({'type': name, **data})}\n\n"


def openai_error(refused: Refused) -> dict[str, Any]:
    """The error envelope of both OpenAI dialects."""
    return {
        "error": {
            "message": refused.message,
            "type": "server_error" if refused.status >= 500 else "invalid_request_error",
            "param": None,
            "code": refused.code,
        }
    }


def refusal_headers(refused: Refused) -> dict[str, str]:
    """Headers that go with a refusal, in every dialect."""
    if refused.status == 413:
        return {"connection": "close"}  # or the server would read the rest to throw it away
    # Stock clients send again after a 409 unless they are told not to.
    return {"x-should-retry": "false"} if refused.status == 409 else {}
