"""The network of a sandbox that has one: HTTP CONNECT tunnels at the door, to public addresses only.

`restricted` names hosts exactly; `enabled` names none. Names are resolved here, outside, and the tunnel goes to the
very address that was judged: a name that later points elsewhere (rebinding) gains nothing, and a redirect is a new
CONNECT.
Private, loopback, link-local and other special addresses are refused for every name, also as IPv4 inside IPv6.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
from dataclasses import dataclass, field

PORTS = (80, 443)
CONNECT_SECONDS = 10.0
IDLE_SECONDS = 600.0
CHUNK_BYTES = 1 << 16
MAX_HOST = 253
HOST = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)(\.(?!-)[a-z0-9-]{1,63}(?<!-))*")


@dataclass(frozen=True)
class Network:
    """A session's policy. `domains` as the client spelled them; matching is in lower case."""

    access: str
    domains: list[str] = field(default_factory=list)

    def allows(self, host: str) -> bool:
        if self.access == "restricted":
            return host.lower() in {domain.lower() for domain in self.domains}
        return self.access == "enabled"

    def environment(self, proxy_url: str) -> dict[str, str]:
        """Variables that lead programs to the proxy; nothing where there is no network."""
        if self.access == "disabled":
            return {}
        proxied = dict.fromkeys(("HTTPS_PROXY", "https_proxy"), proxy_url)
        return proxied | dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")


class TunnelRefused(Exception):
    """`status` and words for the sandbox."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def is_host_name(text: str) -> bool:
    """An exact ASCII host name: no wildcard, address, port, scheme or trailing dot."""
    if not HOST.fullmatch(text.lower()) or len(text) > MAX_HOST:
        return False
    return not re.fullmatch(r"[0-9.]+|0x.*", text.lower().rpartition(".")[2])


def parse_target(target: bytes) -> tuple[str, int]:
    """Host and port of a CONNECT. Raises TunnelRefused."""
    host, _, port = target.decode("latin-1").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not re.fullmatch(r"[0-9]{1,5}", port):
        raise TunnelRefused(400, "CONNECT needs host:port.")
    if int(port) not in PORTS:
        raise TunnelRefused(403, f"Tunnels lead to the ports {', '.join(map(str, PORTS))} only.")
    return host, int(port)


def is_public(address: str) -> bool:
    """Whether an address is on the public internet, also the IPv4 address that an IPv6 one may carry."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None) or nat64(ip)
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


def nat64(ip: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address behind the well-known translation prefix (RFC 6052)."""
    well_known = ipaddress.IPv6Network("64:ff9b::/96")
    return ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in well_known else None


async def resolve(host: str, port: int) -> list[str]:
    """The public addresses of a host. Raises TunnelRefused when it has none."""
    loop = asyncio.get_running_loop()
    try:
        found = await asyncio.wait_for(loop.getaddrinfo(host, port, type=socket.SOCK_STREAM), CONNECT_SECONDS)
    except (OSError, UnicodeError, asyncio.TimeoutError):
        raise TunnelRefused(502, "The host's name cannot be resolved.") from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    public = [address for address in addresses if is_public(address)]
    if not public or len(public) < len(addresses):
        raise TunnelRefused(403, "The host is not on the public internet.")
    return public


async def open_tunnel(network: Network, target: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to where a CONNECT may lead. Raises TunnelRefused."""
    host, port = parse_target(target)
    if not network.allows(host):
        raise TunnelRefused(403, "The session's network policy does not name this host.")
    for address in await resolve(host, port):
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            return await asyncio.wait_for(asyncio.open_connection(address, port), CONNECT_SECONDS)
    raise TunnelRefused(502, "The host does not answer.")


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Passes bytes on until the source ends; then the sink is told so."""
    while chunk := await asyncio.wait_for(reader.read(CHUNK_BYTES), IDLE_SECONDS):
        writer.write(chunk)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
