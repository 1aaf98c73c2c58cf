"""The command `angle-llm serve`: load an encoder and answer requests until a signal."""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress

from angle_llm.serve.client import TOKEN_VARIABLE
from angle_llm.settings.parsing import SettingsError, need_library
from angle_llm.settings.serve import ServeSettings


def serve_main(settings: ServeSettings) -> None:
    """Run `angle-llm serve`. SIGTERM and Ctrl-C stop the server after the requests in progress; exit code 0.

    Raises:
        MissingLibraryError: if fastapi, uvicorn or prometheus-client is not installed.
        SettingsError: for an address that is not free.
    """
    for library in ("fastapi", "uvicorn", "prometheus_client"):
        need_library(library, "serve", "serve")
    import uvicorn

    from angle_llm.model.encoder import SentenceEncoder
    from angle_llm.serve.app import make_app

    token = read_token(settings.host)
    try:  # before the model is loaded, which takes longer
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))  # connections are refused until the model is loaded
    except OSError as error:
        raise SettingsError(f"--host {settings.host} --port {settings.port}: cannot listen there ({error}).") from None
    with listener:
        encoder = SentenceEncoder.from_pretrained(settings.model, **settings.options())
        app = make_app(encoder, settings, token)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        try:
            listener.listen()  # requests that arrive before uvicorn is ready wait
        except OSError as error:  # another server uses the address since `bind`
            raise SettingsError(f"--port {settings.port}: {error}. Choose another port.") from None
        print(f"Serving {settings.model} on http://{host}:{listener.getsockname()[1]}", flush=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        # Clients (httpx) and proxies (nginx) keep unused connections for 5 to 60 s. If the server closed one first, a
        # request sent on it at that moment would fail.
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=600, timeout_keep_alive=75)
        with suppress(KeyboardInterrupt):  # uvicorn raises the signal again after its shutdown
            uvicorn.Server(config).run(sockets=[listener])
    print("stopped")


def read_token(host: str) -> str | None:
    """Return the bearer token from the environment. Warns if there is none and other machines can use the server.

    Raises:
        SettingsError: for a token of white space only.
    """
    variable = os.environ.get(TOKEN_VARIABLE, "")
    token = variable.strip() or None
    if variable and token is None:
        raise SettingsError(f"{TOKEN_VARIABLE} has white space only. Set a token, or unset it.")
    if token is None and host not in ("127.0.0.1", "::1", "localhost"):
        print(f"warning: other machines can use this server. Set a token in {TOKEN_VARIABLE}.", file=sys.stderr)
    return token
