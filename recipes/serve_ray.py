"""Serve an encoder on several machines with Ray Serve, over HTTP as `angle-llm serve` does.

    python recipes/serve_ray.py runs/nli/model --replicas 2 --port 8000
    python recipes/serve_ray.py DIR --replicas 16 --gpus-per-replica 1 --address auto --host 0.0.0.0

Needs `pip install 'angle_llm[ray,serve]'` on every machine. Two kinds of processes answer a request, each `--replicas`
times: a server checks the request and sends its texts to an encoder, which computes requests that arrive together.

    requests ──► proxy of Ray on each machine ──► server (HTTP, limits, token) ──► encoder (model) ──► answers

Ray starts a process again that dies. If an encoder dies, the servers send its requests to another encoder.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Le
from embed_ray import start_ray

from angle_llm.cli import run_cli
from angle_llm.prompts import Side
from angle_llm.serve.listen import read_token
from angle_llm.settings.parsing import (
    NonNegativeFloat,
    Positive,
    need_library,
    parse_settings,
    settings_class,
    settings_from_dict,
)
from angle_llm.settings.serve import ServeSettings

if TYPE_CHECKING:
    import fastapi

    from angle_llm.serve.app import EncodedRequest

NAME = "angle_llm"
"""Name of the application in Ray Serve."""
PROPERTIES = ("prompts", "dimensions", "max_length", "normalize")
"""Properties of an encoder that a server needs."""
ATTEMPTS = 5
"""Number of encoders that a request is sent to if each of them dies. A request that kills encoders then fails."""


@settings_class
class RayServeSettings(ServeSettings):
    """Settings of the program. A bearer token is read from the environment: ANGLE_LLM_SERVER_TOKEN."""

    port: Annotated[int, Ge(1), Le(65_535)] = 8000
    """Port to listen on, on each machine."""
    replicas: Positive = 2
    """Number of encoders, each in a process with the model. On a CPU an encoder has one thread."""
    gpus_per_replica: NonNegativeFloat = 0
    """Number of GPUs that Ray reserves for an encoder."""
    address: str | None = None
    """Address of a Ray cluster. auto: the cluster that this machine belongs to. None: start Ray on this machine."""


class Encoder:
    """The model in a process: computes the embeddings of requests."""

    def __init__(self, settings: RayServeSettings) -> None:
        from ray import serve

        from angle_llm.model.encoder import SentenceEncoder

        self._encoder = SentenceEncoder.from_pretrained(settings.model, **settings.options())
        # A request with more texts than --max-batch-texts is computed alone.
        self._together = serve.batch(
            self._compute,
            max_batch_size=settings.max_batch_texts,
            batch_wait_timeout_s=settings.window,
            batch_size_fn=lambda requests: 1 if len(requests) == 1 else sum(len(request[0]) for request in requests),
        )

    async def properties(self) -> dict[str, Any]:
        """Return the properties that a server needs."""
        return {name: getattr(self._encoder, name) for name in PROPERTIES}

    async def encode(self, texts: list[str], side: Side | None, instruction: str | None) -> EncodedRequest | Exception:
        """Encode the texts of a request, or return the error of the request."""
        result: EncodedRequest | Exception = await self._together((texts, side, instruction))
        return result

    async def _compute(
        self, requests: Sequence[tuple[list[str], Side | None, str | None]]
    ) -> list[EncodedRequest | Exception]:
        """Encode each request, or return its error."""
        from angle_llm.serve.app import encode_requests

        # Not in a thread: Ray would make small batches of the requests that arrive meanwhile, and not join them.
        return encode_requests(self._encoder, requests)


class Server:
    """The HTTP application of `angle-llm serve` in a process, with encoders in other processes."""

    def __init__(self, encoders: Any, settings: RayServeSettings, token: str | None) -> None:
        self._encoders, self._settings, self._token = encoders, settings, token

    async def __serve_build_asgi_app__(self) -> fastapi.FastAPI:
        """Return the application; Ray Serve calls this once."""
        from angle_llm.serve.app import make_app

        encoder: Any = SimpleNamespace(**await self._encoders.properties.remote())
        return make_app(encoder, self._settings, self._token, self._encode)

    async def _encode(self, texts: list[str], side: Side | None, instruction: str | None) -> EncodedRequest:
        """Encode the texts, by another encoder if an encoder dies.

        Raises:
            ValueError: for a text without a token.
            HTTPException: if several encoders die.
        """
        from fastapi import HTTPException
        from ray.exceptions import ObjectLostError, RayActorError

        for _ in range(ATTEMPTS):
            try:
                result: EncodedRequest | Exception = await self._encoders.encode.remote(texts, side, instruction)
            except (RayActorError, ObjectLostError):
                continue
            if isinstance(result, Exception):
                raise result
            return result
        raise HTTPException(503, f"{ATTEMPTS} encoders died while they computed this request.")


def application(settings: RayServeSettings) -> Any:
    """Return the Ray Serve application: servers, which send texts to encoders."""
    from ray import serve

    common = {"num_replicas": settings.replicas, "logging_config": {"enable_access_log": False}}
    encoders = serve.deployment(
        Encoder,
        **common,
        ray_actor_options={"num_cpus": 1, "num_gpus": settings.gpus_per_replica},
        max_ongoing_requests=settings.max_batch_texts,
    )
    servers = serve.deployment(
        serve.ingress()(Server),
        **common,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=settings.max_waiting,  # never reached: a server answers 429 first
    )
    return servers.bind(encoders.bind(settings), settings, read_token(settings.host))


def build(values: dict[str, Any]) -> Any:
    """Return the application for `serve run serve_ray:build model=DIR replicas=2`, or a config file of Ray Serve."""
    from angle_llm.model.source.backbone import absolute_name

    settings = settings_from_dict(RayServeSettings, values, "serve_ray:build")
    return application(replace(settings, model=absolute_name(settings.model)))


def main(settings: RayServeSettings) -> None:
    """Start the application, and delete it after Ctrl-C or SIGTERM.

    Raises:
        SettingsError: if the cluster is too small.
    """
    for library, extra in {"ray": "ray", "fastapi": "serve", "uvicorn": "serve", "prometheus_client": "serve"}.items():
        need_library(library, "recipes/serve_ray.py", extra)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would send usage statistics
    from ray import serve

    from angle_llm.model.source.backbone import absolute_name
    from angle_llm.model.source.resolve import resolve_model

    resolve_model(settings.model)  # Ray would start encoders of a wrong path several times
    settings = replace(settings, model=absolute_name(settings.model))  # replicas of a cluster run in another folder
    needed = {"CPU": settings.replicas, "GPU": settings.replicas * settings.gpus_per_replica}
    start_ray(settings.address, needed, f"--replicas {settings.replicas}")
    serve.start(http_options={"host": settings.host, "port": settings.port})
    serve.run(application(settings), name=NAME)
    print(f"Serving {settings.model} on http://{settings.host}:{settings.port}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        signal.pause()
    serve.delete(NAME)
    print("stopped")


if __name__ == "__main__":
    run_cli(lambda: main(parse_settings(RayServeSettings, description=__doc__ or "")))
