# SPDX-License-Identifier: Apache-2.0
"""A Hub on 127.0.0.1: the part of the Hub's HTTP interface for models that the `huggingface_hub` client needs.

Repositories and large files are in memory. Files are sent as to the real Hub: small texts inside the commit, the
others through the LFS batch endpoint first.
"""

import base64
import hashlib
import json
import threading
import traceback
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml
from huggingface_hub import ModelCard


@dataclass(frozen=True)
class File:
    content: bytes
    lfs: bool

    @property
    def oid(self) -> str:
        """The git hash of the blob; for a large file, its SHA-256."""
        if self.lfs:
            return hashlib.sha256(self.content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()


@dataclass
class Repository:
    private: bool
    commits: dict[str, dict[str, File]] = field(default_factory=dict)  # by hash, oldest first

    def commit(self, files: dict[str, File]) -> str:
        listing = json.dumps([len(self.commits), sorted((path, file.oid) for path, file in files.items())])
        sha = hashlib.sha1(listing.encode()).hexdigest()
        self.commits[sha] = files
        return sha

    @property
    def head(self) -> str:
        return next(reversed(self.commits))

    @property
    def files(self) -> dict[str, File]:
        return self.commits[self.head]


class HubError(Exception):
    """An error response; the client distinguishes errors by `code` and the message."""

    def __init__(self, status: int, message: str, code: str | None = None, commit: str | None = None):
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Message": message}
        if code is not None:
            self.headers["X-Error-Code"] = code
        if commit is not None:
            self.headers["X-Repo-Commit"] = commit


class LostConnection(Exception):
    pass


class HubServer(ThreadingHTTPServer):
    """A server that runs in a thread while the context is open.

    Args:
        tokens: the user that each valid token belongs to; every user may write to their own namespace.
    """

    daemon_threads = True

    def __init__(self, tokens: dict[str, str]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.tokens = tokens
        self.repositories: dict[str, Repository] = {}
        self.large_files: dict[str, bytes] = {}
        # Requests whose path has one of these endings are closed without an answer, once for each ending.
        self.lose_once: set[str] = set()
        self.requests: list[tuple[str, str]] = []
        self.lock = threading.RLock()

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that close the connection, which is not an error of the server."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.read_body()
        with self.server.lock:
            self.server.requests.append((self.command, path))
            try:
                for end in self.server.lose_once:
                    if path.endswith(end):
                        self.server.lose_once.remove(end)
                        raise LostConnection
                self.route(path.strip("/").split("/"), body)
            except HubError as error:
                self.send(error.status, {"error": str(error), "errors": [{"message": str(error)}]}, error.headers)
            except LostConnection:
                self.close_connection = True
            except Exception:
                self.send(500, {"error": traceback.format_exc()}, {"X-Error-Message": "The test's Hub failed"})

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def send(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def route(self, parts: list[str], body: bytes) -> None:
        match self.command, parts:
            case "GET", ["api", "whoami-v2"]:
                self.send(200, {"type": "user", "name": self.user(), "orgs": []})
            case "POST", ["api", "repos", "create"]:
                self.create(json.loads(body))
            case "POST", ["api", "validate-yaml"]:
                self.validate_card(json.loads(body)["content"])
            case "POST", ["api", "models", user, name, "preupload", _]:
                self.preupload(self.repository(user, name, write=True), json.loads(body))
            case "POST", ["api", "models", user, name, "commit", "main"]:
                self.commit(self.repository(user, name, write=True), f"{user}/{name}", body)
            case "POST", [user, name, "info", "lfs", "objects", "batch"] if name.endswith(".git"):
                self.repository(user, name.removesuffix(".git"), write=True)
                self.lfs_batch(json.loads(body))
            case "PUT", ["lfs", oid]:
                self.put_large_file(oid, body)
            case "GET", ["api", "models", user, name]:
                self.info(self.repository(user, name), f"{user}/{name}", "main")
            case "GET", ["api", "models", user, name, "revision", revision]:
                self.info(self.repository(user, name), f"{user}/{name}", revision)
            case "GET", ["api", "models", user, name, "tree", revision, *folder]:
                self.tree(self.repository(user, name), revision, "/".join(folder))
            case "GET" | "HEAD", [user, name, "resolve", revision, *path]:
                self.resolve(self.repository(user, name), revision, "/".join(path))
            case _:
                raise HubError(404, "Not found")

    def user(self, required: bool = True) -> str | None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token not in self.server.tokens:
            raise HubError(401, "Invalid credentials in Authorization header")
        if required and not token:
            raise HubError(401, "Invalid username or password.")
        return self.server.tokens.get(token)

    def repository(self, user: str, name: str, write: bool = False) -> Repository:
        caller = self.user(required=write)
        repository = self.server.repositories.get(f"{user}/{name}")
        if repository is None or (repository.private and caller != user):
            raise HubError(404 if caller else 401, "Repository not found", "RepoNotFound")
        if write and caller != user:
            raise HubError(403, f"You don't have the rights to write to {user}/{name}")
        return repository

    @staticmethod
    def revision(repository: Repository, name: str) -> str:
        sha = repository.head if name == "main" else name
        if sha not in repository.commits:
            raise HubError(404, f"Invalid rev id: {name}", "RevisionNotFound")
        return sha

    def create(self, request: dict[str, Any]) -> None:
        user = self.user()
        owner = request.get("organization") or user
        if owner != user:
            raise HubError(403, f"You don't have the rights to create a model under the namespace {owner!r}")
        repo_id = f"{owner}/{request['name']}"
        url = f"{self.server.url}/{repo_id}"
        if repo_id in self.server.repositories:
            self.send(409, {"error": "You already created this model repo", "url": url})
            return
        # Clients before version 2.0 send `private` instead.
        private = request.get("private", request.get("visibility") == "private")
        repository = self.server.repositories[repo_id] = Repository(private)
        repository.commit({".gitattributes": File(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n", lfs=False)})
        self.send(200, {"url": url, "name": repo_id})

    def validate_card(self, content: str) -> None:
        try:
            card = ModelCard(content)
        except (ValueError, yaml.YAMLError) as error:
            raise HubError(400, str(error)) from error
        if card.data.license not in (None, "apache-2.0"):
            raise HubError(400, '"license" must be one of apache-2.0, ...')
        self.send(200, {"errors": [], "warnings": []})

    def preupload(self, repository: Repository, request: dict[str, Any]) -> None:
        files = []
        for file in request["files"]:
            binary = b"\0" in base64.b64decode(file["sample"])
            here = repository.files.get(file["path"])
            files.append(
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if binary or file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                    "oid": here and here.oid,
                }
            )
        self.send(200, {"files": files})

    def lfs_batch(self, request: dict[str, Any]) -> None:
        objects = []
        for wanted in request["objects"]:
            if wanted["oid"] not in self.server.large_files:
                wanted["actions"] = {"upload": {"href": f"{self.server.url}/lfs/{wanted['oid']}"}}
            objects.append(wanted)
        self.send(200, {"transfer": "basic", "objects": objects})

    def put_large_file(self, oid: str, body: bytes) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            raise HubError(400, "The content is not that of the object's hash")
        self.server.large_files[oid] = body
        self.send(200, {})

    def commit(self, repository: Repository, repo_id: str, body: bytes) -> None:
        files = dict(repository.files)
        for line in body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = File(base64.b64decode(value["content"]), lfs=False)
            elif operation["key"] == "lfsFile":
                if value["oid"] not in self.server.large_files:
                    raise HubError(400, f"The LFS object {value['oid']} of {value['path']} was not uploaded")
                files[value["path"]] = File(self.server.large_files[value["oid"]], lfs=True)
            elif operation["key"] != "header":
                raise HubError(400, f"{operation['key']} is not supported here")
        sha = repository.commit(files)
        self.send(200, {"success": True, "commitOid": sha, "commitUrl": f"{self.server.url}/{repo_id}/commit/{sha}"})

    def info(self, repository: Repository, repo_id: str, revision: str) -> None:
        sha = self.revision(repository, revision)
        files = repository.commits[sha]
        card = ModelCard(files["README.md"].content.decode()).data if "README.md" in files else None
        answer = {
            "_id": repo_id,
            "id": repo_id,
            "modelId": repo_id,
            "author": repo_id.split("/")[0],
            "sha": sha,
            "private": repository.private,
            "tags": (card and card.tags) or [],
            "pipeline_tag": card and card.pipeline_tag,
            "library_name": (card and card.library_name) or "transformers",
            "cardData": card.to_dict() if card else None,
            "siblings": [{"rfilename": path} for path in files],
        }
        self.send(200, answer)

    def tree(self, repository: Repository, revision: str, folder: str) -> None:
        sha = self.revision(repository, revision)
        prefix = f"{folder}/" if folder else ""
        entries = []
        for path, file in repository.commits[sha].items():
            if path.startswith(prefix):
                entry = {"type": "file", "path": path, "oid": file.oid, "size": len(file.content)}
                if file.lfs:
                    entry["lfs"] = {"oid": file.oid, "size": len(file.content), "pointerSize": 134}
                entries.append(entry)
        if folder and not entries:
            raise HubError(404, f"{folder} does not exist on {revision}", "EntryNotFound", sha)
        self.send(200, entries)

    def resolve(self, repository: Repository, revision: str, path: str) -> None:
        sha = self.revision(repository, revision)
        file = repository.commits[sha].get(path)
        if file is None:
            raise HubError(404, "Entry not found", "EntryNotFound", sha)
        self.send(200, file.content, {"X-Repo-Commit": sha, "ETag": f'"{file.oid}"'})
