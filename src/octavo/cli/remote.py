"""A small client for any OpenAI-compatible server's chat, with the standard library alone: an HTTP client is no dependency of the default install."""

import http.client
import json
import socket
import ssl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from octavo.errors import ConfigError, RemoteError

TIMEOUT = 10.0  # seconds to connect
SILENCE = 600.0  # seconds without a byte: a queue may be long


@dataclass(slots=True)
class Piece:
    """What came at once: text, and the number of tokens so far where it is known."""

    text: str
    num_tokens: int


class Remote:
    """One server. Every call opens its own connection; dropping a stream closes it, which aborts the request there."""

    def __init__(self, url: str, api_key: str | None = None, model: str | None = None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"url {url!r}: {error}", "url") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url must be like http://host:port, not {url!r}", "url")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._host, self._port, self._secure = parts.hostname, port, parts.scheme == "https"
        path = parts.path.rstrip("/")
        self._base = path if path.endswith("/v1") else f"{path}/v1"
        self._headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if api_key and (key := api_key.strip()):
            if not key.isprintable() or any(ord(char) > 255 for char in key):
                raise ConfigError("the API key holds a character that no HTTP header can carry", "api_key")
            self._headers["Authorization"] = f"Bearer {key}"
        self.model = model or self._first_model()

    def stream_chat(self, messages: Sequence[dict[str, str]], wanted: dict[str, Any]) -> Iterator[Piece]:
        """Send a conversation and yield the answer's pieces. Closing the iterator closes the connection.

        Raises: RemoteError.
        """
        body = {"model": self.model, "messages": list(messages), "stream": True, "stream_options": {"include_usage": True}, **wanted}
        connection, response = self._request("POST", "/chat/completions", body)
        count = 0
        try:
            for data in self._events(response):
                if "error" in data:
                    raise RemoteError(f"{self.url} ended the answer with an error: {_reason(data)}")
                usage, choices = data.get("usage"), data.get("choices") or []
                text = "".join((choice.get("delta") or {}).get("content") or "" for choice in choices)
                count = usage["completion_tokens"] if usage and not choices else count + bool(text)
                if text or (usage and not choices):
                    yield Piece(text, count)
        finally:
            connection.close()

    def _first_model(self) -> str:
        connection, response = self._request("GET", "/models")
        try:
            served = [each["id"] for each in json.loads(self._read(response))["data"]]
        except (ValueError, KeyError, TypeError):
            raise RemoteError(f"{self.url} does not answer {self._base}/models as an OpenAI server does") from None
        finally:
            connection.close()
        if not served:
            raise RemoteError(f"{self.url} serves no model")
        return str(served[0])

    def _request(self, method: str, path: str, body: Any = None) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send, and read the answer's head. Raises: RemoteError unless the status is 200."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=TIMEOUT)
        try:
            connection.connect()
            connection.sock.settimeout(SILENCE)
            connection.request(method, self._base + path, None if body is None else json.dumps(body), self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise RemoteError(f"cannot reach {self.url}: {_plain(error)}") from None
        except BaseException:  # an interrupt
            connection.close()
            raise
        if response.status != 200:
            try:
                reason = _reason(json.loads(self._read(response)))
            except ValueError:
                reason = response.reason
            finally:
                connection.close()
            raise RemoteError(f"{self.url} answered {response.status}: {reason}")
        return connection, response

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.read()
        except (OSError, http.client.HTTPException) as error:
            raise RemoteError(f"the connection to {self.url} broke: {_plain(error)}") from None

    def _events(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        """The JSON objects of a stream of server-sent events, until [DONE]. Raises: RemoteError when it breaks off."""
        try:
            for line in iter(response.readline, b""):
                name, _, value = line.strip().partition(b":")
                if name != b"data":
                    continue  # a comment, an empty line, another field
                if value.strip() == b"[DONE]":
                    return
                data = json.loads(value)
                if not isinstance(data, dict):
                    raise ValueError(value)
                yield data
        except (OSError, http.client.HTTPException) as error:
            raise RemoteError(f"the connection to {self.url} broke: {_plain(error)}") from None
        except ValueError as error:
            raise RemoteError(f"{self.url} sent an event that is no JSON object: {error}") from None
        raise RemoteError(f"{self.url} closed the connection in the middle of the answer")


def _reason(data: Any) -> str:
    """The message of an error object: OpenAI's shape, or whatever there is."""
    found = data.get("error", data) if isinstance(data, dict) else data
    if isinstance(found, dict) and "message" in found:
        return str(found["message"])
    return json.dumps(found)


def _plain(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return "no such host"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    return error.strerror if isinstance(error, OSError) and error.strerror else (str(error) or type(error).__name__)
