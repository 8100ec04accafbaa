"""Trains the toy model on conversations it generates itself, and writes a Hugging Face folder.

    python -m baton.examples.toy_model.train                      the committed model: minutes on two CPU cores
    python -m baton.examples.toy_model.train --out DIR --tokens 200_000

The tokenizer is trained first if the folder has none. Two runs with the same arguments on the same machine write the
same bytes. The model is transformers' Llama, so that the served model is compared with the trained one.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tqdm import tqdm

from .conversation import ITEM_START, TURN_END, TURN_START, Conversation
from .initial_weights import prepare
from .make_data import HELD_OUT_SEED, catalogue_json, conversations
from .tokenizer import CONTEXT_LENGTH, TEXT_END, save_tokenizer, train_tokenizer

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM  # importing it takes seconds

FOLDER = Path(__file__).parent
WINDOW = 256
"""Conversations drawn at a time; batches of similar length are cut from them."""
ASSISTANT_WEIGHT = 1.0
"""Loss weight of what the model must say."""
HISTORY_WEIGHT = 0.3
"""Loss weight of item histories: they walk the rings of the catalogue as the answers do."""
CONTEXT_WEIGHT = 0.1
"""Loss weight of all else that the model reads."""
DRILL_LENGTH = 72
"""Tokens of a copy drill."""
DRILL_PHASE = 0.03
"""Share of the training tokens, at its start, that are drills and nothing else."""
DRILL_SHARE, DRILL_END = 0.25, 0.9
"""Share of the sequences that are drills after that, and where in the training it has fallen to none."""
REPORT_EVERY = 500_000
"""Tokens between two looks at held-out conversations."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    seed: int = 0
    tokens: int = 9_000_000
    """Training tokens in all; the learning rate falls to zero over them."""
    batch_tokens: int = 2048
    learning_rate: float = 3e-3
    warmup: float = 0.01
    """Share of the tokens over which the learning rate rises."""
    weight_decay: float = 0.05


def model_config(tokenizer: Tokenizer) -> dict:
    """config.json: a Llama of 1.02 million parameters with grouped-query attention and tied embeddings."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT_LENGTH,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.04,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "pad_token_id": tokenizer.token_to_id(TEXT_END),
        "torch_dtype": "float32",
        "use_cache": True,
    }


def generation_config(tokenizer: Tokenizer) -> dict:
    """generation_config.json: greedy, ended by the end of the turn or of the text."""
    return {
        "do_sample": False,
        "eos_token_id": [tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(TEXT_END)],
        "pad_token_id": tokenizer.token_to_id(TEXT_END),
    }


def encode(tokenizer: Tokenizer, conversation: Conversation) -> tuple[list[int], list[float]]:
    """Token ids of the rendered conversation and the loss weight of each, cut to the context length."""
    ids: list[int] = []
    weights: list[float] = []
    for message in conversation.messages:
        heard = HISTORY_WEIGHT if ITEM_START in message.content else CONTEXT_WEIGHT
        for text, weight in (
            (f"{TURN_START}{message.role}\n", CONTEXT_WEIGHT),
            (f"{message.content}{TURN_END}", ASSISTANT_WEIGHT if message.role == "assistant" else heard),
            ("\n", CONTEXT_WEIGHT),
        ):
            piece = tokenizer.encode(text).ids
            ids += piece
            weights += [weight] * len(piece)
    return ids[:CONTEXT_LENGTH], weights[:CONTEXT_LENGTH]


def drill(rng: random.Random, vocabulary: int) -> tuple[list[int], list[float]]:
    """A short sequence of random tokens, over and over; the repetitions count.

    In text much can be guessed; here nothing but copying helps, which keeps the copying heads general.
    """
    unit = [rng.randrange(vocabulary) for _ in range(rng.randint(4, 24))]
    ids = (unit * (DRILL_LENGTH // len(unit) + 1))[:DRILL_LENGTH]
    return ids, [0.0] * len(unit) + [ASSISTANT_WEIGHT] * (len(ids) - len(unit))


def batches(tokenizer: Tokenizer, config: TrainingConfig) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Endless (ids int64 [b, t], weights float32 [b, t], tokens without padding); padding is on the right, weight 0."""
    rng = random.Random(config.seed)
    vocabulary = tokenizer.get_vocab_size()
    seen = drawn = 0
    while True:
        done = seen / config.tokens
        if done < DRILL_PHASE:
            encoded = [drill(rng, vocabulary) for _ in range(WINDOW)]
        else:
            encoded = [encode(tokenizer, item) for item in conversations(config.seed, WINDOW, start=drawn)]
            drawn += WINDOW
            drills = DRILL_SHARE * max(0.0, 1 - done / DRILL_END)
            encoded += [drill(rng, vocabulary) for _ in range(round(WINDOW * drills / (1 - drills)))]
        encoded.sort(key=lambda pair: len(pair[0]))
        groups: list[list[tuple[list[int], list[float]]]] = [[]]
        for pair in encoded:
            if len(pair[0]) * (len(groups[-1]) + 1) > config.batch_tokens:
                groups.append([])
            groups[-1].append(pair)
        rng.shuffle(groups)
        for group in filter(None, groups):
            length = max(len(ids) for ids, _ in group)
            padded = torch.zeros(len(group), length, dtype=torch.int64)
            weights = torch.zeros(len(group), length)
            for row, (ids, weight) in enumerate(group):
                padded[row, : len(ids)] = torch.tensor(ids)
                weights[row, : len(ids)] = torch.tensor(weight)
            tokens = sum(len(ids) for ids, _ in group)
            seen += tokens
            yield padded, weights, tokens


