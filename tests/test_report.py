"""The report says what the result files say, no more and no less, in both of its forms."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from angle_llm.evaluate.published import PUBLISHED
from angle_llm.experiments import Result
from angle_llm.report import ReportSettings, report_main
from angle_llm.report.measured import Density
from angle_llm.report.numbers import excludes_zero, number, over_seeds, signed, span
from angle_llm.report.plots import density_figure, density_means
from angle_llm.report.published import TABLES

GRID = """
title: A question of terms
about: Three rows.
reference: base
seeds: [42, 1]
train: {objective: {cosine_weight: 0.5}, model: {path: some/model, prompt: plain, pooling: last}}
rows:
  base: {label: The base}
  other: {label: "Another <b>row</b> & | more", train: {objective: {cosine_weight: 0.25}}}
  raw: {train: null, label: Untrained}
measures: {sts: [stsb, sickr]}
"""


def sts(stsb: float | None, sickr: float = 70.11, undefined: str | None = None) -> dict[str, Any]:
    def task(label: str, pairs: int, spearman: float | None, **more: Any) -> dict[str, Any]:
        ends = None if spearman is None else [spearman - 1.25, spearman + 1.31]
        common = {"label": label, "variant": "raw", "pairs": pairs, "spearman": spearman, "interval": ends}
        return {**common, "pearson": 61.17, "subtask_mean": None, "subtask_weighted": None, "undefined": None, **more}

    average = None if stsb is None else (stsb + sickr) / 2
    return {
        "asked": {"tasks": ["stsb", "sickr"], "variant": "raw", "pairs": {}},
        "average": {
            "tasks": ["stsb", "sickr"],
            "spearman": average,
            "interval": average and [average - 1, average + 1],
        },
        "tasks": {
            "stsb": task("STS-B", 1379, stsb, undefined=undefined, subtask_mean=55.51, subtask_weighted=56.62),
            "sickr": task("SICK-R", 4927, sickr),
        },
        "density": {
            "stsb": {"gold_edges": [0, 2.5, 5], "cosine_edges": [-1, 0, 0.5, 1], "counts": [[4, 321, 7], [0, 8, 654]]}
        },
    }


def result(row: str, seed: int, *, trained: bool = True, **measures: Any) -> Result:
    return Result(
        grid="terms",
        row=row,
        label=row,
        seed=seed,
        command=f"python recipes/ablation.py --grid recipes/grids/terms.yaml --data-dir DATA --rows {row} --seeds {seed}",
        date="2026-11-21",
        machine="2 CPU thread(s), x86_64",
        versions={"torch": "2.13.0"},
        settings={"model": {"path": "some/model", "prompt": "plain", "pooling": "last"}}
        | (
            {
                "objective": {"cosine_weight": 0.25 if row == "other" else 0.5},
                "seed": seed,
                "run_dir": "",
                "data": {"shuffle_seed": seed},
            }
            if trained
            else {}
        ),
        train={"steps": 16, "seconds": 98.7, "first_loss": 2.3456, "last_loss": 0.9876, "computed_tokens": 54321}
        if trained
        else None,
        measures=measures,
    )


@pytest.fixture
def folders(tmp_path: Path) -> ReportSettings:
    """A grid file, no results yet."""
    (tmp_path / "grids").mkdir()
    (tmp_path / "grids" / "terms.yaml").write_text(GRID, encoding="utf-8")
    return ReportSettings(
        results=tmp_path / "results",
        grids=tmp_path / "grids",
        page=tmp_path / "out" / "report.html",
        tables=tmp_path / "out" / "RESULTS.md",
    )


@pytest.fixture
def filled(folders: ReportSettings) -> ReportSettings:
    """Two rows with two seeds, one without training, comparisons, lengths, speed, every kind of measure."""
    kinds: dict[str, Any] = {
        "transfer": {
            "tasks": {"mr": {"accuracy": 77.31, "interval": {"low": 76.2, "high": 78.4}, "label": "MR"}},
            "average": 77.31,
        },
        "retrieval": {
            "strict_accuracy": 9.87,
            "recall": {"5": 44.13},
            "mrr": 33.21,
            "ndcg": 35.43,
            "intervals": {"mrr": [31.2, 35.1]},
        },
        "saturation": {
            "edges": [-1, 0, 0.9, 1],
            "pairs": [0.111, 0.222, 0.667],
            "terms": {"cosine": [0.314, 0.412, 0.274]},
            "saturated": {"pairs": 0.667, "cosine": 0.274},
        },
        "nested": {"dimensions": [8, 16], "layers": [1, 2], "spearman": [[41.23, 42.34], [51.45, None]]},
        "novel": {"asked": {}, "depth": {"figure": 12.3456}},
    }
    for one in (
        result("base", 42, sts=sts(80.01), **kinds),
        result("base", 1, sts=sts(82.05)),
        result("other", 42, sts=sts(84.44)),
        result("other", 1, sts=sts(84.66)),
        result("raw", 42, trained=False, sts=sts(66.66)),
    ):
        one.write(folders.results)
    differences = {
        "42": {"difference": 2.215, "interval": [1.5, 2.9], "p_value": 0.002},
        "1": {"difference": 1.305, "interval": [0.4, 2.2], "p_value": 0.004},
    }
    compared = {"figure": "average", "per_seed": differences, "mean_difference": 1.76, "interval": [0.11, 3.42]}
    raw: dict[str, Any] = {
        "figure": "average",
        "per_seed": {
            "42": {"difference": -6.675, "interval": [-8.1, -5.2], "p_value": 0.002},
            "1": {"difference": -7.695, "interval": [-9.1, -6.2], "p_value": 0.002},
        },
    }
    raw |= {"mean_difference": -7.185, "interval": [-13.66, -0.71]}
    comparisons = {"reference": "base", "rows": {"other": compared, "raw": raw}}
    write(folders.results / "terms" / "comparisons.json", comparisons)
    quantiles = {"0.05": 5.0, "0.5": 13.0, "0.95": 27.0, "1.0": 61.0}
    histogram = {"edges": [0, 1, 4, 16, 64], "counts": [0, 17, 900, 83]}
    lengths = {"sets": {"NLI": {"quantiles": quantiles, "histogram": histogram, "texts": 1000, "mean": 14.5}}}
    write(folders.results / "lengths.json", lengths)
    summary: dict[str, Any] = {
        "seconds": 2.81,
        "per_second": 5.69,
        "peak_gib": 2.84,
        "ratio": 1.0,
        "ratio_min": 1.0,
        "ratio_max": 1.0,
    }
    scenario: dict[str, Any] = {"title": "Training, float32", "unit": "triples", "units": 16}
    scenario |= {"summary": {"ours": summary, "theirs": None}, "runs": {"theirs": [{"problem": "ended at 24 GiB"}]}}
    speed = {"scenarios": [scenario], "machine": {"cores": 2}, "finished": "2026-11-21"}
    write(folders.results / "speed-train.json", speed)
    scenario = {"title": "Encoding, float32", "unit": "texts", "units": 32328}
    scenario |= {"summary": {"theirs": summary | {"ratio": 4.56, "ratio_min": 4.52, "ratio_max": 4.59}}, "runs": {}}
    write(folders.results / "speed-encode.json", speed | {"scenarios": [scenario]})
    return folders


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


class Reader(HTMLParser):
    """A page's text, tags, ids, and what its attributes point to."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words = ""
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.inside: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.inside.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "style" not in self.inside:
            self.words += data


