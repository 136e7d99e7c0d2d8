"""Resources: what a rollout is given to work with (a model endpoint, a prompt)."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

JsonDict = dict[str, Any]


class Resource(BaseModel):
    """One named thing that an algorithm publishes and rollouts use."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        """Return the base URL that attributes calls to one attempt.

        Args:
            rollout_id: The rollout, or None (with `attempt_id` None) for the endpoint as it is.
            attempt_id: The attempt of that rollout.

        Raises:
            ValueError: Only one of the two ids is given.
        """
        if rollout_id is None and attempt_id is None:
            return self.endpoint
        if not rollout_id or not attempt_id:
            raise ValueError("rollout_id and attempt_id must be strings or all be empty")
        base = self.endpoint.rstrip("/")
        attribution = f"/rollout/{rollout_id}/attempt/{attempt_id}"
        if base.endswith("/v1"):
            return f"{base.removesuffix('/v1')}{attribution}/v1"
        return base + attribution

    def bind(self, rollout_id: str, attempt_id: str) -> LLM:
        """Return a plain `LLM` whose endpoint names the attempt, for agents that need not know
        about it.
        """
        return LLM(
            endpoint=self.get_base_url(rollout_id, attempt_id),
            model=self.model,
            api_key=self.api_key,
            sampling_parameters=self.sampling_parameters,
        )


class PromptTemplate(Resource):
    """A prompt with places to fill in."""

    resource_type: Literal["prompt_template"] = "prompt_template"
    template: str
    engine: Literal["f-string"] = "f-string"

    def format(self, **values: Any) -> str:
        """Return the prompt with `{name}` replaced by the given values."""
        return self.template.format(**values)


ResourceUnion = Annotated[LLM | ProxyLLM | PromptTemplate, Field(discriminator="resource_type")]
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
