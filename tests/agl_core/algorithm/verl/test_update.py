"""A whole update against VERL's own padded path, and against plain torch, on random batches."""

from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from agl_core.algorithm.verl.batch import read_rows
from agl_core.algorithm.verl.config import compose
from agl_core.algorithm.verl.overrides import normalise
from agl_core.algorithm.verl.platform_cpu import quiet_imports
from agl_core.algorithm.verl.settings import batch_settings
from agl_core.algorithm.verl.update import learn
from agl_core.algorithm.verl.worker import UpdateWorker
from agl_core.ledger.tables import BATCH_ROWS
from tests.agl_core.algorithm.verl.conftest import SETTINGS

with quiet_imports():
    from tensordict import TensorDict
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import compute_advantage
    from verl.utils import tensordict_utils
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

EPOCHS, LR, CRITIC_LR, CLIP = 2, 0.02, 0.01, 0.002
Rows = list[dict[str, Any]]


def config_of(estimator: str, **more: Any):
    overrides = normalise(SETTINGS) | {
        "algorithm.adv_estimator": estimator,
        "actor_rollout_ref.actor.ppo_epochs": EPOCHS,
        "actor_rollout_ref.actor.clip_ratio": CLIP,  # exceeded by the first step
        # parameters follow gradients; AdamW would show the rounding of those next to nothing
        "actor_rollout_ref.actor.optim.optimizer": "SGD",
        "actor_rollout_ref.actor.optim.lr": LR,
        "actor_rollout_ref.actor.optim.weight_decay": 0.0,
    }
    if estimator == "gae":
        overrides |= {
            "algorithm.gamma": 0.9,
            "algorithm.lam": 0.8,
            "critic.optim.optimizer": "SGD",
            "critic.optim.lr": CRITIC_LR,
            "critic.optim.weight_decay": 0.0,
            "critic.cliprange_value": 0.01,
        }
    return compose(overrides | more)


@st.composite
def batches(draw: st.DrawFn) -> Rows:
    """Groups of two to four rollouts of one to three rows; some tokens are not the policy's."""
    rows: Rows = []
    index = 0
    for group in range(draw(st.integers(1, 3))):
        for _ in range(draw(st.integers(2, 4))):
            reward = draw(st.sampled_from([0.0, 0.25, 1.0, -0.5]))
            for step in range(draw(st.integers(1, 3))):
                prompt = draw(st.lists(st.integers(3, 97), min_size=1, max_size=5))
                response = draw(st.lists(st.integers(3, 97), min_size=1, max_size=5))
                mask = draw(
                    st.lists(st.integers(0, 1), min_size=len(response), max_size=len(response))
                )
                mask[-1] = 1
                rows.append(
                    {
                        "row": len(rows),
                        "index": index,
                        "rollout_id": f"ro-{index}",
                        "group": group,
                        "call_index": step,
                        "step": step,
                        "num_calls": 1,
                        "prompt_ids": prompt,
                        "response_ids": response,
                        "response_mask": mask,
                        "rollout_logprobs": [-4.5] * len(response),
                        "token_rewards": [0.0] * (len(response) - 1) + [reward],
                        "reward": reward,
                        "rollout_reward": reward,
                    }
                )
            index += 1
    return rows


def pad(rows: list[list[float]], *, left: bool = False, dtype: Any = torch.float32) -> torch.Tensor:
    width = max(map(len, rows))
    filled = [
        [0] * (width - len(row)) + list(row) if left else list(row) + [0] * (width - len(row))
        for row in rows
    ]
    return torch.tensor(filled, dtype=dtype)


def response_mask(rows: Rows) -> torch.Tensor:
    return pad([row["response_mask"] for row in rows])


