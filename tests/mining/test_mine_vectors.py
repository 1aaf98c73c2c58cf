"""Vectors in one file: what has no direction is told by the user's names, and two commands do not spoil each other's work."""

from pathlib import Path

import numpy as np
import pytest
from pairs_for_mining import material
from tiny import tiny_encoder

from angle_llm.data import DataError
from angle_llm.io import FolderError
from angle_llm.mining.vectors import vectors_of
from angle_llm.model.encoder import SentenceEncoder


def vectors_in(folder: Path, encoder: SentenceEncoder, shard_rows: int = 8) -> np.ndarray:
    return vectors_of(material().texts, encoder, "tiny", folder, shard_rows, material().whose)


def test_a_text_whose_vector_has_no_direction_is_told_with_its_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = tiny_encoder("bert")
    real, bad = encoder.encode, {"There is food.": 0.0}

    def encode(texts: list[str], **_: object) -> np.ndarray:
        rows = real(texts)
        for text, value in bad.items():
            rows[[one == text for one in texts]] = value
        return rows

    monkeypatch.setattr(encoder, "encode", encode)
    for value, folder in [(0.0, tmp_path / "zero"), (np.inf, tmp_path / "infinite")]:
        bad["There is food."] = value
        with pytest.raises(DataError, match=r'"There is food\.", the positive of example 2 .*not finite'):
            vectors_in(folder, encoder)


def test_texts_that_another_process_is_reading_are_not_written_again(tmp_path: Path) -> None:
    """Two commands begin together; the second has found no list yet when the first one writes it."""
    encoder, times = tiny_encoder("bert"), []
    real = encoder.encode

    def encode(texts: list[str], **_: object) -> np.ndarray:
        [listed] = tmp_path.glob("texts-*.jsonl")
        before = listed.stat()
        for late in (False, True):
            with pytest.MonkeyPatch.context() as patch:
                if late:
                    patch.setattr(Path, "is_file", lambda path: path != listed and path.exists())
                with pytest.raises(FolderError, match="another process"):
                    vectors_in(tmp_path, tiny_encoder("bert"), 100)
        after = listed.stat()
        times.append((before.st_mtime_ns, before.st_ino) == (after.st_mtime_ns, after.st_ino))
        return real(texts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "encode", encode)
        vectors_in(tmp_path, encoder, 100)
    assert times == [True]
    assert [path.suffix for path in tmp_path.iterdir()] == [".npy"]
