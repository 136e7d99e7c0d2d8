"""The command `agl store`: a store for algorithms and runners of other processes and machines."""

import asyncio
import signal
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from pydantic import SecretStr

from agl_core.errors import ConfigError, StoreError
from agl_core.store import InMemoryLightningStore, LightningStore, SqliteLightningStore


class Backend(StrEnum):
    """Where the store keeps what it is told."""

    SQLITE = "sqlite"
    MEMORY = "memory"


def store(
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but loopback needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 for a free one.")] = 4747,
    backend: Annotated[
        Backend, typer.Option(help="A file that outlives the process, or its memory.")
    ] = Backend.SQLITE,
    path: Annotated[Path | None, typer.Option(help="The file; default .agl/store.db.")] = None,
    token: Annotated[
        str | None,
        typer.Option(help="What clients must send. Others can see it in the list of processes."),
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="A file with the token.")] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin of a web page that may call it; repeatable.")
    ] = None,
) -> None:
    """Serve a store, until Ctrl-C; clients use LightningStoreClient("http://host:port").

    The token is best set as AGL_STORE_TOKEN, for clients too. Traffic is not encrypted.

    Example: agl store --path runs/store.db
    """
    found = _token(token, token_file)
    opened = _open(backend, path)
    origins = cors_origin or []
    asyncio.run(_serve(opened, host, port, found, origins))


async def _serve(
    opened: LightningStore, host: str, port: int, token: SecretStr | None, origins: list[str]
) -> None:
    from agl_core.store import LightningStoreServer  # a web server, for this command only

    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    try:
        async with LightningStoreServer(opened, host, port, origins, token=token) as server:
            typer.echo(f"Store: {server.endpoint}  run {server.run_id}  (Ctrl-C ends it)")
            await stopping.wait()
    finally:
        await opened.close()
    typer.echo("stopped", err=True)


def _open(backend: Backend, path: Path | None) -> LightningStore:
    if backend is Backend.MEMORY:
        if path is not None:
            raise ConfigError("a store in memory has no --path; leave it out, or --backend memory")
        return InMemoryLightningStore()
    try:
        return SqliteLightningStore(path or Path(".agl") / "store.db")
    except (StoreError, OSError) as error:
        raise ConfigError(f"the store cannot be opened: {error}") from error


def _token(token: str | None, file: Path | None) -> SecretStr | None:
    if token is not None and file is not None:
        raise ConfigError("give --token or --token-file, not both")
    if file is not None:
        try:
            token = file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"token file {file} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"token file {file} is not UTF-8 text") from error
    if token == "":
        raise ConfigError("the token is empty")
    return None if token is None else SecretStr(token)
