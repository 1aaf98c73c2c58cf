"""Polite HTTP, against a server on this machine."""

import gzip
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path

import pytest
from web_server import Asked, Reply, Server

import angle_llm.web
from angle_llm.web import Answer, Web, WebError, usual_wait

SECRET = "a-token-nobody-may-read"


def in_turn(*replies: Reply) -> Callable[[Asked], Reply]:
    """The replies one after the other, the last one for ever."""
    waiting = list(replies)
    return lambda asked: waiting.pop(0) if len(waiting) > 1 else waiting[0]


def quick(**named: object) -> Web:
    return Web(backoff=0.001, **named)  # type: ignore[arg-type]


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_a_busy_server_is_asked_again(status: int) -> None:
    with Server(in_turn(Reply({"message": "busy"}, status), Reply([1, "é"]))) as server:
        answer = quick().get(server.url, {"q": "a b"})
        assert (answer.status, answer.body) == (200, [1, "é"])
        assert [asked.query for asked in server.asked] == [{"q": "a b"}] * 2


@pytest.mark.parametrize(
    "broken",
    [
        Reply([1, 2, 3] * 9999, cut=100),
        Reply(b'{"a": [1, 2'),
        Reply(b"<html>"),
        Reply(b""),
        Reply(b"[" * 200_000),
        Reply(b"9" * 5000),
    ],
    ids=["cut", "half", "html", "empty", "deep", "a number of 5000 digits"],
)
def test_an_answer_that_is_not_whole_is_asked_for_again_and_then_told(broken: Reply) -> None:
    with Server(in_turn(broken, Reply({"ok": True}))) as server:
        assert quick().get(server.url).body == {"ok": True}
    with Server(in_turn(broken)) as server, pytest.raises(WebError, match=r"broke off|no JSON") as caught:
        quick(retries=2).get(server.url)
    assert len(server.asked) == 3
    assert caught.value.status == 0


def test_a_refusal_is_final_and_says_what_to_do() -> None:
    with Server(in_turn(Reply({"message": "Not Found"}, 404))) as server:
        with pytest.raises(WebError, match=r"/repos/x: status 404: .*Not Found.*check the name") as caught:
            quick().get(f"{server.url}/repos/x")
        assert len(server.asked) == 1
        assert caught.value.status == 404


def test_the_server_says_how_long_to_wait() -> None:
    with Server(in_turn(Reply({}, 429, {"Retry-After": "1"}), Reply({}))) as server:
        started = time.monotonic()
        quick().get(server.url)
        assert time.monotonic() - started >= 1.0


def test_retry_after_is_read_as_seconds_and_as_a_date() -> None:
    assert usual_wait(Answer(503, {"Retry-After": "17"}, None)) == 17
    later = usual_wait(Answer(429, {"Retry-After": formatdate(time.time() + 100, usegmt=True)}, None))
    assert later == pytest.approx(100, abs=2)  # the date is in whole seconds
    assert usual_wait(Answer(429, {"Retry-After": formatdate(time.time() - 100)}, None)) == 0
    assert usual_wait(Answer(429, {"Retry-After": "soon"}, None)) is None
    far = "Fri, 31 Dec 99999999999999999999 23:59:59 GMT"
    assert usual_wait(Answer(429, {"Retry-After": far}, None)) is None
    assert usual_wait(Answer(200, {"Retry-After": "17"}, None)) is None


def test_a_server_that_says_it_may_be_asked_at_once_is_not_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = list[float]()
    monkeypatch.setattr("angle_llm.web.time.sleep", waits.append)
    monkeypatch.setattr("angle_llm.web.random.uniform", lambda low, high: high)
    with Server(in_turn(Reply({}, 429, {"Retry-After": "0"}))) as server, pytest.raises(WebError, match="429"):
        Web(retries=3).get(server.url)
    assert [wait for wait in waits if wait] == [1.0, 2.0, 4.0]


