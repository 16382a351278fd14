"""Which network addresses a server may be asked to visit.

Owns: `is_public`, and the parts of a URL that name where a request would go.
Must not know: names of hosts that are allowed, HTTP.
Invariant: an address that any notation turns into one of this machine, this network or no place at all is not public.
"""

import ipaddress
from dataclasses import dataclass
from urllib.parse import quote, urljoin, urlsplit

_NAT64 = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("64:ff9b:1::/48"))
_HTTPS_PORT = 443


def is_public(address: str) -> bool:
    """Whether this IP address, as a resolver gives it, is one of the public internet."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        elif ip.sixtofour is not None or ip.teredo is not None or any(ip in network for network in _NAT64):
            return False  # they lead to an IPv4 address behind a gateway that we know nothing of
        elif ip.is_site_local:
            return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified or ip.is_loopback)


@dataclass(frozen=True, slots=True)
class Target:
    """Where a URL leads: `host` in lower case and ASCII, and what is asked for there, ready for a request line."""

    host: str
    port: int
    path: str

    @property
    def url(self) -> str:
        return f"https://{self.authority}{self.path}"

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _HTTPS_PORT else f"{host}:{self.port}"


def parse_target(url: str, base: str | None = None) -> Target:
    """The target of an https URL; `base` is the URL that a relative one (of a redirect) starts from.

    Raises ValueError, with a reason that goes on from "the URL", for any other.
    """
    if any(character.isspace() or not character.isprintable() or character == "\\" for character in url):
        raise ValueError("must not hold spaces, backslashes or control characters")
    try:
        parts = urlsplit(urljoin(base, url) if base is not None else url)
        port = parts.port
        host = parts.hostname or ""
        host = host if ":" in host else host.encode("idna").decode()
    except ValueError as error:  # UnicodeError is one
        raise ValueError(f"is malformed ({error})") from error
    if parts.scheme != "https":
        raise ValueError("must begin with https://")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must not hold a user name or password")
    if not host:
        raise ValueError("must name a host")
    path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~") + (f"?{_query(parts.query)}" if parts.query else "")
    return Target(host.lower().rstrip("."), _HTTPS_PORT if port is None else port, path)


def _query(query: str) -> str:
    return quote(query, safe="/%:@!$&'()*+,;=~?[]")
