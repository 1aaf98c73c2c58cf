"""`verify --server` accepts a server of the encoder, and names the mistake of each wrong server."""

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import save_tiny_adapter, save_tiny_base
from tiny_tokenizers import TOKENIZERS

from angle_llm import PromptTemplate, SentenceEncoder, cli, load_prompt
from angle_llm.export.comparison import Verification
from angle_llm.export.merge import merge
from angle_llm.export.sentence_transformers import export_sentence_transformers
from angle_llm.export.texts import SENTENCES
from angle_llm.export.verify import VerifyOptions, verify
from angle_llm.prompts import SidePrompts
from angle_llm.serve.client import ServerError, ServerModel
from angle_llm.settings.parsing import SettingsError
from angle_llm.settings.serve import ServeSettings

for name in ("fastapi", "prometheus_client", "uvicorn"):
    pytest.importorskip(name)
FastAPI, Response = (getattr(importlib.import_module("fastapi"), name) for name in ("FastAPI", "Response"))
make_app = importlib.import_module("angle_llm.serve.app").make_app
served, transformers_app = (getattr(importlib.import_module("served"), name) for name in ("served", "transformers_app"))
PROMPT = load_prompt("summarize_one_word")
TEXTS = [*SENTENCES[:9], *SENTENCES[18:21], SENTENCES[-3], SENTENCES[-2]]
"""Twelve short texts and two that are longer than the maximum length."""
USAGE: dict[str, Any] = {"prompt": SidePrompts(PROMPT, PROMPT), "pooling": "last", "max_length": 100}
TWO = SidePrompts(PromptTemplate("ask", "Question: {text}"), PromptTemplate("answer", "Answer: {text} ->"))


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base/, adapter/ on it with one prompt, merged/ of it; two/ with two prompts."""
    folder = tmp_path_factory.mktemp("forms")
    base = save_tiny_base("llama", folder / "base")
    save_tiny_adapter(base, folder / "adapter", max_length=100)
    merge(folder / "adapter", folder / "merged", check=False)
    save_tiny_adapter(base, folder / "two", prompt=TWO, max_length=100)
    return folder


def opened(folder: Path, **options: Any) -> SentenceEncoder:
    return SentenceEncoder.from_pretrained(folder, device="cpu", **options)


def app_of(encoder: SentenceEncoder) -> Any:
    return make_app(encoder, ServeSettings(model="runs/tiny"))


def checked(run: Path, app: Any, path: str = "", **options: Any) -> Verification:
    with served(app) as url:
        return verify([run, url + path], VerifyOptions(device="cpu", **options))


@pytest.mark.parametrize(("run", "path"), [("adapter", "/v1/embeddings"), ("two", ""), ("two", "/embed")])
def test_the_right_server_passes_over_both_protocols(run: str, path: str, forms: Path) -> None:
    found = checked(forms / run, app_of(opened(forms / run)), path)
    assert found.holds, found.text()
    assert found.comparisons[0].largest_difference < 1e-9
    assert found.base_difference is not None
    assert found.base_difference > 0.01


def normalised(folder: Path) -> SentenceEncoder:
    encoder = opened(folder)
    return encoder.changed(model=encoder.model.changed(normalize=True))


def swapped(folder: Path) -> SentenceEncoder:
    return opened(folder).with_prompt(SidePrompts(TWO.document, TWO.query))


WRONG: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "prompt dropped": ("adapter", lambda f: app_of(opened(f / "merged", prompt="plain")), "the prompt is dropped"),
    "prompt twice": (
        "adapter",
        lambda f: app_of(opened(f / "merged", prompt=replace(PROMPT, template=PROMPT.format(PROMPT.template)))),
        "added twice",
    ),
    "other side": ("two", lambda f: app_of(swapped(f / "two")), "prompt of the other side"),
    "one side for both": (
        "two",
        lambda f: app_of(opened(f / "two").with_prompt(TWO.query)),
        "prompt of the other side",
    ),
    "mean pooling": ("adapter", lambda f: app_of(opened(f / "merged", pooling="mean")), "pooling mean"),
    "mean pooling without the prompt": (
        "adapter",
        lambda f: app_of(opened(f / "merged", prompt="plain", pooling="mean")),
        "the prompt is dropped, and pooling mean, expected last",
    ),
    "max pooling": ("adapter", lambda f: app_of(opened(f / "merged", pooling="max")), "pooling max"),
    "bare base": (
        "adapter",
        lambda f: app_of(opened(f / "base", max_length=100, prompt=PROMPT)),
        "the bare base is served, without the training",
    ),
    "shorter texts": ("adapter", lambda f: app_of(opened(f / "merged", max_length=64)), "truncated to 64 tokens, exp"),
    "normalised": ("adapter", lambda f: app_of(normalised(f / "merged")), "normalize True, expected False"),
    "wrong order": (
        "adapter",
        lambda f: transformers_app(f / "merged", PROMPT, order=lambda rows: rows[::-1]),
        "right vector alone",
    ),
    "padding": ("adapter", lambda f: transformers_app(f / "merged", PROMPT, masked=False), "right vector alone"),
}


QUICK = ("prompt dropped", "other side", "bare base", "shorter texts", "wrong order")
BY_TIME = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in WRONG]


@pytest.mark.parametrize("mistake", BY_TIME)
def test_the_mistake_of_a_wrong_server_is_named(mistake: str, forms: Path) -> None:
    run, make, named = WRONG[mistake]
    found = checked(forms / run, make(forms), texts=TEXTS)
    assert not found.holds
    print(found.text())
    assert named in "\n".join(found.problems)


def run_verify(*words: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        cli.run(["verify", *map(str, words)])
    return ended.value.code, capsys.readouterr().out


def test_without_a_base_the_exit_code_is_3_and_with_one_0(
    forms: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder = opened(forms / "merged")
    encoder.save_pretrained(tmp_path / "whole")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS[:4]))
    with served(app_of(encoder)) as url:
        words = [tmp_path / "whole", "--server", url, "--texts", tmp_path / "texts.txt"]
        code, shown = run_verify(*words, capsys=capsys)
        assert (code, "whether the model was trained is not checked" in shown) == (3, True)
        code, shown = run_verify(*words, "--base", forms / "base", capsys=capsys)
        assert (code, "whether the model was trained is not checked" in shown) == (0, False)
        code, shown = run_verify(*words, "--base", forms / "merged", capsys=capsys)
        assert (code, "it was not trained" in shown) == (1, True)


def test_a_prompt_can_be_sent_and_a_long_text_truncated_by_request(forms: Path) -> None:
    """A server without the prompt, which refuses long texts unless the request truncates them, as vLLM does."""
    plain = make_app(opened(forms / "merged", prompt="plain"), ServeSettings(model="tiny", max_characters=400))
    found = checked(forms / "adapter", plain, server={"send_prompt": True}, texts=TEXTS[:6])
    assert found.holds, found.text()
    with pytest.raises(ServerError, match="413"):
        checked(forms / "adapter", plain, texts=TEXTS)


def test_no_text_with_names_of_added_tokens_is_skipped(tmp_path: Path) -> None:
    base = save_tiny_base("llama", tmp_path / "base")
    TOKENIZERS["gemma"]().save_pretrained(base)
    save_tiny_adapter(base, tmp_path / "adapter", max_length=100)
    export_sentence_transformers(tmp_path / "adapter", tmp_path / "exported", check=False)
    found = checked(tmp_path / "adapter", transformers_app(tmp_path / "exported", load_prompt("plain")))
    assert found.holds, found.text()
    assert (found.texts, found.notes) == (len(SENTENCES), ())


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([[1.0, float("nan")]] * 14, "finite"),
        ([[1.0, 2.0]], "expected 14 finite vectors"),
        ([[1.0], [1.0, 2.0]] * 7, "expected 14"),
        ({"error": "no"}, "expected 14"),
        ("text", "expected 14"),
    ],
)
def test_an_answer_without_a_vector_for_each_text_is_an_error(answer: Any, message: str) -> None:
    app = FastAPI()

    @app.post("/embed")
    def embed(body: dict[str, Any]) -> Response:
        return Response(json.dumps([[1.0, 2.0]] if len(body["inputs"]) == 1 else answer))

    with served(app) as url, pytest.raises(ServerError, match=message):
        ServerModel(url, **USAGE).encode(TEXTS)


@pytest.mark.parametrize("indexes", [[7] * 14, [*range(1, 15)], [0, *range(13)]])
def test_a_missing_or_repeated_index_is_an_error(indexes: list[int]) -> None:
    app = FastAPI()

    @app.post("/v1/embeddings")
    def embeddings(body: dict[str, Any]) -> Any:
        numbers = [0] if len(body["input"]) == 1 else indexes
        return {"data": [{"index": number, "embedding": [1.0, 2.0]} for number in numbers]}

    with served(app) as url:
        model = ServerModel(f"{url}/v1/embeddings", **USAGE)
        with pytest.raises(ServerError, match="an index that is missing or repeated"):
            model.encode(TEXTS)


@pytest.mark.parametrize("names", [{"object": "list"}, {"models": []}, {"data": None}, {"data": [{}]}, []])
def test_a_server_without_names_of_models_is_used_as_tei(names: Any) -> None:
    app = FastAPI()

    @app.get("/v1/models")
    def models() -> Any:
        return names

    @app.post("/embed")
    def embed(body: dict[str, Any]) -> Any:
        return [[1.0, 2.0]] * len(body["inputs"])

    with served(app) as url:
        assert ServerModel(url, **USAGE).encode(TEXTS).shape == (len(TEXTS), 2)


@pytest.mark.parametrize("url", ["http://localhost:80a", "http://[::1"])
def test_a_malformed_url_is_an_error_of_the_settings(url: str) -> None:
    with pytest.raises(SettingsError, match="--server: expected a URL, got 'http"):
        ServerModel(url, **USAGE)
