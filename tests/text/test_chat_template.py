"""Chat templates against transformers' rendering, and what hostile or broken ones do."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import InvalidRequest, UnsupportedError
from octavo.text import chat_template as module
from octavo.text.chat_template import ChatTemplate

TEMPLATES = json.loads((Path(__file__).parents[1] / "fixtures" / "chat_templates.json").read_text("utf-8"))["templates"]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Now & <here> \"ü\"", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "enum": ["Köln", "東京"]}}, "required": ["city"]}}}]  # fmt: skip
PLAIN = [{"role": "user", "content": " Hello! <b>&\"'\n"}]
TALK = [{"role": "system", "content": "Be brief."}, *PLAIN, {"role": "assistant", "content": "Hi 👋 "}, {"role": "user", "content": "more"}]
CALLS = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln"}}}]},
    {"role": "tool", "name": "get_weather", "tool_call_id": "abcdefghi", "content": "12 °C"},
]  # fmt: skip


def theirs(template, messages, **kwargs):
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([messages], chat_template=template, **{**SPECIAL, **kwargs})
    return rendered[0]


CASES = [
    (name, messages, tools)
    for name in TEMPLATES
    for messages, tools in [(PLAIN, None), (TALK, None), (TALK, TOOLS), (CALLS, TOOLS)]
    if messages is not CALLS or TEMPLATES[name]["tools"]
]


@pytest.mark.parametrize(("name", "messages", "tools"), CASES)
@pytest.mark.parametrize("prompt", [True, False])
def test_same_as_transformers(name, messages, tools, prompt):
    source = TEMPLATES[name]["template"]
    ours = ChatTemplate(source, SPECIAL).render(messages, tools=tools, add_generation_prompt=prompt, date_string="26 Jul 2024")
    assert ours == theirs(source, messages, tools=tools, add_generation_prompt=prompt, date_string="26 Jul 2024")
    assert "Hello! <b>&\"'" in ours or messages is CALLS


def test_documents_and_more_variables():
    source = "{% for d in documents %}[{{ d.title }}: {{ d.text }}]{% endfor %}{{ mood }}{{ bos_token }}"
    documents = [{"title": "T", "text": "x<y"}]
    ours = ChatTemplate(source, SPECIAL).render(PLAIN, documents=documents, mood="!", bos_token="B")
    assert ours == theirs(source, PLAIN, documents=documents, mood="!", bos_token="B") == "[T: x<y]!B"
    assert ChatTemplate(source, SPECIAL).render(PLAIN, documents=documents, variables={"mood": "!", "bos_token": "B"}) == ours
    for name in ("messages", "tools", "add_generation_prompt"):  # from a request: not a TypeError
        with pytest.raises(InvalidRequest, match=f"'{name}'"):
            ChatTemplate(source).render(PLAIN, variables={name: 1})


@pytest.mark.parametrize("name", list(TEMPLATES))
@pytest.mark.parametrize("text", ["The answer is", "two words ", "  lead", "line\n\n"])
def test_continue_final_message_is_transformers(name, text):
    messages = [*PLAIN, {"role": "assistant", "content": text}]
    source = TEMPLATES[name]["template"]
    ours = ChatTemplate(source, SPECIAL).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert ours == theirs(source, messages, continue_final_message=True)
    assert ours.endswith((text, text.strip()))
    assert "\ue0ff" not in ours


def test_continue_final_message_refusals():
    chat = ChatTemplate(TEMPLATES["smollm2"]["template"])
    with pytest.raises(InvalidRequest, match="exclude each other"):
        chat.render(PLAIN, continue_final_message=True)
    parts = ChatTemplate("{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}")
    with pytest.raises(InvalidRequest, match="last message with text"):
        parts.render([{"role": "assistant", "content": []}], continue_final_message=True, add_generation_prompt=False)
    with pytest.raises(InvalidRequest, match="does not show"):
        ChatTemplate("x").render(PLAIN, continue_final_message=True, add_generation_prompt=False)


def test_generation_tag_is_only_its_body():
    source = "{% for m in messages %}{% generation %}\n{{ m.content }}{% endgeneration %}|{% endfor %}"
    assert ChatTemplate(source).render(TALK) == theirs(source, TALK)


def test_loop_controls_tojson_and_time():
    source = (
        "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{{ {'b': '<é>', 'a': [1]} | tojson }}{{ {'a': 1} | tojson(indent=2) }}{{ strftime_now('%Y') | length }}"
        "{{ 'a' ~ 1 ~ none }}{{ dict(a=1) }}{{ '%5.2f|%s' % (1.5, 'x') }}{{ '%s' | format('y') }}{{ '{:>4}'.format(3) }}{{ 'x' | indent(3, true) }}"
    )
    assert ChatTemplate(source).render(PLAIN) == theirs(source, PLAIN)


def test_content_parts():
    parts = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    assert ChatTemplate("{{ messages[0]['content'] + '!' }}").render(parts) == "one\ntwo!"
    loops = [
        "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}",
        "{% for m in messages %}{% for p in m['content'] %}[{{ p['text'] }}]{% endfor %}{% endfor %}",
        "{% for m in messages %}{% set c = m['content'] %}{% if c is string %}{{ c }}{% else %}"
        "{% for p in c %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}",
    ]
    for source in loops:
        assert ChatTemplate(source).render(parts) == theirs(source, parts) == "[one][two]"
    assert ChatTemplate(loops[2]).render(PLAIN) == PLAIN[0]["content"]
    built = "{% for m in messages %}{% set c = '<' + m['content'] + '>' %}{% for x in c.split('o') %}{{ x }}{% endfor %}{% endfor %}"
    assert ChatTemplate(built).render(parts) == "<ne\ntw>"  # a loop over a text made of the content is not over its parts
    open_end = ChatTemplate(loops[0]).render(parts, add_generation_prompt=False, continue_final_message=True)
    assert open_end == "[one][two"
    with pytest.raises(InvalidRequest, match="'image_url'; text parts only") as caught:
        ChatTemplate("x").render([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    assert caught.value.param == "messages[0].content"


def test_arguments_on_the_wire_are_json_in_a_text():
    wire = json.loads(json.dumps(CALLS))
    wire[1]["tool_calls"][0]["function"]["arguments"] = '{"city": "Köln"}'
    chat = ChatTemplate(TEMPLATES["qwen2.5"]["template"], SPECIAL)
    assert chat.render(wire, tools=TOOLS) == chat.render(CALLS, tools=TOOLS)
    assert wire[1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Köln"}'  # the caller's messages stay as they were
    wire[1]["tool_calls"][0]["function"]["arguments"] = "{city"
    with pytest.raises(InvalidRequest, match="not valid JSON") as caught:
        chat.render(wire)
    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"


def test_named_templates():
    chat = ChatTemplate({"default": "D", "tool_use": "T", "rag": "R"})
    assert (chat.render(PLAIN), chat.render(PLAIN, tools=TOOLS), chat.render(PLAIN, name="rag")) == ("D", "T", "R")
    assert chat.names == ["default", "tool_use", "rag"] and bool(chat)
    with pytest.raises(InvalidRequest, match=r"'x'.*default, rag, tool_use"):
        chat.render(PLAIN, name="x")


def test_no_template():
    assert not ChatTemplate(None)
    with pytest.raises(InvalidRequest, match="without a chat template"):
        ChatTemplate(None).render(PLAIN)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hi", "list of"), ({"role": "user"}, "list of"), ([], "empty"), (["hi"], r"messages\[0\]"), ([{"content": "x"}], "role"),
        ([{"role": 5, "content": "x"}], "role"), ([{"role": "user", "content": 5}], "content must be text"),
    ],
)  # fmt: skip
def test_malformed_messages_are_named(messages, words):
    with pytest.raises(InvalidRequest, match=words):
        ChatTemplate("x").render(messages)


def test_arguments_that_are_refused():
    with pytest.raises(InvalidRequest, match="tools must be a list"):
        ChatTemplate("x").render(PLAIN, tools={"a": 1})
    with pytest.raises(InvalidRequest, match="documents must be a list"):
        ChatTemplate("x").render(PLAIN, documents=["a"])


def test_what_a_template_refuses_or_fails_on_is_the_requests_fault():
    chat = ChatTemplate(TEMPLATES["mistral"]["template"], SPECIAL)
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        chat.render([*PLAIN, *PLAIN])
    with pytest.raises(InvalidRequest, match="'x' is undefined"):
        ChatTemplate("{{ x.y }}").render(PLAIN)
    with pytest.raises(InvalidRequest, match="ZeroDivisionError"):
        ChatTemplate("{{ 1 / 0 }}").render(PLAIN)
    assert ChatTemplate("[{{ x }}{{ messages[0].nothing }}]").render(PLAIN) == theirs("[{{ x }}{{ messages[0].nothing }}]", PLAIN) == "[]"


@pytest.mark.parametrize("source", ["{% if %}", "{% foo %}", "{{ 'a' | nofilter }}", "{{ "])
def test_a_broken_template_is_unsupported(source):
    with pytest.raises(UnsupportedError, match="line 1"):
        ChatTemplate(source).render(PLAIN)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ ''.format.__self__.__class__.x }}",
        "{{ messages.__class__.x }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{% include 'x' %}",
    ],
)
def test_python_is_out_of_reach(source):
    with pytest.raises(InvalidRequest):
        ChatTemplate(source).render(PLAIN)


DOUBLE = "{{% set ns = namespace(x='{}') %}}{{% for i in range(60) %}}{}{{% endfor %}}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% for k in r %}{% endfor %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f(n) %}{{ f(n-1) }}{% endmacro %}{{ f(5) }}",
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{{ 'a' * 10**9 }}",
        "{{ 9**9**9 }}",
        "{{ [1] * 10**9 }}",
        "{{ 'x' | center(10000000000) }}",
        "{{ 'x'.ljust(10000000000) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (9999999999, 1) }}",
        "{{ '%99999999d' | format(1) }}",
        "{{ '{:9999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 9999999999) }}",
        DOUBLE.format("a" * 40, "{% set ns.x = ns.x + ns.x %}"),
        DOUBLE.format("a" * 40, "{% set ns.x = ns.x ~ ns.x %}"),
        DOUBLE.format("a" * 40, "{% set t %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = t %}"),
    ],
)
def test_hostile_templates_end_soon(source, monkeypatch):
    monkeypatch.setattr(module, "RENDER_SECONDS", 0.3)
    raised: list[BaseException] = []

    def work() -> None:
        try:
            ChatTemplate(source).render(PLAIN)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert isinstance(raised[0], InvalidRequest), raised


def test_threads_share_a_template():
    chat = ChatTemplate(TEMPLATES["qwen2.5"]["template"], SPECIAL)
    expected = [chat.render([{"role": "user", "content": str(i)}]) for i in range(8)]
    results: dict[int, set[str]] = {i: set() for i in range(8)}

    def work(i: int) -> None:
        for _ in range(30):
            results[i].add(chat.render([{"role": "user", "content": str(i)}]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[i] for i in range(8)] == [{text} for text in expected]


def test_jinja_is_not_imported_before_it_is_needed():
    import subprocess
    import sys

    modules = "octavo.text.chat_template, octavo.text.tokenizer, octavo.engine.detokenize"
    code = f"import sys, {modules}; print('jinja2' in sys.modules, 'tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["False", "False"]


def refused(messages: Any, **more: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate("{% for m in messages %}<{{ m.content }}>{% endfor %}").render(messages, **more)
    return caught.value


@pytest.mark.parametrize("message", [{"role": "user", "content": None}, {"role": "user"}, {"role": "assistant", "content": None},
                                     {"role": "assistant", "content": None, "tool_calls": []}, {"role": "tool", "content": None, "tool_calls": [{}]}])
def test_a_message_without_content(message: dict[str, Any]) -> None:
    """It would be written out as "None"."""
    assert refused([{"role": "user", "content": "a"}, message]).param == "messages[1].content"


def test_a_call_needs_no_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]}
    assert ChatTemplate("{% for m in messages %}<{{ m.content }}>{% endfor %}").render([call]) == "<>"
    assert refused([call | {"tool_calls": "abc"}]).param == "messages[0].tool_calls"


@pytest.mark.parametrize("given", [5, "a", [1], {1: 2}])
def test_template_variables_that_are_no_object(given: Any) -> None:
    assert refused(PLAIN, variables=given).param == "chat_template_kwargs"


def test_lone_surrogates_are_blamed_on_their_message() -> None:
    fine, broken = {"role": "user", "content": "é\U0001f600"}, {"role": "user", "content": "a\udc00"}
    assert refused([fine, broken]).param == "messages[1].content"
    assert refused([fine, {"role": "user", "content": ["x", "\ud800"]}]).param == "messages[1].content"
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate("{{ extra }}").render([fine], variables={"extra": "\ud800"})
    assert caught.value.param == "messages"


def test_what_is_no_plain_data() -> None:
    assert refused([{"role": "user", "content": "a", "more": (i for i in "ab")}]).param == "messages[0]"
    assert refused(PLAIN, tools=[{"a": (i for i in "ab")}]).param == "tools"


def test_compile_finds_a_broken_template() -> None:
    ChatTemplate({"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}).compile()
    with pytest.raises(UnsupportedError, match="cannot be compiled"):
        ChatTemplate({"default": "{{ 1 }}", "tool_use": "{% if %}"}).compile()
