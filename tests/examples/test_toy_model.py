"""The toy model's folder is consistent, was made by the scripts beside it, and really speaks both languages."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from examples.toy_model import evaluate, train
from examples.toy_model.conversation import TURN_END
from examples.toy_model.make_data import HELD_OUT_SEED, catalogue_json, conversations
from examples.toy_model.recommendation_language import CATALOGUE, named_category
from examples.toy_model.tokenizer import CONTEXT_LENGTH, SPECIAL_TOKENS, VISIBLE_TOKENS, train_tokenizer

FOLDER = train.FOLDER


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def read(name: str):
    return json.loads((FOLDER / name).read_text())


# --- the folder -------------------------------------------------------------------------------------------------------


def test_configs_match_the_training_script(tokenizer):
    assert read("config.json") == train.model_config(tokenizer)
    assert read("generation_config.json") == train.generation_config(tokenizer)


def test_weights_fit_the_config_and_are_small(tokenizer):
    config = read("config.json")
    with safe_open(FOLDER / "model.safetensors", framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        dtypes = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert shapes["model.embed_tokens.weight"] == (tokenizer.get_vocab_size(), config["hidden_size"])
    assert sum(name.endswith("self_attn.q_proj.weight") for name in shapes) == config["num_hidden_layers"]
    assert "lm_head.weight" not in shapes, "the head is tied to the embedding"
    assert dtypes == {"F32"}
    assert (FOLDER / "model.safetensors").stat().st_size < 6e6


def test_committed_tokenizer_matches_the_training_script(tokenizer):
    assert json.loads(train_tokenizer().to_str()) == json.loads(tokenizer.to_str())


def test_added_tokens_are_single_ids_and_special_ones_are_hidden(tokenizer):
    for token in (*SPECIAL_TOKENS, *VISIBLE_TOKENS):
        assert len(tokenizer.encode(f"a{token}b").ids) == 3, token
    ids = tokenizer.encode("".join((*SPECIAL_TOKENS, *VISIBLE_TOKENS))).ids
    assert tokenizer.decode(ids, skip_special_tokens=True).replace(" ", "") == "".join(VISIBLE_TOKENS)


@pytest.mark.parametrize("text", ["", " two  spaces\n\n", "0123 4567", "naïve — 漢字 🙂\u200d", "\x00\x7f\u202e"])
def test_tokenizer_round_trips_any_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_words_and_two_digit_numbers_are_single_tokens(tokenizer):
    """Copying them is copying one token."""
    for text in (" 48", " 10", " lemon", " port"):
        assert len(tokenizer.encode(f"value{text}.").ids) == len(tokenizer.encode("value.").ids) + 1, text
    assert len(tokenizer.encode(" 4096").ids) > 1


def test_catalogue_file_matches_the_catalogue():
    text = (FOLDER / "catalogue.json").read_text()
    assert text == catalogue_json()
    items = json.loads(text)
    assert len({tuple(item["tokens"]) for item in items}) == len(items) == 320


@pytest.mark.equality
def test_chat_template_matches_the_training_format(tokenizer):
    from transformers import AutoTokenizer

    hub = AutoTokenizer.from_pretrained(FOLDER)
    assert len(hub) == tokenizer.get_vocab_size()
    assert (hub.eos_token, hub.pad_token, hub.bos_token) == (TURN_END, "<|endoftext|>", None)
    for conversation in conversations(seed=3, count=20):
        messages = [{"role": message.role, "content": message.content} for message in conversation.messages]
        assert hub.apply_chat_template(messages, tokenize=False) == conversation.render()
        prompt, _ = conversation.prompts()[-1]
        assert hub.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True) == prompt
        assert hub.encode(prompt) == tokenizer.encode(prompt).ids


# --- the languages ----------------------------------------------------------------------------------------------------


def test_conversations_depend_only_on_seed_and_index():
    first = [conversation.render() for conversation in conversations(seed=5, count=40)]
    assert first == [conversation.render() for conversation in conversations(seed=5, count=40)]
    assert first[17:21] == [conversation.render() for conversation in conversations(seed=5, count=4, start=17)]
    assert not set(first) & {conversation.render() for conversation in conversations(seed=6, count=40)}


def test_each_turn_is_a_prefix_of_the_next():
    for conversation in conversations(seed=8, count=40):
        text = conversation.render()
        for prompt, answer in conversation.prompts():
            assert text.startswith(prompt + answer)


def test_prompts_have_many_lengths_within_the_context(tokenizer):
    lengths = [len(tokenizer.encode(conversation.render()).ids) for conversation in conversations(seed=9, count=400)]
    assert min(lengths) < 120 and sorted(lengths)[len(lengths) // 2] < 400 and 600 < max(lengths) < CONTEXT_LENGTH


def test_encoding_by_message_equals_encoding_the_whole(tokenizer):
    for conversation in conversations(seed=10, count=40):
        ids, weights = train.encode(tokenizer, conversation)
        assert ids == tokenizer.encode(conversation.render()).ids[:CONTEXT_LENGTH]
        answers = sum(len(tokenizer.encode(answer).ids) for _, answer in conversation.prompts())
        assert weights.count(train.ASSISTANT_WEIGHT) == answers


def test_evaluation_accepts_only_the_true_answer():
    """The judge accepts what the generator says, and nothing else."""
    for conversation in conversations(seed=11, count=80):
        if conversation.language == "recommendation":
            [(prompt, answer)] = conversation.prompts()
            assert evaluate._judge_item(conversation, prompt, answer) == (True, True, True, True)
            broken = answer.replace("<|sid_end|>", "")
            assert evaluate._judge_item(conversation, prompt, broken)[1:] == (False, False, False)


def test_category_is_extracted_from_thoughts():
    assert named_category("Next come tea blends.") == "tea blends"
    assert named_category("Next come trains.") is None
    assert len({item.category for ring in CATALOGUE for item in ring}) == 16


# --- training ---------------------------------------------------------------------------------------------------------


def test_same_seed_trains_the_same_weights(tokenizer):
    def short_run(seed: int) -> torch.Tensor:
        config = train.TrainingConfig(seed=seed, tokens=6_000, batch_tokens=2048)
        parameters = train.train(tokenizer, config).parameters()
        return torch.cat([parameter.detach().flatten() for parameter in parameters])

    first = short_run(0)
    assert torch.equal(first, short_run(0))
    assert not torch.equal(first, short_run(1))


@pytest.mark.equality
def test_model_passes_held_out_agent_and_recommendation_tasks():
    """Held-out conversations, greedy, through transformers. README.md has the figures of a larger run."""
    model, tokenizer = evaluate.load(FOLDER)
    scores = evaluate.evaluate(model, tokenizer, list(conversations(HELD_OUT_SEED + 1, 48)))
    assert scores.agent_turns >= 0.95
    assert scores.think_category >= 0.95
    assert scores.item_exists >= 0.95
    assert scores.item_category >= 0.95
    assert scores.item_likely >= 0.9
    assert scores.ends_by_itself == 1.0
    assert scores.margins.median() > 2.0