@torch.no_grad()
def held_out_accuracy(model: LlamaForCausalLM, tokenizer: Tokenizer, held_out: list[Conversation]) -> dict[str, float]:
    """Language -> share of the assistant's tokens that the model puts first, given the true text before them."""
    right: dict[str, list[torch.Tensor]] = {}
    for conversation in held_out:
        ids, weights = encode(tokenizer, conversation)
        said = torch.tensor(weights[1:]) == ASSISTANT_WEIGHT
        best = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].argmax(-1)
        right.setdefault(conversation.language, []).append((best == torch.tensor(ids[1:]))[said])
    return {language: torch.cat(parts).float().mean().item() for language, parts in right.items()}


def train(tokenizer: Tokenizer, config: TrainingConfig) -> LlamaForCausalLM:
    """A model trained on ``config.tokens`` tokens, float32 on the CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(config.seed)
    model = LlamaForCausalLM(LlamaConfig(**model_config(tokenizer)))
    prepare(model)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=config.learning_rate,
        betas=(0.9, 0.98),
    )
    model.train()
    held_out = list(conversations(HELD_OUT_SEED, 32))
    seen, smooth, reported = 0, math.nan, 0
    with tqdm(total=config.tokens, unit="token", unit_scale=True, desc="training") as progress:
        for ids, weights, tokens in batches(tokenizer, config):
            rate = _learning_rate(config, seen)
            for group in optimizer.param_groups:
                group["lr"] = rate
            # Causal attention and padding on the right: no mask is needed.
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            weight = weights[:, 1:].flatten()
            loss = (loss * weight).sum() / weight.sum()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            seen += tokens
            smooth = loss.item() if math.isnan(smooth) else 0.98 * smooth + 0.02 * loss.item()
            progress.update(tokens)
            progress.set_postfix(loss=f"{smooth:.3f}", lr=f"{rate:.1e}", refresh=False)
            if seen - reported >= REPORT_EVERY:
                reported = seen
                accuracy = held_out_accuracy(model, tokenizer, held_out)
                progress.write(", ".join(f"{name} {share:.1%}" for name, share in accuracy.items()) + f" at {seen:,}")
            if seen >= config.tokens:
                return model.eval()
    raise AssertionError("batches() never ends")


def _learning_rate(config: TrainingConfig, seen: int) -> float:
    """Linear rise, then a cosine to zero."""
    done = seen / config.tokens
    if done < config.warmup:
        return config.learning_rate * (done + 0.1 * config.warmup) / (1.1 * config.warmup)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * min((done - config.warmup) / (1 - config.warmup), 1)))


def save_model(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes config.json, generation_config.json, model.safetensors (tied head left out) and catalogue.json."""
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model_config(tokenizer), indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation_config(tokenizer), indent=2) + "\n")
    (folder / "catalogue.json").write_text(catalogue_json())


def load_or_train_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer; it is trained only where there is none, so that token ids stay what they are."""
    if not (folder / "tokenizer.json").exists():
        save_tokenizer(train_tokenizer(), folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def main() -> None:
    defaults = TrainingConfig()
    parser = argparse.ArgumentParser(description="Train the toy model.")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--tokens", type=int, default=defaults.tokens)
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument(
        "--threads", type=int, default=1, help="another number rounds, and so learns, a little otherwise"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = load_or_train_tokenizer(args.out)
    config = TrainingConfig(seed=args.seed, tokens=args.tokens, learning_rate=args.learning_rate)
    save_model(train(tokenizer, config), tokenizer, args.out)
    print(f"saved to {args.out}; now: python -m baton.examples.toy_model.evaluate --model {args.out}")


if __name__ == "__main__":
    main()
