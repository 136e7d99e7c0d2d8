"""Make the calculator's tiny policy: a character tokenizer and a warmed-up Llama.

The warm-up is supervised: first the skill alone (call the tool with the expression, then repeat its
result), then a mix of behaviours in which the skill is the minority, so that reinforcement learning
has something to shift:

    guess     ~51                       without the tool: near the truth, seldom right
    proper    calc(12+34) -> 46    =46
    half      calc(12)    -> 12    =12      computes only a part
    broken    calc 12+34  -> error ~51      not how the tool is called
    ignore    calc(12+34) -> 46    ~51      the result is not used

Each behaviour leaves the proper one at a single token, so reinforcement shifts a few choices and
the copying of digits, which has to be exact, is left alone. (Where the behaviours differed by their
digits, updates damaged the copying.)

Only tokens of the assistant carry loss. Seeded; a few minutes on one core.

    python -m examples.calculator.make_policy [--out examples/calculator/policy]
"""

import argparse
import random
import string
import time
from pathlib import Path

import torch  # noqa: TID253 - a script; nothing imports it but its tests
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import (  # noqa: TID253 - as above
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from examples.calculator.make_data import answer, question, split_expressions

TOOL_ERROR = "error"
"""What `agent.py` answers to a call that it cannot read."""
POLICY = Path(__file__).parent / "policy"
MODEL_CARD = """---
license: apache-2.0
---

The policy that the calculator example starts from: a character-level Llama of about
100k weights, made by `examples/calculator/make_policy.py` from a fixed seed and no data but
arithmetic expressions. It was warmed up on a mix of habits: guess, use the tool properly, use it
wrongly.
"""
SPECIAL = ["<|pad|>", "<|unk|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MIX = {"guess": 0.54, "proper": 0.25, "half": 0.06, "broken": 0.04, "ignore": 0.11}

Turn = tuple[str, str]
"""Role and content."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each printable ASCII character, and a chat template."""
    characters = [c for c in string.printable if c == "\n" or c.isprintable()]
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<|unk|>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        eos_token="<|end|>",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
        model_max_length=256,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a small Llama with random fp32 weights, drawn from torch's global seed."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=SPECIAL.index("<|end|>"),
        pad_token_id=SPECIAL.index("<|pad|>"),
        dtype=torch.float32,
    )
    return LlamaForCausalLM(config)


def _near(value: int, rng: random.Random) -> int:
    """Return a guess: about the value, all digits but the first 0."""
    near = value + rng.randint(-20, 20)
    unit = 10 ** (len(str(abs(near))) - 1)
    return round(near / unit) * unit


def conversation(behaviour: str, expression: str, rng: random.Random) -> list[Turn]:
    """Return the turns of one conversation in which the assistant behaves in the named way."""
    value = answer(expression)
    asked = ("user", question(expression))
    if behaviour == "guess":
        return [asked, ("assistant", f"~{_near(value, rng)}")]
    if behaviour == "broken":
        turns = [asked, ("assistant", f"calc {expression}"), ("user", TOOL_ERROR)]
        return [*turns, ("assistant", f"~{_near(value, rng)}")]
    called = expression[:2] if behaviour == "half" else expression
    result = called if behaviour == "half" else str(value)
    said = f"~{_near(value, rng)}" if behaviour == "ignore" else f"={result}"
    return [asked, ("assistant", f"calc({called})"), ("user", result), ("assistant", said)]


def encode(turns: list[Turn], tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Return token ids, and labels that are -100 outside the assistant's text and its end token."""
    ids: list[int] = []
    labels: list[int] = []
    vocabulary = tokenizer.get_vocab()
    for role, content in turns:
        head = [vocabulary[f"<|{role}|>"]]
        body = [vocabulary[token] for token in [*content, "<|end|>"]]
        ids += head + body
        labels += [-100, *(body if role == "assistant" else [-100] * len(body))]
    return ids, labels


def make_batch(
    expressions: list[str],
    mix: dict[str, float],
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels, each [num_expressions, longest], padded on the right."""
    behaviours = rng.choices(list(mix), weights=list(mix.values()), k=len(expressions))
    rows = [
        encode(conversation(behaviour, expression, rng), tokenizer)
        for behaviour, expression in zip(behaviours, expressions, strict=True)
    ]
    longest = max(len(ids) for ids, _ in rows)
    pad = tokenizer.pad_token_id
    ids = torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in rows])
    return ids, labels


def warm_up(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    skill_steps: int = 500,
    mix_steps: int = 600,
    batch_size: int = 160,
    learning_rate: float = 3e-3,
    noise: float = 0.06,
) -> None:
    """Train the model in place: `skill_steps` on proper use alone, then `mix_steps` on the mix.

    Each gradient is taken at weights moved by Gaussian noise of a standard deviation that grows to
    `noise`: what is learned then survives weights that move, as reinforcement will move them.
    """
    rng = random.Random(seed)
    expressions = split_expressions().warm_up
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    num_steps = skill_steps + mix_steps
    started = time.monotonic()
    for step in range(num_steps):
        rate = min(1.0, (step + 1) / 50, max(0.02, (num_steps - step) / mix_steps))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * rate
        mix = {"proper": 1.0} if step < skill_steps else MIX
        ids, labels = make_batch(rng.sample(expressions, batch_size), mix, tokenizer, rng)
        deviation = noise * min(1.0, max(0.0, (step - skill_steps / 2) / (skill_steps / 2)))
        kept = [weight.detach().clone() for weight in model.parameters()]
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight), alpha=deviation)
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight, value in zip(model.parameters(), kept, strict=True):
                weight.copy_(value)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == num_steps - 1:
            print(f"step {step}: loss {loss.item():.4f}, {time.monotonic() - started:.0f} s")


def main() -> None:
    """Write the policy's folder."""
    parser = argparse.ArgumentParser(description="Make the calculator's tiny policy.")
    parser.add_argument("--out", type=Path, default=POLICY)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    warm_up(model, tokenizer, options.seed)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    (options.out / "README.md").write_text(MODEL_CARD, encoding="utf-8")
    size_bytes = sum(file.stat().st_size for file in options.out.iterdir())
    print(f"{options.out}: {model.num_parameters()} weights, {size_bytes} bytes")


if __name__ == "__main__":
    main()
