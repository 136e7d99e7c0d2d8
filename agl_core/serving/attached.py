"""Check a model server before a run trusts it.

It must answer with token ids and log-probs, and it must turn a conversation into the token ids that
the policy's own tokenizer and chat template give: ids of another kind would train the policy on
texts that no model saw. The digests that an engine states name what differs; the conversations show
it for a server that states none.

Its log-probs must be those of the distribution that it sampled from, `log_softmax(logits / T)`:
VERL recomputes them so, and servers differ (vLLM gives them at T = 1 unless it is started with
`--logprobs-mode processed_logprobs`). Where the server has the policy's weights they are recomputed
here; else two temperatures are compared, since a token's log-prob must change with it.

And it must add no sampling of its own: vLLM takes the defaults of the model's
`generation_config.json` (top-p, top-k, repetition penalty in most instruct models) for every field
that a request leaves out, unless it is started with `--generation-config vllm`. The proxy leaves
none out; a server with such defaults is refused all the same, since others may ask it too.
"""

from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from agl_core import semconv
from agl_core.errors import ConfigError, UpstreamError
from agl_core.ledger.run import BaseModelRecord
from agl_core.llm_proxy import capture
from agl_core.llm_proxy.answer_shape import check_answer
from agl_core.sampling import state_fields
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
"""Asked once each; those that the policy's chat template refuses are left out."""
TEMPERATURE = 0.7
"""Of the answers: at 1 both definitions of a log-prob are the same."""
_SAMPLED_TEMPERATURE, _NUM_SAMPLED = 1.0, 32
"""Of one longer answer: its tokens must come from the whole distribution."""
_HOT = 2.0
"""Temperature at which many tokens are likely, so that a cut distribution shows."""
_NUM_TOP = 5
_NUM_TOKENS = 8
_SEED = 1
_CUT_LOGPROB = -100.0
"""Servers write -9999 or less for a token that was cut."""
_TOLERANCE = 0.1
"""Mean difference in nats; two runs of one bf16 model differ by some hundredths."""
_SAMPLING_TOLERANCE = 0.02
"""Mean difference in nats of two answers to one request; a top-p of 0.95 gives 0.05."""
_DEADLINE_SECONDS = 60.0
"""Of one answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server gave for one conversation."""

    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: np.ndarray
    """[response_length] as the server states them."""
    top: list[dict[str, float]]
    """[response_length] log-prob by token, of the sampled one and of likely others."""


def check_attached(url: str, base: BaseModelRecord) -> None:
    """Return if the server at `url` can serve a run that starts from this policy.

    Raises:
        ConfigError: It is no engine server, gives no token ids or log-probs, has another tokenizer
            or chat template than the policy, other log-probs than those it samples by, or sampling
            defaults of its own.
        UpstreamError: It does not answer.
    """
    url = url.rstrip("/")
    policy = ask_server("GET", f"{url}/policy", timeout_seconds=_DEADLINE_SECONDS)
    stated = {
        "chat template": ("chat_template_digest", base.chat_template_digest),
        "tokenizer": ("tokenizer_digest", base.tokenizer_digest),
    }
    others = [name for name, (key, own) in stated.items() if policy.get(key, own) != own]
    if others:
        raise _differs(url, f"another {' and another '.join(others)}", base)
    conversations = _encoded(base)
    answers: list[Answer] = []
    for messages, expected in conversations:
        answer = _ask(url, policy["version"], messages, TEMPERATURE)
        if answer.prompt_ids != expected:
            raise _differs(url, "another tokenizer or chat template", base)
        answers.append(answer)
    if conversations:
        _refuse_sampling_defaults(url, policy["version"], conversations[0][0])
    if policy["weights_digest"] == base.policy.weights_digest:
        _compare_with_policy(url, answers, base)
        for messages, _ in conversations[:1]:
            sampled = _ask(
                url, policy["version"], messages, _SAMPLED_TEMPERATURE, num_tokens=_NUM_SAMPLED
            )
            _compare_with_policy(url, [sampled], base, _SAMPLED_TEMPERATURE)
        return
    others = [_ask(url, policy["version"], messages, 1.0) for messages, _ in conversations]
    _compare_temperatures(url, answers, others)