def test_a_wait_of_days_is_given_up() -> None:
    with Server(in_turn(Reply({}, 429, {"Retry-After": "99999"}))) as server, pytest.raises(WebError, match="429"):
        quick().get(server.url)


def test_a_long_wait_is_told_before_it_begins() -> None:
    told = list[str]()

    def stop(words: str) -> None:
        told.append(words)
        raise KeyboardInterrupt

    with Server(in_turn(Reply({}, 403))) as server, pytest.raises(KeyboardInterrupt):
        quick(wait=lambda answer: 100.0 if answer.status == 403 else None, tell=stop).get(server.url)
    assert told[0].startswith("waiting 100 s, until ")


def test_a_server_that_is_not_there_and_one_that_does_not_answer_are_told() -> None:
    with Server(in_turn(Reply({}))) as gone:
        pass
    with pytest.raises(WebError, match="no connection"):
        quick(retries=1).get(gone.url)
    wake = threading.Event()

    def sleep(asked: Asked) -> Reply:
        wake.wait(5)
        return Reply({})

    with Server(sleep) as server:
        with pytest.raises(WebError, match=r"no answer in 0.2 s"):
            quick(retries=0, timeout=0.2).get(server.url)
        wake.set()
    with pytest.raises(WebError, match="cannot be asked"):
        quick().get("htps//nowhere")


def test_addresses_that_are_none_are_told() -> None:
    with pytest.raises(WebError, match=r"^http://\[bad: it cannot be asked"):
        quick().get("http://[bad?key=secret")
    with Server(in_turn(Reply({}, 302, {"Location": "http://[bad"}))) as server:
        with pytest.raises(WebError, match="it cannot be asked"):
            quick().get(server.url)
        assert len(server.asked) == 1


