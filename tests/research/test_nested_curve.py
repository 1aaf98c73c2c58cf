"""The quality curve: every point equals the score of the cut encoder."""

import json
from pathlib import Path
from typing import Any

import nested
import pytest
from evaluate_samples import opens, rows_of
from nested import NestedEvalSettings, halves, nested_main, quality_curve
from tiny import tiny_encoder

from angle_llm.evaluate import evaluate, read_pairs
from angle_llm.evaluate.encoding import encode_functions

PAIRS = "starter:graded_pairs.tsv"


def test_every_point_equals_the_score_of_the_cut_encoder() -> None:
    encoder = tiny_encoder("llama")
    task = read_pairs(PAIRS)
    points = quality_curve(encoder, [task], layers=[1], dimensions=[8, 16])
    assert [(point.layers, point.dimensions) for point in points] == [(m, k) for m in (1, 3) for k in (8, 16, 32)]
    for point in points:
        short = encoder.truncated(layers=point.layers, dimensions=point.dimensions)
        alone = evaluate(lambda texts, short=short: short.encode(texts), [task])
        # Float32 rounding may swap two pairs of nearly equal cosine; a figure moves by some 1e-4 then.
        assert point.spearman == pytest.approx({task.name: alone.tasks[task.name].spearman}, abs=0.01)
    assert len({round(point.mean, 1) for point in points}) > 1, "all points are equal, so this test checks nothing"


def test_instructions_of_pairs_are_used(tmp_path: Path) -> None:
    rows = [
        {"sentence1": f"Dog {n}.", "sentence2": f"A cat {n * n}.", "score": n, "instruction": f"Find {n}."}
        for n in range(9)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = read_pairs(tmp_path / "rows.jsonl")
    encoder = tiny_encoder("llama", prompt="qwen3_embedding_query")
    (*_, whole) = quality_curve(encoder, [task], layers=[], dimensions=[])
    assert whole.spearman == {
        "rows": pytest.approx(evaluate(encode_functions(encoder)[0], [task]).tasks["rows"].spearman)
    }


def test_the_curve_does_not_depend_on_the_order_of_the_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    def reversed_texts(encode: Any, tasks: Any) -> Any:
        return evaluate(lambda texts: encode(texts[::-1])[::-1], tasks)

    curves = []
    for function in (evaluate, reversed_texts):
        monkeypatch.setattr(nested, "evaluate", function)
        curves.append(quality_curve(tiny_encoder("llama"), [read_pairs(PAIRS)], layers=[1], dimensions=[8]))
    assert curves[0] == curves[1]


@pytest.mark.parametrize("cuts", [{"layers": [4]}, {"layers": [0]}, {"dimensions": [64]}, {"dimensions": [0]}])
def test_invalid_layers_and_dimensions_are_refused(cuts: dict[str, list[int]]) -> None:
    with pytest.raises(ValueError, match=r"--layers, --dimensions.*3 layers.*32 dimensions"):
        quality_curve(
            tiny_encoder("llama"),
            [read_pairs(PAIRS)],
            **({"layers": [], "dimensions": []} | cuts),
        )


def test_dimensions_are_halved_down_to_eight() -> None:
    assert halves(576) == [9, 18, 36, 72, 144, 288]
    assert halves(64) == [8, 16, 32]


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = NestedEvalSettings(model="tiny", tasks=(PAIRS,), layers=(1,), dimensions=(16,))
    opens(monkeypatch, lambda path, /, **options: tiny_encoder("bert"))
    points = nested_main(settings)
    rows = rows_of(capsys.readouterr().out)
    assert rows["layers \\ dimensions"] == ["16", "32"]
    assert rows["1"] == [f"{point.mean:.2f}" for point in points[:2]]
