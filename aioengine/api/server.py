"""The listening HTTP server of one front end."""

import asyncio
import socket
import ssl
import stat
from functools import partial
from pathlib import Path
from typing import Final

from aiohttp import web

from aioengine.api.app import build_app
from aioengine.api.connection import Connection
from aioengine.api.context import Api
from aioengine.config import EngineConfig
from aioengine.errors import StartupError

ANY_ADDRESS: Final = frozenset({"0.0.0.0", "::"})
CLOSE_GRACE_S: Final = 2.0
"""For handlers that are still writing when the server closes."""
BACKLOG: Final = 1024
PROBE_S: Final = 2.0
"""For a unix socket that may have a server: one whose backlog is full does not answer."""


class HttpServer:
    """Owns its socket and the endpoint file.

    With `--api-ranks leaders` front ends are told apart by their DP rank: it is added to the port
    (0 stays any), and beyond DP rank 0 to the names of the endpoint file and the unix socket.
    """

    def __init__(self, api: Api, dp_rank: int = 0) -> None:
        config = api.config
        self._config = config
        self.port = config.port + dp_rank if config.port else 0
        suffix = f".dp{dp_rank}" if dp_rank else ""
        self._uds = None if config.uds is None else Path(config.uds + suffix)
        path = config.endpoint_file
        self._endpoint_file = None if path is None else Path(path + suffix)
        self._files: list[Path] = []
        """To be removed at the end."""
        self._listener: asyncio.Server | None = None
        self._runner = web.AppRunner(
            build_app(api),
            handler_cancellation=True,  # a client that leaves ends its handler, streaming or not
            shutdown_timeout=CLOSE_GRACE_S,
        )

    async def open(self) -> str:
        """Listen and return the URL, with this host's name if every interface serves. Raises
        StartupError that names the flag."""
        loop = asyncio.get_running_loop()
        tls = await loop.run_in_executor(None, _tls, self._config)
        await self._runner.setup()
        assert self._runner.server is not None
        connect = partial(Connection, self._runner.server, loop)
        if self._uds is not None:
            url = await self._open_unix(connect, self._uds, tls)
        else:
            url = await self._open_tcp(connect, tls)
        if self._endpoint_file is not None:
            try:
                await loop.run_in_executor(None, _write_atomically, self._endpoint_file, url + "\n")
            except OSError as error:
                raise StartupError(
                    f"--endpoint-file {self._endpoint_file}: {error.strerror}"
                ) from None
            self._files.append(self._endpoint_file)
        return url

    async def _open_tcp(self, connect: partial[Connection], tls: ssl.SSLContext | None) -> str:
        config = self._config
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(
                connect, config.host, self.port, backlog=BACKLOG, ssl=tls
            )
        except (OSError, OverflowError) as error:
            raise StartupError(
                f"cannot serve HTTP on --host {config.host} --port {self.port}: {error}"
            ) from None
        port = self._listener.sockets[0].getsockname()[1]
        host = socket.gethostname() if config.host in ANY_ADDRESS else config.host
        host = f"[{host}]" if ":" in host else host
        return f"{'https' if tls else 'http'}://{host}:{port}{config.root_path}"

    async def _open_unix(
        self, connect: partial[Connection], path: Path, tls: ssl.SSLContext | None
    ) -> str:
        """A socket that nobody listens on any more is replaced."""
        loop = asyncio.get_running_loop()
        try:
            if await loop.run_in_executor(None, _is_served, path):
                raise StartupError(f"--uds {path}: somebody listens there")
            self._listener = await loop.create_unix_server(connect, path, backlog=BACKLOG, ssl=tls)
        except OSError as error:
            raise StartupError(f"cannot serve HTTP on --uds {path}: {error}") from None
        self._files.append(path)
        return f"unix:{path}"

    async def close(self) -> None:
        """Stop listening, let handlers write their last bytes, remove the files."""
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()
        for path in self._files:
            path.unlink(missing_ok=True)


def _tls(config: EngineConfig) -> ssl.SSLContext | None:
    """Raises StartupError. Reads files, and asks nobody for the password of a key."""
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    names = f"--ssl-certfile {config.ssl_certfile}"
    if config.ssl_keyfile is not None:
        names += f" --ssl-keyfile {config.ssl_keyfile}"
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise StartupError(f"{names}: {error}") from None
    return context


def _is_served(path: Path) -> bool:
    """Whether a server listens on this unix socket; a dead one is removed. Raises OSError."""
    if not path.exists() or not stat.S_ISSOCK(path.stat().st_mode):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return False
    return True


def _write_atomically(path: Path, text: str) -> None:
    """A reader sees the whole text or no file."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.write_text(text)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
