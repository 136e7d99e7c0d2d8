import logging
import pickle
import tracemalloc

import pytest
from pydantic import TypeAdapter

from agl_core.types.core import Attempt, AttemptedRollout
from agl_core.types.resources import (
    LLM,
    NamedResources,
    PromptTemplate,
    ProxyLLM,
    _warn_raw_endpoint,
)

PROXY = ProxyLLM(endpoint="http://127.0.0.1:8000/v1", model="v000003", api_key="secret")
ATTEMPTED = AttemptedRollout(
    rollout_id="ro-1",
    input=None,
    start_time=0.0,
    attempt=Attempt(rollout_id="ro-1", attempt_id="at-2", sequence_id=1, start_time=0.0),
)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture):
    _warn_raw_endpoint.cache_clear()
    with caplog.at_level(logging.WARNING, "agl_core.types.resources"):
        yield lambda: [r for r in caplog.records if r.name == "agl_core.types.resources"]


def test_the_base_url_names_rollout_and_attempt_before_v1():
    url = PROXY.get_base_url("ro-1", "at-2")
    assert url == "http://127.0.0.1:8000/rollout/ro-1/attempt/at-2/v1"


def test_an_endpoint_without_v1_gets_the_attribution_at_its_end():
    llm = ProxyLLM(endpoint="http://proxy/", model="m")
    assert llm.get_base_url("ro-1", "at-2") == "http://proxy/rollout/ro-1/attempt/at-2"


def test_without_ids_the_endpoint_is_as_it_is():
    assert PROXY.get_base_url() == "http://127.0.0.1:8000/v1"


@pytest.mark.parametrize(("rollout", "attempt"), [("ro-1", None), (None, "at-2"), ("", "")])
def test_one_id_alone_is_refused(rollout: str | None, attempt: str | None):
    with pytest.raises(ValueError, match="must be strings or all be empty"):
        PROXY.get_base_url(rollout, attempt)


def test_a_model_of_an_attempt_needs_no_ids_and_keeps_the_rest():
    llm = PROXY.with_attempted_rollout(ATTEMPTED)
    assert type(llm) is LLM
    assert llm.get_base_url() == PROXY.get_base_url("ro-1", "at-2")
    assert (llm.model, llm.api_key) == ("v000003", "secret")


def test_reading_the_raw_endpoint_of_a_proxy_warns_once(warnings):
    assert PROXY.endpoint == "http://127.0.0.1:8000/v1"
    assert PROXY.endpoint == "http://127.0.0.1:8000/v1"
    (warning,) = warnings()
    assert "use get_base_url" in warning.getMessage()


def test_nothing_but_reading_the_raw_endpoint_warns(warnings):
    PROXY.get_base_url("ro-1", "at-2")
    PROXY.with_attempted_rollout(ATTEMPTED)
    again = pickle.loads(pickle.dumps(ProxyLLM.model_validate_json(PROXY.model_dump_json())))
    assert again.model_copy(deep=True) == PROXY
    assert "8000/v1" in repr(again)
    assert LLM(endpoint="http://x/v1", model="m").endpoint == "http://x/v1"
    assert warnings() == []


def test_named_resources_keep_their_kind_through_json():
    adapter = TypeAdapter(NamedResources)
    resources: NamedResources = {"llm": PROXY, "prompt": PromptTemplate(template="Hi {name}")}
    again = adapter.validate_json(adapter.dump_json(resources))
    assert again == resources
    assert isinstance(again["llm"], ProxyLLM)


@pytest.mark.parametrize(
    ("engine", "template"),
    [
        ("f-string", "Hi {name}, {task[question]} {{as is}} {score:.1f}"),
        ("jinja", "Hi {{ name }}, {{ task.question }} {as is} {{ '%.1f' % score }}"),
    ],
)
def test_a_prompt_is_filled_in(engine, template):
    prompt = PromptTemplate(template=template, engine=engine)
    filled = prompt.format(name="Ada", task={"question": "{why}?"}, score=0.25)
    assert filled == "Hi Ada, {why}? {as is} 0.2"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("stray }", "Single '}'"),
        ("stray {", "brace that is text is written twice"),
        ('{"json": 1}', r'no value for the place \{"json"\} \(given: name\)'),
        ("{}", r"no value for the place \{0\}"),
        ("{nobody}", "no value for the place"),
        ("{name.nothing}", "no attribute"),
        ("{name.__class__}", "private"),
        ("{name[__x]}", "private"),
        ("{name:d}", "format code"),
    ],
)
def test_a_template_that_braces_cannot_fill_in_is_refused(template, reason):
    with pytest.raises(ValueError, match=reason):
        PromptTemplate(template=template).format(name="Ada")