def made(settings: ReportSettings) -> tuple[Reader, str]:
    report_main(settings)
    return Reader(settings.page.read_text(encoding="utf-8")), settings.tables.read_text(encoding="utf-8")


FIGURES = [
    *("81.03 ± 1.44", "79.78–82.34", "84.55 ± 0.16", "66.66", "65.41–67.97"),  # STS-B over seeds, ends averaged
    *("75.57 ± 0.72", "1,379", "4,927", "61.17", "55.51", "56.62"),  # average; pairs, Pearson, means over sub-tasks
    *("+1.76", "+2.21", "1.50–2.90", "0.004", "−6.67", "−8.10 to −5.20", "−7.18"),  # against the reference
    *(
        "77.31",
        "76.20–78.40",
        "9.87",
        "44.13",
        "33.21",
        "31.20–35.10",
        "35.43",
        "12.3456",
    ),  # transfer, retrieval, novel
    *("11.1", "22.2", "66.7", "31.4", "41.2", "27.4", "41.23", "42.34", "51.45"),  # saturation, nested
    *("98", "54,321", "2.3456", "0.9876", "2026-11-21", "2 CPU thread(s), x86_64", "torch 2.13.0", "0.25"),  # the runs
    *(
        "1,000",
        "14.5",
        "13",
        "61",
        "2.81",
        "5.69",
        "2.8",
        "ended at 24 GiB",
        "32,328",
        "4.56",
        "4.52–4.59",
    ),  # lengths, speed
    "python recipes/ablation.py --grid recipes/grids/terms.yaml --data-dir DATA --rows other --seeds 1 --again",
]


