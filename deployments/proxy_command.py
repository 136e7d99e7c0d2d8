"""The command `agl proxy`: the recording proxy for agents of other processes and machines."""

import asyncio
import logging
import signal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agl_core.env_var import named_secret
from agl_core.errors import ConfigError
from agl_core.text_formats import parse_json

if TYPE_CHECKING:  # a web server, for this command only
    from agl_core.llm_proxy import Price, ProxyConfig

_STOP_SECONDS = 40.0


def proxy(
    backend: Annotated[
        list[str],
        typer.Option(help="Base URL of a model server, ending in /v1; repeat it for several."),
    ],
    store: Annotated[
        str,
        typer.Option(help="Address of the store that calls are recorded in, see `agl store`."),
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but loopback needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 for a free one.")] = 4750,
    token_env: Annotated[
        str | None,
        typer.Option(help="Variable that holds what agents must send as their API key."),
    ] = None,
    admin_token_env: Annotated[
        str | None,
        typer.Option(help="Variable that holds the token of /admin (pause, backends, usage)."),
    ] = None,
    backend_key_env: Annotated[
        str | None, typer.Option(help="Variable that holds the model servers' API key.")
    ] = None,
    no_token_ids: Annotated[
        bool,
        typer.Option(
            "--no-token-ids",
            help="Do not ask for return_token_ids: the model servers refuse it. Nothing can be "
            "trained on then.",
        ),
    ] = False,
    deadline_seconds: Annotated[
        float, typer.Option(help="Limit of one call, retries included.")
    ] = 600.0,
    max_request_mib: Annotated[int, typer.Option(help="Largest request.")] = 16,
    sampling: Annotated[
        str | None,
        typer.Option(help="JSON object: sampling parameters of calls that leave them open."),
    ] = None,
    validation_sampling: Annotated[
        str | None, typer.Option(help="The same for rollouts of mode val or test.")
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(help="MODEL=INPUT,OUTPUT for a million tokens; * is any model; repeatable."),
    ] = None,
) -> None:
    """Serve models to agents and record every call with its token ids, until Ctrl-C.

    Agents speak chat completions, completions, responses or Anthropic's messages. The base URL of
    a client names the attempt: http://HOST:PORT/rollout/ROLLOUT/attempt/ATTEMPT/v1; the headers
    x-rollout-id and x-attempt-id do the same. /mode/val before it asks for validation sampling.
    Calls go to the least loaded healthy server, those that begin alike to the same one.

    The store's token is AGL_STORE_TOKEN. Traffic is not encrypted.

    Example: agl proxy --backend http://gpu-1:8000/v1 --backend http://gpu-2:8000/v1
    --store http://head:4747
    """
    from agl_core.llm_proxy import Backend, ProxyConfig

    key = named_secret(backend_key_env)
    servers = [Backend(url, key, returns_token_ids=not no_token_ids) for url in backend]
    config = ProxyConfig(
        backends=tuple(servers),
        token=named_secret(token_env),
        admin_token=named_secret(admin_token_env),
        sampling_parameters=parse_sampling(sampling) or {},
        validation_sampling_parameters=parse_sampling(validation_sampling),
        prices=dict(map(parse_price, price or ())),
        deadline_seconds=deadline_seconds,
        max_request_bytes=max_request_mib * 1024 * 1024,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(_serve(config, store, host, port))


async def _serve(config: "ProxyConfig", store: str, host: str, port: int) -> None:
    from agl_core.llm_proxy import ProxyServer
    from agl_core.llm_proxy.store_calls import StoreCalls
    from agl_core.store import LightningStoreClient

    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    client = LightningStoreClient(store)
    try:
        await client.statistics()
        try:
            server = ProxyServer(config, StoreCalls(client), host, port)
            await asyncio.to_thread(server.start)
        except (ValueError, OSError) as error:
            raise ConfigError(f"the proxy cannot start: {error}") from error
        typer.echo(f"Proxy: {server.url}/rollout/ROLLOUT/attempt/ATTEMPT/v1  (Ctrl-C ends it)")
        await stopping.wait()
        await asyncio.to_thread(server.stop, _STOP_SECONDS)
    finally:
        await client.close()
    typer.echo("stopped", err=True)


def parse_sampling(text: str | None) -> dict[str, Any] | None:
    """Return a JSON object.

    Raises:
        ConfigError: It is none.
    """
    if text is None:
        return None
    try:
        found = parse_json(text)
        reason = "it is another value"
    except ValueError as error:
        found, reason = None, str(error)
    if not isinstance(found, dict):
        raise ConfigError(
            f'sampling {text!r:.200} is no JSON object, as in {{"temperature": 0.7}}: {reason}'
        )
    return found


def parse_price(text: str) -> tuple[str, "Price"]:
    """Return model and price of MODEL=INPUT,OUTPUT.

    Raises:
        ConfigError: It is none.
    """
    from agl_core.llm_proxy import Price

    model, _, numbers = text.rpartition("=")
    try:
        price = Price(*map(float, numbers.split(",")))
    except (TypeError, ValueError):
        price = None
    if not model or price is None or min(price.input, price.output) < 0:
        raise ConfigError(f"price {text!r} is not MODEL=INPUT,OUTPUT, as in *=0.5,1.5")
    return model, price
