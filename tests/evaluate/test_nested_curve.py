"""The quality curve: every point is what the cut encoder itself reaches, and the texts are encoded once."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import save_tiny_base, tiny_encoder

from angle_llm import SentenceEncoder
from angle_llm.evaluate import evaluate, read_pairs
from angle_llm.evaluate.nested import NestedEvalSettings, Point, halves, nested_main, plot, quality_curve

PAIRS = "starter:graded_pairs.tsv"


def test_every_point_is_what_the_cut_encoder_reaches_from_one_encoding() -> None:
    encoder = tiny_encoder("llama")
    calls = []
    plainly = encoder.encode_layers

    def counted(*texts: Any, **options: Any) -> Any:
        calls.append(texts)
        return plainly(*texts, **options)

    encoder.encode_layers = counted  # type: ignore[method-assign]
    task = read_pairs(PAIRS)
    points = quality_curve(encoder, [task], layers=[1], dimensions=[8, 16])
    assert len(calls) == 1
    assert [(point.layers, point.dimensions) for point in points] == [(m, k) for m in (1, 3) for k in (8, 16, 32)]
    for point in points:
        short = encoder.truncated(layers=point.layers, dimensions=point.dimensions)
        alone = evaluate(lambda texts, short=short: short.encode(texts), [task])  # type: ignore[misc]
        # Float32 rounding may swap two pairs of nearly equal cosine; a figure moves by some 1e-4 then.
        assert point.spearman == pytest.approx({task.name: alone.tasks[task.name].spearman}, abs=0.01)
    assert len({round(point.mean, 1) for point in points}) > 1, "all points are alike, so this test shows nothing"


@pytest.mark.parametrize("asked", [{"layers": [4]}, {"layers": [0]}, {"dimensions": [64]}, {"dimensions": [0]}])
def test_invalid_layers_and_dimensions_are_refused(asked: dict[str, list[int]]) -> None:
    with pytest.raises(ValueError, match=r"--layers, --dimensions.*3 layers.*32 dimensions"):
        quality_curve(
            tiny_encoder("llama"),
            [read_pairs(PAIRS)],
            **({"layers": [], "dimensions": []} | asked),  # type: ignore[arg-type]
        )


def test_dimensions_are_halved_down_to_eight() -> None:
    assert halves(576) == [9, 18, 36, 72, 144, 288]
    assert halves(64) == [8, 16, 32]


def test_the_command_prints_a_table_and_writes_every_point(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = save_tiny_base("bert", tmp_path / "base")
    settings = NestedEvalSettings(
        model=str(base), tasks=(PAIRS,), layers=(1,), dimensions=(16,), device="cpu", json=tmp_path / "curve.json"
    )
    points = nested_main(settings, SentenceEncoder.from_pretrained)
    printed = capsys.readouterr().out
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines() if "|" in line]
    assert cells[0] == ["layers \\ dimensions", "16", "32"]
    assert cells[2] == ["1", f"{points[0].mean:.2f}", f"{points[1].mean:.2f}"]
    written = json.loads((tmp_path / "curve.json").read_text())
    assert [point["mean"] for point in written["points"]] == [point.mean for point in points]
    assert written["settings"]["layers"] == [1]


def test_the_curve_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra: pip install 'angle_llm[bench]'")
    points = [Point(m, k, {"stsb": 50.0 + m + k / 8}) for m in (1, 2) for k in (8, 16, 32)]
    plot(points, tmp_path / "plots" / "curve.svg")
    assert "<svg" in (tmp_path / "plots" / "curve.svg").read_text()
