"""Where the images of a request come from: the request itself, allowed hosts, one directory.

Owns: ImageSources: what of these is open, and that nothing else is ever reached.
Must not know: what an image is, prompts. `addresses.py` knows which addresses are public.
Invariants: no connection is made to a host that is not listed, nor to an address that was not checked: a name is
resolved once, and the connection goes to the address found. Bytes and seconds are bounded while they come in.
"""

import asyncio
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx

from izh.errors import OptionError, RequestError
from izh.multimodal.decode import MAX_IMAGE_BYTES, MEDIA_TYPES, read_data_uri
from izh.multimodal.intake import ImageData
from izh.server.addresses import Target, is_public, parse_target
from izh.server.errors import shown

MAX_REDIRECTS = 3
TIMEOUT_S = 10.0  # for one image, redirects included

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Addresses of (host, port)."""


async def resolve(host: str, port: int) -> list[str]:
    """As the system does. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class ImageSources:
    """`hosts` are names, "*.name" for all below it, with ":port" if not 443; `root` is the directory for file URLs.

    Raises OptionError for a host that is no name. `resolve_host` and `transport` replace the network in tests.
    """

    def __init__(
        self,
        hosts: tuple[str, ...] = (),
        root: str | None = None,
        *,
        max_bytes: int = MAX_IMAGE_BYTES,
        timeout_s: float = TIMEOUT_S,
        resolve_host: Resolve = resolve,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._hosts = tuple(_listed(host) for host in hosts)
        self._root = None if root is None else _directory(root)
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._resolve = resolve_host
        self._transport = transport

    async def read(self, url: str, param: str) -> ImageData:
        """The image's bytes. Raises RequestError naming `param`, the field that holds the URL."""
        scheme = url[:8].partition(":")[0].lower()
        match scheme:
            case "data":
                media_type, data = await asyncio.to_thread(read_data_uri, url, param, self._max_bytes)
                return ImageData(data, media_type, param)
            case "https" if self._hosts:
                return await self._fetched(url, param)
            case "file" if self._root is not None:
                return ImageData(await asyncio.to_thread(self._read_file, self._root, url, param), None, param)
        taken = ["data URIs (data:image/png;base64,...)"]
        taken += ["https URLs of listed hosts"] if self._hosts else []
        taken += ["file URLs"] if self._root is not None else []
        raise RequestError(f"{param} must be one of: {', '.join(taken)}; got {shown(url)}", param)

    # -- hosts --------------------------------------------------------------------------------------------------------

    async def _fetched(self, url: str, param: str) -> ImageData:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._follow(url, param)
        except TimeoutError as error:
            raise RequestError(f"{param}: the image did not arrive within {self._timeout_s:g} s", param) from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            # Not the error's own text: it may tell what this server sees of its network.
            raise RequestError(f"{param}: the image could not be fetched", param) from error

    async def _follow(self, url: str, param: str) -> ImageData:
        base: str | None = None
        for _ in range(MAX_REDIRECTS + 1):
            try:
                target = parse_target(url, base)
            except ValueError as error:
                raise RequestError(f"{param}: the URL {error}, got {shown(url)}", param) from error
            self._check_listed(target, param)
            address = await self._checked_address(target, param)
            async with (
                httpx.AsyncClient(
                    transport=self._transport or _transport(), trust_env=False, timeout=self._timeout_s
                ) as client,
                client.stream(
                    "GET",
                    httpx.URL(scheme="https", host=address, port=target.port, raw_path=target.path.encode()),
                    headers={"Host": target.authority, "Accept": "image/*", "Accept-Encoding": "identity"},
                    extensions={"sni_hostname": target.host},
                ) as response,
            ):
                if not response.has_redirect_location:
                    return await self._body(response, param)
                base, url = target.url, response.headers["location"]
        raise RequestError(f"{param}: more than {MAX_REDIRECTS} redirects", param)

    def _check_listed(self, target: Target, param: str) -> None:
        for host, port in self._hosts:
            below = host.startswith("*.") and target.host.endswith(host[1:])
            if port == target.port and (target.host == host or below):
                return
        raise RequestError(
            f"{param}: the host {shown(target.authority)} is not one that this server fetches from", param
        )

    async def _checked_address(self, target: Target, param: str) -> str:
        addresses = await self._resolve(target.host, target.port)
        # One private address among several is enough: which one answers would be up to whoever wrote the record.
        if not addresses or not all(map(is_public, addresses)):
            raise RequestError(f"{param}: the host {shown(target.host)} has no public address", param)
        return addresses[0]

    async def _body(self, response: httpx.Response, param: str) -> ImageData:
        if response.status_code != httpx.codes.OK:
            raise RequestError(f"{param}: the host answered with status {response.status_code}", param)
        if response.headers.get("content-encoding", "identity") != "identity":
            raise RequestError(f"{param}: the host sent the image in a compressed encoding", param)
        announced = response.headers.get("content-length", "0")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            raise RequestError(f"{param} has {announced} bytes, at most {self._max_bytes} are allowed", param)
        media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type.startswith("image/") and media_type not in MEDIA_TYPES:
            known = ", ".join(MEDIA_TYPES)
            raise RequestError(f"{param} has the media type {shown(media_type)}; supported: {known}", param)
        data = bytearray()
        async for piece in response.aiter_raw():
            data += piece
            if len(data) > self._max_bytes:
                raise RequestError(f"{param} has more than the {self._max_bytes} bytes that are allowed", param)
        return ImageData(bytes(data), media_type if media_type in MEDIA_TYPES else None, param)

    # -- files --------------------------------------------------------------------------------------------------------

    def _read_file(self, root: Path, url: str, param: str) -> bytes:
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
            raise RequestError(f"{param} must have the form file:///PATH, got {shown(url)}", param)
        try:
            path = (root / unquote(parts.path)).resolve()
            if not path.is_relative_to(root):
                raise RequestError(f"{param} must lie in the server's --image-root, got {shown(url)}", param)
            with open(path, "rb", opener=_regular) as file:
                data = file.read(self._max_bytes + 1)
        except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, a loop of links
            if isinstance(error, RequestError):
                raise
            raise RequestError(f"{param}: there is no such file: {shown(url)}", param) from error
        if len(data) > self._max_bytes:
            raise RequestError(f"{param} has more than the {self._max_bytes} bytes that are allowed", param)
        return data


def _regular(path: str, flags: int) -> int:
    """Opens a file that is one. O_NONBLOCK: opening a pipe must not wait for its writer."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a file")
    return descriptor


def _transport() -> httpx.AsyncHTTPTransport:
    """No connection is kept: one made for a host must not serve another host at the same address."""
    return httpx.AsyncHTTPTransport(limits=httpx.Limits(max_keepalive_connections=0), retries=0)


def _listed(host: str) -> tuple[str, int]:
    try:
        target = parse_target(f"https://{host}" if "/" not in host else "")
    except ValueError as error:
        raise OptionError(f"--allow-image-hosts takes names of hosts, got {host!r}: it {error}") from error
    return target.host, target.port


def _directory(root: str) -> Path:
    path = Path(root).expanduser().resolve()
    if not path.is_dir():
        raise OptionError(f"--image-root {root}: there is no such directory")
    return path
