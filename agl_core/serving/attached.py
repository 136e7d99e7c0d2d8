"""Check a model server that runs already before a run trusts it.

It must answer with token ids and log-probs, and it must turn a conversation into the token ids that
the policy's own tokenizer and chat template give: ids of another kind would train the policy on
texts that no model saw. The digests that an engine states name what differs; the conversations show
it for a server that states none.
"""

from pathlib import Path
from typing import Any

from agl_core import semconv
from agl_core.errors import ConfigError, UpstreamError
from agl_core.ledger.run import BaseModelRecord
from agl_core.llm_proxy import capture
from agl_core.serving.launch import ask_server

Messages = list[dict[str, str]]

_SYSTEM = {"role": "system", "content": "Be brief."}
_QUESTION = {"role": "user", "content": "What is 12 + 345?\n\u00c9x = \U0001f642"}
_ANSWER = {"role": "assistant", "content": " <sum>"}
_RESULT = {"role": "tool", "content": "357"}
CONVERSATIONS: tuple[Messages, ...] = (
    [_QUESTION],
    [_SYSTEM, _QUESTION, _ANSWER, _QUESTION],
    [_QUESTION, _ANSWER, _RESULT],
)
"""One token is sampled for each; those that the policy's chat template refuses are left out."""


def check_attached(url: str, base: BaseModelRecord) -> None:
    """Return if the server at `url` can serve a run that starts from this policy.

    Raises:
        ConfigError: It is no engine server, gives no token ids or log-probs, or has another
            tokenizer or chat template than the policy.
        UpstreamError: It does not answer.
    """
    url = url.rstrip("/")
    policy = ask_server("GET", f"{url}/policy")
    stated = {
        "chat template": ("chat_template_digest", base.chat_template_digest),
        "tokenizer": ("tokenizer_digest", base.tokenizer_digest),
    }
    others = [name for name, (key, own) in stated.items() if policy.get(key, own) != own]
    if others:
        raise _differs(url, f"another {' and another '.join(others)}", base)
    for messages, expected in _encoded(base):
        _check_answer(url, policy["version"], messages, expected, base)


def _check_answer(
    url: str, version: str, messages: Messages, expected: list[int], base: BaseModelRecord
) -> None:
    """Ask as the proxy asks, for one token."""
    body = {"model": version, "messages": messages, "max_tokens": 1}
    asked = capture.add_recording(body, seed=0)
    answer = ask_server("POST", f"{url}/v1/chat/completions", asked)
    if defect := capture.check_answer(answer):
        raise UpstreamError(f"model server {url}: {defect}")
    recorded = capture.response_attributes(answer, {})
    if defect := capture.find_defect(recorded):
        raise ConfigError(
            f"model server {url} gives nothing to train on: {defect}; use a server that honours "
            "return_token_ids and logprobs"
        )
    found = list(recorded[semconv.PROMPT_TOKEN_IDS])
    if found != expected:
        raise _differs(url, "another tokenizer or chat template", base)


def _differs(url: str, what: str, base: BaseModelRecord) -> ConfigError:
    return ConfigError(
        f"model server {url} has {what} than the policy {base.policy.path}: start it with that "
        "folder, or leave out serving.url"
    )


def _encoded(base: BaseModelRecord) -> list[tuple[Messages, list[int]]]:
    """Return the conversations that the policy's template takes, with their token ids."""
    # Loads torch; runs that start their own engine need not.
    from agl_core.serving.decoding import encode_chat, load_tokenizer

    assert base.policy.path is not None, "a run starts from a policy on this machine's disk"
    tokenizer: Any = load_tokenizer(Path(base.policy.path))
    found: list[tuple[Messages, list[int]]] = []
    for messages in CONVERSATIONS:
        try:
            found.append((messages, encode_chat(tokenizer, messages)))
        except ConfigError:
            continue
    return found
