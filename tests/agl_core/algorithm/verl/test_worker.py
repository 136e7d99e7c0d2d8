"""The update worker against plain transformers and plain torch, and across processes."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agl_core.algorithm.verl import checkpoint
from agl_core.algorithm.verl.advantage import estimate
from agl_core.algorithm.verl.batch import RowBatch, read_rows
from agl_core.algorithm.verl.model import mini_batches
from agl_core.algorithm.verl.worker import UpdateWorker
from agl_core.errors import TrainerError
from tests.agl_core.algorithm.verl.conftest import SETTINGS, UNEVEN, compose, make_rows
from tests.agl_core.algorithm.verl.test_checkpoint import Bomb


def plain_log_probs(model: torch.nn.Module, batch: RowBatch, temperature: float) -> torch.Tensor:
    """Log-probs [R] of the response tokens, one row at a time without padding."""
    out, prompt_end, response_end = [], 0, 0
    for p, r in zip(batch.prompt_lengths, batch.response_lengths, strict=True):
        prompt = batch.prompt_ids[prompt_end : prompt_end + p]
        response = batch.response_ids[response_end : response_end + r]
        prompt_end, response_end = prompt_end + p, response_end + r
        ids = torch.from_numpy(np.concatenate([prompt, response]))
        logits = model(ids[None]).logits[0, p - 1 : -1] / temperature
        out.append(torch.log_softmax(logits, -1).gather(1, torch.from_numpy(response)[:, None]))
    return torch.cat(out).squeeze(1)


def advantages(batch: RowBatch) -> np.ndarray:
    return estimate(batch, compose(SETTINGS).algorithm, batch.token_rewards).values


def exported(worker: UpdateWorker, folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    worker.export(folder)
    return load_file(folder / "model.safetensors")


def same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.fixture
def rows() -> RowBatch:
    return read_rows(make_rows(UNEVEN))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_plain_transformers(worker, rows, tiny_policy, temperature):
    model = AutoModelForCausalLM.from_pretrained(tiny_policy)
    with torch.no_grad():
        expected = plain_log_probs(model, rows, temperature)
    values = worker.log_probs(rows, temperature).values
    assert values.dtype == np.float32
    assert np.abs(values - expected.numpy()).max() < 1e-5


def test_entropy_is_the_mean_over_weighted_tokens(worker, tiny_policy):
    batch = read_rows(make_rows(UNEVEN[:1]))  # two tokens, the last of them predicts nothing
    ids = torch.from_numpy(np.concatenate([batch.prompt_ids, batch.response_ids]))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tiny_policy)(ids[None]).logits[0]
    logits = logits[len(batch.prompt_ids) - 1 : -1]
    expected = torch.distributions.Categorical(logits=logits).entropy().mean().item()
    assert worker.log_probs(batch, 1.0).entropy == pytest.approx(expected, abs=1e-5)


def test_one_step_equals_a_plain_clipped_loss_and_adamw(worker, rows, tiny_policy, tmp_path):
    advantage = advantages(rows)
    shift = np.linspace(-0.5, 0.5, len(advantage), dtype=np.float32)  # ratios beyond both bounds
    old = worker.log_probs(rows, 1.0).values + shift

    model = AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01
    )
    log_probs = plain_log_probs(model, rows, 1.0)
    ratio = torch.exp(log_probs - torch.from_numpy(old))
    adv, mask = torch.from_numpy(advantage), torch.from_numpy(rows.response_mask)
    objective = torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
    loss = -(objective * mask).sum() / mask.sum()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

    (metrics,) = worker.update(rows, old, advantage, step=0)
    assert metrics["actor/pg_loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert metrics["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert metrics["actor/pg_clipfrac"] > 0
    assert metrics["actor/lr"] == 1e-3
    assert not [name for name in metrics if "perf" in name or "mfu" in name]
    weights = exported(worker, tmp_path / "policy")
    for name, parameter in model.named_parameters():
        difference = (weights[name] - parameter.detach()).abs()
        # AdamW divides by |gradient| + 1e-8: rounding shows where the gradient is next to nothing
        assert difference[parameter.grad.abs() > 1e-6].max() < 1e-6, name
        assert difference.max() < 2e-5, name


def row_losses(losses: np.ndarray, rows: RowBatch) -> list[np.ndarray]:
    ends = np.cumsum(rows.response_lengths)[:-1]
    masks = np.split(rows.response_mask > 0, ends)
    return [loss[mask] for loss, mask in zip(np.split(losses, ends), masks, strict=True)]


@pytest.mark.parametrize(
    ("mode", "formula"),
    [
        ("token-mean", lambda parts: np.concatenate(parts).mean()),
        ("seq-mean-token-mean", lambda parts: np.mean([part.mean() for part in parts])),
        ("seq-mean-token-sum", lambda parts: np.mean([part.sum() for part in parts])),
        ("seq-mean-token-sum-norm", lambda parts: np.mean([part.sum() / 32 for part in parts])),
    ],
)
def test_losses_are_normalised_over_the_mini_batch(worker_with, rows, tmp_path, mode, formula):
    advantage = advantages(rows)
    expected = formula(row_losses(-advantage * np.exp(0.1), rows))
    start, norms = tmp_path / "start", []
    for size in (3, 16):
        worker = worker_with(loss_agg_mode=mode, ppo_micro_batch_size_per_gpu=size)
        if not norms:
            worker.save_checkpoint(start, 0)
        worker.load_checkpoint(start)
        old = worker.log_probs(rows, 1.0).values - np.float32(0.1)
        (metrics,) = worker.update(rows, old, advantage, step=0)
        assert metrics["actor/pg_loss"] == pytest.approx(expected, abs=2e-6)
        norms.append(metrics["actor/grad_norm"])
    assert norms == pytest.approx([norms[0]] * 2, rel=1e-5)


def test_no_row_is_dropped_however_rows_divide():
    for num_rows in (1, 2, 5, 7, 8):
        for num_steps in (1, 2, 3, 4):
            for seed in (None, (1, 2)):
                parts = mini_batches(np.arange(num_rows), num_steps, seed)
                assert len(parts) == min(num_steps, num_rows)
                assert sorted(np.concatenate(parts)) == list(range(num_rows))
                sizes = [len(part) for part in parts]
                assert max(sizes) - min(sizes) <= 1


def test_shuffling_is_by_seed_and_step():
    def order(*seed: int) -> list[int]:
        return np.concatenate(mini_batches(np.arange(20), 3, seed)).tolist()

    assert order(42, 0, 0) == order(42, 0, 0)
    assert order(42, 0, 0) != order(42, 1, 0) != order(42, 1, 1)


def test_every_row_reaches_verl_in_every_epoch(worker_with, rows, monkeypatch):
    worker = worker_with(ppo_mini_batch_size=2, ppo_epochs=2, shuffle=True)
    train_batch = worker._actor.worker.train_batch
    seen, schedule = [], []

    def spy(data):
        weighted = data["response_mask"].to_padded_tensor(0).sum(1) > 0
        ids = [ids.tolist() for ids in data["input_ids"].unbind()]
        seen.append([i for i, keep in zip(ids, weighted.tolist(), strict=True) if keep])
        assert data["global_batch_size"] == len(seen[-1])
        schedule.append(data["update_lr_scheduler"])
        return train_batch(data)

    monkeypatch.setattr(worker._actor.worker, "train_batch", spy)
    old = worker.log_probs(rows, 1.0).values
    metrics = worker.update(rows, old, advantages(rows), step=3)
    assert [len(part) for part in seen] == [4, 3, 4, 3]
    assert len(metrics) == 4
    assert schedule == [False, False, False, True]
    expected = sorted((r["prompt_ids"] + r["response_ids"]) for r in make_rows(UNEVEN).to_pylist())
    assert sorted(seen[0] + seen[1]) == expected
    assert sorted(seen[2] + seen[3]) == expected
    assert seen[0] != seen[2]


def test_rows_without_weight_change_nothing(worker, tmp_path):
    table = make_rows(UNEVEN)
    plain = table.to_pylist()
    for row in plain[5:]:
        row["response_mask"] = [0] * len(row["response_mask"])
    batch = read_rows(type(table).from_pylist(plain, schema=table.schema))
    few = read_rows(table.slice(0, 5))
    worker.save_checkpoint(tmp_path / "start", 0)
    found = []
    for kept in (batch, few):
        worker.load_checkpoint(tmp_path / "start")
        old = worker.log_probs(kept, 1.0).values
        (metrics,) = worker.update(kept, old, np.full_like(old, 0.5), step=0)
        found.append((metrics["actor/pg_loss"], metrics["actor/grad_norm"]))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_a_batch_without_weight_is_refused(worker):
    batch = read_rows(make_rows(UNEVEN, masked=True))
    zeros = np.zeros(len(batch.response_ids), np.float32)
    with pytest.raises(TrainerError, match="no token of the batch has loss weight"):
        worker.update(batch, zeros, zeros, step=0)


def test_a_gradient_that_is_not_finite_is_an_error(worker, rows):
    old = worker.log_probs(rows, 1.0).values
    with pytest.raises(TrainerError, match="optimizer step 0: actor/loss is nan"):
        worker.update(rows, old, np.full_like(old, np.nan), step=0)


def test_a_token_outside_the_vocabulary_is_an_error(worker, rows):
    rows.response_ids[0] = 10_000
    with pytest.raises(TrainerError, match="forward pass failed: IndexError"):
        worker.log_probs(rows, 1.0)


def test_a_folder_without_checkpoint_is_refused(worker, tmp_path):
    with pytest.raises(TrainerError, match="no checkpoint of one rank"):
        worker.load_checkpoint(tmp_path)


def test_a_checkpoint_with_code_in_it_is_refused_and_nothing_of_it_is_used(worker, tmp_path):
    before = exported(worker, tmp_path / "before")
    for name in ("model", "optim", "extra_state"):
        worker.save_checkpoint(tmp_path / name, 0)
        torch.save({"a": Bomb(tmp_path / "exploded")}, checkpoint.part(tmp_path / name, name))
        with pytest.raises(TrainerError, match=f"{name}_world.*holds more than tensors"):
            worker.load_checkpoint(tmp_path / name)
    assert not (tmp_path / "exploded").exists()
    assert same_tensors(before, exported(worker, tmp_path / "after"))


def take_a_step(policy: Path, checkpoint: Path, folder: Path) -> None:
    """Go on from a checkpoint in this process, and leave log-probs and weights in a folder."""
    torch.set_num_threads(1)  # as here; another number adds up in another order
    worker = UpdateWorker(compose(SETTINGS), policy, total_steps=4)
    worker.load_checkpoint(checkpoint)
    batch = read_rows(make_rows(UNEVEN))
    old = worker.log_probs(batch, 1.0).values
    np.save(folder / "old.npy", old)
    worker.update(batch, old, advantages(batch), step=1)
    exported(worker, folder / "policy")
    worker.close()


def test_a_fresh_process_goes_on_bit_equal_from_a_checkpoint(worker, rows, tiny_policy, tmp_path):
    advantage = advantages(rows)
    worker.update(rows, worker.log_probs(rows, 1.0).values, advantage, step=0)
    worker.save_checkpoint(tmp_path / "checkpoint", 1)
    old = worker.log_probs(rows, 1.0).values
    worker.update(rows, old, advantage, step=1)
    here = exported(worker, tmp_path / "here")

    there = tmp_path / "there"
    there.mkdir()
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.agl_core.algorithm.verl.test_worker import take_a_step\n"
        "take_a_step(*map(Path, sys.argv[1:]))"
    )
    paths = [str(path) for path in (tiny_policy, tmp_path / "checkpoint", there)]
    result = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    assert np.array_equal(old, np.load(there / "old.npy"))
    assert same_tensors(here, load_file(there / "policy" / "model.safetensors"))


def test_export_of_unchanged_weights_equals_the_input(worker, tiny_policy, tmp_path):
    weights = exported(worker, tmp_path / "policy")
    assert same_tensors(weights, load_file(tiny_policy / "model.safetensors"))
    names = {path.name for path in tiny_policy.iterdir()}
    assert {path.name for path in (tmp_path / "policy").iterdir()} == names
    for name in names - {"model.safetensors"}:
        assert (tmp_path / "policy" / name).read_bytes() == (tiny_policy / name).read_bytes()


def test_an_exported_folder_loads_as_any_other(worker, rows, tmp_path):
    advantage = advantages(rows)
    worker.update(rows, worker.log_probs(rows, 1.0).values, advantage, step=0)
    exported(worker, tmp_path / "policy")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    with torch.no_grad():
        expected = plain_log_probs(model, rows, 1.0).numpy()
    assert np.abs(worker.log_probs(rows, 1.0).values - expected).max() < 1e-5
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "1+1="}], tokenize=False)
    assert text == "1+1=\n"


def test_a_worker_can_follow_a_closed_one(tiny_policy):
    shows_errors = sys.excepthook
    for _ in range(2):
        worker = UpdateWorker(compose(SETTINGS), tiny_policy, total_steps=4)
        worker.close()
    assert sys.excepthook is shows_errors


def test_a_folder_that_holds_no_model_is_an_error(tmp_path):
    with pytest.raises(TrainerError, match="VERL build failed"):
        UpdateWorker(compose(SETTINGS), tmp_path, total_steps=4)
