"""Convert the result files of the tag `before-redesign` to docs/results.csv and docs/runs.csv. Ran once, on 2026-11-23.

    PYTHONPATH=recipes python docs/history/convert_results.py

Values are copied with seven digits; nothing is measured. Published values, text lengths and the speed comparison become rows too.
"""

import io
import json
import subprocess
import tarfile
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from ablation import COMMAND
from ablation_grid import experiments, load_grid
from ablation_measure import Results, asked, flow, line_of, measurement

from angle_llm.evaluate import PUBLISHED, Interval
from angle_llm.evaluate.transfer import PUBLISHED_TRANSFER

SOURCE = "Li & Li, AnglE, arXiv 2309.12871"
NON_TRANSFER = ("mrpc", "stsb", "qqp (val)", "qnli (val)", "github issues", "average")
PUBLISHED_OTHER = {
    "trained and tested on one set": {
        "AnglE-BERT": dict(zip(NON_TRANSFER, (62.20, 86.26, 76.54, 72.19, 70.55, 73.55), strict=True)),
        "AnglE-RAN (long-text encoder, 86M)": dict(
            zip(NON_TRANSFER, (58.70, 80.23, 74.87, 63.04, 71.25), strict=False)
        ),
        "SBERT": dict(zip(NON_TRANSFER, (46.19, 84.67, 73.80, 65.98, 69.50), strict=False)),
        "SimCSE": dict(zip(NON_TRANSFER, (48.13, 76.27, 65.84, 33.00, 60.38), strict=False)),
    },
    "loss terms, AnglE-BERT trained on STS-B": {
        name: {"stsb": value}
        for name, value in (
            ("all terms", 86.26),
            ("without in-batch", 86.00),
            ("without angle", 85.30),
            ("only cosine", 85.28),
            ("only angle", 85.15),
            ("only in-batch", 72.48),
        )
    },
    "poolings, AnglE-BERT trained on STS-B": {
        name: {"stsb": value}
        for name, value in (
            ("cls", 86.26),
            ("cls-last-avg", 85.81),
            ("last-avg", 84.15),
            ("first-last-avg", 81.99),
            ("last-max", 79.76),
        )
    },
    "pairs written by a language model": {
        name: {"stsb": value}
        for name, value in (("ensemble", 82.01), ("ChatGPT", 81.52), ("ChatGLM", 81.11), ("LLaMA2-7B", 79.29))
    },
    "flickr30k captions, strict accuracy": {
        "AnglE": {"flickr30k": 12.9},
        "SimCSE": {"flickr30k": 10.4},
        "SBERT": {"flickr30k": 5.2},
    },
}
LOG = {  # docs/history/LOG-2026.md: the chosen settings on STS-B, and the demo
    "nli_2048": (
        "in-batch",
        "in-batch, 2,048 NLI triples",
        {
            "42": {"stsb-dev": 83.80, "stsb": 80.98},
            "1": {"stsb-dev": 84.24, "stsb": 81.06},
            "2": {"stsb-dev": 84.06, "stsb": 80.21},
        },
    ),
    "starter": (
        "demo",
        "the demo, 1,024 starter triples",
        {
            "42": {"starter": 78.29, "stsb": 74.34},
            "1": {"starter": 79.67, "stsb": 75.59},
            "2": {"starter": 78.94, "stsb": 75.38},
        },
    ),
}


def interval(ends: list[float] | None) -> Interval | None:
    return None if ends is None else Interval(*ends)


