"""A tiny random policy, a local artifact store, and one update worker for the whole session."""

import hashlib
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agl_core.algorithm.verl.config import compose
from agl_core.algorithm.verl.overrides import normalise
from agl_core.ledger.tables import BATCH_ROWS
from agl_core.types.training import FileRef, FolderRef

SETTINGS: dict[str, Any] = {
    "data": {"train_batch_size": 4, "max_prompt_length": 64, "max_response_length": 32, "seed": 7},
    "actor_rollout_ref": {
        "rollout": {"n": 2},
        "actor": {
            "ppo_mini_batch_size": 4,
            "ppo_micro_batch_size_per_gpu": 4,
            "optim": {"lr": 1e-3},
        },
    },
    "algorithm.adv_estimator": "grpo",
    "trainer.total_training_steps": 4,
}


class LocalArtifacts:
    """Keeps folders and tables below one local folder, as the ledger's artifacts do."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tables: dict[str, pa.Table] = {}
        self._scratches = 0

    def scratch(self, name: str) -> Path:
        self._scratches += 1
        folder = self.root / f"scratch-{self._scratches}" / name
        folder.mkdir(parents=True)
        return folder

    def put_folder(self, name: str, folder: Path) -> FolderRef:
        files = []
        prefix = f"kept-{self._scratches}/{name}/"
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            key = prefix + path.relative_to(folder).as_posix()
            (self.root / key).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, self.root / key)
            data = path.read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            files.append(FileRef(key=key, sha256=digest, size_bytes=len(data)))
        return FolderRef(prefix=prefix, files=tuple(files))

    def put_table(self, name: str, table: pa.Table) -> FileRef:
        self.tables[name] = table
        self.root.mkdir(parents=True, exist_ok=True)
        path = self.root / f"{name}.parquet"
        pq.write_table(table, path)
        data = path.read_bytes()
        return FileRef(
            key=path.name,
            sha256=hashlib.sha256(data).hexdigest(),
            size_bytes=len(data),
            rows=table.num_rows,
        )

    def fetch_folder(self, ref: FolderRef) -> Path:
        for file in ref.files:
            data = (self.root / file.key).read_bytes()
            assert hashlib.sha256(data).hexdigest() == file.sha256
        return self.root / ref.prefix


def make_rows(
    shape: list[tuple[int, int, float]], *, logprob: float | None = -4.5, masked: bool = False
) -> pa.Table:
    """Build a batch table of one row for each (rollout index, group, reward)."""
    rows, steps = [], Counter()
    for place, (index, group, reward) in enumerate(shape):
        prompt = [1 + (place * 7 + k) % 90 for k in range(3 + place % 4)]
        response = [1 + (place * 11 + 5 * k) % 90 for k in range(2 + (place * 3) % 5)]
        mask = [0 if masked or (place % 3 == 2 and k == 1) else 1 for k in range(len(response))]
        rows.append(
            {
                "row": 100 + place,
                "index": index,
                "rollout_id": f"ro-{index}",
                "group": group,
                "call_index": steps[index],
                "step": steps[index],
                "num_calls": 1,
                "prompt_ids": prompt,
                "response_ids": response,
                "response_mask": mask,
                "rollout_logprobs": None if logprob is None else [logprob] * len(response),
                "policy_versions": ["v000000"] * len(response),
                "token_rewards": [0.0] * (len(response) - 1) + [reward],
                "reward": reward,
                "rollout_reward": reward,
                "truncated": None,
                "drop_reason": None,
            }
        )
        steps[index] += 1
    return pa.Table.from_pylist(rows, schema=BATCH_ROWS)


UNEVEN = [
    (0, 0, 1.0),
    (0, 0, 1.0),
    (1, 0, 0.0),
    (2, 1, 0.5),
    (3, 1, 0.25),
    (3, 1, 0.25),
    (4, 1, 1.0),
]
"""Seven rows of five rollouts in a group of two and one of three."""


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: a Llama of 2 layers, random weights, a character tokenizer."""
    from agl_core.algorithm.verl.platform_cpu import quiet_imports

    with quiet_imports():
        import torch
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.set_num_threads(1)  # threads that wait for each other are slow on a busy machine
    characters = [chr(code) for code in range(32, 127)]
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            initializer_range=0.2,
        )
    )
    folder = tmp_path_factory.mktemp("policy")
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def _session_worker(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory):
    from agl_core.algorithm.verl.worker import UpdateWorker

    update_worker = UpdateWorker(compose(SETTINGS), tiny_policy, total_steps=4)
    start = tmp_path_factory.mktemp("start")
    update_worker.save_checkpoint(start, step=0)
    yield update_worker, start
    update_worker.close()


@pytest.fixture
def worker(_session_worker):
    """The session's update worker, with the weights and optimizer that it started with."""
    update_worker, start = _session_worker
    update_worker.load_checkpoint(start)
    update_worker.start = start
    return update_worker


@pytest.fixture
def worker_with(worker, monkeypatch: pytest.MonkeyPatch):
    """Sets keys of the actor that are read after the worker is built."""
    from functools import partial

    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.utils.losses import ppo_loss

    def configure(**actor: Any):
        keys = {f"actor_rollout_ref.actor.{key}": value for key, value in actor.items()}
        config = compose(normalise(SETTINGS) | keys)
        loss_config = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        monkeypatch.setattr(worker, "_config", config)
        monkeypatch.setattr(worker._actor.worker, "loss_fn", partial(ppo_loss, config=loss_config))
        return worker

    return configure
