"""Chat templates: messages to the text that a model was trained on. The same for LLM.chat and the server.

The rendered text is complete: encode it with ``add_special_tokens=False``.
"""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from octavo.errors import InvalidRequest, UnsupportedError, shown

if TYPE_CHECKING:
    from jinja2 import Environment, Template, nodes

    from octavo.text.tokenizer import Tokenizer

RENDER_SECONDS = 10.0  # a hostile template's time; real ones take about a millisecond
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_END_MARK = "\ue0ffEND-OF-CONTINUED-MESSAGE\ue0ff "  # its space shows whether the template trims messages


class ChatTemplate:
    """One template, or several by name. Compiled when first used, then kept; safe to share between threads."""

    def __init__(self, source: str | Mapping[str, str] | None, special_tokens: Mapping[str, str] | None = None) -> None:
        self._sources = {"default": source} if isinstance(source, str) else dict(source or {})
        self._special_tokens = dict(special_tokens or {})
        self._compiled: dict[str, _Compiled] = {}

    @classmethod
    def of(cls, tokenizer: "Tokenizer", override: str | Mapping[str, str] | None = None) -> "ChatTemplate":
        """The template that came with a tokenizer, or ``override`` with that tokenizer's special tokens."""
        return cls(tokenizer.chat_template if override is None else override, tokenizer.special_tokens)

    def __bool__(self) -> bool:
        return bool(self._sources)

    @property
    def names(self) -> list[str]:
        """The names of the templates there are."""
        return list(self._sources)

    def compile(self) -> None:
        """Compile every template now. Raises: UnsupportedError for one that is broken."""
        for name in self._sources:
            self._pick(name, False)

    def mentions(self, word: str) -> bool:
        """Whether a template's source holds a word, such as the name of a role."""
        return any(word in source for source in self._sources.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        name: str | None = None,
        variables: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> str:
        """The text of a conversation, as transformers renders it.

        Message content is text or a list of ``{"type": "text", "text": …}``; lists are joined by newlines for templates
        that know only text. ``continue_final_message`` leaves the last message open for the model to go on with.
        ``name`` picks one of several templates (by default "tool_use" when there are tools). ``variables`` (a request's
        chat_template_kwargs) and further keywords are handed to the template and win over bos_token, eos_token ….

        Raises: InvalidRequest when messages are malformed, the template refuses them or the model has no template;
        UnsupportedError when the template itself is broken.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other: one goes on with a message, the other begins one",
                "continue_final_message",
            )
        if variables is not None and not (isinstance(variables, Mapping) and all(isinstance(key, str) for key in variables)):
            raise InvalidRequest(f"chat_template_kwargs must be an object of named values, not {shown(variables)}", "chat_template_kwargs")
        variables = {**(variables or {}), **kwargs}
        if clash := sorted(_RESERVED & variables.keys()):
            raise InvalidRequest(f"chat_template_kwargs must not hold {clash[0]!r}: that is set by the request itself", "chat_template_kwargs")
        template = self._pick(name, bool(tools))
        chat = _checked(messages, template.wants_parts)
        _check_dicts(tools, "tools")
        _check_dicts(documents, "documents")
        final = _open_end(chat) if continue_final_message else ""
        text = template.render(
            {
                **self._special_tokens,
                **variables,
                "messages": chat,
                "tools": _copy(tools, "tools"),
                "documents": _copy(documents, "documents"),
                "add_generation_prompt": add_generation_prompt,
            }
        )
        _check_unicode(text, chat)
        return _cut(text, final) if continue_final_message else text

    def _pick(self, name: str | None, has_tools: bool) -> "_Compiled":
        if not self._sources:
            raise InvalidRequest("this model comes without a chat template: give one (--chat-template), or complete a plain prompt", "messages")
        if name is None:
            name = "tool_use" if has_tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise InvalidRequest(f"there is no chat template named {name!r}; there are: {', '.join(sorted(self._sources))}", "chat_template")
        found = self._compiled.get(name)
        if found is None:
            found = self._compiled[name] = _Compiled(self._sources[name])
        return found


class _Compiled:
    """One template, compiled."""

    def __init__(self, source: str) -> None:
        from jinja2 import TemplateError

        from octavo.text.template_sandbox import Sandbox, time_limit

        self._source = source
        self._environment: Environment = Sandbox()
        try:
            with time_limit(RENDER_SECONDS):
                self._template: Template = self._environment.from_string(source)
        except (TemplateError, RecursionError, MemoryError, OverflowError, SyntaxError) as error:
            line = getattr(error, "lineno", None)
            raise UnsupportedError(f"the chat template cannot be compiled{f' (line {line})' if line else ''}: {error}", "chat_template") from error

    @cached_property
    def wants_parts(self) -> bool:
        """Whether the template goes through a message's content part by part."""
        return _loops_over_content(self._environment.parse(self._source))

    def render(self, variables: dict[str, Any]) -> str:
        from jinja2 import TemplateError

        from octavo.text.template_sandbox import MAX_TEXT, time_limit

        pieces: list[str] = []
        size = 0
        try:
            with time_limit(RENDER_SECONDS):
                for piece in self._template.generate(variables):
                    pieces.append(piece)
                    size += len(piece)
                    if size > MAX_TEXT:
                        raise InvalidRequest(f"the chat template makes more than {MAX_TEXT} characters of these messages", "messages")
        except InvalidRequest:
            raise
        except TemplateError as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}", "messages") from error
        except Exception as error:  # a template is a program: it may fail in any way, and the request is what made it
            raise InvalidRequest(f"the chat template fails on these messages: {type(error).__name__}: {error}", "messages") from error
        return "".join(pieces)


