"""Make the calculator's tiny policy: a character tokenizer and a warmed-up Llama.

The warm-up is supervised: first the skill alone (call the tool with the expression, then repeat its
result), then a mix of behaviours in which the skill is the minority, so that reinforcement learning
has something to shift:

    guess     =51                       without the tool: near the truth, seldom right
    proper    calc(12+34) -> 46    =46
    wrong     calc(12+94) -> 106   =106     a digit or the operator differs
    broken    calc(12+)   -> error =51      half of it missing: the tool cannot read it
    ignore    calc(12+34) -> 46    =51      the result is not used

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

POLICY = Path(__file__).parent / "policy"
SPECIAL = ["<|pad|>", "<|unk|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MIX = {"guess": 0.54, "proper": 0.28, "wrong": 0.05, "broken": 0.03, "ignore": 0.10}

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
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    return LlamaForCausalLM(config)


def _near(value: int, rng: random.Random) -> int:
    """Return a guess: within 20 of the value, right once in 41."""
    return value + rng.randint(-20, 20)


def _spoil(expression: str, rng: random.Random) -> str:
    """Return the expression with one character replaced by another of its kind."""
    position = rng.randrange(len(expression))
    kind = "+-*" if expression[position] in "+-*" else "123456789"
    other = rng.choice([c for c in kind if c != expression[position]])
    return expression[:position] + other + expression[position + 1 :]


def conversation(behaviour: str, expression: str, rng: random.Random) -> list[Turn]:
    """Return the turns of one conversation in which the assistant behaves in the named way."""
    value = answer(expression)
    asked = ("user", question(expression))
    if behaviour == "guess":
        return [asked, ("assistant", f"={_near(value, rng)}")]
    if behaviour == "broken":
        called = expression.rstrip("0123456789")
        turns = [asked, ("assistant", f"calc({called})"), ("user", "error")]
        return [*turns, ("assistant", f"={_near(value, rng)}")]
    called = _spoil(expression, rng) if behaviour == "wrong" else expression
    result = answer(called)
    said = _near(result, rng) if behaviour == "ignore" else result
    return [
        asked,
        ("assistant", f"calc({called})"),
        ("user", str(result)),
        ("assistant", f"={said}"),
    ]


def encode(turns: list[Turn], tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Return token ids, and labels that are -100 outside the assistant's text and its end token."""
    ids: list[int] = []
    labels: list[int] = []
    for role, content in turns:
        head = [tokenizer.convert_tokens_to_ids(f"<|{role}|>")]
        body = [*tokenizer.convert_tokens_to_ids(list(content)), tokenizer.eos_token_id]
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
    skill_steps: int = 700,
    mix_steps: int = 500,
    batch_size: int = 192,
    learning_rate: float = 3e-3,
) -> None:
    """Train the model in place: `skill_steps` on proper use alone, then `mix_steps` on the mix."""
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
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == num_steps - 1:
            print(f"step {step}: loss {loss.item():.4f}, {time.monotonic() - started:.0f} s")


def main() -> None:
    """Write the policy's folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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
    size_bytes = sum(file.stat().st_size for file in options.out.iterdir())
    print(f"{options.out}: {model.num_parameters()} weights, {size_bytes} bytes")


if __name__ == "__main__":
    main()
