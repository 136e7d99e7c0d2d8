import math
import shutil
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agl_core.errors import ConfigError, TransientError, UpstreamError
from agl_core.serving.decoding import draw_uniforms, load_policy, pick_tokens
from agl_core.serving.engine import Engine
from agl_core.serving.generation import Completion, GenerationRequest
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
) -> GenerationRequest:
    return GenerationRequest(version, prompt, max_tokens, temperature, seed, draw, stop)


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
    request = make_request(PROMPTS[0], seed=77)
    alone = sample(engine, request)[0]
    others = [make_request(prompt, 20, seed=index) for index, prompt in enumerate(PROMPTS * 5)]
    together = sample(engine, *others[:7], request, *others[7:])[7]
    assert together.token_ids == alone.token_ids
    assert together.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


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


def test_sampled_frequencies_follow_the_softmax() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]])).repeat(20_000, 1)
    uniforms = torch.rand(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens, logprobs = pick_tokens(logits, torch.full((20_000,), 0.5), uniforms)
    weights = torch.tensor([0.25, 0.09, 0.04])
    expected = weights / weights.sum()
    assert torch.bincount(tokens) / 20_000 == pytest.approx(expected.numpy(), abs=0.02)
    assert logprobs.numpy() == pytest.approx(torch.log(expected)[tokens].numpy(), abs=1e-5)


def test_a_uniform_near_one_picks_a_token_of_the_vocabulary() -> None:
    largest = torch.tensor([math.nextafter(1.0, 0.0)], dtype=torch.float64)
    tokens, _ = pick_tokens(torch.zeros(1, 7), torch.ones(1), largest)
    assert tokens.item() == 6


def test_draws_of_one_seed_are_different_parts_of_one_stream() -> None:
    first, second = (draw_uniforms(make_request([1], 4, draw=draw)) for draw in (0, 1))
    generator = torch.Generator().manual_seed(5)
    assert torch.equal(
        torch.cat([first, second]), torch.rand(8, generator=generator, dtype=torch.float64)
    )


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
    ],
)
def test_impossible_requests_cannot_be_made(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"token|temperature|seed|stop"):
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
