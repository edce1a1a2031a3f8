# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A small Hub for tests: an HTTP server that speaks what the huggingface_hub client speaks, kept in memory.

It follows the Hub where a client could tell the difference: repositories start with one commit that holds
.gitattributes; `preupload` names the files for LFS and the ids of those that are there already; large content goes to
an object store on another host (localhost instead of 127.0.0.1), which refuses an Authorization header as a presigned
URL does; a commit is NDJSON and refers to stored objects only; files resolve with ETag,
X-Repo-Commit and, for LFS, a redirect with X-Linked-Etag and X-Linked-Size. It offers no xet: run clients with
HF_HUB_DISABLE_XET=1, because a client that has hf_xet uploads through nothing else.

    with FakeHub() as hub:  # hub.url is what HF_ENDPOINT must be
        hub.faults.append(Fault("POST", "/commit/", "drop"))
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from hub_card import card_errors

GITATTRIBUTES = b"".join(f"*.{kind} filter=lfs diff=lfs merge=lfs -text\n".encode() for kind in ("safetensors", "bin"))
LFS_SIZE = 10 * 2**20  # the Hub refuses larger files outside LFS


@dataclass(frozen=True)
class Blob:
    """A file of a commit: its content, or the object it points to."""

    size: int
    oid: str  # git's SHA-1 of the content; of the pointer for LFS
    content: bytes = b""
    sha256: str | None = None  # for LFS

    @property
    def etag(self) -> str:
        return self.sha256 or self.oid


@dataclass
class Repository:
    private: bool
    commits: list[tuple[str, str, dict[str, Blob]]] = field(default_factory=list)  # (sha, message, files), oldest first

    @property
    def sha(self) -> str:
        return self.commits[-1][0]

    @property
    def files(self) -> dict[str, Blob]:
        return self.commits[-1][2]

    def commit(self, message: str, files: dict[str, Blob]) -> str:
        tree = "".join(f"{path} {blob.oid}\n" for path, blob in sorted(files.items()))
        parent = self.sha if self.commits else ""
        sha = hashlib.sha1(f"{len(self.commits)} {parent} {message}\n{tree}".encode()).hexdigest()
        self.commits.append((sha, message, files))
        return sha

    def at(self, revision: str) -> tuple[str, dict[str, Blob]] | None:
        """(sha, files) at a branch (there is only main) or commit."""
        if revision == "main":
            return self.sha, self.files
        return next(((sha, files) for sha, _, files in self.commits if sha == revision), None)


@dataclass
class Fault:
    """What goes wrong at the first `times` requests of that method whose path contains `where`.

    Attributes:
        what: an HTTP status; "drop" to close the connection unanswered; "drop-after" to act and then close it;
            "hang" to stop in the middle of the request's body until the client or the server is gone.
        reached: set when a request meets the fault.
    """

    method: str
    where: str
    what: int | str
    times: int = 1
    reached: threading.Event = field(default_factory=threading.Event)


class FakeHub:
    """The server and its state; everything is public, so that a test may look and meddle.

    Attributes:
        users: token -> (user name, organisations it may write to, may it write at all).
        repositories: full id -> Repository. objects: sha256 -> content. requests: (method, path), as they arrive.
    """

    def __init__(self) -> None:
        self.users = {"hf_writer": ("writer", ["essm-tests"], True), "hf_reader": ("reader", ["essm-tests"], False)}
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.faults: list[Fault] = []
        self.closing = threading.Event()
        self.lock = threading.RLock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.store_url = f"http://localhost:{self.server.server_port}/store"

    def __enter__(self) -> FakeHub:
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()

    def count(self, method: str, where: str) -> int:
        """How many requests of that method had `where` in their path."""
        return sum(m == method and where in path for m, path in self.requests)

    def content(self, repository: str, path: str) -> bytes:
        """A file at the newest commit."""
        blob = self.repositories[repository].files[path]
        return self.objects[blob.sha256] if blob.sha256 else blob.content