def verl_advantages(rows: Rows, config: Any, values: torch.Tensor | None):
    """VERL's `compute_advantage`; outcome estimators see each rollout as one response."""
    algorithm = config.algorithm
    if values is not None:
        data = DataProto.from_dict(
            {
                "token_level_rewards": pad([row["token_rewards"] for row in rows]),
                "response_mask": response_mask(rows),
                "values": values,
            }
        )
        data = compute_advantage(data, "gae", algorithm.gamma, algorithm.lam, config=algorithm)
        return data.batch["advantages"], data.batch["returns"]
    joined: dict[int, Rows] = defaultdict(list)
    for row in rows:
        joined[row["index"]].append(row)
    masks = [[m for row in part for m in row["response_mask"]] for part in joined.values()]
    rewards = [
        [0.0] * (len(mask) - 1) + [part[0]["rollout_reward"]]
        for mask, part in zip(masks, joined.values(), strict=True)
    ]
    data = DataProto.from_dict(
        {"token_level_rewards": pad(rewards), "response_mask": pad(masks)},
        non_tensors={"uid": np.array([part[0]["group"] for part in joined.values()])},
    )
    data = compute_advantage(data, algorithm.adv_estimator, config=algorithm)
    flat = {  # the last token of each is sampled
        index: data.batch["advantages"][k, len(mask) - 1].item()
        for k, (index, mask) in enumerate(zip(joined, masks, strict=True))
    }
    return pad([[flat[row["index"]]] * len(row["response_ids"]) for row in rows]), None


def padded_data(rows: Rows, **columns: torch.Tensor) -> TensorDict:
    """The rows as VERL's trainer has them: prompts padded left, responses right."""
    prompts = pad([row["prompt_ids"] for row in rows], left=True, dtype=torch.int64)
    responses = pad([row["response_ids"] for row in rows], dtype=torch.int64)
    attention = torch.cat(
        [
            pad([[1] * len(row["prompt_ids"]) for row in rows], left=True, dtype=torch.int64),
            pad([[1] * len(row["response_ids"]) for row in rows], dtype=torch.int64),
        ],
        dim=1,
    )
    data = tensordict_utils.get_tensordict(
        {
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "prompts": prompts,
            "responses": responses,
            "response_mask": response_mask(rows).long(),
            **columns,
        }
    )
    data = left_right_2_no_padding(data)
    tensordict_utils.assign_non_tensor(
        data,
        temperature=1.0,
        micro_batch_size_per_gpu=len(rows),
        use_dynamic_bsz=False,
        calculate_entropy=False,
    )
    return data


def verl_infer(worker: Any, rows: Rows, name: str) -> torch.Tensor:
    data = padded_data(rows)
    tensordict_utils.assign_non_tensor(data, compute_loss=False)
    with quiet_imports():
        output = worker.infer_batch(data)
    return no_padding_2_padding(tensordict_utils.get(output, name), data).float()


def verl_train(worker: Any, rows: Rows, **columns: torch.Tensor) -> None:
    data = padded_data(rows, **columns)
    tensordict_utils.assign_non_tensor(
        data,
        mini_batch_size=len(rows),
        global_batch_size=len(rows),
        epochs=EPOCHS,
        seed=1,
        dataloader_kwargs={"shuffle": False},
    )
    with quiet_imports():
        worker.train_mini_batch(data)


def verl_update(worker: UpdateWorker, rows: Rows, config: Any) -> None:
    """One iteration as VERL's trainer makes it."""
    actor = worker._actor.worker
    old = verl_infer(actor, rows, "log_probs")
    values = verl_infer(worker._critic.worker, rows, "values") if worker._critic else None
    advantages, returns = verl_advantages(rows, config, values)
    if worker._critic:
        verl_train(worker._critic.worker, rows, values=values, returns=returns)
    verl_train(actor, rows, old_log_probs=old, advantages=advantages)


def plain_outputs(model: torch.nn.Module, rows: Rows, *, is_critic: bool) -> list[torch.Tensor]:
    """Log-probs, or values, of the response tokens of each row, one row at a time."""
    found = []
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        start = len(row["prompt_ids"]) - 1
        output = model(ids).logits[0, start:-1]
        if is_critic:
            found.append(output[:, 0])
        else:
            response = torch.tensor(row["response_ids"])[:, None]
            found.append(torch.log_softmax(output, -1).gather(1, response)[:, 0])
    return found


