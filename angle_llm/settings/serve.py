"""Settings of the command `angle-llm serve`."""

from __future__ import annotations

from typing import Annotated

import tyro
from annotated_types import Ge, Le

from angle_llm.settings.encoder import EncoderOptions
from angle_llm.settings.parsing import NonNegativeFloat, Positive, settings_class


@settings_class
class ServeSettings(EncoderOptions):
    """Settings of `angle-llm serve`. A bearer token is read from the environment: ANGLE_LLM_SERVER_TOKEN."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """The encoder to serve, such as runs/nli/model; as in `angle-llm embed --model`."""
    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0: all addresses of this machine; set a token in ANGLE_LLM_SERVER_TOKEN then."""
    port: Annotated[int, Ge(0), Le(65_535)] = 8000
    """Port to listen on. 0: a free port."""
    name: str | None = None
    """Model name in requests and answers. None: the last part of MODEL."""
    window: NonNegativeFloat = 0.005
    """Seconds to wait for further requests, which are computed together."""
    max_batch_texts: Positive = 256
    """Texts computed together: further requests are added until there are this many texts."""
    max_texts: Positive = 2048
    """Maximum number of texts in a request; more get status 413."""
    max_characters: Positive = 200_000
    """Maximum number of characters in a text."""
    max_bytes: Positive = 16 * 2**20
    """Maximum number of bytes in the body of a request."""
    max_waiting: Positive = 8192
    """Maximum number of texts that wait for computation; further requests get status 429."""
