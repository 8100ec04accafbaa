"""A tokenizer whose tokens are bytes: ids 0-255, then <eos> (256). A character beyond ASCII spans several tokens."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

VOCAB_SIZE = 257
EOS_ID = 256

CHAT_TEMPLATE = """{%- if tools %}[tools]
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
[/tools]
{% endif %}
{%- for message in messages %}[{{ message.role }}]
{%- if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}
{{- message.content | trim }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<eos>
{% endfor %}
{%- if add_generation_prompt %}[assistant]{{ "<think>\\n" if enable_thinking }}{% endif %}"""
"""In the form of Hermes, with thoughts. It keeps earlier thoughts, and strips the words of a message."""


def write_byte_tokenizer(folder: Path) -> Path:
    """Write tokenizer.json and its config; returns the folder."""
    # The byte-level alphabet, in the order of the bytes it stands for.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    characters = [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
    model = models.BPE(vocab={char: byte for byte, char in enumerate(characters)}, merges=[])
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken("<eos>", special=True)])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": CHAT_TEMPLATE}))
    return folder