def plain_outcome_advantages(rows: Rows, estimator: str) -> list[list[float]]:
    """GRPO, or RLOO, by its formula over one reward of each rollout."""
    rewards = {row["index"]: (row["group"], row["rollout_reward"]) for row in rows}
    found = {}
    for index, (group, reward) in rewards.items():
        others = [r for i, (g, r) in rewards.items() if g == group and i != index]
        if estimator == "rloo":
            found[index] = reward - sum(others) / len(others)
        else:
            peers = np.array([*others, reward])
            found[index] = (reward - peers.mean()) / (peers.std(ddof=1) + 1e-6)
    return [[found[row["index"]]] * len(row["response_ids"]) for row in rows]


def plain_gae(
    rows: Rows, values: list[torch.Tensor], gamma: float, lam: float
) -> tuple[list[list[float]], list[list[float]]]:
    """GAE over the tokens that were sampled, then whitened over all of them."""
    advantages, returns = [], []
    for row, value in zip(rows, values, strict=True):
        found = [0.0] * len(value)
        next_value = next_advantage = 0.0
        for t in reversed(range(len(value))):
            delta = row["token_rewards"][t] + gamma * next_value - value[t].item()
            here = delta + gamma * lam * next_advantage
            if row["response_mask"][t]:
                next_value, next_advantage = value[t].item(), here
            found[t] = next_advantage
        advantages.append(found)
        returns.append([a + v.item() for a, v in zip(found, value, strict=True)])
    sampled = np.array(
        [
            a
            for row, part in zip(rows, advantages, strict=True)
            for m, a in zip(row["response_mask"], part, strict=True)
            if m
        ]
    )
    scale = 1 / np.sqrt(sampled.var(ddof=1) + 1e-8)
    return [[(a - sampled.mean()) * scale for a in part] for part in advantages], returns


def plain_steps(model: torch.nn.Module, lr: float, loss_of: Any) -> None:
    """Take gradient steps with the norm clipped to 1."""
    for _ in range(EPOCHS):
        model.zero_grad()
        loss_of().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= lr * parameter.grad


def plain_update(policy: Any, critic: Any, rows: Rows, config: Any) -> None:
    mask = torch.tensor([m for row in rows for m in row["response_mask"]])

    def flat(parts: list[Any]) -> torch.Tensor:
        return torch.cat([torch.as_tensor(part, dtype=torch.float32) for part in parts])

    def mean(losses: torch.Tensor) -> torch.Tensor:
        if config.agentlightning.loss.per_rollout:
            return mean_over_rollouts(losses)
        return (losses * mask).sum() / mask.sum()

    def mean_over_rollouts(losses: torch.Tensor) -> torch.Tensor:
        parts: dict[int, list[torch.Tensor]] = defaultdict(list)
        lengths = [len(row["response_ids"]) for row in rows]
        for row, one in zip(rows, losses.split(lengths), strict=True):
            parts[row["index"]].append(one[torch.tensor(row["response_mask"], dtype=torch.bool)])
        if config.actor_rollout_ref.actor.loss_agg_mode == "token-mean":
            means = [torch.cat(part).mean() for part in parts.values()]
        else:
            means = [torch.stack([one.mean() for one in part]).mean() for part in parts.values()]
        return torch.stack(means).mean()

    with torch.no_grad():
        old = flat(plain_outputs(policy, rows, is_critic=False))
        parts = plain_outputs(critic, rows, is_critic=True) if critic is not None else []
    if critic is not None:
        advantages, returns = plain_gae(rows, parts, config.algorithm.gamma, config.algorithm.lam)
        values, wanted = flat(parts), flat(returns)
        bound = config.critic.cliprange_value

        def value_loss() -> torch.Tensor:
            found = flat(plain_outputs(critic, rows, is_critic=True))
            near = torch.minimum(torch.maximum(found, values - bound), values + bound)
            return 0.5 * mean(torch.maximum((found - wanted) ** 2, (near - wanted) ** 2))

        plain_steps(critic, CRITIC_LR, value_loss)
    else:
        advantages = plain_outcome_advantages(rows, config.algorithm.adv_estimator)
    advantage = flat(advantages)

    def policy_loss() -> torch.Tensor:
        ratio = torch.exp(flat(plain_outputs(policy, rows, is_critic=False)) - old)
        loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP))
        bounded = torch.minimum(-advantage * 3.0, loss)
        return mean(torch.where(advantage < 0, bounded, loss))

    plain_steps(policy, LR, policy_loss)