class _Refused(Exception):
    """An HTTP error to be answered: status, X-Error-Code, X-Error-Message."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"
    quiet = False  # say nothing

    def log_message(self, *_: object) -> None:
        pass

    def _handle(self) -> None:
        url = urlsplit(self.path)
        self.route, self.query = unquote(url.path), parse_qs(url.query)
        with self.hub.lock:
            self.hub.requests.append((self.command, self.route))
            fault = next((f for f in self.hub.faults if f.method == self.command and f.where in self.route), None)
            if fault is not None:
                fault.times -= 1
                if fault.times <= 0:
                    self.hub.faults.remove(fault)
        try:
            if fault is not None and fault.what == "hang":
                self.rfile.read(int(self.headers.get("Content-Length", 0)) // 2)
                fault.reached.set()
                self.hub.closing.wait()
                self.close_connection = True
                return
            self.body = self._read_body()
            if fault is not None:
                fault.reached.set()
                if fault.what == "drop":
                    self.close_connection = True
                    return
                if isinstance(fault.what, int):
                    raise _Refused(fault.what, "as the test wants")
                self.quiet, self.close_connection = fault.what == "drop-after", True
            for method, pattern, action in _ROUTES:
                match = re.fullmatch(pattern, self.route)
                if match and (self.command == method or (self.command == "HEAD" and method == "GET")):
                    with self.hub.lock:
                        getattr(self, action)(**match.groupdict())
                    return
            raise _Refused(404, f"no such endpoint: {self.command} {self.route}")
        except _Refused as refusal:
            headers = {"X-Error-Message": refusal.message}
            headers |= {"X-Error-Code": refusal.code} if refusal.code else {}
            self._answer(refusal.status, {"error": refusal.message}, headers)

    do_GET = do_HEAD = do_POST = do_PUT = _handle

    def _read_body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            if self.route.startswith("/store"):
                raise _Refused(411, "the store needs a Content-Length")
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        if len(body) != length:
            raise ConnectionResetError("the client went away")
        return body

    def _answer(self, status: int, content: Any = b"", headers: dict[str, str] | None = None) -> None:
        if not isinstance(content, bytes):
            content, headers = json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})}
        if self.quiet:
            return
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    # --- Who may do what

    def _user(self, required: bool = True) -> tuple[str, list[str], bool] | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        user = self.hub.users.get(token)
        if user is None and (required or token):
            raise _Refused(401, "Invalid credentials in Authorization header" if token else "Please log in")
        return user

    def _check_write(self, namespace: str) -> None:
        user = self._user()
        assert user is not None
        if not user[2] or namespace not in (user[0], *user[1]):
            raise _Refused(403, f"You don't have the rights to write to the namespace {namespace!r}")

    def _repository(self, repo: str) -> Repository:
        user = self._user(required=False)
        found = self.hub.repositories.get(repo)
        visible = found and (not found.private or (user and repo.split("/")[0] in (user[0], *user[1])))
        if found is None or not visible:
            raise _Refused(404 if user else 401, "Repository not found", "RepoNotFound")
        return found

    def _revision(self, repo: str, revision: str) -> tuple[str, dict[str, Blob]]:
        found = self._repository(repo).at(revision)
        if found is None:
            raise _Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found

    # --- API

    def whoami(self) -> None:
        user = self._user()
        assert user is not None
        name, organisations, may_write = user
        self._answer(
            200,
            {
                "type": "user",
                "name": name,
                "orgs": [{"type": "org", "name": organisation} for organisation in organisations],
                "auth": {"type": "access_token", "accessToken": {"role": "write" if may_write else "read"}},
            },
        )

    def create(self) -> None:
        wanted = json.loads(self.body)
        user = self._user()
        assert user is not None
        namespace = wanted.get("organization") or user[0]
        repo = f"{namespace}/{wanted['name']}"
        self._check_write(namespace)
        status = 200
        if repo in self.hub.repositories:
            status = 409
        else:
            created = Repository(private=wanted.get("visibility") == "private")
            created.commit("initial commit", {".gitattributes": _regular(GITATTRIBUTES)})
            self.hub.repositories[repo] = created
        message = {"error": "You already created this model repo"} if status == 409 else {}
        self._answer(status, {"url": f"{self.hub.url}/{repo}", "name": repo, "id": repo, **message})

    def auth_check(self, repo: str, write: str | None) -> None:
        self._repository(repo)
        if write:
            self._check_write(repo.split("/")[0])
        self._answer(200, {})

    def validate_yaml(self) -> None:
        errors = [{"message": message} for message in card_errors(json.loads(self.body)["content"])]
        self._answer(400 if errors else 200, {"errors": errors, "warnings": []})

    def preupload(self, repo: str, revision: str) -> None:
        self._check_write(repo.split("/")[0])
        _, files = self._revision(repo, revision)
        answers = []
        for file in json.loads(self.body)["files"]:
            path, size = file["path"], file["size"]
            patterns = [line.split()[0] for line in files[".gitattributes"].content.decode().splitlines()]
            binary = b"\0" in base64.b64decode(file["sample"])
            lfs = size > LFS_SIZE or binary or any(fnmatch(path, pattern) for pattern in patterns)
            answer = {"path": path, "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False}
            answers.append(answer | ({"oid": files[path].etag} if path in files else {}))
        self._answer(200, {"files": answers})

    def lfs_batch(self, repo: str) -> None:
        self._check_write(repo.split("/")[0])
        self._repository(repo)
        wanted = json.loads(self.body)
        assert wanted["operation"] == "upload" and wanted["hash_algo"] == "sha256"
        assert self.headers["Content-Type"] == self.headers["Accept"] == "application/vnd.git-lfs+json"
        objects = []
        for entry in wanted["objects"]:
            oid, size = entry["oid"], entry["size"]
            answer: dict[str, Any] = {"oid": oid, "size": size}
            if oid not in self.hub.objects:
                upload: dict[str, Any] = {"href": f"{self.hub.store_url}/{oid}"}
                verify = {"href": f"{self.hub.url}/{repo}.git/info/lfs/objects/verify"}
                answer["actions"] = {"upload": upload, "verify": verify}
            objects.append(answer)
        self._answer(200, {"transfer": "basic", "objects": objects}, {"Content-Type": "application/vnd.git-lfs+json"})

    def store(self, oid: str) -> None:
        if "Authorization" in self.headers:
            raise _Refused(400, "only one auth mechanism allowed: the URL is signed")
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise _Refused(400, "the content's SHA-256 is not the signed one")
        self.hub.objects[oid] = self.body
        self._answer(200)

    def verify(self, repo: str) -> None:
        self._check_write(repo.split("/")[0])
        wanted = json.loads(self.body)
        if len(self.hub.objects.get(wanted["oid"], b"")) != wanted["size"]:
            raise _Refused(404, "no such object of that size")
        self._answer(200, {})

    def commit(self, repo: str, revision: str) -> None:
        self._check_write(repo.split("/")[0])
        _, old = self._revision(repo, revision)
        assert self.headers["Content-Type"] == "application/x-ndjson"
        lines = [json.loads(line) for line in self.body.splitlines()]
        files, header = dict(old), {}
        for key, value in ((line["key"], line["value"]) for line in lines):
            if key == "header":
                header = value
            elif key == "file":
                content = base64.b64decode(value["content"])
                if len(content) > LFS_SIZE:
                    raise _Refused(400, f"{value['path']} is larger than 10 MiB: use LFS")
                files[value["path"]] = _regular(content)
            elif key == "lfsFile":
                if len(self.hub.objects.get(value["oid"], b"")) != value["size"]:
                    raise _Refused(400, f"{value['path']}: LFS pointer to an object that does not exist")
                files[value["path"]] = pointer(value["oid"], value["size"])
            elif key == "deletedFile":
                if value["path"] not in files:
                    raise _Refused(404, "A file with this name doesn't exist", "EntryNotFound")
                del files[value["path"]]
            else:
                raise _Refused(400, f"unknown operation {key!r}")
        if header.get("parentCommit") not in (None, self._repository(repo).sha):
            raise _Refused(412, "A commit has happened since")
        readme = files.get("README.md")
        if readme is not None and (errors := card_errors(readme.content.decode())):
            raise _Refused(400, errors[0])
        sha = self._repository(repo).commit(header["summary"], files)
        url = f"{self.hub.url}/{repo}/commit/{sha}"
        self._answer(200, {"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": ""})

    def info(self, repo: str, revision: str | None) -> None:
        sha, files = self._revision(repo, revision or "main")
        siblings = [{"rfilename": path} for path in sorted(files)]
        private = self._repository(repo).private
        self._answer(
            200,
            {"_id": "0", "id": repo, "modelId": repo, "sha": sha, "private": private, "siblings": siblings, "tags": []},
        )

    def tree(self, repo: str, revision: str, folder: str | None) -> None:
        _, files = self._revision(repo, revision)
        prefix = f"{folder}/" if folder else ""
        entries = [_entry(path, blob) for path, blob in sorted(files.items()) if path.startswith(prefix)]
        if folder and not entries:
            raise _Refused(404, f"{folder} does not exist", "EntryNotFound")
        self._answer(200, entries)

    # --- Files

    def resolve(self, repo: str, revision: str, path: str) -> None:
        sha, files = self._revision(repo, revision)
        if path not in files:
            self._answer(404, b"Entry not found", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
            return
        blob, headers = files[path], {"X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        if blob.sha256:
            headers |= {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(blob.size)}
            headers |= {"Location": f"{self.hub.store_url}/{blob.sha256}", "ETag": f'"{blob.oid}"'}
            return self._answer(302, b"", headers)
        self._send_file(blob.content, headers | {"ETag": f'"{blob.oid}"'})

    def fetch(self, oid: str) -> None:
        if "Authorization" in self.headers:
            raise _Refused(400, "only one auth mechanism allowed: the URL is signed")
        if oid not in self.hub.objects:
            raise _Refused(404, "no such object")
        self._send_file(self.hub.objects[oid], {"ETag": f'"{oid}"', "Accept-Ranges": "bytes"})

    def _send_file(self, content: bytes, headers: dict[str, str]) -> None:
        self._answer(200, content, headers)


_REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
_AT = r"(?P<revision>[^/]+)"
_ROUTES = (
    ("GET", "/api/whoami-v2", "whoami"),
    ("POST", "/api/repos/create", "create"),
    ("POST", "/api/validate-yaml", "validate_yaml"),
    ("GET", f"/api/models/{_REPO}/auth-check(?P<write>/write)?", "auth_check"),
    ("POST", f"/api/models/{_REPO}/preupload/{_AT}", "preupload"),
    ("POST", f"/api/models/{_REPO}/commit/{_AT}", "commit"),
    ("GET", f"/api/models/{_REPO}/tree/{_AT}(/(?P<folder>.+))?", "tree"),
    ("GET", f"/api/models/{_REPO}(/revision/{_AT})?", "info"),
    ("POST", f"/{_REPO}.git/info/lfs/objects/batch", "lfs_batch"),
    ("POST", f"/{_REPO}.git/info/lfs/objects/verify", "verify"),
    ("PUT", r"/store/(?P<oid>\w+)", "store"),
    ("GET", r"/store/(?P<oid>\w+)", "fetch"),
    ("GET", f"/{_REPO}/resolve/{_AT}/(?P<path>.+)", "resolve"),
)


def _git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _regular(content: bytes) -> Blob:
    return Blob(len(content), _git_oid(content), content)


def pointer(sha256: str, size: int) -> Blob:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n"
    return Blob(size, _git_oid(pointer.encode()), sha256=sha256)


def _entry(path: str, blob: Blob) -> dict[str, Any]:
    lfs = {"lfs": {"oid": blob.sha256, "size": blob.size, "pointerSize": 134}} if blob.sha256 else {}
    return {"type": "file", "path": path, "oid": blob.oid, "size": blob.size, **lfs}
