"""`angle-llm data generate` over real sockets: what it asks, pays, writes and keeps to itself."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_server import SENTENCES, ChatServer, Refusal, chat_server, usual
from programs import run

from angle_llm.config import DataSource, SettingsError
from angle_llm.data import DataError
from angle_llm.data.sources import load_examples
from angle_llm.generation.asking import GenerationError
from angle_llm.generation.budget import Prices
from angle_llm.generation.command import GenerateSettings, generate_main
from angle_llm.generation.server import TokenRate

KEY = "sk-a-secret-that-is-never-told"


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as server:
        yield server


@pytest.fixture
def sentences(tmp_path: Path) -> Path:
    path = tmp_path / "sentences.txt"
    path.write_text("\n".join(SENTENCES) + "\n")
    return path


def settings_for(server: ChatServer, sentences: Path, **changed: Any) -> GenerateSettings:
    values: dict[str, Any] = {
        "generator": (server.address,),
        "out": sentences.parent / "pairs.jsonl",
        "size": 2,
        "retries": 2,
    }
    return GenerateSettings(sentences=sentences, **values | changed)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def report_of(settings: GenerateSettings) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(settings.beside(".report.json").read_text())
    return report


def test_pairs_are_what_training_reads(server: ChatServer, sentences: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = settings_for(server, sentences)
    assert generate_main(settings)
    assert len(server.bodies) == 12
    rows = rows_of(settings.out)
    assert len(rows) == 24
    assert [row["row"] for row in rows] == [n for n in range(6) for _ in range(4)]
    assert {row["side"]: row["score"] for row in rows} == {"synonym": 1, "antonym": 0}
    assert len(load_examples(DataSource(path=str(settings.out))).examples) == 24
    assert "12 requests = 12 answered + 0 failed + 0 unasked" in capsys.readouterr().out
    report = report_of(settings)
    for one in report["account"]:
        assert one["lines"] == one["kept"] + sum(one["left_out"].values()) == 18


def test_what_is_asked_is_an_openai_chat_completion(server: ChatServer, sentences: Path) -> None:
    generate_main(
        settings_for(server, sentences, limit=1, body={"top_p": "null", "chat_template_kwargs": "{thinking: false}"})
    )
    body = server.bodies[0]
    assert body["model"] == "tiny"
    assert body["messages"][0]["content"].endswith("Input sentence: A man is eating a piece of bread. Output:")
    assert (body["max_tokens"], body["temperature"], body["chat_template_kwargs"]) == (128, 0.7, {"thinking": False})
    assert "top_p" not in body
    assert server.bodies[0]["seed"] != server.bodies[1]["seed"]


def test_a_finished_command_asks_nobody_and_writes_the_same(server: ChatServer, sentences: Path) -> None:
    settings = settings_for(server, sentences)
    generate_main(settings)
    before = settings.out.read_bytes(), settings.beside(".report.json").read_bytes()
    generate_main(settings)
    assert len(server.bodies) == 12
    assert (settings.out.read_bytes(), settings.beside(".report.json").read_bytes()) == before


def test_filters_are_changed_without_asking_again(server: ChatServer, sentences: Path) -> None:
    settings = settings_for(server, sentences)
    generate_main(settings)
    generate_main(replace(settings, limits=replace(settings.limits, longest=35)))
    assert len(server.bodies) == 12
    assert 0 < len(rows_of(settings.out)) < 24


def test_other_sampling_asks_anew_and_keeps_the_old_answers(server: ChatServer, sentences: Path) -> None:
    settings = settings_for(server, sentences)
    generate_main(settings)
    generate_main(replace(settings, sampling=replace(settings.sampling, temperature=0.2)))
    assert len(server.bodies) == 24
    generate_main(settings)
    assert len(server.bodies) == 24


def test_concurrency_changes_no_byte(sentences: Path, tmp_path: Path) -> None:
    written = []
    with chat_server(seconds=0.02) as server:
        for count in (1, 8):
            folder = tmp_path / str(count)
            folder.mkdir()
            settings = settings_for(server, sentences, concurrency=count, out=folder / "pairs.jsonl")
            generate_main(settings)
            written.append((settings.out.read_bytes(), settings.beside(".report.json").read_bytes()))
        assert server.most_at_once > 4
    assert written[0] == written[1]


def test_killed_anywhere_it_goes_on_and_asks_for_nothing_twice(sentences: Path, server: ChatServer) -> None:
    sentences.write_text("".join(f"{number} men walk along the long road.\n" for number in range(40)))
    settings = settings_for(server, sentences)
    command = [sys.executable, "-m", "angle_llm.cli", "data", "generate", str(sentences)]
    command += ["--generator", server.address, "--out", str(settings.out), "--size", "2", "--concurrency", "4"]
    server.seconds = 0.03
    for wanted in (10, 40):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while len(server.bodies) < wanted:
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(0.1)  # what was on its way is answered to nobody
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    # Each kill may lose what was on its way: 4 requests.
    assert sum(count - 1 for count in server.messages.values()) <= 8
    assert len(server.messages) == 80

    alone = replace(settings, out=settings.out.with_name("alone.jsonl"))
    generate_main(alone)
    assert alone.out.read_bytes() == settings.out.read_bytes()


def test_what_the_journal_holds_is_never_asked_for_again(sentences: Path, server: ChatServer) -> None:
    settings = settings_for(server, sentences)
    generate_main(settings)
    journal = settings.beside(".journal.jsonl")
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:7]) + lines[7][:30])
    generate_main(settings)
    assert len(server.bodies) == 12 + 5


def test_a_busy_server_is_left_alone_for_as_long_as_it_says(sentences: Path) -> None:
    def rule(message: str, times: int) -> str | Refusal:
        return Refusal(429, {"Retry-After": "1"}) if times == 0 else usual(message, times)

    with chat_server(rule) as server:
        assert generate_main(settings_for(server, sentences, limit=1, sides=("synonym",)))
    assert server.times[1] - server.times[0] >= 1.0


def test_a_server_that_breaks_is_asked_again_and_what_stays_broken_is_told(
    sentences: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rule(message: str, times: int) -> str | Refusal:
        broken = "Two dogs" in message or times == 0
        return Refusal(500, words="out of order") if broken else usual(message, times)

    with chat_server(rule) as server:
        settings = settings_for(server, sentences, retries=1, limit=3)
        assert not generate_main(settings)
        assert report_of(settings)["requests"] == {"total": 6, "answered": 4, "failed": 2, "unasked": 0}
        assert "out of order" in capsys.readouterr().out
        assert {row["row"] for row in rows_of(settings.out)} == {0, 2}
        asked = len(server.bodies)
        server.rule = usual
        assert generate_main(settings)  # asks for the two alone
        assert len(server.bodies) == asked + 2


def test_a_server_that_fails_again_and_again_ends_it(sentences: Path) -> None:
    with (
        chat_server(lambda message, times: Refusal(500)) as server,
        pytest.raises(GenerationError, match="failed 3 times in a row"),
    ):
        generate_main(settings_for(server, sentences, retries=0, concurrency=1, max_failures=3))
    assert len(server.bodies) == 3


@pytest.mark.parametrize("said", ["{}", '{"choices": []}', '{"choices": [{"message": {"content": null}}]}', "[1]"])
def test_an_answer_that_is_no_completion_is_a_failure(
    said: str, sentences: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from angle_llm.web import Answer, Web

    with chat_server() as server:
        monkeypatch.setattr(Web, "post", lambda *_: Answer(200, {}, json.loads(said)))
        settings = settings_for(server, sentences, limit=1)
        assert not generate_main(settings)
    assert "something else than a chat completion" in next(iter(report_of(settings)["failures"]))


def test_the_key_is_in_no_file_output_or_error(
    sentences: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def rule(message: str, times: int) -> str | Refusal:
        if "Two dogs" in message:
            return Refusal(400, words=f"the key was {KEY} and {KEY}")
        return f"1. My {message[27:31]} key is Bearer {KEY} and bread."  # same, oppo

    monkeypatch.setenv("MY_KEY", KEY)
    with chat_server(rule) as server:
        settings = settings_for(server, sentences, api_key_variable="MY_KEY")
        assert not generate_main(settings)
        server.rule = lambda message, times: Refusal(401, words=f"wrong key: {KEY}")
        with pytest.raises(GenerationError) as refused:
            generate_main(replace(settings, seed=1))
        assert server.keys == {f"Bearer {KEY}"}
    told = capfd.readouterr()
    assert "***" in settings.out.read_text()
    assert "environment variable" in str(refused.value)
    for text in (told.out, told.err, str(refused.value), *(path.read_text() for path in sentences.parent.iterdir())):
        assert KEY not in text


def test_a_short_key_is_no_secret_and_stays_in_sentences(
    sentences: Path, server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers on one's own machine take any key: people give them `a`, or `none`."""
    settings = settings_for(server, sentences)
    generate_main(settings)
    without = settings.out.read_bytes()
    settings.beside(".journal.jsonl").unlink()
    settings.out.unlink()
    monkeypatch.setenv("OPENAI_API_KEY", " a\n")
    generate_main(settings)
    assert settings.out.read_bytes() == without
    assert server.keys == {None, "Bearer a"}