def test_every_figure_of_the_files_is_in_both_forms(filled: ReportSettings) -> None:
    page, tables = made(filled)
    assert [figure for figure in FIGURES if figure not in page.words] == []
    assert [figure for figure in FIGURES if figure not in tables] == []


def test_a_table_is_the_same_in_both_forms(filled: ReportSettings) -> None:
    page, tables = made(filled)
    numbers = set(re.findall(r"\d+\.\d\d\b", tables))
    assert len(numbers) > 100
    assert {figure for figure in numbers if figure not in page.words} == set()


def test_published_rows_are_marked_and_all_there(filled: ReportSettings) -> None:
    page, tables = made(filled)
    for words in (page.words, tables):
        assert "published, on SentEval's text, other model and data" in words
        assert all(row.model in words and number(row.average) in words for row in PUBLISHED)
        assert all(f"Published: {table.title}" in words for table in TABLES)


def test_only_what_is_sure_is_bold(filled: ReportSettings) -> None:
    _, tables = made(filled)
    assert "77.33 ± 0.08" in tables
    assert "**77.33" not in tables, "two seeds may happen to agree"
    for row, figure in (("base", 81.5), ("other", 84.55)):
        result(row, 2, sts=sts(figure)).write(filled.results)
    path = filled.results / "terms" / "comparisons.json"
    compared = json.loads(path.read_text())
    compared["rows"]["other"]["per_seed"]["2"] = {"difference": 1.525, "interval": [0.5, 2.5], "p_value": 0.01}
    write(path, compared)
    assert "**77.33 ± 0.0" in made(filled)[1]
    compared["rows"]["other"]["per_seed"]["1"]["interval"] = [-0.1, 2.2]
    write(path, compared)
    _, tables = made(filled)
    assert "77.33 ± 0.0" in tables
    assert "**77.33" not in tables


def test_an_interval_of_two_seeds_is_told_nowhere(filled: ReportSettings) -> None:
    page, tables = made(filled)
    for words in (page.words, tables):
        assert "0.11–3.42" not in words
        assert "too few seeds" in words


def test_what_is_sure_is_found(filled: ReportSettings) -> None:
    """Beside its own reference: `raw` is compared with `other` here, the others with `base`."""
    for row, figure in (("base", 81.5), ("other", 84.55)):
        result(row, 2, sts=sts(figure)).write(filled.results)
    grid = filled.grids / "terms.yaml"
    grid.write_text(
        grid.read_text()
        .replace("seeds: [42, 1]", "seeds: [42, 1, 2]")
        .replace("{train: null, label", "{train: null, reference: other, label")
    )
    path = filled.results / "terms" / "comparisons.json"
    compared = json.loads(path.read_text())
    compared["rows"]["other"]["per_seed"]["2"] = {"difference": 1.525, "interval": [0.2, 2.9], "p_value": None}
    seeds: dict[str, Any] = {}
    for seed, figure in ((42, 84.44), (1, 84.66), (2, 84.55)):
        seeds[str(seed)] = {"difference": 33.33 - figure / 2, "interval": [-9.9, -8.0]}
    raw: dict[str, Any] = {"reference": "other", "figure": "average", "per_seed": seeds, "mean_difference": -8.944}
    compared["rows"]["raw"] = raw | {"interval": [-9.1, -8.8]}
    write(path, compared)
    page, _ = made(filled)
    shown = page.words[page.words.index("Each row beside its reference") :]
    assert "A question of terms, beside “The base”Another <b>row</b> & | moresurely higher+1.760.11–3.42" in shown
    assert "beside “Another <b>row</b> & | more”Untrainedsurely lower−8.94−9.10 to −8.80" in shown
    assert "against: Another <b>row</b> & | more" in page.words, "in the table, below the row's name"
    assert "comparisons.json is not" not in page.words
    assert "comparisons.json lacks" not in page.words
    for changed, told in (
        ({"interval": [-18.1, 0.2]}, "Untrainednot told apart−8.94"),
        ({"per_seed": seeds | {"1": seeds["1"] | {"interval": None}}}, "Untrainedover seeds, pairs not kept−8.94"),
        ({"per_seed": seeds | {"1": seeds["1"] | {"interval": [-18.1, 0.2]}}}, "Untrainedover seeds alone−8.94"),
    ):
        compared["rows"]["raw"] = raw | {"interval": [-9.1, -8.8]} | changed
        write(path, compared)
        assert told in made(filled)[0].words
    compared["rows"]["raw"] = raw | {"reference": "base", "interval": [-9.1, -8.8]}
    write(path, compared)
    lacking = "comparisons.json lacks what has a result: raw (seed 42), raw (seed 1), raw (seed 2)"
    assert lacking in made(filled)[0].words, "compared with another row than the grid says"


