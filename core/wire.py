"""Requests of the Agents API: strict parsing of bodies and queries into small typed records.

Every member is either understood, or refused with its path: nothing is ignored. A member that the API knows and that
this server cannot honour must hold its neutral value.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn
from urllib.parse import parse_qsl, urlsplit

from core.budget import Ceilings
from core.errors import bad_request, unsupported
from core.proxy import Network, is_host_name
from core.sandbox import CONTAINER_SIZES

MIB = 1 << 20
CREATE_BODY_BYTES, BODY_BYTES = 16 * MIB, MIB
MAX_FILES, FILE_BYTES, FILES_BYTES = 50, 5 * MIB, 10 * MIB
INPUT_BYTES = 512 << 10
PATH_BYTES = 4096
METADATA_PAIRS, METADATA_KEY, METADATA_VALUE = 16, 64, 512
KEY_BYTES = 16 << 10
ENV_NAMES = 1000
STRING_BYTES, STRINGS_BYTES = 100 << 10, 1 << 20  # of an argument or variable: Linux takes 128 KiB each, 2 MiB in all
EVENTS_PER_BATCH = 64
PROTOCOLS = ("anthropic", "responses", "chat_completions")
RESERVED_ENV = re.compile(r"PATH|OPENAI_API_KEY|OAC_.*|CODEX_.*")
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
RESERVED_PATHS = re.compile(r"/workspace/(\.codex(/.*)?|\.managed-agents[^/]*(/.*)?|outputs)", re.DOTALL)
MAX_DOMAINS = 100

Doc = dict[str, Any]
Content = list[Doc]  # the parts of one user message


# ── JSON ──────────────────────────────────────────────────────────────────────────────────────────


def parse_object(data: bytes) -> Doc:
    """Strict JSON with an object at its root. Raises ApiError (400)."""
    if not data:
        raise bad_request("The request body is empty; send a JSON object.")
    try:
        value = json.loads(data.decode(), object_pairs_hook=unique_members, parse_constant=refuse_constant)
        if b"\\u" in data:
            refuse_text(value, "")
    except (ValueError, RecursionError) as error:
        raise bad_request(f"The request body is not valid JSON: {short(error)}") from None
    if not isinstance(value, dict):
        raise bad_request("The request body must be a JSON object.")
    return value


def short(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]


def unique_members(pairs: list[tuple[str, Any]]) -> Doc:
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate member {next(name for name in names if names.count(name) > 1)!r}")
    return members


def refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def refuse_text(value: Any, path: str) -> None:
    """Escapes can spell what no UTF-8 text holds, and a NUL, which no path, argument or variable can hold."""
    if isinstance(value, str):
        if "\0" in value:
            raise bad_request("U+0000 is not allowed in a string.", path or None)
        if has_surrogates(value):
            raise bad_request("A string holds half of a surrogate pair, which is not Unicode text.", path or None)
    elif isinstance(value, dict):
        for name, member in value.items():
            refuse_text(name, path)
            refuse_text(member, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list):
        for index, member in enumerate(value):
            refuse_text(member, f"{path}[{index}]")


class Members:
    """The members of one object, taken one by one; what is left at the end is unknown."""

    def __init__(self, value: Any, path: str = "") -> None:
        self.path = path
        if not isinstance(value, dict):
            raise bad_request("Expected an object.", path or None)
        self.rest = dict(value)

    def at(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def take(self, name: str, kind: type | tuple[type, ...], what: str, *, required: bool = False) -> Any:
        """The member if it has the type, None if it is absent or null."""
        value = self.rest.pop(name, None)
        if value is None:
            if required:
                raise bad_request(f"Missing required parameter: '{self.at(name)}'.", self.at(name))
            return None
        accepted = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kind) or (isinstance(value, bool) and bool not in accepted):
            raise bad_request(f"'{self.at(name)}' must be {what}.", self.at(name))
        return value

    def string(self, name: str, *, required: bool = False, longest: int | None = None) -> str | None:
        value: str | None = self.take(name, str, "a string", required=required)
        if value is not None and longest is not None and len(value.encode(errors="replace")) > longest:
            raise bad_request(f"'{self.at(name)}' must be at most {longest} bytes.", self.at(name))
        return value

    def choice(self, name: str, values: tuple[str, ...], *, required: bool = False) -> str | None:
        value = self.string(name, required=required)
        if value is not None and value not in values:
            raise bad_request(f"'{self.at(name)}' must be one of {', '.join(values)}.", self.at(name))
        return value

    def positive(self, name: str) -> int | None:
        value: int | None = self.take(name, int, "a positive integer")
        if value is not None and value <= 0:
            raise bad_request(f"'{self.at(name)}' must be a positive integer.", self.at(name))
        return value

    def items(self, name: str, *, required: bool = False) -> list[Any]:
        value: list[Any] | None = self.take(name, list, "a list", required=required)
        return value or []

    def members(self, name: str) -> Members | None:
        value = self.take(name, dict, "an object")
        return None if value is None else Members(value, self.at(name))

    def neutral(self, name: str, *values: Any) -> None:
        """A known member that cannot be honoured: absent, null, or one of `values`."""
        value = self.rest.pop(name, None)
        if value is not None and not any(same(value, allowed) for allowed in values):
            raise unsupported(f"'{self.at(name)}' is not supported by this server.", self.at(name))

    def done(self) -> None:
        for name in self.rest:
            raise bad_request(f"Unknown parameter: '{self.at(name)}'.", self.at(name))


def same(value: Any, allowed: Any) -> bool:
    """Equality as JSON has it: 0 is not false."""
    return json.dumps(value, sort_keys=True) == json.dumps(allowed, sort_keys=True)


# ── session create ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class InlineFile:
    path: str
    data: bytes


@dataclass(frozen=True)
class Bundle:
    """Where the model is and how to speak to it; frozen per session. The key never leaves the server."""

    protocol: str
    base_url: str
    api_key: str = field(repr=False)
    context_window: int | None = None
    max_output_tokens: int | None = None

    def public(self) -> Doc:
        return {
            "protocol": self.protocol,
            "base_url": self.base_url,
            "api_key_configured": True,
            "context_window": self.context_window,
            "max_output_tokens": self.max_output_tokens,
        }


@dataclass(frozen=True)
class Agent:
    model: str | None
    instructions: str | None
    verbosity: str
    harness: str | None
    harness_config: Doc


@dataclass(frozen=True)
class Environment:
    container_size: str
    network: Network
    files: list[InlineFile]
    env: Mapping[str, str] = field(repr=False)
    setup_commands: list[tuple[str, str]] = field(repr=False)  # (command, working directory)


@dataclass(frozen=True)
class SessionCreate:
    """What a client asked for. `limits` holds the ceilings it named, as they read back."""

    agent: Agent
    environment: Environment
    input: list[Content] | None
    metadata: dict[str, str]
    bundle: Bundle | None
    ceilings: Ceilings
    limits: dict[str, int]
    stream: bool


def parse_session_create(body: Doc) -> SessionCreate:
    """Raises ApiError with the path of the first member at fault."""
    members = Members(body)
    if members.take("agent_id", str, "a string") is not None:
        raise unsupported("Saved agents are not supported by this server; send 'agent'.", "agent_id")
    raw_agent = members.take("agent", dict, "an object", required=True)
    top_extension = members.members("x_agents_core") or Members({}, "x_agents_core")
    agent = parse_agent(Members(raw_agent, "agent"), top_extension)
    bundle = parse_bundle(top_extension)
    top_extension.neutral("environment")
    limits = parse_limits(top_extension)
    top_extension.done()
    environment = parse_environment(
        Members(members.take("environment", dict, "an object", required=True), "environment")
    )
    stream = bool(members.take("stream", bool, "a boolean"))
    content = parse_input(members)
    options = members.members("stream_options")
    if options is not None:
        if not stream:
            raise bad_request("'stream_options' needs 'stream': true.", "stream_options")
        options.take("include_obfuscation", bool, "a boolean")
        options.done()
    if stream and content is None:
        raise bad_request("'stream': true needs an 'input'.", "input")
    metadata = parse_metadata(members)
    ceilings = Ceilings(**limits, spend_cents=parse_spend(members))
    members.neutral("vault_ids", [])
    members.neutral("prompt_cache_options")
    members.neutral("review", "none")
    members.done()
    return SessionCreate(agent, environment, content, metadata, bundle, ceilings, limits, stream)


def parse_agent(agent: Members, top: Members) -> Agent:
    extension = agent.members("x_agents_core") or Members({}, "agent.x_agents_core")
    model = agent.string("model", longest=1024)
    instructions = agent.string("instructions", longest=INPUT_BYTES)
    agent.neutral("name")
    agent.neutral("tools", [])
    agent.neutral("reasoning", {}, {"effort": None}, {"effort": None, "summary": None})
    agent.neutral("service_tier", "auto")
    agent.neutral("compaction", {}, {"async": False})
    agent.neutral("experimental", {}, {"time_awareness": False})
    agent.neutral("multi_agent", {}, {"enabled": False}, {"enabled": False, "max_concurrent_subagents": None})
    verbosity = "medium"
    text = agent.members("text")
    if text is not None:
        text.neutral("format", {"type": "text"})
        verbosity = text.choice("verbosity", ("low", "medium", "high")) or "medium"
        text.done()
    agent.done()
    harness = extension.string("harness")
    own, winning = (holder.take("harness_config", dict, "an object") for holder in (extension, top))
    extension.done()
    return Agent(model, instructions, verbosity, harness, (own if winning is None else winning) or {})


def parse_limits(extension: Members) -> dict[str, int]:
    limits = extension.members("limits")
    if limits is None:
        return {}
    named = {name: limits.positive(name) for name in ("max_calls", "max_total_tokens", "max_turn_seconds")}
    limits.done()
    return {name: value for name, value in named.items() if value is not None}


def parse_spend(members: Members) -> int | None:
    """The spend limit in US cents."""
    spend = members.members("spend_control")
    if spend is None:
        return None
    limit = spend.positive("limit")
    spend.done()
    return limit


def parse_bundle(extension: Members) -> Bundle | None:
    provider = extension.members("model_provider")
    if provider is None:
        return None
    if not provider.rest:
        raise bad_request("'x_agents_core.model_provider' must not be empty.", provider.path)
    protocol = provider.choice("protocol", PROTOCOLS, required=True)
    base_url = provider.string("base_url", required=True, longest=PATH_BYTES)
    api_key = provider.string("api_key", required=True, longest=KEY_BYTES)
    assert protocol is not None and base_url is not None and api_key is not None
    check_base_url(base_url, provider.at("base_url"))
    if not api_key or not api_key.isascii() or not api_key.isprintable():
        raise bad_request("'x_agents_core.model_provider.api_key' must be printable ASCII.", provider.at("api_key"))
    bundle = Bundle(
        protocol,
        base_url,
        api_key,
        provider.positive("context_window"),
        provider.positive("max_output_tokens"),
    )
    provider.done()
    return bundle


def check_base_url(base_url: str, param: str) -> None:
    """https anywhere, http to loopback and private addresses; no user info, query or fragment."""
    try:
        url = urlsplit(base_url)
        host, _ = url.hostname, url.port
    except ValueError:
        raise bad_request(f"'{param}' is not a URL.", param) from None
    if not base_url.isascii() or not base_url.isprintable() or " " in base_url:
        raise bad_request(f"'{param}' must be printable ASCII.", param)
    if url.scheme not in ("http", "https") or not host:
        raise bad_request(f"'{param}' must be an http or https URL.", param)
    if url.username is not None or url.password is not None or "?" in base_url or "#" in base_url:
        raise bad_request(f"'{param}' must not hold user info, a query or a fragment.", param)
    if url.scheme == "http" and not private_host(host):
        raise bad_request(f"'{param}': plain http is for loopback and private addresses; use https.", param)


def private_host(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_private and not address.is_unspecified


def parse_metadata(members: Members) -> dict[str, str]:
    metadata = members.take("metadata", dict, "an object") or {}
    if len(metadata) > METADATA_PAIRS:
        raise bad_request(f"'metadata' holds at most {METADATA_PAIRS} pairs.", "metadata")
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise bad_request(f"'metadata.{key}' must be a string.", f"metadata.{key}")
        if not 1 <= len(key) <= METADATA_KEY or len(value) > METADATA_VALUE:
            limits = f"keys of 1 to {METADATA_KEY} and values of at most {METADATA_VALUE} characters"
            raise bad_request(f"'metadata' takes {limits}.", f"metadata.{key}")
    return dict(metadata)


# ── input ─────────────────────────────────────────────────────────────────────────────────────────


def parse_input(members: Members) -> list[Content] | None:
    """The user messages of the first turn, or None."""
    value = members.rest.pop("input", None)
    if value is None:
        return None
    return parse_messages(value, "input")


def parse_messages(value: Any, path: str) -> list[Content]:
    """A string, or a non-empty list of user messages."""
    if isinstance(value, str):
        messages = [[{"type": "input_text", "text": value}]]
    elif isinstance(value, list) and value:
        messages = [parse_message(message, f"{path}[{index}]") for index, message in enumerate(value)]
    else:
        raise bad_request(f"'{path}' must be a string or a non-empty list of messages.", path)
    if sum(len(part["text"].encode(errors="replace")) for content in messages for part in content) > INPUT_BYTES:
        raise bad_request(f"'{path}' must be at most {INPUT_BYTES} bytes.", path)
    return messages


def parse_message(value: Any, path: str) -> Content:
    message = Members(value, path)
    message.choice("type", ("message",))
    message.choice("role", ("user",), required=True)
    parts = message.items("content", required=True)
    message.done()
    if not parts:
        raise bad_request(f"'{path}.content' must not be empty.", f"{path}.content")
    return [parse_part(part, f"{path}.content[{index}]") for index, part in enumerate(parts)]


def parse_part(value: Any, path: str) -> Doc:
    part = Members(value, path)
    kind = part.choice("type", ("input_text", "input_image"), required=True)
    if kind == "input_image":
        raise unsupported("Images are not supported by this server.", path)
    text = part.string("text", required=True)
    part.done()
    return {"type": "input_text", "text": text}


# ── environment ───────────────────────────────────────────────────────────────────────────────────


def parse_environment(members: Members) -> Environment:
    kind = members.string("type", required=True)
    if kind != "openai_hosted":
        if kind in ("none", "self_hosted"):
            raise unsupported("This server runs 'openai_hosted' environments only.", "environment.type")
        raise bad_request("'environment.type' must be openai_hosted.", "environment.type")
    size = members.choice("container_size", tuple(CONTAINER_SIZES)) or "medium"
    network = parse_network(members)
    files = parse_files(members.items("files"))
    env = parse_env(members.take("env", dict, "an object") or {})
    commands = [parse_setup(value, index) for index, value in enumerate(members.items("setup_commands"))]
    packages = members.members("packages")
    if packages is not None:
        for name in ("python", "npm", "system"):
            if packages.items(name):
                reason = "packages are not installed by this server; bring them as files or by a setup command."
                raise unsupported(f"'environment.packages.{name}': {reason}", "environment.packages")
        packages.done()
    for name in ("environment_template_id", "environment_id"):
        members.neutral(name)
    for name in ("skills", "plugins", "capability_directories"):
        members.neutral(name, [])
    members.neutral("desktop", {"enabled": False})
    members.done()
    return Environment(size, network, files, env, commands)


def parse_network(members: Members) -> Network:
    """The API's default is `enabled`. Domains are kept as they are spelled."""
    network = members.members("network")
    if network is None:
        return Network("enabled")
    access = network.choice("access", ("enabled", "disabled", "restricted"), required=True)
    assert access is not None
    domains, where = network.items("allowed_domains"), network.at("allowed_domains")
    if network.items("blocked_domains"):
        raise bad_request(f"'{network.at('blocked_domains')}' must be empty.", network.at("blocked_domains"))
    network.done()
    if access != "restricted" and domains:
        raise bad_request(f"'{where}' goes with restricted access only.", where)
    if access == "restricted" and not 1 <= len(domains) <= MAX_DOMAINS:
        raise bad_request(f"'{where}' holds 1 to {MAX_DOMAINS} host names.", where)
    for index, domain in enumerate(domains):
        if not isinstance(domain, str) or not is_host_name(domain):
            raise bad_request(f"'{where}[{index}]' must be an exact ASCII host name.", f"{where}[{index}]")
    return Network(access, domains)


