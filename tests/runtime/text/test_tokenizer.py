from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from baton.runtime.text.chat_template import ChatTemplateError
from baton.runtime.text.incremental_decode import decode_all
from baton.runtime.text.tokenizer import Tokenizer, TokenizerError
from tests.doubles import trained_tokenizers
from tests.doubles.trained_tokenizers import CONFIG, write_folder

TEXTS = [
    "The quick brown fox",
    " leading and trailing ",
    "",
    "two  spaces\n\nand\ttabs",
    "你好 👨‍👩‍👧 naïve é",
    "<s>written out</s> <|im_end|> <think>x</think>",
    "▁ and <0x41>",
]
BACKENDS = {name: getattr(trained_tokenizers, name) for name in ("byte_level", "byte_fallback", "unigram")}
CHAT = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"


def test_encode_decode_and_batches():
    tokenizer = Tokenizer(trained_tokenizers.byte_level(), CONFIG)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]
    assert tokenizer.encode_batch([]) == []


def test_special_ids_and_sizes():
    tokenizer = Tokenizer(trained_tokenizers.byte_level(), CONFIG)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.special_ids == {0, 1, 2, 3}
    assert tokenizer.vocab_size == trained_tokenizers.byte_level().get_vocab()["<é ü>"] + 1
    assert Tokenizer(trained_tokenizers.byte_level(), {}).eos_token_id is None


def test_bos_is_added_only_with_special_tokens():
    backend = trained_tokenizers.byte_level()
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = Tokenizer(backend, CONFIG)
    plain = tokenizer.encode("fox", add_special_tokens=False)
    assert tokenizer.encode("fox") == [1, *plain]
    assert tokenizer.encode_batch(["fox"]) == [[1, *plain]]
    assert tokenizer.encode_batch(["fox"], add_special_tokens=False) == [plain]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "text", ["", "fox", " fox", "\nfox", "\n\n", "\tx", "|x", "</s>The dog", "og, and stops\n### User: hello"]
)
def test_a_continued_text_gets_no_prefix(backend: str, text: str):
    template = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    trained = BACKENDS[backend]()
    trained.post_processor = template
    tokenizer = Tokenizer(trained, CONFIG)
    ids = tokenizer.encode_continuation(text)
    assert tokenizer.encode_continuation_batch([text, "x"]) == [ids, tokenizer.encode_continuation("x")]
    special = tokenizer.encode(text, add_special_tokens=False)
    if text.startswith("</s>"):  # what follows a special token looks as it does in one text
        assert ids == special
    elif "\ufffd" not in decode_all(tokenizer.token_bytes, special, skip_special_tokens=False) and 0 not in special:
        assert decode_all(tokenizer.token_bytes, ids, skip_special_tokens=False) == text


def test_a_word_is_not_split_where_a_text_continues():
    tokenizer = Tokenizer(trained_tokenizers.byte_fallback(), CONFIG)
    alone = decode_all(tokenizer.token_bytes, tokenizer.encode("umps", False), skip_special_tokens=False)
    going_on = decode_all(tokenizer.token_bytes, tokenizer.encode_continuation("umps"), skip_special_tokens=False)
    assert (alone, going_on) == (" umps", "umps")


def test_prompts_are_never_cut_or_padded():
    backend = trained_tokenizers.byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    assert 2 < len(Tokenizer(backend, CONFIG).encode("The quick brown fox")) < 50


def test_token_text_keeps_the_space_and_marks_partial_characters():
    tokenizer = Tokenizer(trained_tokenizers.unigram(), CONFIG)
    assert tokenizer.token_text(tokenizer.encode("the river")[0])[0] == " "
    tokenizer = Tokenizer(trained_tokenizers.byte_level(), CONFIG)
    half = tokenizer.token_to_id("Ã")
    assert half is not None and tokenizer.token_text(half) == "\ufffd"
    assert tokenizer.token_text(10**6) == ""


def test_load_finds_the_chat_template(tmp_path):
    folder = write_folder(tmp_path, trained_tokenizers.byte_level(), {**CONFIG, "chat_template": CHAT})
    messages = [{"role": "user", "content": " hi "}]
    assert Tokenizer.load(folder).apply_chat_template(messages) == "<s><user>hi"
    (folder / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.load(folder).apply_chat_template(messages) == "from the file"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "default one"}]
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({**CONFIG, "chat_template": named}))
    assert Tokenizer.load(folder).apply_chat_template(messages) == "default one"