def test_a_model_of_another_grid_has_been_trained_all_the_same(folders: ReportSettings) -> None:
    """Its one seed is one seed, though its row trains nothing."""
    text = "title: T\nreference: raw\nmeasures: {sts: [stsb, sickr]}\nrows: {raw: {train: null}, left: {train: null}}\n"
    (folders.grids / "terms.yaml").write_text(text)
    for row, model, figure in (("raw", "some/model", 66.61), ("left", "RUNS/nli/in-batch-seed7/model", 88.88)):
        one = result(row, 42, trained=False, sts=sts(figure))
        replace(one, settings={"model": one.settings["model"] | {"path": model}}).write(folders.results)
    seeds = {"none": {"difference": 11.11, "interval": [10.0, 12.2], "tasks": {"stsb": 22.22, "sickr": 0}}}
    left = {"figure": "average", "per_seed": seeds, "mean_difference": 11.11, "interval": None}
    write(folders.results / "terms/comparisons.json", {"reference": "raw", "rows": {"left": left}})
    page, tables = made(folders)
    assert "T, beside “raw” on the mean of STS-B, SICK-R, 68.36lefttoo few seeds+11.1110.00–12.20" in page.words
    assert re.search(r"\| left +\| 7 ", tables)
    one = result("left", 42, trained=False, sts=sts(88.88))
    one.write(folders.results)
    assert "leftsurely higher+11.11" in made(folders)[0].words
    seeds["none"] |= {"difference": None, "interval": None}
    undefined = {"reference": "raw", "rows": {"left": left | {"mean_difference": None}}}
    write(folders.results / "terms/comparisons.json", undefined)
    assert "leftundefined" in made(folders)[0].words
    seeds["none"] |= {"difference": 11.11, "interval": None}
    write(folders.results / "terms/comparisons.json", {"reference": "raw", "rows": {"left": left}})
    assert "leftpairs not kept+11.11" in made(folders)[0].words


def test_one_set_in_two_forms_is_told(filled: ReportSettings) -> None:
    both = sts(84.44)
    for task in both["tasks"].values():
        task["variant"] = "senteval"
    result("other", 42, sts=both).write(filled.results)
    page, _ = made(filled)
    assert "Text: raw (the sentences as released); senteval (SentEval's text" in page.words
    assert "rows on different text are no comparison of models" in page.words


def test_comparisons_of_other_results_are_told(filled: ReportSettings) -> None:
    """As where a grid was stopped before it compared."""
    result("other", 1, sts=sts(84.96)).write(filled.results)
    page, tables = made(filled)
    for words in (page.words, tables):
        assert "terms/comparisons.json is not of these results: other (seed 1)" in words


def test_what_one_row_alone_has_is_a_difference(filled: ReportSettings) -> None:
    own = result("other", 42, sts=sts(84.44))
    data = {"data": {"where": {"clean": 0}, "batches": "mixed"}}
    replace(own, settings=own.settings | data).write(filled.results)
    _, tables = made(filled)
    shared = next(line for line in tables.splitlines() if line.startswith("All rows share"))
    assert "data.where.clean" not in shared
    assert "data.where.clean" in tables
    assert "data.batches" not in tables, "the default, which the older results had too"
    replace(own, settings=own.settings | {"data": data["data"] | {"batches": "by_set"}}).write(filled.results)
    assert re.search(r"data\.batches.*\n.*\n.*The base.* mixed .*\n.* by\\?_set ", made(filled)[1])