def parse_files(values: list[Any]) -> list[InlineFile]:
    if len(values) > MAX_FILES:
        raise bad_request(f"'environment.files' holds at most {MAX_FILES} files.", "environment.files")
    files = [parse_file(value, f"environment.files[{index}]") for index, value in enumerate(values)]
    if sum(len(file.data) for file in files) > FILES_BYTES:
        raise bad_request(f"'environment.files' hold at most {FILES_BYTES} bytes in all.", "environment.files")
    paths = {file.path for file in files}
    if len(paths) != len(files):
        raise bad_request("'environment.files' name a path twice.", "environment.files")
    for index, file in enumerate(files):
        parents = parents_of(file.path)
        if any(parent in paths for parent in parents):
            path = f"environment.files[{index}].path"
            raise bad_request("A file's path is a directory of another file's path.", path)
    return files


def parents_of(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(2, len(parts))]


def parse_file(value: Any, path: str) -> InlineFile:
    members = Members(value, path)
    kind = members.string("type", required=True)
    if kind != "inline":
        raise unsupported("Only inline files are supported by this server.", f"{path}.type")
    name = members.string("path", required=True)
    encoded = members.string("data", required=True)
    members.done()
    assert name is not None and encoded is not None
    check_path(name, f"{path}.path")
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise bad_request(f"'{path}.data' must be standard base64.", f"{path}.data") from None
    if len(data) > FILE_BYTES:
        raise bad_request(f"'{path}.data' must be at most {FILE_BYTES} bytes.", f"{path}.data")
    return InlineFile(name, data)


