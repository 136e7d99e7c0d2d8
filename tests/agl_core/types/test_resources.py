import pytest
from pydantic import TypeAdapter

from agl_core.types.resources import LLM, NamedResources, PromptTemplate, ProxyLLM

PROXY = ProxyLLM(endpoint="http://127.0.0.1:8000/v1", model="v000003", api_key="secret")


def test_the_base_url_names_rollout_and_attempt_before_v1():
    url = PROXY.get_base_url("ro-1", "at-2")
    assert url == "http://127.0.0.1:8000/rollout/ro-1/attempt/at-2/v1"


def test_an_endpoint_without_v1_gets_the_attribution_at_its_end():
    llm = ProxyLLM(endpoint="http://proxy/", model="m")
    assert llm.get_base_url("ro-1", "at-2") == "http://proxy/rollout/ro-1/attempt/at-2"


def test_without_ids_the_endpoint_is_as_it_is():
    assert PROXY.get_base_url() == PROXY.endpoint


@pytest.mark.parametrize(("rollout", "attempt"), [("ro-1", None), (None, "at-2"), ("", "")])
def test_one_id_alone_is_refused(rollout: str | None, attempt: str | None):
    with pytest.raises(ValueError, match="must be strings or all be empty"):
        PROXY.get_base_url(rollout, attempt)


def test_a_bound_model_needs_no_ids_and_keeps_the_rest():
    llm = PROXY.bind("ro-1", "at-2")
    assert type(llm) is LLM
    assert llm.get_base_url() == PROXY.get_base_url("ro-1", "at-2")
    assert (llm.model, llm.api_key) == ("v000003", "secret")


def test_named_resources_keep_their_kind_through_json():
    adapter = TypeAdapter(NamedResources)
    resources: NamedResources = {"llm": PROXY, "prompt": PromptTemplate(template="Hi {name}")}
    again = adapter.validate_json(adapter.dump_json(resources))
    assert again == resources
    assert isinstance(again["llm"], ProxyLLM)


def test_a_prompt_is_filled_in():
    assert PromptTemplate(template="Hi {name}").format(name="Ada") == "Hi Ada"
