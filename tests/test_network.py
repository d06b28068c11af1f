"""Sandboxes with network: tunnels at the door, to public hosts only. Reached hosts live in a network namespace of ours.

There is no internet here: the server runs in a namespace whose loopback holds a public address, with a listener on it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from conftest import BOXES, HOSTED, Core, connect, service

from core.proxy import Network, TunnelRefused, is_host_name, is_public, parse_target
from core.sandbox.backends import BACKENDS

Doc = dict[str, Any]
PUBLIC, PRIVATE = "1.2.3.4", "10.9.8.7"
HOSTS = f"{PUBLIC} named.example other.example\n{PRIVATE} inward.example\n127.0.0.1 localhost loop.example\n"
SERVER = """
import socket, threading
for address in ("1.2.3.4", "10.9.8.7"):
    for port in (443, 80):
        listener = socket.create_server((address, port))
        def serve(listener=listener):
            while True:
                peer, _ = listener.accept()
                peer.sendall(b"from " + listener.getsockname()[0].encode() + b": " + peer.recv(100))
                peer.close()
        threading.Thread(target=serve, daemon=True).start()
print("ready", flush=True)
threading.Event().wait()
"""
PROBE = """import socket, sys
for target in sys.argv[1:]:
    peer = socket.create_connection(("127.0.0.1", 4141), 10)
    peer.sendall(f"CONNECT {target} HTTP/1.1\\r\\nHost: {target}\\r\\n\\r\\n".encode())
    head = peer.recv(4096).decode()
    print(target, head.split()[1], end=" ")
    if head.split()[1] == "200":
        peer.sendall(b"hello")
        print(peer.recv(4096).decode(), end="")
    print()
"""


@pytest.fixture(scope="module", params=BACKENDS)
def walled(request: pytest.FixtureRequest) -> Iterator[tuple[str, Core]]:
    """(namespace, a server in it): a network namespace with a public and a private address of its own."""
    if os.getuid() != 0 or not shutil.which("ip"):
        pytest.skip("making a network namespace takes root and iproute2")
    name = f"rl-eval-{uuid.uuid4().hex[:8]}"
    etc = Path("/etc/netns", name)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, etc, ignore_errors=True)
        etc.mkdir(parents=True)
        (etc / "hosts").write_text(HOSTS)
        (etc / "nsswitch.conf").write_text("hosts: files\n")
        subprocess.run(["ip", "netns", "add", name], check=True)
        stack.callback(subprocess.run, ["ip", "netns", "del", name], check=True)
        here = ("ip", "netns", "exec", name)
        for arguments in (("link", "set", "lo", "up"), ("addr", "add", f"{PUBLIC}/32", "dev", "lo")):
            subprocess.run([*here, "ip", *arguments], check=True)
        subprocess.run([*here, "ip", "addr", "add", f"{PRIVATE}/32", "dev", "lo"], check=True)
        listener = subprocess.Popen([*here, sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
        stack.callback(listener.wait)
        stack.callback(listener.kill)
        assert listener.stdout is not None and listener.stdout.readline() == "ready\n"
        BOXES.stop("landlock")
        arguments = ("core", "serve", "--sandbox", request.param)
        running = stack.enter_context(service(*arguments, python=(*here, sys.executable)))
        yield name, connect(running)


@pytest.fixture
def inside_out(walled: tuple[str, Core]) -> Iterator[Core]:
    """The server's API listens in there too: each test enters the namespace for its own time."""
    name, core = walled
    with Path("/proc/thread-self/ns/net").open() as before, Path("/run/netns", name).open() as theirs:
        setns(theirs.fileno())
        try:
            yield core
        finally:
            setns(before.fileno())


def setns(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0x40000000) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def probe(core: Core, network: Doc, *targets: str) -> dict[str, str]:
    """Target → what a CONNECT to it brought: a status, and what the host said."""
    script = f"python3 - {' '.join(targets)} <<'END'\n{PROBE}END\n"
    session, turn = core.run(script, environment={"network": network})
    assert turn.status == "completed"
    lines = core.output(session.id).splitlines()
    return dict(line.split(" ", 1) for line in lines if line.split(" ", 1)[0] in targets)


def test_enabled_reaches_public_addresses_only(inside_out: Core) -> None:
    names = ("named.example:443", "1.2.3.4:80", "inward.example:443", "loop.example:443", "10.9.8.7:443")
    more = ("[::ffff:10.9.8.7]:443", "named.example:22", "nowhere.example:443", "127.0.0.1:443", "169.254.169.254:80")
    found = probe(inside_out, {"access": "enabled"}, *names, *more)
    assert found["named.example:443"] == found["1.2.3.4:80"].replace(":80", ":443") == "200 from 1.2.3.4: hello"
    assert found["nowhere.example:443"].strip() == "502"
    refused = set(found) - {"named.example:443", "1.2.3.4:80", "nowhere.example:443"}
    assert len(refused) == 7 and {found[target].strip() for target in refused} == {"403"}