def test_one_seed_is_told(filled: ReportSettings) -> None:
    (filled.results / "terms" / "other-seed1.json").unlink()
    page, tables = made(filled)
    for words in (page.words, tables):
        assert "One seed only, so nothing is known of another: Another" in words
        assert "4 of 5 experiments have results. Missing: other-seed1." in words


def test_an_undefined_figure_is_told_with_its_reason(filled: ReportSettings) -> None:
    result("other", 1, sts=sts(None, undefined="all cosines are equal")).write(filled.results)
    page, tables = made(filled)
    for words in (page.words, tables):
        assert "STS-B: undefined, as all cosines are equal." in words


def test_a_number_that_is_not_finite_is_undefined(filled: ReportSettings) -> None:
    path = filled.results / "terms" / "other-seed1.json"
    path.write_text(path.read_text().replace("84.66", "NaN"))
    page, tables = made(filled)
    assert "STS-B: undefined, as the file gives no reason." in page.words
    assert "nan" not in page.words.lower().split()
    assert "undefined" in tables


def test_text_is_escaped(filled: ReportSettings) -> None:
    bad = result("other", 42, sts=sts(84.44))
    replace(bad, machine="<script>alert(1)</script>", command='echo "</code><img src=x>"').write(filled.results)
    page, tables = made(filled)
    assert "Another <b>row</b> & | more" in page.words
    assert "<script>alert(1)</script>" in page.words
    assert not {"script", "img", "b"} & set(page.tags) - {"b"}
    assert "Another &lt;b&gt;row&lt;/b&gt; & \\| more" in tables
    assert "<script>" not in tables


def test_the_same_files_give_the_same_bytes(filled: ReportSettings, tmp_path: Path) -> None:
    made(filled)
    first = filled.page.read_bytes(), filled.tables.read_bytes()
    made(filled)
    assert first == (filled.page.read_bytes(), filled.tables.read_bytes())
    assert str(tmp_path) not in first[0].decode() + first[1].decode()


def test_nothing_is_fetched(filled: ReportSettings) -> None:
    page, _ = made(filled)
    html = filled.page.read_text(encoding="utf-8")
    pointing = {
        value for _, name, value in page.attributes if name in {"src", "href", "srcset", "xlink:href", "action"}
    }
    assert pointing
    assert all(target.startswith("#") for target in pointing)
    assert not {"script", "link", "iframe", "object", "img"} & set(page.tags)
    assert "url(" not in html
    assert "@import" not in html
    assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'; img-src data:") in page.attributes


def test_the_page_can_be_read_by_those_who_do_not_see_it(filled: ReportSettings) -> None:
    page, _ = made(filled)
    assert {"header", "nav", "main", "footer", "h1"} <= set(page.tags)
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    pointed = {value for _, name, value in page.attributes if name == "aria-labelledby"}
    pointed |= {value.removeprefix("#") for tag, name, value in page.attributes if tag == "a" and name == "href"}
    assert pointed <= set(ids)
    assert page.tags.count("th") == sum(name == "scope" for _, name, _ in page.attributes)
    drawings = sum(value == "img" for _, name, value in page.attributes if name == "role")
    assert drawings == 6  # rows, two densities, lengths, saturation, nested
    assert all(value for _, name, value in page.attributes if name == "aria-label")