@pytest.mark.parametrize(
    "template",
    [
        "{{ name",
        "{{ nobody }}",
        "{% for %}",
        "{{ name.__class__.__mro__ }}",
        "{{ names.append(1) }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_jinja_cannot_fill_in_is_refused(template):
    with pytest.raises(ValueError, match="cannot be filled in"):
        PromptTemplate(template=template, engine="jinja").format(name="Ada", names=[])


def test_poml_is_not_supported():
    with pytest.raises(NotImplementedError, match="POML"):
        PromptTemplate(template="<poml/>", engine="poml").format()


class Database:
    name = "db"

    def drop(self):
        raise AssertionError("was called")

    def __format__(self, specification):
        raise RuntimeError("no text")

    def __str__(self):
        raise RuntimeError("no text")


def deep(depth):
    return "(" * depth + "1" + ")" * depth


@pytest.mark.parametrize(
    ("engine", "template"),
    [
        ("f-string", "{x:>30000000}"),
        ("f-string", "{x:99999999999999999999}"),
        ("f-string", "{number:.{number}f}"),
        ("f-string", "{number:c}"),
        ("f-string", "{database}"),
        ("f-string", "{long}" * 11),
        ("jinja", "{{ 'a' * 50000000 }}"),
        ("jinja", "{{ 50000000 * ['a'] }}"),
        ("jinja", "{{ 9 ** 99999999 }}"),
        ("jinja", "{{ '%50000000d' % 1 }}"),
        ("jinja", "{{ '%*d' % (50000000, 1) }}"),
        ("jinja", "{{ '%(a)50000000d' % {'a': 1} }}"),
        ("jinja", "{{ '%50000000d'|format(1) }}"),
        ("jinja", "{{ x|center(50000000) }}"),
        ("jinja", "{{ x|indent(width=50000000) }}"),
        ("jinja", "{{ x.ljust(50000000) }}"),
        ("jinja", "{{ '{:>50000000}'.format(1)|length }}"),
        ("jinja", "{{ lipsum(n=50000000) }}"),
        ("jinja", "{% for i in range(11) %}{{ long }}{% endfor %}"),
        ("jinja", "{{ database.drop() }}"),
        ("jinja", "{{ [database]|map('drop')|list }}"),
        ("jinja", "{{ database }}"),
        ("jinja", "{{ call() }}"),
        ("jinja", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"),
        ("jinja", "{{ " + deep(5000) + " }}"),
    ],
)
def test_a_template_that_does_too_much_is_a_value_error(engine, template):
    prompt = PromptTemplate(template=template, engine=engine)
    values = {"x": "a", "number": 10**10, "long": "a" * 1_000_000}
    with pytest.raises(ValueError, match="cannot be filled in"):
        prompt.format(**values, database=Database(), call=Database().drop)


def test_what_templates_commonly_do_is_allowed():
    template = (
        "{% macro line(k, v) %}{{ loop_mark }}{{ k.upper() }}={{ v|round(1) }}{% endmacro %}"
        "{% for k, v in scores.items() %}{{ line(k, v) }}{{ loop.cycle(';', '.') }}{% endfor %}"
        "{{ '-' * 3 }}{{ '%5.1f' % 2 }}{{ names|join(', ')|center(9) }}{{ database.name }}"
        "{% set found = namespace(n=2 ** 3) %}{{ found.n }}{{ range(3)|list }}"
    )
    prompt = PromptTemplate(template=template, engine="jinja")
    filled = prompt.format(
        scores={"a": 0.25, "b": 1.0}, names=["x", "y"], database=Database(), loop_mark="*"
    )
    assert filled == "*A=0.2;*B=1.0.---  2.0   x, y  db8[0, 1, 2]"


def test_a_value_may_have_any_name():
    assert PromptTemplate(template="{self} {values}").format(self=1, values=2) == "1 2"


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{% set n = namespace(a=long) %}{% for i in range(99)%}{%set n.a=n.a+n.a%}{% endfor %}",
        "{% set n = namespace(a=long) %}{% for i in range(99)%}{%set n.a=n.a~n.a%}{% endfor %}",
        "{% set n = namespace(a=[]) %}{% for i in range(99)%}{%set n.a=[n.a,n.a]%}{% endfor %}",
        "{{ long.join(['x'] * 10000)|length }}",
        "{{ (['x'] * 10000)|join(long)|length }}",
        "{{ ('a' * 10000)|replace('a', long)|length }}",
        "{{ (long ~ '\n' * 100000)|indent(9999)|length }}",
        "{{ ('a b ' * 100000)|wordwrap(1, wrapstring='x' * 10000)|length }}",
        "{{ ('%(a)s' * 10000) % {'a': long} }}",
        "{% set b %}{% for i in range(1000) %}{{ long }}{% endfor %}{% endset %}",
        "{% macro m() %}{% for i in range(1000) %}{{ long }}{% endfor %}{% endmacro %}{{ m() }}",
        "{% for i in range(1000) %}{% set part = long[1:] %}{% endfor %}",
        "{{ long.rfind('b' + long) }}",
        "{{ [[1]]|sum(start=[]) }}",
        "{{ 9 ** 9999 ** 9 }}",
        "{{ [[1]]|tojson(indent=99999999) }}",
        "{{ 1 }}" * 10_000,
    ],
)
def test_a_template_that_works_too_much_is_refused_before_it_does(template):
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="cannot be filled in"):
            PromptTemplate(template=template, engine="jinja").format(long="a" * 1_000_000)
        assert tracemalloc.get_traced_memory()[1] < 150_000_000
    finally:
        tracemalloc.stop()


def test_large_values_and_many_rows_fit_into_a_template():
    prompt = PromptTemplate(
        template="{% for row in rows %}{{ row.q|trim }}: {{ row.a }}\n{% endfor %}{{ text }}",
        engine="jinja",
    )
    rows = [{"q": " why ", "a": number} for number in range(10_000)]
    filled = prompt.format(rows=rows, text="a" * 5_000_000)
    assert filled.startswith("why: 0\nwhy: 1\n")
    assert len(filled) > 5_000_000
