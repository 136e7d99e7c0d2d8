import shutil
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from agl_core.errors import ConfigError, TransientError, UpstreamError
from agl_core.serving.decoding import load_policy
from agl_core.serving.engine import Engine
from agl_core.serving.generation import Completion, GenerationRequest, SampledToken
from agl_core.serving.weights import weights_digest

PROMPTS = [[10, 11, 12], [20], list(range(30, 60)), [10, 11, 12, 13, 14, 15, 16]]


def make_request(
    prompt: list[int],
    max_tokens: int = 12,
    temperature: float = 1.0,
    seed: int = 5,
    draw: int = 0,
    stop: tuple[str, ...] = (),
    version: str = "v000000",
    **more: Any,
) -> GenerationRequest:
    return GenerationRequest(version, prompt, max_tokens, temperature, seed, draw, stop, **more)


def sample(engine: Engine, *requests: GenerationRequest) -> list[Completion]:
    futures = [engine.submit(request) for request in requests]
    return [future.result(timeout=30) for future in futures]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_equal_a_plain_forward_pass(engine: Engine, temperature: float) -> None:
    requests = [
        make_request(prompt, max_tokens=6 + 5 * index, temperature=temperature, seed=index)
        for index, prompt in enumerate(PROMPTS)
    ]
    for request, completion in zip(requests, sample(engine, *requests), strict=True):
        ids = request.prompt_ids + completion.token_ids
        with torch.inference_mode():
            logits = engine.loaded.model(torch.tensor([ids])).logits[0]
        logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
        start = len(request.prompt_ids) - 1
        expected = [logprobs[start + i, t].item() for i, t in enumerate(completion.token_ids)]
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)
        if temperature == 0:
            assert completion.token_ids == logits[start:-1].argmax(dim=-1).tolist()
    assert engine.num_batches == 1


def test_response_does_not_depend_on_its_batch_companions(engine: Engine) -> None:
    request = make_request(PROMPTS[0], seed=77, top_p=0.9)
    alone = sample(engine, request)[0]
    others = [make_request(prompt, 20, seed=index) for index, prompt in enumerate(PROMPTS * 4)]
    together = sample(engine, *others[:7], request, *others[7:15])[7]
    assert together.token_ids == alone.token_ids
    assert together.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_requests_join_a_batch_that_runs_and_leave_it_without_a_trace(engine: Engine) -> None:
    requests = [
        make_request(prompt, max_tokens=8 + 9 * index, seed=index)
        for index, prompt in enumerate([list(range(90)), [7], *PROMPTS, list(range(9, 40))])
    ]
    alone = [sample(engine, request)[0] for request in requests]
    num_batches = engine.num_batches
    futures: dict[int, Future[Completion]] = {}
    has_all = threading.Event()

    def submit_next(number: int) -> None:
        """Submit the next request from within a step of those before."""
        if number < len(requests) and number not in futures:
            futures[number] = engine.submit(requests[number], lambda _: submit_next(number + 1))
        has_all.set() if len(futures) == len(requests) else None

    submit_next(0)
    assert has_all.wait(30)
    joined = [futures[number].result(timeout=30) for number in range(len(requests))]
    assert [c.token_ids for c in joined] == [c.token_ids for c in alone]
    for one, other in zip(joined, alone, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=5e-5)
    assert engine.num_batches == num_batches + len(requests)


def test_tokens_come_one_by_one_and_make_up_the_completion(engine: Engine) -> None:
    tokens: list[SampledToken] = []
    are_early: list[bool] = []
    request = make_request(PROMPTS[0], num_top_logprobs=3)

    def take(token: SampledToken) -> None:
        are_early.append(not future.done())
        tokens.append(token)

    with engine._changed:  # the engine waits until the future has its name
        future = engine.submit(request, take)
    completion = future.result(timeout=30)
    assert tokens == completion.tokens == sample(engine, request)[0].tokens
    assert len(tokens) == 12
    assert all(are_early)
    assert [token.finish_reason for token in tokens] == [None] * 11 + ["length"]
    assert "".join(token.text for token in tokens) == completion.text


def test_cancelling_stops_a_response_and_frees_its_place(policy_folder: Path) -> None:
    engine = Engine(policy_folder, "v000000", max_batch_size=1)
    begun = threading.Event()
    tokens: list[SampledToken] = []

    def take(token: SampledToken) -> None:
        tokens.append(token)
        begun.set()
        future.cancel()

    with engine._changed:
        future = engine.submit(make_request(PROMPTS[0], 240), take)
    assert begun.wait(30)
    assert sample(engine, make_request(PROMPTS[1], 3))[0].token_ids
    assert len(tokens) == 1
    engine.close()