@contextmanager
def raw_server(talk: Callable[[socket.socket], None]) -> Iterator[tuple[str, list[int]]]:
    """Its address, and the connections it had: each request is read and `talk` answers, byte by byte if it likes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        came = list[int]()

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                    came.append(connection.fileno())
                    with connection:
                        connection.recv(65_536)
                        talk(connection)
                except OSError:
                    if listening.fileno() < 0:
                        return

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", came
        listening.shutdown(socket.SHUT_RDWR)


def drip(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    for _ in range(100):  # ten seconds
        connection.sendall(b" ")
        time.sleep(0.1)


def test_a_server_that_drips_does_not_hold_a_request_for_ever() -> None:
    with raw_server(drip) as (url, came):
        started = time.monotonic()
        with pytest.raises(WebError, match=r"not whole within 2 s"):
            quick(retries=0, timeout=0.2).get(url)
        assert 2 <= time.monotonic() - started < 6
        assert len(came) == 1


@pytest.mark.parametrize("packed", [False, True])
def test_an_answer_without_bound_is_given_up(monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    monkeypatch.setattr(angle_llm.web, "LARGEST", 100_000)
    body = b" " * 1_000_000
    headers = {"Content-Encoding": "gzip"} if packed else {}
    reply = Reply(gzip.compress(body) if packed else body, headers=headers)
    with Server(in_turn(reply)) as server:
        with pytest.raises(WebError, match="more than 100,000 bytes"):
            quick().get(server.url)
        assert len(server.asked) == 1
    with (
        Server(in_turn(Reply(body, 302, {"Location": "/there"}))) as server,
        pytest.raises(WebError, match="more than 100,000 bytes"),
    ):
        quick().get(server.url)


def test_a_packed_answer_is_unpacked_and_a_wrongly_packed_one_told() -> None:
    reply = Reply(gzip.compress(b'{"ok": 1}'), headers={"Content-Encoding": "gzip"})
    with Server(in_turn(reply)) as server:
        web = quick()
        assert [web.get(server.url).body for _ in range(3)] == [{"ok": 1}] * 3
    with Server(in_turn(Reply(b"no gzip", headers={"Content-Encoding": "gzip"}))) as server:
        with pytest.raises(WebError, match="cannot be unpacked"):
            quick(retries=1).get(server.url)
        assert len(server.asked) == 2


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl program, for a certificate")
def test_a_certificate_that_nobody_signed_is_told_as_that_and_at_once(tmp_path: Path) -> None:
    pem = tmp_path / "pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key", "-out", "pem", "-subj", "/CN=localhost"],
        cwd=tmp_path, check=True, capture_output=True,
    )  # fmt: skip
    secured = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secured.load_cert_chain(pem, tmp_path / "key")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        came = list[int]()

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                    came.append(connection.fileno())
                    secured.wrap_socket(connection, server_side=True).close()
                except OSError:
                    if listening.fileno() < 0:
                        return

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(WebError, match=r"its certificate is not trusted\. .*REQUESTS_CA_BUNDLE"):
            quick().get(f"https://localhost:{listening.getsockname()[1]}")
        listening.shutdown(socket.SHUT_RDWR)
    assert len(came) == 1


def test_a_server_on_this_machine_is_not_asked_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with Server(in_turn(Reply({"by": "proxy"}))) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        web = quick(headers={"Authorization": f"Bearer {SECRET}"})
        with Server(
            lambda asked: Reply({}, 302, {"Location": "/b"}) if asked.path == "/a" else Reply({"by": 1})
        ) as server:
            assert web.get(f"{server.url}/a").body == {"by": 1}
            assert web.post(server.url, {}).body == {"by": 1}
        assert proxy.asked == []
        assert web.get("http://elsewhere.example/").body == {"by": "proxy"}  # and others are


def test_post_sends_json_and_headers_and_goes_nowhere_else() -> None:
    with Server(in_turn(Reply({"id": 1}, 201))) as server:
        assert quick(headers={"X-A": "1"}).post(server.url, {"text": "é"}, {"X-B": "2"}).body == {"id": 1}
        (asked,) = server.asked
        assert (asked.body, asked.headers["x-a"], asked.headers["x-b"]) == (rb'{"text": "\u00e9"}', "1", "2")
        with (
            Server(in_turn(Reply({}, 307, {"Location": server.url}))) as other,
            pytest.raises(WebError, match="status 307"),
        ):
            quick().post(other.url, {"text": SECRET})
        assert len(server.asked) == 1


def test_304_comes_back_without_a_body() -> None:
    with Server(in_turn(Reply(status=304))) as server:
        answer = quick().get(server.url, headers={"If-None-Match": '"x"'})
    assert (answer.status, answer.body) == (304, None)


def test_secrets_stay_with_their_server_and_out_of_words() -> None:
    headers = {"Authorization": f"Bearer {SECRET}", "X-Api-Key": SECRET}
    with Server(in_turn(Reply({"fine": 1}))) as elsewhere:
        with Server(in_turn(Reply({}, 302, {"Location": elsewhere.url}))) as server:
            assert quick(headers=headers).get(server.url).body == {"fine": 1}
            assert server.asked[0].headers["authorization"] == f"Bearer {SECRET}"
        assert SECRET not in str(elsewhere.asked)
    with Server(lambda asked: Reply({"you said": asked.headers["authorization"]}, 401)) as server:
        web = quick(headers=headers)
        with pytest.raises(WebError, match=r"you said.*\*\*\*") as caught:
            web.get(server.url.replace("//", f"//me:{SECRET}@") + f"/x?key={SECRET}")
    assert SECRET not in str(caught.value) + repr(caught.value) + repr(web)


def test_a_password_file_does_not_replace_the_key(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password other\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    with Server(in_turn(Reply({}))) as server:
        quick(headers={"Authorization": "Bearer mine"}).get(server.url)
    assert server.asked[0].headers["authorization"] == "Bearer mine"


def test_requests_of_several_threads_are_spaced() -> None:
    with Server(in_turn(Reply({}))) as server:
        web = quick(per_minute=600)
        started = time.monotonic()
        threads = [threading.Thread(target=web.get, args=(server.url,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert time.monotonic() - started >= 0.3  # four turns, three gaps of a tenth of a second
        assert len(server.asked) == web.requests == 4