def check_path(path: str, param: str) -> None:
    """Absolute, canonical, below /workspace/, and nothing that the server or a harness keeps there."""
    parts = path.split("/")
    canonical = parts[:2] == ["", "workspace"] and len(parts) > 2 and not {"", ".", ".."} & set(parts[1:])
    if not canonical or "\\" in path:
        raise bad_request(f"'{param}' must be a canonical path below /workspace/.", param)
    if len(path.encode()) > PATH_BYTES or any(len(part.encode()) > 255 for part in parts):
        raise bad_request(f"'{param}' must be at most {PATH_BYTES} bytes, and each name at most 255.", param)
    if RESERVED_PATHS.fullmatch(path):
        raise bad_request(f"'{param}' is reserved.", param)


def has_surrogates(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def parse_env(values: Doc) -> dict[str, str]:
    for name, value in values.items():
        param = f"environment.env.{name}"
        if not isinstance(value, str):
            raise bad_request(f"'{param}' must be a string.", param)
        if not ENV_NAME.fullmatch(name) or RESERVED_ENV.fullmatch(name):
            raise bad_request(f"'{param}' is not an allowed name.", param)
        if len(name) + len(value.encode()) > STRING_BYTES:
            raise bad_request(f"'{param}' must be at most {STRING_BYTES} bytes with its name.", param)
    if (
        len(values) > ENV_NAMES
        or sum(len(name) + len(value.encode()) for name, value in values.items()) > STRINGS_BYTES
    ):
        limits = f"{ENV_NAMES} names and {STRINGS_BYTES} bytes"
        raise bad_request(f"'environment.env' holds at most {limits}.", "environment.env")
    return dict(values)


def parse_setup(value: Any, index: int) -> tuple[str, str]:
    members = Members(value, f"environment.setup_commands[{index}]")
    command = members.string("command", required=True, longest=STRING_BYTES)
    directory = members.string("cwd", longest=PATH_BYTES) or "/workspace"
    members.done()
    assert command is not None
    return command, directory


# ── update and events ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Message:
    """One input event: the user messages in it."""

    messages: list[Content]


@dataclass(frozen=True)
class Cancel:
    pass


@dataclass(frozen=True)
class ToolResult:
    call_id: str


InputEvents = list[Message] | list[Cancel] | list[ToolResult]


def parse_events(body: Doc) -> InputEvents:
    """One kind per batch. Raises ApiError."""
    members = Members(body)
    values = members.take("events", list, "a list", required=True)
    members.done()
    if len(values) > EVENTS_PER_BATCH:
        raise bad_request(f"'events' holds at most {EVENTS_PER_BATCH} events.", "events")
    parsed = [parse_event(value, f"events[{index}]") for index, value in enumerate(values)]
    messages = [event for event in parsed if isinstance(event, Message)]
    cancels = [event for event in parsed if isinstance(event, Cancel)]
    results = [event for event in parsed if isinstance(event, ToolResult)]
    if len(parsed) not in (len(messages), len(cancels), len(results)):
        raise bad_request("'events' must be of one kind.", "events")
    return messages or cancels or results


def parse_event(value: Any, path: str) -> Message | Cancel | ToolResult:
    event = Members(value, path)
    kind = event.string("type", required=True)
    prefix = "agent.session.input."
    if kind == f"{prefix}message":
        messages = parse_messages(event.items("input", required=True), f"{path}.input")
        event.done()
        return Message(messages)
    if kind == f"{prefix}cancel":
        event.done()
        return Cancel()
    if kind == f"{prefix}tool_result":
        return parse_tool_result(event)
    raise bad_request(f"'{path}.type' is not an input event of this server.", f"{path}.type")


def parse_tool_result(event: Members) -> ToolResult:
    event.string("turn_id", required=True)
    call_id = event.string("call_id", required=True)
    success = event.take("success", bool, "a boolean", required=True)
    output = event.take("output", (str, list), "a string or a list of content parts")
    for index, part in enumerate(output if isinstance(output, list) else []):
        parse_part(part, f"{event.at('output')}[{index}]")
    error = event.string("error")
    event.done()
    if (error if success else output) is not None:
        raise bad_request("A result has 'output' when it succeeded and 'error' when it did not.", event.path)
    assert call_id is not None
    return ToolResult(call_id)


def parse_session_update(body: Doc) -> dict[str, str] | None:
    """The new metadata, or None when it stays as it is."""
    members = Members(body)
    given = "metadata" in body
    metadata = parse_metadata(members)
    for name in ("agent", "prompt_cache_options", "spend_control"):
        members.neutral(name)
    members.neutral("review", "none")
    members.done()
    return metadata if given else None


# ── queries ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Paging:
    limit: int
    descending: bool
    after: str | None


class Query:
    """The query string: unknown keys are ignored, known ones must not be given twice."""

    def __init__(self, raw: bytes) -> None:
        self.pairs = parse_qsl(raw.decode("latin-1"), keep_blank_values=True)

    def one(self, key: str) -> str | None:
        values = [value for name, value in self.pairs if name == key]
        if len(values) > 1:
            raise bad_request(f"Failed to deserialize query string: duplicate field `{key}`")
        return values[0] if values else None

    def metadata(self) -> dict[str, str]:
        """The `metadata[key]=value` pairs, at most as many as a session can have."""
        pairs = [pair for pair in self.pairs if pair[0].startswith("metadata[") and pair[0].endswith("]")]
        for key, _ in pairs[: METADATA_PAIRS + 1]:
            self.one(key)
        if len(pairs) > METADATA_PAIRS:
            raise bad_request(f"At most {METADATA_PAIRS} metadata pairs can be asked for.")
        return {key[len("metadata[") : -1]: value for key, value in pairs}

    def paging(self, *, clamp: bool) -> Paging:
        """Precedence: duplicate key, limit, order. `clamp` or refuse a limit outside 1 to 100."""
        raw_limit, order, after = self.one("limit"), self.one("order"), self.one("after")
        limit = 20
        if raw_limit is not None:
            if not re.fullmatch(r"[0-9]{1,18}", raw_limit):
                raise bad_request("Failed to deserialize query string: limit: invalid digit found in string")
            limit = int(raw_limit)
            if not 1 <= limit <= 100:
                if not clamp:
                    raise bad_request("limit must be between 1 and 100")
                limit = min(max(limit, 1), 100)
        if order not in (None, "asc", "desc"):
            raise bad_request("order must be asc or desc")
        return Paging(limit, order != "asc", after)