@pytest.mark.parametrize("more", [{"top_k": 4}, {"top_p": 0.6}, {"top_k": 6, "top_p": 0.8}])
def test_truncated_responses_and_their_logprobs_are_those_of_numpy(
    engine: Engine, more: dict[str, Any]
) -> None:
    requests = [make_request(PROMPTS[0], 10, 0.8, seed, **more) for seed in range(8)]
    for request, completion in zip(requests, sample(engine, *requests), strict=True):
        logits = forward(engine, request.prompt_ids, completion.token_ids) / 0.8
        for row, token in zip(logits, completion.tokens, strict=True):
            probs = truncated_softmax(row, **more)
            assert probs[token.token_id] > 0
            assert token.logprob == pytest.approx(np.log(probs[token.token_id]), abs=1e-4)


def forward(engine: Engine, prompt: list[int], response: list[int]) -> np.ndarray:
    """Return [response_length, vocabulary] logits of a plain forward pass, in float64."""
    with torch.inference_mode():
        logits = engine.loaded.model(torch.tensor([prompt + response])).logits[0]
    return logits[len(prompt) - 1 : -1].double().numpy()


def truncated_softmax(logits: np.ndarray, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """Return the probabilities after top-k and top-p, by a loop over the sorted tokens."""
    probs = np.exp(logits - logits.max())
    order = sorted(range(len(probs)), key=lambda i: -probs[i])[: top_k or len(probs)]
    total = sum(probs[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        if mass >= top_p:
            break
        kept.append(i)
        mass += probs[i] / total
    result = np.zeros_like(probs)
    result[kept] = probs[kept] / probs[kept].sum()
    return result


def test_top_logprobs_are_the_likeliest_of_a_plain_forward_pass(engine: Engine) -> None:
    request = make_request(PROMPTS[0], num_top_logprobs=5)
    wide, narrow, none = sample(
        engine, request, make_request(PROMPTS[0], num_top_logprobs=2), make_request(PROMPTS[0])
    )
    logits = forward(engine, request.prompt_ids, wide.token_ids)
    logprobs = torch.log_softmax(torch.tensor(logits), dim=-1)
    for row, token in zip(logprobs, wide.tokens, strict=True):
        values, ids = row.topk(5)
        assert [token_id for token_id, _ in token.top_logprobs] == ids.tolist()
        assert [v for _, v in token.top_logprobs] == pytest.approx(values.tolist(), abs=1e-4)
    assert [t.top_logprobs for t in narrow.tokens] == [t.top_logprobs[:2] for t in wide.tokens]
    assert not any(token.top_logprobs for token in none.tokens)


def test_forced_ids_are_continued_with_and_have_their_exact_logprobs(engine: Engine) -> None:
    forced = (40, 9, 22, 70)
    request = make_request(PROMPTS[0], temperature=0.7, forced_ids=forced)
    completion, free = sample(engine, request, make_request(PROMPTS[0]))
    assert completion.token_ids == list(forced) != free.token_ids[:4]
    assert completion.finish_reason == "stop"
    logits = torch.tensor(forward(engine, request.prompt_ids, completion.token_ids)) / 0.7
    expected = torch.log_softmax(logits, dim=-1)[range(4), list(forced)]
    assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_forced_ids_end_as_sampled_ones_do(engine: Engine) -> None:
    end_id = engine.loaded.tokenizer.eos_token_id
    ended, cut, stopped = sample(
        engine,
        make_request(PROMPTS[0], forced_ids=(40, end_id, 41)),
        make_request(PROMPTS[0], max_tokens=2, forced_ids=(40, 41, 42)),
        make_request(PROMPTS[0], forced_ids=(40, 41, 42), stop_token_ids=frozenset([41])),
    )
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == ([40, end_id], "stop", None)
    assert (cut.token_ids, cut.finish_reason) == ([40, 41], "length")
    assert (stopped.token_ids, stopped.stop_reason) == ([40, 41], 41)
    assert stopped.text == engine.loaded.decode([40])


def test_seed_and_draw_decide_the_tokens(engine: Engine) -> None:
    first, again, other_seed, other_draw = sample(
        engine,
        make_request(PROMPTS[0]),
        make_request(PROMPTS[0]),
        make_request(PROMPTS[0], seed=6),
        make_request(PROMPTS[0], draw=1),
    )
    assert first.token_ids == again.token_ids
    assert other_seed.token_ids != first.token_ids != other_draw.token_ids


def test_end_token_is_in_the_ids_and_not_in_the_text(policy_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(policy_folder, tmp_path / "policy")
    policy = load_policy("v000000", folder)
    end_id = policy.tokenizer.eos_token_id
    engine = Engine(folder, "v000000")
    with torch.no_grad():  # the head is tied: make the end token likely after the first one
        engine.loaded.model.model.embed_tokens.weight[end_id] *= 30
    completions = sample(engine, *[make_request(PROMPTS[0], 64, seed=seed) for seed in range(8)])
    engine.close()
    ended = [completion for completion in completions if completion.finish_reason == "stop"]
    assert ended
    for completion in ended:
        assert completion.token_ids[-1] == end_id
        assert end_id not in completion.token_ids[:-1]
        assert "<|end|>" not in completion.text
        assert len(completion.logprobs) == len(completion.token_ids)


def test_length_ends_a_response_at_max_tokens(engine: Engine) -> None:
    completion = sample(engine, make_request(PROMPTS[0], max_tokens=1))[0]
    assert len(completion.token_ids) == 1
    assert completion.finish_reason in ("length", "stop")


def test_stop_text_is_cut_off(engine: Engine) -> None:
    text = sample(engine, make_request(PROMPTS[0], max_tokens=12))[0].text
    stop = text[3:5]
    completion = sample(engine, make_request(PROMPTS[0], max_tokens=12, stop=("\n\n", stop)))[0]
    assert completion.text == text[: text.index(stop)]
    assert completion.finish_reason == "stop"


def test_other_version_is_refused(engine: Engine) -> None:
    with pytest.raises(UpstreamError, match="model v000001 is not served; serving v000000"):
        sample(engine, make_request(PROMPTS[0], version="v000001"))


def test_too_long_a_request_is_refused_and_its_companions_are_answered(engine: Engine) -> None:
    good, bad = (
        engine.submit(make_request(PROMPTS[0])),
        engine.submit(make_request([1] * 250, 7)),
    )
    assert good.result(timeout=30).token_ids
    with pytest.raises(ConfigError, match="exceed the model's 256 positions"):
        bad.result(timeout=30)


def test_requests_before_a_swap_are_answered_by_the_old_policy(
    engine: Engine, other_policy_folder: Path
) -> None:
    before = [engine.submit(make_request(PROMPTS[0], seed=seed)) for seed in range(100)]
    loaded = engine.load("v000001", other_policy_folder)
    assert loaded.weights_digest == weights_digest(other_policy_folder)
    assert engine.policy == loaded
    assert {future.result(timeout=30).policy.version for future in before} == {"v000000"}
    with pytest.raises(UpstreamError):
        sample(engine, make_request(PROMPTS[0]))
    after = sample(engine, make_request(PROMPTS[0], version="v000001"))[0]
    assert after.policy == loaded


def test_bad_folder_leaves_the_old_policy(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="safetensors"):
        engine.load("v000001", tmp_path)
    assert sample(engine, make_request(PROMPTS[0]))[0].policy.version == "v000000"


@pytest.mark.parametrize("missing", ["config.json", "chat_template.jinja", "tokenizer.json"])
def test_incomplete_folder_is_an_error(policy_folder: Path, tmp_path: Path, missing: str) -> None:
    folder = shutil.copytree(policy_folder, tmp_path / "policy")
    (folder / missing).unlink()
    with pytest.raises(ConfigError):
        load_policy("v000001", folder)


def test_weights_that_lack_a_tensor_are_an_error(policy_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(policy_folder, tmp_path / "policy")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"its weights lack model\.norm\.weight"):
        load_policy("v000001", folder)


def test_policies_that_are_loaded_at_once_are_whole(policy_folder: Path) -> None:
    def load(number: int) -> torch.Tensor:
        return load_policy(f"v{number:06d}", policy_folder).model.lm_head.weight

    with ThreadPoolExecutor(8) as pool:
        heads = list(pool.map(load, range(32)))
    embeddings = load_file(policy_folder / "model.safetensors")["model.embed_tokens.weight"]
    assert all(torch.equal(head, embeddings) for head in heads)


def test_a_failing_batch_fails_its_requests_only(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.loaded, "model", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            sample(engine, make_request(PROMPTS[0]))
    assert sample(engine, make_request(PROMPTS[0]))[0].token_ids


def test_cancelled_request_does_not_disturb_the_others(engine: Engine) -> None:
    first, second = (engine.submit(make_request(PROMPTS[0], 100)) for _ in range(2))
    first.cancel()
    assert second.result(timeout=30).token_ids


def test_close_refuses_what_waits(policy_folder: Path) -> None:
    engine = Engine(policy_folder, "v000000", max_batch_size=1)
    futures = [engine.submit(make_request(PROMPTS[0], 100)) for _ in range(20)]
    futures[-1].cancel()
    engine.close()
    errors = [future.exception(timeout=30) for future in futures[:-1]]
    assert isinstance(errors[-1], TransientError)


def test_closed_engine_refuses(policy_folder: Path) -> None:
    engine = Engine(policy_folder, "v000000")
    engine.close()
    future: Future[Completion] = engine.submit(make_request(PROMPTS[0]))
    with pytest.raises(TransientError, match="closed"):
        future.result(timeout=30)
    with pytest.raises(TransientError, match="closed"):
        engine.load("v000001", policy_folder)
    engine.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": []},
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"seed": 2**63},
        {"draw": -1},
        {"stop": ("",)},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"num_top_logprobs": -1},
        {"forced_ids": ()},
        {"forced_ids": (4,), "top_k": 2},
    ],
)
def test_impossible_requests_cannot_be_made(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"token|temperature|seed|stop|top_p|forced"):
        make_request(**{"prompt": [1], **changes})


def test_weights_that_the_digest_does_not_cover_are_not_loaded(
    policy_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "policy"
    shutil.copytree(policy_folder, folder)
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").rename(folder / "spare.safetensors")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        Engine(folder, "v000000")
