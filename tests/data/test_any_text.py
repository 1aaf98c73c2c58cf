"""Any text of a data file gets a finite vector, or an error that names it."""

from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import tiny_encoder

from angle_llm.data.formats import RowError, read_text
from angle_llm.model.encoder import SentenceEncoder

ODD = ["\u200b", "\ufeff", "\u202e", "\U000e0001", "e\u0301", "\U0001f469\u200d\U0001f4bb", "\uffff"]
ODD += ["<s>", "</s>", "[CLS]", '"', "{text}", "\x1b"]
TEXTS = st.lists(st.characters() | st.sampled_from(ODD), max_size=40).map("".join)


@cache
def encoder_of(kind: str) -> SentenceEncoder:
    return tiny_encoder(kind, max_length=64)


def accepted(text: str) -> bool:
    try:
        return read_text({"text": text}, "text") == text
    except RowError:
        return False


@pytest.mark.parametrize("kind", ["llama", "bert"])
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(texts=st.lists(TEXTS, max_size=8))
def test_any_text_gets_a_finite_vector_or_an_error(kind: str, texts: list[str]) -> None:
    encoder = encoder_of(kind)
    texts = [text for text in texts if accepted(text)]
    try:
        rows = encoder.encode(texts)
    except ValueError as error:
        if "adds no token to prompt" not in str(error):
            raise
        return
    assert rows.shape == (len(texts), encoder.dimensions)
    assert np.isfinite(rows).all()
