"""Resources: what a rollout is given to work with (a model endpoint, a prompt)."""

import functools
import logging
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from agl_core.types.core import AttemptedRollout
from agl_core.types.template import fill_in_braces, fill_in_jinja

logger = logging.getLogger(__name__)

JsonDict = dict[str, Any]


class Resource(BaseModel):
    """One named thing that an algorithm publishes and rollouts use."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    resource_type: Any
    """Discriminates the kinds of resource."""


class LLM(Resource):
    """A model behind an OpenAI-compatible endpoint."""

    resource_type: Literal["llm"] = "llm"
    endpoint: str
    """Base URL, ending in `/v1`."""
    model: str
    """Name to ask the endpoint for."""
    api_key: str | None = None
    sampling_parameters: JsonDict = Field(default_factory=JsonDict)
    """Extra fields for each request, for example `temperature` and `max_tokens`."""

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        """Return the base URL for an OpenAI client; a plain endpoint ignores the ids."""
        del rollout_id, attempt_id
        return self.endpoint


class ProxyLLM(LLM):
    """A model behind the recording proxy, which attributes calls by the rollout and attempt in the
    URL path.
    """

    resource_type: Literal["proxy_llm"] = "proxy_llm"  # pyright: ignore

    def __getattribute__(self, name: str) -> Any:
        if name == "endpoint":
            _warn_raw_endpoint()
        return super().__getattribute__(name)

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        """Return the base URL that attributes calls to one attempt.

        Args:
            rollout_id: The rollout, or None (with `attempt_id` None) for the endpoint as it is.
            attempt_id: The attempt of that rollout.

        Raises:
            ValueError: Only one of the two ids is given.
        """
        if rollout_id is None and attempt_id is None:
            return self.__dict__["endpoint"]
        if not rollout_id or not attempt_id:
            raise ValueError("rollout_id and attempt_id must be strings or all be empty")
        base = self.__dict__["endpoint"].rstrip("/")
        attribution = f"/rollout/{rollout_id}/attempt/{attempt_id}"
        if base.endswith("/v1"):
            return f"{base.removesuffix('/v1')}{attribution}/v1"
        return base + attribution

    def with_attempted_rollout(self, rollout: AttemptedRollout) -> LLM:
        """Return a plain `LLM` whose endpoint names the attempt, for agents that need not know
        about it.
        """
        return LLM(
            endpoint=self.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id),
            model=self.model,
            api_key=self.api_key,
            sampling_parameters=self.sampling_parameters,
        )


class RecordedLLM(LLM):
    """A model server whose calls each runner records itself, by a proxy in its own process.

    What an agent is given in its place is the `ProxyLLM` of that proxy. Calls need no extra fields:
    the proxy asks for token ids and log-probs.
    """

    resource_type: Literal["recorded_llm"] = "recorded_llm"  # pyright: ignore
    further_endpoints: tuple[str, ...] = ()
    """Of servers with the same model and key; calls go to the least loaded one."""
    upstream_model: str | None = None
    """What the servers call the model; None for `model`."""
    weights_digest: str | None = None
    """Of what must answer, under the version `model`; a call that other weights served is refused.
    Where no `api_key` is given, runners then use the one in `AGL_ENGINE_TOKEN`. None lets any
    answer."""
    deadline_seconds: float = Field(default=600.0, gt=0)
    """For one call, retries included."""
    max_tries: int = Field(default=8, ge=1)

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        """Raise RuntimeError: an agent is given the address of its runner's proxy instead."""
        raise RuntimeError(
            "a RecordedLLM is opened by a LitAgentRunner, which gives the agent a ProxyLLM; "
            "publish an LLM to have the model server called without a record"
        )


@functools.cache
def _warn_raw_endpoint() -> None:
    logger.warning(
        "calls to the endpoint of a ProxyLLM belong to no attempt; use get_base_url(rollout_id, "
        "attempt_id) or with_attempted_rollout(rollout) (said once)"
    )


class PromptTemplate(Resource):
    """A prompt with places to fill in."""

    resource_type: Literal["prompt_template"] = "prompt_template"
    template: str
    engine: Literal["f-string", "jinja", "poml"] = "f-string"
    """`{name}`, or `{{ name }}` with all of Jinja in its sandbox."""

    def format(self, /, **values: Any) -> str:
        """Return the prompt with the given values filled in.

        A template may be text of a model: what starts with an underscore cannot be reached, nothing
        is called but harmless methods of texts, lists and dicts, and both the prompt's size and
        the work of making it are limited (`agl_core.types.template`).

        Raises:
            NotImplementedError: The engine is `poml`.
            ValueError: The template is malformed (a stray brace), names a value that is not given,
                cannot be filled in with these, makes too long a text or does too much work.
        """
        if self.engine == "poml":
            raise NotImplementedError(
                "Formatting prompt templates for non-f-string engines with format() helper is not "
                "supported yet: POML templates are not supported; use f-string or jinja"
            )
        fill_in = fill_in_braces if self.engine == "f-string" else fill_in_jinja
        return fill_in(self.template, values)


ResourceUnion = Annotated[
    LLM | ProxyLLM | RecordedLLM | PromptTemplate, Field(discriminator="resource_type")
]
NamedResources = dict[str, ResourceUnion]


class ResourcesUpdate(BaseModel):
    """One version of the resources under an id."""

    model_config = ConfigDict(extra="forbid")

    resources_id: str
    create_time: float
    update_time: float
    version: int
    """From 1, counted for each id."""
    resources: NamedResources
