"""`python3 -m core reap`: ends what a dead client left, on a running server or on the data of one that is down.

A run is named by the sessions' metadata `run_id`. Sandboxes of a dead server are dead already; on its data there are
rows, files and artifacts to remove.
"""

from __future__ import annotations

import os
from pathlib import Path

import httpx

from core.sandbox.rooms import remove_tree
from core.store import Store

TIMEOUT_SECONDS = 60.0


class ReapFailed(Exception):
    """The message is one line that says what to do."""


def reap(run_id: str | None, data: Path | None) -> int:
    """Removes the sessions of a run, all of them when it is None; returns how many. Raises ReapFailed."""
    return reap_data(run_id, data) if data is not None else reap_server(run_id)


def reap_data(run_id: str | None, data: Path) -> int:
    if not (data / "core.db").is_file():
        raise ReapFailed(f"{data} holds no data of a server")
    store, count = Store(data), 0
    try:
        metadata = {} if run_id is None else {"run_id": run_id}
        while page := store.session_page(metadata, None, limit=100, descending=False, after=None).data:
            for stored in page:
                with store.transaction():
                    store.delete_session(stored["id"])
                for directory in ("rooms", "blobs"):
                    remove_tree(data / directory / stored["id"])
                count += 1
    finally:
        store.close()
    return count


def reap_server(run_id: str | None) -> int:
    base_url, key = os.environ.get("OPENAI_BASE_URL"), os.environ.get("OPENAI_API_KEY")
    if not base_url or not key:
        raise ReapFailed("set OPENAI_BASE_URL and OPENAI_API_KEY of the server, or name its data with --data")
    headers = {"Authorization": f"Bearer {key}", "OpenAI-Beta": "agents=v1"}
    query = {"limit": "100", "order": "asc"} | ({} if run_id is None else {"metadata[run_id]": run_id})
    count = 0
    try:
        with httpx.Client(base_url=base_url, headers=headers, timeout=TIMEOUT_SECONDS, trust_env=False) as client:
            while True:
                page = client.get("/agents/sessions", params=query).raise_for_status().json()
                for session in page["data"]:
                    answer = client.delete(f"/agents/sessions/{session['id']}", params={"cancel": "true"})
                    answer.raise_for_status()
                    count += 1
                if not page["has_more"]:
                    return count
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise ReapFailed(f"the server at {base_url} does not answer as expected: {error}") from None