def _loops_over_content(tree: "nodes.Template") -> bool:
    """Whether some loop runs over ``….content`` or ``…['content']``, directly or through a variable that was set to it."""
    from jinja2 import nodes

    def reads_content(node: nodes.Node, names: set[str]) -> bool:
        found = list(node.find_all((nodes.Getattr, nodes.Getitem, nodes.Name)))
        for each in [node, *found]:
            if isinstance(each, nodes.Getattr) and each.attr == "content":
                return True
            if isinstance(each, nodes.Getitem) and isinstance(each.arg, nodes.Const) and each.arg.value == "content":
                return True
            if isinstance(each, nodes.Name) and each.name in names:
                return True
        return False

    names: set[str] = set()
    for each in tree.find_all(nodes.Assign):
        # only a plain copy: a text that was built from the content is a text
        if isinstance(each.target, nodes.Name) and isinstance(each.node, nodes.Getattr | nodes.Getitem) and reads_content(each.node, set()):
            names.add(each.target.name)
    plain = (nodes.Getattr, nodes.Getitem, nodes.Name)
    return any(isinstance(loop.iter, plain) and reads_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _checked(messages: Sequence[Mapping[str, Any]], wants_parts: bool) -> list[dict[str, Any]]:
    """A copy of the messages in the form that templates expect."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequest(f"messages must be a list of {{role, content}}, not {type(messages).__name__}", "messages")
    if not messages:
        raise InvalidRequest("messages is empty: at least one is needed", "messages")
    chat = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"messages[{i}] must be an object with role and content, not {type(message).__name__}", f"messages[{i}]")
        if not isinstance(message.get("role"), str):
            raise InvalidRequest(f"messages[{i}].role must be text, not {shown(message.get('role'))}", f"messages[{i}].role")
        copied = _copy(dict(message), f"messages[{i}]")
        calls = copied.get("tool_calls") or []
        if not isinstance(calls, list | tuple):
            raise InvalidRequest(f"messages[{i}].tool_calls must be a list, not {shown(calls)}", f"messages[{i}].tool_calls")
        if copied.get("content") is None:  # a template would write it out as "None"
            if not (calls and copied["role"] == "assistant"):
                raise InvalidRequest(f"messages[{i}].content is missing: text, or a list of text parts", f"messages[{i}].content")
            copied["content"] = ""
        copied["content"] = _content(copied["content"], f"messages[{i}].content", wants_parts)
        for j, call in enumerate(calls):
            _parse_arguments(call, f"messages[{i}].tool_calls[{j}].function.arguments")
        chat.append(copied)
    return chat


def _check_unicode(text: str, chat: list[dict[str, Any]]) -> None:
    """Lone surrogates have no encoding: say here which message has them, rather than nowhere in particular later."""
    if _encodes(text):
        return
    for i, message in enumerate(chat):
        for name, value in message.items():
            if not all(map(_encodes, _texts(value))):
                raise InvalidRequest(f"messages[{i}].{name} is no valid Unicode: it holds a lone surrogate", f"messages[{i}].{name}")
    raise InvalidRequest("the rendered messages are no valid Unicode: they hold a lone surrogate", "messages")


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _texts(value: Any) -> Iterator[str]:
    """All texts in plain data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _texts(key)
            yield from _texts(each)


def _copy(value: Any, where: str) -> Any:
    """A copy that a template may change. Raises: InvalidRequest for what is no plain data."""
    try:
        return copy.deepcopy(value)
    except Exception as error:  # generators, locks, absurd nesting: any object may refuse, in its own way
        raise InvalidRequest(f"{where} must be plain data: {type(error).__name__}: {error}", where) from error


def _content(content: Any, where: str, wants_parts: bool) -> Any:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InvalidRequest(f"{where} must be text or a list of text parts, not {type(content).__name__}", where)
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidRequest(f"{where}[{i}] is of type {kind!r}; text parts only: {{'type': 'text', 'text': …}}", where)
    return [{"type": "text", "text": text} for text in texts] if wants_parts else "\n".join(texts)


def _parse_arguments(call: Any, where: str) -> None:
    """On the wire a call's arguments are JSON in a text; templates write them out as JSON themselves."""
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{where} is not valid JSON: {error}", where) from error


def _check_dicts(values: Sequence[Mapping[str, Any]] | None, name: str) -> None:
    if values is None:
        return
    if not isinstance(values, list | tuple) or not all(isinstance(value, Mapping) for value in values):
        raise InvalidRequest(f"{name} must be a list of objects", name)


def _open_end(chat: list[dict[str, Any]]) -> str:
    """Mark where the last message's text ends; → that text."""
    last = chat[-1]
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _END_MARK
        return content
    if isinstance(content, list) and content:
        text = content[-1]["text"]
        content[-1]["text"] = text + _END_MARK
        return str(text)
    raise InvalidRequest("continue_final_message needs a last message with text", "messages")


def _cut(text: str, final: str) -> str:
    """Everything up to the mark; without trailing white space where the template trims messages."""
    at = text.rfind(_END_MARK.strip())
    if at < 0 or final.strip() not in text:
        raise InvalidRequest("continue_final_message: the chat template does not show the last message as it is", "continue_final_message")
    return text[:at] if text.startswith(_END_MARK, at) else text[:at].rstrip()