NAMED = {"default": "plain {{ messages[0].content }}", "tool_use": "with {{ tools[0].function.name }}"}


def in_the_config(folder: Path) -> None:
    write_folder(
        folder,
        trained_tokenizers.byte_level(),
        CONFIG | {"chat_template": [{"name": name, "template": source} for name, source in NAMED.items()]},
    )


def in_files(folder: Path) -> None:
    write_folder(folder, trained_tokenizers.byte_level(), CONFIG | {"chat_template": "not this one"})
    (folder / "chat_template.jinja").write_text(NAMED["default"])
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(NAMED["tool_use"])
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ documents[0].title }}")


def in_the_json_of_a_processor(folder: Path) -> None:
    write_folder(folder, trained_tokenizers.byte_level(), CONFIG)
    (folder / "chat_template.json").write_text(
        json.dumps({"chat_template": [{"name": name, "template": source} for name, source in NAMED.items()]})
    )


@pytest.mark.parametrize("layout", [in_the_config, in_files, in_the_json_of_a_processor])
def test_named_chat_templates_are_loaded(tmp_path, layout):
    layout(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    messages, tools = [{"role": "user", "content": "hi"}], [{"type": "function", "function": {"name": "ls"}}]
    assert tokenizer.apply_chat_template(messages) == "plain hi"
    assert tokenizer.apply_chat_template(messages, tools=tools) == "with ls"
    if layout is not in_the_json_of_a_processor:  # transformers reads that with processors only
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(tmp_path)
        assert theirs.apply_chat_template(messages, tokenize=False) == "plain hi"
        assert theirs.apply_chat_template(messages, tools=tools, tokenize=False) == "with ls"
        assert theirs.chat_template.keys() == tokenizer.chat_templates.keys()


def test_single_named_template_is_the_default(tmp_path):
    config = {**CONFIG, "chat_template": [{"name": "chatml", "template": "that one"}]}
    assert Tokenizer.load(write_folder(tmp_path, trained_tokenizers.byte_level(), config)).chat_template is not None


@pytest.mark.parametrize("given", [5, [{"name": "a"}], ["a"], {"default": "a"}])
def test_malformed_chat_templates_are_refused(tmp_path, given):
    folder = write_folder(tmp_path, trained_tokenizers.byte_level(), {**CONFIG, "chat_template": given})
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: chat_template takes Jinja source, or a list"):
        Tokenizer.load(folder)
    folder = write_folder(tmp_path, trained_tokenizers.byte_level(), CONFIG)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": given}))
    with pytest.raises(TokenizerError, match=r"chat_template\.json: chat_template takes"):
        Tokenizer.load(folder)


def test_a_broken_named_template_is_named(tmp_path):
    in_files(tmp_path)
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{% if %}")
    with pytest.raises(TokenizerError, match="chat template tool_use: the chat template is not valid Jinja"):
        Tokenizer.load(tmp_path)
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_bytes(b"\xff")
    with pytest.raises(TokenizerError, match=r"tool_use\.jinja cannot be read"):
        Tokenizer.load(tmp_path)


def test_a_model_without_a_template_raises_an_error(tmp_path):
    tokenizer = Tokenizer.load(write_folder(tmp_path, trained_tokenizers.byte_level(), CONFIG))
    with pytest.raises(ChatTemplateError, match="no chat template; send a plain text prompt"):
        tokenizer.apply_chat_template([])


class TestBrokenFolders:
    def test_missing_tokenizer_is_an_error(self, tmp_path):
        with pytest.raises(TokenizerError, match=r"no tokenizer\.json in .*--tokenizer-path"):
            Tokenizer.load(tmp_path)

    def test_broken_tokenizer_json_is_an_error(self, tmp_path):
        write_folder(tmp_path, trained_tokenizers.byte_level(), CONFIG)
        (tmp_path / "tokenizer_config.json").write_text("{")
        with pytest.raises(TokenizerError, match=r"tokenizer_config\.json is not valid JSON"):
            Tokenizer.load(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text("[]")
        with pytest.raises(TokenizerError, match="must hold a JSON object, not a list"):
            Tokenizer.load(tmp_path)
        (tmp_path / "tokenizer.json").write_text("{}")
        with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
            Tokenizer.load(tmp_path)

    def test_unsupported_decoder_and_broken_template_are_refused(self, tmp_path):
        backend = trained_tokenizers.unigram()
        backend.decoder = trained_tokenizers.decoders.WordPiece()
        with pytest.raises(TokenizerError, match="WordPiece"):
            Tokenizer.load(write_folder(tmp_path, backend, CONFIG))
        config = {**CONFIG, "chat_template": "{% for %}"}
        with pytest.raises(TokenizerError, match="not valid Jinja"):
            Tokenizer.load(write_folder(tmp_path, trained_tokenizers.unigram(), config))


def test_detokenizer_imports_neither_torch_nor_transformers():
    code = "import sys, baton.runtime.detokenizer; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.equality
class TestAgainstTransformers:
    """The same folder, read by transformers' AutoTokenizer."""

    CONFIGS = (
        CONFIG,
        {**CONFIG, "add_bos_token": True},
        {},
        {
            **CONFIG,
            "eos_token": "<|im_end|>",
            "pad_token": {"__type": "AddedToken", "content": "<|pad|>", "special": True},
            "additional_special_tokens": ["<|extra|>"],
        },
    )

    def both(self, folder, backend, config):
        from transformers import AutoTokenizer

        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
        write_folder(folder, backend, config)
        return Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)

    @pytest.mark.parametrize("config", range(len(CONFIGS)))
    @pytest.mark.parametrize("name", BACKENDS)
    def test_encode_and_decode_equal_transformers(self, tmp_path, name, config):
        ours, theirs = self.both(tmp_path, BACKENDS[name](), self.CONFIGS[config])
        assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
        assert ours.vocab_size == len(theirs)
        assert {*theirs.all_special_ids} <= ours.special_ids
        for text in [*TEXTS, "a<|pad|>b<|extra|>"]:
            for special in (True, False):
                ids = theirs.encode(text, add_special_tokens=special)
                assert ours.encode(text, add_special_tokens=special) == ids
                for skip in (True, False):
                    assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)

    @pytest.mark.parametrize("extra", [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}])
    def test_post_processor_of_the_file_takes_precedence(self, tmp_path, extra):
        backend = trained_tokenizers.byte_level()
        backend.post_processor = TemplateProcessing(single="<|im_end|> $A", special_tokens=[("<|im_end|>", 3)])
        ours, theirs = self.both(tmp_path, backend, {**CONFIG, **extra})
        assert ours.encode("fox") == theirs.encode("fox")
        assert ours.encode("fox")[0] == 3

    def test_flags_of_added_tokens_come_from_the_config(self, tmp_path):
        backend = trained_tokenizers.byte_level()
        think = backend.token_to_id("<think>")
        entry = {"content": "<think>", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
        config = {**CONFIG, "added_tokens_decoder": {str(think): {**entry, "special": True}}}
        ours, theirs = self.both(tmp_path, backend, config)
        text = "a  <think> b"
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
        assert think in ours.special_ids

    def test_chat_template(self, tmp_path):
        source = (
            "{{ bos_token }}{% for m in messages %}\n"
            "  {%- if loop.first and tools %}{{ tools | tojson }}{% endif %}\n"
            "<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}\n"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}"
        )
        ours, theirs = self.both(tmp_path, trained_tokenizers.byte_level(), {**CONFIG, "chat_template": source})
        messages = [{"role": "system", "content": "Be <brief>."}, {"role": "user", "content": "é\n"}]
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": [1, 2.5, None, True]}}}]
        for given in (None, tools):
            expected = theirs.apply_chat_template(messages, tools=given, tokenize=False, add_generation_prompt=True)
            assert ours.apply_chat_template(messages, tools=given) == expected


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("template", [None, ("<s> $A", "<s> $A <s>:1 $B:1"), ("$A </s>", "$A </s> $B </s>")])
def test_special_ids_around_pairs(name: str, template: tuple[str, str] | None) -> None:
    """Two texts that are tokenised apart and joined by these are what the library makes of the pair."""
    backend = BACKENDS[name]()
    if template is not None:
        single, pair = template
        backend.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer = Tokenizer(backend, CONFIG)
    around = tokenizer.special_ids_around_pair
    assert around is not None
    before, between, after = around
    for one, other in (("yx", "xy"), ("The quick fox", "naïve é"), ("x", "x")):
        joined = [*before, *tokenizer.encode(one, False), *between, *tokenizer.encode(other, False), *after]
        assert joined == backend.encode(one, other).ids
