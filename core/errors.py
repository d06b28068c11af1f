"""The error envelope of the API.

ApiError
├── bad_request          400 syntax, schema, limits, query
├── unsupported          400 well-formed, but nothing here can run it
├── not_found            404 the same bytes for missing, malformed, foreign and deleted ids
├── conflict             409 definitive (the client is told not to retry) or settling (ends by itself)
└── unavailable          503 with Retry-After

Messages say what to do and hold no secret, host path or stack.
"""

from __future__ import annotations


class ApiError(Exception):
    """An answer with a status other than success. `param` is the path of the member at fault."""

    def __init__(
        self,
        status: int,
        type_: str,
        code: str | None,
        message: str,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"type": type_, "message": message, "code": code, "param": param}}
        self.headers = headers or {}


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, "invalid_request_error", "invalid_request_error", message, param)


def unsupported(message: str, param: str | None, code: str = "unsupported_or_invalid_configuration") -> ApiError:
    return ApiError(400, "invalid_request_error", code, message, param)


def not_found() -> ApiError:
    return ApiError(404, "not_found_error", "not_found_error", "Resource not found.")


def conflict(message: str, code: str = "conflict_error", *, settling: bool = False) -> ApiError:
    """A 409. A definitive one ends the retries of the stock client; a settling one it waits out."""
    headers = {} if settling else {"X-Should-Retry": "false"}
    return ApiError(409, "conflict_error", code, message, headers=headers)


def storage_unavailable(message: str) -> ApiError:
    return unavailable(message, "artifact_storage_unavailable", 30)


def unavailable(message: str, code: str, retry_after: int = 5) -> ApiError:
    return ApiError(503, "server_error", code, message, headers={"Retry-After": str(retry_after)})
