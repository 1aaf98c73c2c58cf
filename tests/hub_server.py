"""Local model hub: the part of the HTTP API that huggingface_hub uses to read, create and fill a repository.

Repositories are folders of bytes by commit, in memory. `Hub.requests` lists every request, so a test can check what was fetched.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

TOKEN = "hf_a_secret_that_is_never_told"
LFS_SUFFIXES = (".safetensors", ".bin", ".model")


@dataclass
class Repo:
    """Commits by name, the name of the newest, and visibility."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    head: str = ""
    messages: list[str] = field(default_factory=list)

    def commit(self, files: dict[str, bytes], message: str = "") -> str:
        self.head = hashlib.sha1(f"{len(self.commits)} {sorted(files)}".encode()).hexdigest()
        self.commits[self.head] = files
        self.messages.append(message)
        return self.head

    def at(self, revision: str) -> str | None:
        return self.head if revision == "main" else revision if revision in self.commits else None


class Hub:
    """A server that runs until the process ends."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.refuse_commits = False
        self.breaks_off = False
        handler = type("Bound", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def empty(self) -> None:
        """Remove all repositories and recorded requests."""
        self.repos.clear()
        self.blobs.clear()
        self.requests.clear()
        self.refuse_commits = self.breaks_off = False

    def put(self, repo: str, files: dict[str, bytes] | Path) -> str:
        """A commit of these files, or of those in a folder; returns its name."""
        if isinstance(files, Path):
            files = {
                path.relative_to(files).as_posix(): path.read_bytes() for path in files.rglob("*") if path.is_file()
            }
        return self.repos.setdefault(repo, Repo()).commit(files)

    def fetched(self) -> set[str]:
        """Names of the files whose content was sent since `requests` was cleared."""
        sent = [
            line.removesuffix(" -> 200")
            for line in self.requests
            if line.startswith("GET") and line.endswith(" -> 200")
        ]
        return {line.rpartition("/")[2] for line in sent if "/resolve/" in line}


@cache
def _the_hub() -> Hub:
    """One per process: libraries cache the address."""
    return Hub()


def open_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """An empty hub that replaces the real one in this process, with an empty cache and no login."""
    hub = _the_hub()
    hub.empty()
    for name, value in {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(folder),
        "HF_TOKEN_PATH": str(folder / "token"),
        "HF_STORED_TOKENS_PATH": str(folder / "tokens"),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,  # the storage that came after LFS, with a protocol of its own
    }.items():
        monkeypatch.setattr(constants, name, value)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return hub


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body after its headers would wait 40 ms for the acknowledgement of the headers

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "chunked" in (self.headers.get("Transfer-Encoding") or ""):
            body = self._chunks()
        for verbs, pattern, method in _ROUTES:
            match = re.fullmatch(pattern, path)
            if match and self.command in verbs.split():
                method(self, body, *match.groups())
                return
        self._send(404, {"error": f"no route {self.command} {path}"})

    def _chunks(self) -> bytes:
        content = b""
        while length := int(self.rfile.readline(), 16):
            content += self.rfile.read(length)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _send(self, status: int, content: Any = b"", **headers: str) -> None:
        self.hub.requests.append(f"{self.command} {unquote(self.path)} -> {status}")
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    @property
    def _known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repo(self, name: str) -> Repo | None:
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and not self._known):
            self._send(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            return None
        return repo

    def _commit(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        repo = self._repo(name)
        if repo is None:
            return None
        commit = repo.at(revision)
        if commit is None:
            self._send(404, {"error": "Revision not found"}, X_Error_Code="RevisionNotFound")
            return None
        return commit, repo.commits.get(commit, {})

    # --- requests ---------------------------------------------------------------------------------------------------------

    def whoami(self, body: bytes) -> None:
        if self._known:
            self._send(200, {"type": "user", "name": "user", "auth": {}})
        else:
            self._send(401, {"error": "Invalid credentials"})

    def info(self, body: bytes, name: str, revision: str = "main") -> None:
        found = self._commit(name, revision)
        if found is not None:
            commit, files = found
            card = files.get("README.md", b"").decode().partition("\nlicense: ")[2].partition("\n")[0]
            siblings = [{"rfilename": path} for path in files]
            self._send(200, {"id": name, "modelId": name, "sha": commit, "siblings": siblings, "private": False, "tags": [],
                "downloads": 0, "likes": 0, "cardData": {"license": card} if card else {}})  # fmt: skip

    def tree(self, body: bytes, name: str, revision: str) -> None:
        found = self._commit(name, revision)
        if found is not None:
            self._send(200, [{"type": "file", "path": path, "size": len(content), "oid": _oid(content)} | _lfs(path, content)
                for path, content in found[1].items()])  # fmt: skip

    def resolve(self, body: bytes, name: str, revision: str, path: str) -> None:
        found = self._commit(name, revision)
        if found is None:
            return
        commit, files = found
        if path not in files:
            self._send(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
            return
        etag = hashlib.sha256(files[path]).hexdigest() if path.endswith(LFS_SUFFIXES) else _oid(files[path])
        if self.hub.breaks_off and self.command == "GET":
            length = str(len(files[path]))
            self._send(200, files[path][:-1], ETag=f'"{etag}"', X_Repo_Commit=commit, Content_Length=length)
            self.close_connection = True
        else:
            self._send(200, files[path], ETag=f'"{etag}"', X_Repo_Commit=commit, Accept_Ranges="bytes")

    def create(self, body: bytes) -> None:
        values = json.loads(body)
        name = f"{values.get('organization') or 'user'}/{values['name']}"
        if not self._known or not name.startswith("user/"):
            self._send(403 if self._known else 401, {"error": "You don't have the rights to create a model there"})
            return
        self.hub.repos[name] = Repo(private=values.get("visibility") == "private" or bool(values.get("private")))
        self.hub.repos[name].commit({".gitattributes": b""}, "initial")
        self._send(200, {"url": f"{self.hub.url}/{name}", "id": name, "name": name})

    def check_yaml(self, body: bytes) -> None:
        self._send(200, {"errors": [], "warnings": []})

    def preupload(self, body: bytes, name: str, revision: str) -> None:
        files = json.loads(body)["files"]
        self._send(200, {"files": [{"path": file["path"], "shouldIgnore": False, "oid": None,
            "uploadMode": "lfs" if file["path"].endswith(LFS_SUFFIXES) else "regular"} for file in files]})  # fmt: skip

    def lfs_batch(self, body: bytes, name: str) -> None:
        objects = [
            {**item, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{item['oid']}", "header": {}}}}
            for item in json.loads(body)["objects"]
        ]
        self._send(200, {"transfer": "basic", "objects": objects})

    def lfs_blob(self, body: bytes, oid: str) -> None:
        self.hub.blobs[oid] = body
        self._send(200 if hashlib.sha256(body).hexdigest() == oid else 400)

    def take_commit(self, body: bytes, name: str, revision: str) -> None:
        repo = self._repo(name)
        if repo is None:
            return
        if self.hub.refuse_commits:
            self._send(413, {"error": "Payload too large"})
            return
        files, message = dict(repo.commits[repo.head]), ""
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                message = value["summary"]
            elif item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif item["key"] == "deletedFile":
                files.pop(value["path"])
        commit = repo.commit(files, message)
        self._send(200, {"success": True, "commitOid": commit, "commitUrl": f"{self.hub.url}/{name}/commit/{commit}"})


def _oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _lfs(path: str, content: bytes) -> dict[str, Any]:
    if not path.endswith(LFS_SUFFIXES):
        return {}
    return {"lfs": {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}}


_NAME = r"((?:datasets/)?[\w.-]+(?:/[\w.-]+)?)"
_ROUTES: list[tuple[str, str, Any]] = [
    ("GET", r"/api/whoami-v2", _Handler.whoami),
    ("GET", rf"/api/models/{_NAME}", _Handler.info),
    ("GET", rf"/api/models/{_NAME}/revision/([\w.-]+)", _Handler.info),
    ("GET", rf"/api/models/{_NAME}/tree/([\w.-]+)", _Handler.tree),
    ("GET HEAD", rf"/{_NAME}/resolve/([\w.-]+)/(.+)", _Handler.resolve),
    ("POST", r"/api/repos/create", _Handler.create),
    ("POST", r"/api/validate-yaml", _Handler.check_yaml),
    ("POST", rf"/api/models/{_NAME}/preupload/([\w.-]+)", _Handler.preupload),
    ("POST", rf"/{_NAME}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    ("PUT", r"/lfs/(\w+)", _Handler.lfs_blob),
    ("POST", rf"/api/models/{_NAME}/commit/([\w.-]+)", _Handler.take_commit),
]