def sts(values: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for name, task in values["tasks"].items():
        common = {"text": task["variant"], "n": task["pairs"]}
        found.append(measurement("sts", name, "spearman", task["spearman"], interval(task["interval"]), **common))
        found.append(measurement("sts", name, "pearson", task["pearson"], **common))
        for metric, key in (("mean", "subtask_mean"), ("weighted mean", "subtask_weighted")):
            if task[key] is not None:
                found.append(measurement("sts", name, f"spearman, {metric} of subtasks", task[key], **common))
    for name, density in values["density"].items():
        edges, centres = density["gold_edges"], np.array(density["cosine_edges"][:-1]) + 0.0125
        for low, high, counts in zip(edges, edges[1:], density["counts"], strict=False):
            if sum(counts):
                cumulative = np.cumsum(counts) / sum(counts)
                ends = np.interp([0.25, 0.75], cumulative, np.array(density["cosine_edges"][1:]))
                mean, metric = float(np.average(centres, weights=counts)), f"cosine at score {low:g} to {high:g}"
                found.append(measurement("sts", name, metric, mean, Interval(*map(float, ends)), n=sum(counts)))
    average = values["average"]
    if average and len(average["tasks"]) > 1:
        ends = interval(average["interval"])
        found.append(measurement("sts", "average", "spearman", average["spearman"], ends, n=len(average["tasks"])))
    return found


def saturation(values: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for name, shares in {"pairs": values["pairs"], **values["terms"]}.items():
        for (low, high), share in zip(pairwise(values["edges"]), shares, strict=True):
            found.append(measurement("saturation", name, f"% at cosine {low:g} to {high:g}", 100 * share))
        found.append(measurement("saturation", name, "% at |cosine| >= 0.9", 100 * values["saturated"][name]))
    return found


def transfer(values: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for name, task in values["tasks"].items():
        n = task["rows"].get("test", task["rows"].get("all"))
        found.append(measurement("transfer", name, "accuracy", task["accuracy"], interval(task["interval"]), n=n))
        for metric in ("f1", "majority", "repeated", "dropped", "unconverged"):
            if task[metric] is not None:
                found.append(measurement("transfer", name, metric, task[metric]))
        found += [measurement("transfer", name, f"rows {split}", rows) for split, rows in task["rows"].items()]
        chosen = task["chosen"] if isinstance(task["chosen"], list) else [task["chosen"]]
        found += [measurement("transfer", name, f"C of fold {i}", c) for i, c in enumerate(chosen, 1)]
    return [*found, measurement("transfer", "average", "accuracy", values["average"], n=len(values["tasks"]))]


def retrieval(values: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for name, task in values["tasks"].items():
        for metric, figure in task["figures"].items():
            ends = interval(figure["interval"])
            found.append(measurement("retrieval", name, metric, figure["value"], ends, n=task["queries"]))
        found.append(measurement("retrieval", name, "candidates", task["candidates"]))
    return found


def nested(values: dict[str, Any]) -> list[dict[str, Any]]:
    task = "+".join(values["asked"]["tasks"])
    return [
        measurement("nested", task, f"spearman, {layers} layers, {dimensions} dimensions", value)
        for layers, row in zip(values["layers"], values["spearman"], strict=True)
        for dimensions, value in zip(values["dimensions"], row, strict=True)
    ]


KINDS = {"sts": sts, "saturation": saturation, "transfer": transfer, "retrieval": retrieval, "nested": nested}


def grids(old: Path, runs: dict[tuple[str, ...], dict[str, str]], found: list[dict[str, Any]]) -> None:
    for path in sorted(Path("recipes/grids").glob("*.yaml")):
        grid = load_grid(path)
        for one in experiments(grid, Path("DATA")):
            file = old / grid.name / f"{one.name}.json"
            if not file.is_file():
                continue
            result = json.loads(file.read_text())
            key = dict(zip(("grid", "row", "seed"), one.key, strict=True))
            versions = result["versions"]
            of_package, _, commit = versions.pop("angle_llm").partition(" at ")
            versions = {"angle_llm": of_package, **versions}
            runs[one.key] = key | {
                "label": one.label,
                "date": result["date"],
                "commit": commit,
                "machine": result["machine"],
                "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
                "command": COMMAND.format(grid.name, one.row) + ("" if one.seed is None else f" --seeds {one.seed}"),
                "settings": flow(one.given),
                "measures": flow(asked(one.measures)),
            }
            facts = result["train"] or {}
            found += [key | measurement("training", "", name.replace("_", " "), value) for name, value in facts.items()]
            for kind, values in result["measures"].items():
                found += [key | each for each in KINDS[kind](values)]
        compared = old / grid.name / "comparisons.json"
        if compared.is_file():
            comparisons = json.loads(compared.read_text())
            for row, of_row in comparisons["rows"].items():
                for seed, of_seed in of_row["per_seed"].items():
                    key = {"grid": grid.name, "row": row, "seed": "" if seed == "none" else seed}
                    key |= {"reference": of_row.get("reference", comparisons["reference"])}
                    figure, tasks = of_row["figure"], dict(of_seed["tasks"])
                    averaged = [t for t in ("sts12", "sts14", "sts15", "stsb", "sickr") if t in tasks]
                    if figure == "average" and len(averaged) > 1:
                        tasks["average"] = of_seed["difference"]
                    elif figure == "average":
                        figure = averaged[0]
                    for task, value in tasks.items():
                        more, ends = {}, None
                        if task == figure:
                            ends, more = interval(of_seed["interval"]), {"p": of_seed["p_value"]}
                        if task == "average":
                            more["n"] = len(averaged)
                        found.append(key | measurement("difference", task, "spearman", value, ends, **more))


def speed(old: Path, runs: dict[tuple[str, ...], dict[str, str]], found: list[dict[str, Any]]) -> None:
    commands = {
        "encode": "--encode --peers angle-emb sentence-transformers --dtype float32 --repetitions 1 --data-dir DATA",
        "train-64": "--train --peers angle-emb sentence-transformers --dtype float32 --max-length 256 --batch 64 --steps 2 "
        "--repetitions 1 --data nli_triplets.jsonl.gz",
        "train": "--train --peers angle-emb sentence-transformers --dtype float32 bfloat16 --max-length 50 256 --batch 16 "
        "--steps 3 --repetitions 3 --data nli_triplets.jsonl.gz",
    }
    for name, flags in commands.items():
        report = json.loads((old / f"speed-{name}.json").read_text())
        machine = report["machine"]
        for scenario in report["scenarios"]:
            for library, repetitions in scenario["runs"].items():
                for number, of in enumerate(repetitions, 1):
                    key = {"grid": f"speed-{name}", "row": library, "seed": str(number)}
                    packages = report["packages"].get(library, {})
                    runs[tuple(key.values())] = key | {
                        "label": library,
                        "date": report["finished"][:10],
                        "machine": f"{machine['cores']} cores, {machine['processor']}, {machine['system']}",
                        "versions": ", ".join(f"{k} {v}" for k, v in packages.items()),
                        "command": f"python eval/speed.py {flags}",
                        "settings": "{}",
                        "measures": "{}",
                    }
                    task, n = scenario["title"], scenario["units"]
                    note = {"note": of["problem"]} if of["problem"] else {}
                    found.append(key | measurement("speed", task, "seconds", of["seconds"], n=n, **note))
                    if of["peak_bytes"] is not None:
                        found.append(key | measurement("speed", task, "peak GiB", of["peak_bytes"] / 2**30))
                    if of["cosine_min"] is not None:
                        found.append(key | measurement("speed", task, "smallest cosine", of["cosine_min"]))


def others(old: Path, runs: dict[tuple[str, ...], dict[str, str]], found: list[dict[str, Any]]) -> None:
    def run(grid: str, row: str, seed: str, label: str, command: str, date: str = "2026-11-22") -> dict[str, str]:
        key = {"grid": grid, "row": row, "seed": seed}
        runs[tuple(key.values())] = key | {
            "label": label,
            "date": date,
            "command": command,
            "settings": "{}",
            "measures": "{}",
        }
        return key

    for name, of in json.loads((old / "lengths.json").read_text())["sets"].items():
        key = run("lengths", name, "", name, "python eval/lengths.py --data-dir DATA (removed)")
        found.append(key | measurement("lengths", "", "mean", of["mean"], n=of["texts"]))
        for share, value in of["quantiles"].items():
            found.append(key | measurement("lengths", "", f"{100 * float(share):g} %", value, n=of["texts"]))
    for grid, (row, label, seeds) in LOG.items():
        for seed, tasks in seeds.items():
            key = run(grid, row, seed, label, "docs/history/LOG-2026.md", "2026-11-21")
            found += [key | measurement("sts", task, "spearman", value, text="raw") for task, value in tasks.items()]
    for paper in PUBLISHED:
        key = run("published", paper.model, "", paper.model, "model cards and papers: AnglE, PromptEOL, SimCSE", "")
        tasks = {**paper.scores, "average": paper.average}
        found += [key | measurement("published", t, "spearman", v, text="senteval") for t, v in tasks.items()]
    for frozen in PUBLISHED_TRANSFER:
        key = run(
            "published",
            f"transfer: {frozen.model}",
            "",
            frozen.model,
            "Gao et al., SimCSE (2021), table of transfer tasks",
            "",
        )
        tasks = {**frozen.scores, "average of seven": frozen.average}
        found += [key | measurement("published", t, "accuracy", v, text="senteval") for t, v in tasks.items()]
    for table, models in PUBLISHED_OTHER.items():
        for model, tasks in models.items():
            key = run("published", f"{table}: {model}", "", model, SOURCE, "")
            metric = "strict accuracy" if "flickr30k" in tasks else "spearman"
            found += [key | measurement("published", task, metric, value) for task, value in tasks.items()]


if __name__ == "__main__":
    archive = subprocess.run(["git", "archive", "before-redesign", "docs/results"], capture_output=True, check=True)
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
        old = Path(folder) / "docs" / "results"
        runs: dict[tuple[str, ...], dict[str, str]] = {}
        found: list[dict[str, Any]] = []
        grids(old, runs, found)
        speed(old, runs, found)
        others(old, runs, found)
    results = Results(Path("docs/results.csv"))
    results._write([line_of(one) for one in found], list(runs.values()))
    print(f"{len(found)} measurements of {len(runs)} runs")