def _refuse_sampling_defaults(url: str, version: str, messages: Messages) -> None:
    """Refuse a server that samples otherwise where a request leaves fields out.

    The same seed gives the same tokens, and the same log-probs of the likely ones, unless defaults
    change the distribution. They are compared up to the first token that differs.
    """
    stated = _ask(url, version, messages, _HOT)
    bare = _ask(url, version, messages, _HOT, is_bare=True)
    differences: list[float] = []
    for position, (one, other) in enumerate(zip(stated.top, bare.top, strict=False)):
        differences += [abs(one[token] - other[token]) for token in one.keys() & other.keys()]
        if stated.response_ids[position] != bare.response_ids[position]:
            break
    distance = float(np.mean(differences)) if differences else float("inf")
    if distance > _SAMPLING_TOLERANCE:
        raise ConfigError(
            f"model server {url} has sampling defaults of its own: the log-probs of a request "
            f"without top_p, top_k and penalties differ by {distance:.2f} nats from those of one "
            "that states them; start vLLM with --generation-config vllm"
        )


def _ask(
    url: str,
    version: str,
    messages: Messages,
    temperature: float,
    *,
    num_tokens: int = _NUM_TOKENS,
    is_bare: bool = False,
) -> Answer:
    """Ask as the proxy asks, for a few tokens.

    Args:
        url: Of the server.
        version: Of the policy.
        messages: The conversation.
        temperature: To sample at.
        num_tokens: At most.
        is_bare: Leave the other sampling fields to the server.
    """
    body = {
        "model": version,
        "messages": messages,
        "max_tokens": num_tokens,
        "temperature": temperature,
        "top_logprobs": _NUM_TOP,
    }
    asked = capture.add_recording(body if is_bare else state_fields(body), seed=_SEED)
    path = f"{url}/v1/chat/completions"
    answer = ask_server("POST", path, asked, timeout_seconds=_DEADLINE_SECONDS)
    if defect := check_answer(answer):
        raise UpstreamError(f"model server {url}: {defect}")
    recorded = capture.response_attributes(answer, {})
    if defect := capture.find_defect(recorded):
        raise ConfigError(
            f"model server {url} gives nothing to train on: {defect}; use a server that honours "
            "return_token_ids and logprobs"
        )
    return Answer(
        list(recorded[semconv.PROMPT_TOKEN_IDS]),
        list(recorded[semconv.RESPONSE_TOKEN_IDS]),
        np.asarray(recorded[semconv.LOGPROBS], float),
        [_top(entry) for entry in answer["choices"][0]["logprobs"]["content"]],
    )


def _top(entry: dict[str, Any]) -> dict[str, float]:
    """Return the log-probs at one position that are not those of tokens that were cut."""
    listed = [entry, *(entry.get("top_logprobs") or ())]
    found = {str(other.get("token")): float(other["logprob"]) for other in listed}
    return {token: logprob for token, logprob in found.items() if logprob > _CUT_LOGPROB}


def _compare_with_policy(
    url: str, answers: list[Answer], base: BaseModelRecord, temperature: float = TEMPERATURE
) -> None:
    """Recompute the log-probs with the policy's own weights, at the temperature and at 1."""
    from agl_core.serving.decoding import load_policy, score  # loads torch

    assert base.policy.path is not None, "a run starts from a policy on this machine's disk"
    policy = load_policy(base.policy.version, Path(base.policy.path))
    pairs = [(answer.prompt_ids, answer.response_ids) for answer in answers]
    stated = np.concatenate([answer.logprobs for answer in answers])
    own, raw = (
        np.concatenate([score(policy, *pair, at) for pair in pairs]) for at in (temperature, 1.0)
    )
    distance, from_raw = (float(np.abs(stated - other).mean()) for other in (own, raw))
    if distance > 1e-3 and from_raw < distance / 4:
        raise _is_raw(url)
    if distance > _TOLERANCE:
        raise ConfigError(
            f"model server {url} gives log-probs that differ from the policy's own by "
            f"{distance:.2f} nats on average at temperature {temperature:g}: serve the weights of "
            f"{base.policy.path} as they are, neither quantised nor changed, and sample from the "
            "whole distribution"
        )


def _compare_temperatures(url: str, answers: list[Answer], others: list[Answer]) -> None:
    """Refuse a server whose log-probs do not change with the temperature.

    Compared where both answers begin with the same tokens, so have the same logits.
    """
    differences: list[float] = []
    total = 0.0
    for one, other in zip(answers, others, strict=True):
        pairs = zip(one.response_ids, other.response_ids, strict=False)
        length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        differences.extend(np.abs(one.logprobs[:length] - other.logprobs[:length]))
        total += float(np.abs(one.logprobs[:length]).sum())
    if total > 0.5 and max(differences) < 1e-3:
        raise _is_raw(url)


def _is_raw(url: str) -> ConfigError:
    return ConfigError(
        f"model server {url} gives log-probs at temperature 1, not at the one it samples with: "
        "start vLLM with --logprobs-mode processed_logprobs"
    )


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