def test_restricted_reaches_the_named_hosts_only(inside_out: Core) -> None:
    network = {"access": "restricted", "allowed_domains": ["Named.Example", "inward.example"]}
    targets = ("named.example:443", "other.example:443", "1.2.3.4:443", "sub.named.example:443", "inward.example:443")
    found = probe(inside_out, network, *targets)
    assert found.pop("named.example:443") == "200 from 1.2.3.4: hello"
    assert {answer.strip() for answer in found.values()} == {"403"}


def test_programs_find_the_proxy_by_its_variable(inside_out: Core) -> None:
    """A stock client goes through the tunnel by itself; without network there is no such variable."""
    script = "python3 -c 'import os; print(os.environ.get(\"HTTPS_PROXY\"))'"
    for access, expected in (("enabled", "http://127.0.0.1:4141\n"), ("disabled", "None\n")):
        session, _ = inside_out.run(script, environment={"network": {"access": access}})
        assert inside_out.output(session.id) == expected


def test_setup_commands_have_the_sessions_network(inside_out: Core) -> None:
    setup = f"python3 - named.example:443 > /workspace/setup.txt <<'END'\n{PROBE}END\n"
    environment = {"network": {"access": "enabled"}, "setup_commands": [{"command": setup}]}
    session, _ = inside_out.run("cat setup.txt", environment=environment)
    assert inside_out.output(session.id) == "named.example:443 200 from 1.2.3.4: hello\n"


def test_without_network_the_door_opens_no_tunnel(inside_out: Core) -> None:
    assert probe(inside_out, {"access": "disabled"}, "named.example:443") == {"named.example:443": "403 "}


def test_the_policy_reads_back_as_it_was_spelled(core: Core) -> None:
    network = {"access": "restricted", "allowed_domains": ["B.example", "a.example", "B.example"]}
    session = core.shell(None, environment={"network": network})
    assert session.to_dict()["environment"]["network"] == network
    bare = core.sessions.create(agent={"x_agents_core": {"harness": "shell"}}, environment={"type": "openai_hosted"})
    assert bare.to_dict()["environment"]["network"] == {"access": "enabled", "allowed_domains": []}


BAD_NETWORKS: list[Doc] = [
    {"access": "restricted"},
    {"access": "restricted", "allowed_domains": []},
    {"access": "restricted", "allowed_domains": ["x.example"] * 101},
    {"access": "restricted", "allowed_domains": ["*.example"]},
    {"access": "restricted", "allowed_domains": ["1.2.3.4"]},
    {"access": "restricted", "allowed_domains": ["x.example:443"]},
    {"access": "restricted", "allowed_domains": ["https://x.example"]},
    {"access": "restricted", "allowed_domains": ["x.example."]},
    {"access": "restricted", "allowed_domains": ["bücher.example"]},
    {"access": "restricted", "allowed_domains": [7]},
    {"access": "enabled", "allowed_domains": ["x.example"]},
    {"access": "disabled", "allowed_domains": ["x.example"]},
    {"access": "enabled", "blocked_domains": ["x.example"]},
    {"access": "everything"},
    {"access": "enabled", "mode": 1},
]


@pytest.mark.parametrize("network", BAD_NETWORKS)
def test_a_policy_that_is_none_is_refused(core: Core, network: Doc) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        core.sessions.create(
            agent={"x_agents_core": {"harness": "shell"}}, environment={**HOSTED, "network": network}, input="true"
        )
    assert str(caught.value.param).startswith("environment.network")


ADDRESSES = {
    "1.2.3.4": True,
    "2606:4700::1": True,
    "127.0.0.1": False,
    "10.0.0.1": False,
    "172.16.0.1": False,
    "192.168.1.1": False,
    "169.254.169.254": False,
    "100.64.0.1": False,
    "0.0.0.0": False,
    "224.0.0.1": False,
    "255.255.255.255": False,
    "::1": False,
    "::": False,
    "fe80::1%eth0": False,
    "fc00::1": False,
    "ff02::1": False,
    "::ffff:127.0.0.1": False,
    "::ffff:1.2.3.4": True,
    "2002:7f00:1::": False,
    "64:ff9b::a00:1": False,
    "64:ff9b::102:304": True,
}


@pytest.mark.parametrize("address, public", ADDRESSES.items())
def test_what_counts_as_public(address: str, public: bool) -> None:
    assert is_public(address) is public


@pytest.mark.parametrize(
    "target", [b"", b"host", b"host:", b":443", b"host:0", b"host:99999", b"host:https", b"h:443:22"]
)
def test_a_target_that_is_none_is_refused(target: bytes) -> None:
    with pytest.raises(TunnelRefused):
        parse_target(target)


@pytest.mark.parametrize("name", ["a.example", "A-1.example", "localhost", "x" * 63 + ".example"])
def test_host_names(name: str) -> None:
    assert is_host_name(name) and Network("restricted", [name]).allows(name.upper())
    for odd in (name + ".", "-" + name, name + "/", name + " ", "x" * 64 + "." + name, ""):
        assert not is_host_name(odd)