def test_one_key_is_not_given_to_two_hosts(
    sentences: Path, server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = ("https://one.invalid/v1#a", "https://two.invalid/v1#b")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with pytest.raises(SettingsError, match=r"OPENAI_API_KEY would go to all of one\.invalid, two\.invalid") as told:
        generate_main(settings_for(server, sentences, generator=two))
    assert KEY not in str(told.value)


def test_pairs_are_not_written_among_the_sentences(sentences: Path, server: ChatServer) -> None:
    """Run again, the command would read its own pairs and journal."""
    with pytest.raises(SettingsError, match="whose files are read"):
        settings_for(server, sentences.parent, out=sentences.parent / "pairs.jsonl")
    assert settings_for(server, sentences).out.parent == sentences.parent


def test_a_judge_that_is_not_there_is_told_before_anything_is_asked(sentences: Path, server: ChatServer) -> None:
    settings = settings_for(
        server, sentences, judge=str(sentences.parent / "nowhere"), judge_min={"synonym": 0.5}, device="cpu"
    )
    with pytest.raises(FileNotFoundError, match="nowhere"):
        generate_main(settings)
    assert not server.bodies


def test_a_limit_in_the_body_is_what_the_budget_fears(sentences: Path, server: ChatServer) -> None:
    priced: dict[str, Any] = {"prices": Prices(new=1.0), "max_cost": 0.001}
    generate_main(settings_for(server, sentences, **priced, body={"max_completion_tokens": "1001"}))
    assert not server.bodies
    generate_main(settings_for(server, sentences, **priced, body={"max_completion_tokens": "500", "n": "3"}))
    assert not server.bodies
    generate_main(
        settings_for(server, sentences, **priced, body={"max_completion_tokens": "500", "max_tokens": "null"})
    )
    assert server.bodies
    with pytest.raises(SettingsError, match="--max-cost needs a limit to an answer's tokens"):
        settings_for(server, sentences, **priced, body={"max_tokens": "null"})


def test_an_answer_without_content_is_paid_for(sentences: Path) -> None:
    """So does a model that spends all its tokens on thoughts."""
    with chat_server(lambda message, times: None) as server:  # type: ignore[arg-type,return-value]
        settings = settings_for(server, sentences, concurrency=1, prices=Prices(new=1e6), max_cost=200.0)
        assert not generate_main(settings)
        assert len(server.bodies) == 4, "20 tokens each, and 128 feared: 60 + 128 is within 200, 80 + 128 is not"


def test_a_key_is_not_sent_in_the_clear_to_another_machine(sentences: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from angle_llm.generation.generators import Sampling
    from angle_llm.generation.server import ChatServer as Asked
    from angle_llm.web import Web

    sends = {
        name: Asked(f"{name}/v1#m", Sampling(), Web(), key=KEY).sends_key
        for name in (
            "https://far.example",
            "http://far.example",
            "http://127.0.0.1:1",
            "http://localhost:1",
            "http://[::1]:1",
        )
    }
    assert [name for name, sent in sends.items() if not sent] == ["http://far.example"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("http://127.0.0.1:1/v1", "is no server"),
        ("127.0.0.1:1/v1#m", "is no server"),
        ("ftp://127.0.0.1/v1#m", "is no server"),
        ("http://me:secret@127.0.0.1/v1#m", "an address with a password"),
        ("http://127.0.0.1/v1?key=secret#m", "an address with a password"),
    ],
)
def test_an_address_that_cannot_be_meant_is_refused(name: str, words: str, sentences: Path, server: ChatServer) -> None:
    with pytest.raises(SettingsError, match=words) as refused:
        generate_main(settings_for(server, sentences, generator=(name,)))
    assert "secret" not in str(refused.value)


def test_the_budget_is_that_of_all_runs_together(sentences: Path, server: ChatServer) -> None:
    settings = settings_for(server, sentences, max_requests=5)
    assert not generate_main(settings)
    assert not generate_main(settings)
    assert len(server.bodies) == 5
    assert report_of(settings)["requests"] == {"total": 12, "answered": 5, "failed": 0, "unasked": 7}
    assert generate_main(replace(settings, max_requests=12))
    assert len(server.bodies) == 12


def test_the_cost_is_that_of_the_tokens_the_server_counted(sentences: Path, server: ChatServer) -> None:
    settings = settings_for(server, sentences, prices=Prices(read=2, new=10), max_cost=0.0032)
    assert not generate_main(settings)
    report = report_of(settings)
    # 100 tokens read and 20 written cost 0.0004; the worst request, of some 300 and 128, 0.0019.
    assert (report["requests"]["answered"], report["cost"]) == (4, 0.0016)


def test_several_generators_are_all_asked(sentences: Path, server: ChatServer) -> None:
    with chat_server(lambda message, times: usual(message, times).replace("Once", "Then")) as second:
        settings = settings_for(server, sentences, generator=(server.address, second.address))
        assert generate_main(settings)
        together = f"{server.address} + {second.address}"
        assert {row["generator"] for row in rows_of(settings.out)} == {server.address, second.address, together}
        generate_main(replace(settings, ensemble="agree"))
        assert {row["generator"] for row in rows_of(settings.out)} == {together}
        assert len(server.bodies) == len(second.bodies) == 12


def test_sentences_are_counted_row_by_row(tmp_path: Path, server: ChatServer) -> None:
    table = tmp_path / "rows.jsonl"
    texts = [*SENTENCES[:3], SENTENCES[0].upper(), " ", "Never mind the second one.", "A last sentence, beyond it."]
    table.write_text("".join(json.dumps({"said": text, "other": 1}) + "\n" for text in texts))
    settings = settings_for(server, table, column="said", limit=4, on_bad_row="skip")
    generate_main(settings)
    assert report_of(settings)["sources"] == {"rows": 7, "asked": 4, "repeated": 1, "bad": 1, "beyond_limit": 1}
    assert {row["row"] for row in rows_of(settings.out)} == {0, 1, 2, 5}
    with pytest.raises(DataError, match=r"rows.jsonl:5: said is empty"):
        generate_main(replace(settings, on_bad_row="error"))


def test_a_larger_limit_holds_the_sentences_of_a_smaller_one(sentences: Path, server: ChatServer) -> None:
    settings = settings_for(server, sentences, limit=3, shuffle_seed=1)
    generate_main(settings)
    first = {row["row"] for row in rows_of(settings.out)}
    generate_main(replace(settings, limit=5))
    assert len(server.bodies) == 10
    assert first < {row["row"] for row in rows_of(settings.out)}
    assert first != {0, 1, 2}


def test_a_file_that_was_not_made_here_is_left_alone(sentences: Path, server: ChatServer) -> None:
    settings = settings_for(server, sentences)
    settings.out.write_text("mine")
    with pytest.raises(SettingsError, match="was not made here"):
        generate_main(settings)
    assert settings.out.read_text() == "mine"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"generator": ()}, "a generator"),
        ({"generator": ("local:a", "local:a")}, "each --generator once"),
        ({"out": Path("pairs.csv")}, r"--out to end in \.jsonl"),
        ({"size": 0}, "--size must be at least 1, got 0"),
        ({"judge": "x"}, "--judge-min or --judge-max"),
        ({"judge_min": {"synonym": 0.5}}, "--judge for --judge-min"),
        ({"ensemble": "agree"}, "two generators or more"),
        ({"prompt": "papr"}, "Did you mean 'paper'"),
        ({"max_cost": 1.0}, "needs the prices"),
        ({"retries": -1}, "--retries must be 0 or more, got -1"),
        ({"prices": Prices(read=-1.0)}, r"--prices\.read must be 0 or more"),
        ({"requests_per_minute": 0.0}, r"--requests-per-minute must be above 0, got 0\.0"),
        ({"timeout": 0.0}, "--timeout must be above 0"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(changed: dict[str, Any], words: str, sentences: Path) -> None:
    with chat_server() as server, pytest.raises(SettingsError, match=words):
        generate_main(settings_for(server, sentences, **changed))


def test_tokens_a_minute_are_not_exceeded() -> None:
    rate = TokenRate(100, window=0.2)
    start = time.monotonic()
    for _ in range(5):
        rate.take(50)
    assert time.monotonic() - start >= 0.4  # two in each fifth of a second
    rate.take(1000)  # more than there ever is: it has a window of its own


def test_the_command_line_names_each_generator(sentences: Path, server: ChatServer) -> None:
    both = ["--generator", server.address, "--generator", server.address.replace("#tiny", "#other")]
    out = ["--out", sentences.parent / "p.jsonl"]
    done = run("angle-llm", "data", "generate", sentences, *out, *both, "--max-requests", "9")
    assert done.returncode == 1
    assert "generate:" in done.stderr.splitlines()[-1], "how far it came, and nothing else"
    assert "24 requests = 9 answered + 0 failed + 15 unasked" in done.stdout


def test_half_a_character_in_an_answer_stops_nothing(sentences: Path) -> None:
    with chat_server(
        lambda message, times: '["A man eats bread again \\ud83d", "Some bread is eaten\\nslowly"]'
    ) as server:
        settings = settings_for(server, sentences, limit=1, sides=("synonym",))
        assert generate_main(settings)
        assert [row["text2"] for row in rows_of(settings.out)] == [
            "A man eats bread again ?",
            "Some bread is eaten slowly",
        ]