def test_without_results_the_page_says_what_to_run(folders: ReportSettings) -> None:
    page, tables = made(folders)
    for words in (page.words, tables):
        assert "There are no results yet" in words
        assert "Not run yet." in words
        assert "python recipes/ablation.py --grid recipes/grids/terms.yaml --data-dir DATA" in words


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"format_version": 1, "grid"', "base-seed1.json is damaged"),
        ('{"format_version": 9}', "base-seed1.json is of another version"),
        ("[]", "base-seed1.json is damaged"),
    ],
)
def test_a_damaged_result_is_named_and_the_rest_is_used(
    text: str, said: str, filled: ReportSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    (filled.results / "terms" / "base-seed1.json").write_text(text)
    page, tables = made(filled)
    assert said in page.words
    assert said in tables
    assert "84.55 ± 0.16" in page.words
    assert said in capsys.readouterr().err


def test_figures_of_the_wrong_shape_are_named(filled: ReportSettings) -> None:
    result(
        "other",
        1,
        sts={"tasks": {"stsb": {"label": "STS-B"}}},
        nested={"dimensions": [1], "layers": [1], "spearman": []},
    ).write(filled.results)
    (filled.results / "lengths.json").write_text("{")
    page, _ = made(filled)
    assert "terms/other-seed1.json, sts: tasks.stsb.variant: Field required" in page.words
    assert "spearman must have a row for each of 1 layers" in page.words
    assert "lengths.json cannot be used" in page.words


def test_a_result_of_other_settings_than_its_grid_is_told(filled: ReportSettings) -> None:
    path = filled.grids / "terms.yaml"
    path.write_text(path.read_text().replace("cosine_weight: 0.25", "cosine_weight: 0.75"))
    page, _ = made(filled)
    assert (
        "terms/other-seed42.json was run with other settings than its grid file has now: objective.cosine_weight."
        in page.words
    )
    assert "terms/base-seed42.json was run" not in page.words


def test_grids_come_in_order_and_results_without_a_grid_file_are_told(filled: ReportSettings) -> None:
    (filled.grids / "ablation.yaml").write_text(GRID)
    (filled.grids / "nli.yaml").write_text(GRID)
    replace(result("base", 42, sts=sts(80.01)), grid="alone").write(filled.results)
    page, tables = made(filled)
    sections = [value for tag, name, value in page.attributes if tag == "section" and name == "id"]
    assert sections == [
        "overview",
        "findings",
        *(f"grid-{name}" for name in ("nli", "ablation", "alone", "terms")),
        "lengths",
        "speed",
        "published",
    ]
    assert "There is no grid file recipes/grids/alone.yaml" in tables


def test_no_folder_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="name them with --results and --grids"):
        report_main(
            ReportSettings(results=tmp_path / "a", grids=tmp_path / "b", page=tmp_path / "c", tables=tmp_path / "d")
        )


def test_a_mean_over_seeds_needs_all_of_them() -> None:
    figure = over_seeds([(80.0, (79.0, 81.0)), (None, None)])
    assert figure is not None
    assert (figure.mean, figure.deviation, figure.cell().text, figure.cell().small) == (None, None, "undefined", "")
    assert over_seeds([]) is None


def test_numbers_are_written_as_people_do() -> None:
    assert (number(-1.234), signed(0.5), signed(-0.5), number(None)) == ("−1.23", "+0.50", "−0.50", "undefined")
    assert (span((1, 2)), span((-1, 2)), span(None), span((None, 2))) == ("1.00–2.00", "−1.00 to 2.00", "", "")
    assert [excludes_zero(ends) for ends in ((0.1, 1), (-1, -0.1), (-1, 1), (0, 1), None)] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_a_ridge_is_drawn_where_there_are_pairs() -> None:
    """Binary labels leave the ranges between them empty."""
    binary = Density((0, 0.2, 0.4, 0.6, 0.8, 1), (-1, 0, 1), ((3, 1), (0, 0), (0, 0), (0, 0), (0, 4)))
    assert density_means(binary) == [("0–0.2", 4, -0.25), ("0.8–1", 4, 0.5)]
    figure = density_figure("Cosines", [("after", binary)])
    drawn = ElementTree.tostring(figure.panels[0][1], encoding="unicode")
    assert drawn.count('class="ridge') == 2
    assert "0.4–0.6" not in drawn


def luminance(colour: str) -> float:
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_words_stand_out_from_what_is_behind_them(mode: str) -> None:
    """WCAG 2.2: 4.5 for text; marks of plots need 3 and have 4.5 too."""
    style = files("angle_llm.report").joinpath("style.css").read_text(encoding="utf-8")
    blocks = re.findall(r":root \{(.*?)\}", style, flags=re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", blocks[mode == "dark"]))
    pairs = [(ink, paper) for ink in ("ink", "soft", "accent") for paper in ("paper", "card")]
    pairs += [("problem", "problem-paper"), ("missing", "missing-paper"), *((f"s{n}", "paper") for n in range(1, 7))]
    for ink, paper in pairs:
        light, dark = sorted((luminance(colours[ink]), luminance(colours[paper])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, paper)


def test_the_door_needs_no_model_library(filled: ReportSettings) -> None:
    code = (
        "import sys; from angle_llm.report import *; from pathlib import Path as P; "
        f"report_main(ReportSettings(results=P({str(filled.results)!r}), grids=P({str(filled.grids)!r}), "
        f"page=P({str(filled.page)!r}), tables=P({str(filled.tables)!r}))); "
        "print(sorted({'torch', 'transformers', 'peft', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