@pytest.fixture(scope="module")
def workers(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory):
    """A worker and its start for outcome estimators, and for GAE."""
    built: dict[bool, tuple[UpdateWorker, Path]] = {}

    def get(estimator: str) -> tuple[UpdateWorker, Path]:
        needs_critic = estimator == "gae"
        if needs_critic not in built:
            worker = UpdateWorker(config_of(estimator), tiny_policy, total_steps=4)
            start = tmp_path_factory.mktemp("start")
            worker.save_checkpoint(start, step=0)
            built[needs_critic] = worker, start
        return built[needs_critic]

    yield get
    for worker, _ in built.values():
        worker.close()


@pytest.fixture
def worker_loss():
    """Gives a worker another configuration and its loss for a while."""

    @contextmanager
    def configured(worker: UpdateWorker, config: Any) -> Generator[None]:
        inner, before = worker._actor.worker, worker._config
        loss = inner.loss_fn
        worker._config = config
        inner.loss_fn = partial(
            ppo_loss, config=omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        )
        try:
            yield
        finally:
            worker._config, inner.loss_fn = before, loss

    return configured


def weights_of(worker: UpdateWorker) -> dict[str, torch.Tensor]:
    found = {name: w.clone() for name, w in worker._actor.weights().items()}
    if worker._critic is not None:
        found |= {f"critic.{name}": w.clone() for name, w in worker._critic.weights().items()}
    return found


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    names = one.keys() & other.keys()
    assert len(names) > 20
    return max((one[name] - other[name]).abs().max().item() for name in names)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "gae"])
@settings(
    max_examples=6,
    phases=[Phase.explicit, Phase.generate],  # shrinking takes minutes
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(rows=batches())
def test_an_update_equals_verls_padded_path_and_plain_torch(
    estimator: str, workers, tiny_policy: Path, rows: Rows
):
    worker, start = workers(estimator)
    config = config_of(estimator)
    worker._config = config
    worker.load_checkpoint(start)
    before = weights_of(worker)
    policy = AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32)
    critic = None
    if estimator == "gae":
        critic = AutoModelForTokenClassification.from_pretrained(tiny_policy, num_labels=1)
        critic.load_state_dict(worker._critic.weights())

    batch = read_rows(pa.Table.from_pylist(rows, schema=BATCH_ROWS))
    update = learn(worker, batch, config, batch_settings(config, 2), step=0, kl_coefficient=0.0)
    ours = weights_of(worker)
    assert len(update.steps) == EPOCHS

    worker.load_checkpoint(start)
    verl_update(worker, rows, config)
    verls = weights_of(worker)

    plain_update(policy, critic, rows, config)
    plain = {name: p.detach() for name, p in policy.named_parameters()}
    if critic is not None:
        plain |= {f"critic.{name}": p.detach() for name, p in critic.named_parameters()}

    assert largest_difference(ours, verls) < 1e-6
    assert largest_difference(ours, plain) < 1e-6
    has_contrast = any(
        row["group"] == other["group"] and row["rollout_reward"] != other["rollout_reward"]
        for row in rows
        for other in rows
    )
    if has_contrast or estimator == "gae":
        assert largest_difference(ours, before) > 1e-5


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@settings(
    max_examples=3,
    phases=[Phase.explicit, Phase.generate],
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(rows=batches())
def test_a_loss_per_rollout_is_the_mean_over_rollouts(
    aggregation: str, workers, tiny_policy: Path, rows: Rows, worker_loss
):
    worker, start = workers("grpo")
    more = {
        "agentlightning.loss.per_rollout": True,
        "actor_rollout_ref.actor.loss_agg_mode": aggregation,
    }
    config = config_of("grpo", **more)
    worker.load_checkpoint(start)
    policy = AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32)
    with worker_loss(worker, config):
        batch = read_rows(pa.Table.from_pylist(rows, schema=BATCH_ROWS))
        learn(worker, batch, config, batch_settings(config, 2), step=0, kl_coefficient=0.0)
    plain_update(policy, None, rows, config)
    plain = {name: p.detach() for name, p in policy.named_parameters()}
    assert largest_difference(weights_of(worker), plain) < 1e-6
