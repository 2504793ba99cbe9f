"""A local Hugging Face hub: repositories are folders, served over HTTP.

It answers the requests of `huggingface_hub`: the list of a model's files at a revision,
its tree, and files, whole or in part.
"""

import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

MODEL = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?")
TREE = re.compile(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)")
FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class Hub:
    """The repositories below a folder, and a record of the requests.

    Attributes:
      folder: the subfolder OWNER/NAME is the main branch, OWNER/NAME@REV is a revision.
      sent: (OWNER/NAME, file, bytes) of every answer with a file's content.
      gated: repositories that need a token.
    """

    def __init__(self, folder):
        self.folder, self.sent, self.gated = Path(folder), [], set()

    def files(self, repo=None):
        """Returns the files that were sent, whole or in part."""
        return sorted({file for name, file, _ in self.sent if repo in (None, name)})

    def bytes_of(self, end):
        """Returns how many bytes were sent of files whose names end with `end`."""
        return sum(count for _, file, count in self.sent if file.endswith(end))

    def place(self, repo, revision):
        """Returns the folder and commit of a revision. The revision can be a commit."""
        names = [repo] if revision in (None, "main") else [f"{repo}@{revision}"]
        if revision not in (None, "main"):
            folders = self.folder.glob(f"{repo}*")
            names += [str(f.relative_to(self.folder)) for f in folders]
            names = [n for n in names if revision in (commit(n), n.partition("@")[2])]
        found = [name for name in names if (self.folder / name).is_dir()]
        return (self.folder / found[0], commit(found[0])) if found else (None, None)


def commit(name):
    return hashlib.sha1(name.encode()).hexdigest()


@contextmanager
def served(folder):
    """Serves the repositories below `folder`. Yields the `Hub` and its address."""
    hub = Hub(folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            self.answer(body=True)

        def answer(self, body):
            path = unquote(urlsplit(self.path).path)
            if found := TREE.fullmatch(path):
                self.listing(*found.groups(), of_tree=True)
            elif found := MODEL.fullmatch(path):
                self.listing(*found.groups(), of_tree=False)
            elif found := FILE.fullmatch(path):
                self.file(*found.groups(), body)
            else:
                self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})

        def listing(self, repo, revision, of_tree):
            if not (hub.folder / repo).is_dir():
                self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})
                return
            folder, sha = hub.place(repo, revision)
            if repo in hub.gated:
                self.reply(403, b"{}", {"X-Error-Code": "GatedRepo"})
            elif folder is None:
                self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            else:
                files = [f for f in sorted(folder.rglob("*")) if f.is_file()]
                names = {f.relative_to(folder).as_posix(): f for f in files}
                if of_tree:
                    value = [entry(n, f, "path", "oid") for n, f in names.items()]
                else:
                    found = [
                        entry(n, f, "rfilename", "blobId") for n, f in names.items()
                    ]
                    value = {"id": repo, "modelId": repo, "sha": sha, "siblings": found}
                self.reply(200, json.dumps(value).encode())

        def file(self, repo, revision, name, body):
            folder, sha = hub.place(repo, revision)
            path = None if folder is None else folder / name
            if path is None or not path.is_file():
                self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            content, status = path.read_bytes(), 200
            headers = {"ETag": f'"{etag(path)}"', "X-Repo-Commit": sha}
            if asked := re.fullmatch(
                r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")
            ):
                start, end = int(asked[1]), int(asked[2] or len(content) - 1) + 1
                headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
                content, status = content[start:end], 206
            if body:
                hub.sent.append((repo, name, len(content)))
            self.reply(status, content, headers, body)

        def reply(self, status, content, headers=None, body=True):
            self.send_response(status)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body and self.command == "GET":
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def etag(path):
    return hashlib.sha1(path.read_bytes()).hexdigest()


def entry(name, path, name_key, id_key):
    return {
        "type": "file",
        name_key: name,
        "size": path.stat().st_size,
        id_key: etag(path),
    }
