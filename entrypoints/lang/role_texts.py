"""Extracts the text that a model's chat template writes around a message.

A template renders whole conversations; a program writes them piece by piece and must never rewrite what it has sent.
So the template is rendered with a marker for each message's content, and the text between two markers is the text
between the two contents:

    <|im_start|>user\\n MARK0 <|im_end|>\\n<|im_start|>assistant\\n MARK1 <|im_end|>\\n
    |-- before 0 ---|       |- after 0 -||------- before 1 ------|      |-- after 1 -|

So even templates that would drop or rewrite earlier messages (for example, strip old reasoning) keep them here: the
model's text stays as the model wrote it, as in every continuation.
"""

from __future__ import annotations

from ...runtime.text.chat_template import ChatTemplate, ChatTemplateError


class RoleTexts:
    """The state of a conversation: the roles so far, and the text that must follow the last content."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._roles: list[str] = []
        self._after = ""
        self.is_open = False
        """True between `begin_message` and `end_message`."""

    def copy_roles(self) -> RoleTexts:
        """An independent conversation that starts out like this one."""
        other = RoleTexts(self._template)
        other._roles, other._after, other.is_open = list(self._roles), self._after, self.is_open
        return other

    @property
    def num_messages(self) -> int:
        return len(self._roles)

    def append_messages(self, other: RoleTexts, since: int) -> None:
        """Append the messages of ``other`` from position ``since`` on, which have all ended."""
        self._roles += other._roles[since:]
        self._after = other._after

    def begin_message(self, role: str) -> str:
        """The text before the content of a new message. Raises ChatTemplateError if the template refuses the message,
        or does not keep each content in one piece."""
        roles = [*self._roles, role]
        whole = self._render(roles)
        start = self._find(whole, len(roles) - 1)
        # An assistant's content starts where the model would: at the end of the generation prompt.
        prompt = self._render(self._roles, add_generation_prompt=True) if role == "assistant" else whole[:start]
        between = prompt
        if self._roles:
            last = len(self._roles) - 1
            between = prompt[self._find(prompt, last) + len(_marker(last)) :]
            if not between.startswith(self._after):
                raise ChatTemplateError(
                    f"the chat template writes other text after a {self._roles[-1]} message when a {role} message "
                    "follows, so it cannot be written piece by piece; write the text yourself instead of using roles"
                )
        self._roles = roles
        self.is_open = True
        before = between[len(self._after) :]
        self._after = whole[start + len(_marker(len(roles) - 1)) :]
        return before

    def end_message(self) -> str:
        """The text after the content of the current message."""
        self.is_open = False
        return self._after

    def _render(self, roles: list[str], *, add_generation_prompt: bool = False) -> str:
        messages = [{"role": role, "content": _marker(position)} for position, role in enumerate(roles)]
        return self._template.render(messages, add_generation_prompt=add_generation_prompt)

    def _find(self, text: str, position: int) -> int:
        marker = _marker(position)
        if text.count(marker) != 1:
            raise ChatTemplateError(
                f"the chat template writes the content of a message {text.count(marker)} times, so its text cannot be "
                "cut into before and after; write the text yourself instead of using roles"
            )
        return text.index(marker)


def _marker(position: int) -> str:
    # Only letters and digits: templates strip, split and escape other characters.
    return f"BatonContent{position}Ends"
