"""From a row to the token ids that the policy reads.

The ids are made here once and are the truth from then on; text is a view of them and is never encoded again. Works on any tokenizer object
of transformers without importing it.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from nearpolicy.errors import DataError, UsageError
from nearpolicy.rollout import Prompt
from nearpolicy.tasks.rows import Message, Row

ChatTemplate = Literal["auto"] | bool
Warn = Callable[[str], None]


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=3)


class Renderer:
    """Renders rows for one tokenizer. Warns once about each thing; counts what it skips.

    A prompt becomes chat messages and goes through the tokenizer's chat template, with the assistant's turn opened, when `chat_template` is
    True, or "auto" and the tokenizer has one; else its string is encoded as the tokenizer does by default, without an end-of-text token.
    A template writes its own special tokens: none are added to its text, so a beginning-of-text token is never doubled by both.

    Args:
        system_prompt: put in front as a system message, where the row has none of its own.
        chat_template_kwargs: variables of the template (for example enable_thinking).
        max_prompt_tokens: longest prompt; None is no limit.
        on_long: what becomes of a longer one: an error naming the row, or None and a count.
        warn: called with each warning's text; None issues a UserWarning.
    Raises:
        UsageError: a template is asked for where there is none, or a system prompt without a template.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        system_prompt: str | None = None,
        chat_template: ChatTemplate = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_prompt_tokens: int | None = None,
        on_long: Literal["error", "skip"] = "error",
        warn: Warn | None = None,
    ) -> None:
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if chat_template is True and not has_template:
            raise UsageError(
                "Chat template", got="a tokenizer without one", expected="an instruct model's", do="Set task.chat_template to auto or off."
            )
        self._tokenizer, self._system_prompt = tokenizer, system_prompt
        self._use_template = has_template if chat_template == "auto" else bool(chat_template)
        if system_prompt is not None and not self._use_template:
            raise UsageError("System prompt", got="one, without a chat template to put it in", expected="an instruct model with its template on",
                             do="Write it into the prompts, or turn the template on.")  # fmt: skip
        self._kwargs, self._max, self._on_long = dict(chat_template_kwargs or {}), max_prompt_tokens, on_long
        self._warn_function, self._bare_instruct = warn or _warn, has_template and not self._use_template
        self._bos: int | None = tokenizer.bos_token_id
        self._adds_bos = self._bos is not None and self._encode("0")[:1] == [self._bos]
        self.warned: Counter[str] = Counter()
        """Prompts each warning applied to."""
        self.skipped = 0
        """Prompts left out for their length."""

    def __call__(self, row: Row) -> Prompt | None:
        """The rendered row; None when it is too long and such rows are skipped.

        Raises:
            DataError: too long, no tokens at all, messages without a template, or a template that fails on it.
        """
        ids = self._templated(row) if self._use_template else self._bare(row)
        if not ids:
            raise DataError(f"Prompt of row {row.id!r}", got="no tokens", expected="at least one", do="Drop the row.")
        self._check_bos(ids)
        if self._max is not None and len(ids) > self._max:
            if self._on_long == "skip":
                self.skipped += 1
                return None
            raise DataError(f"Prompt of row {row.id!r}", got=f"{len(ids)} tokens", expected=f"at most {self._max} (task.max_prompt_tokens)",
                            do="Raise the limit, drop the row, or set task.long_prompts to skip.")  # fmt: skip
        return Prompt(
            id=row.id,
            token_P=np.asarray(ids, dtype=np.int64),
            text=self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False),
            columns={**row.columns, "prompt": row.prompt},
        )

    def all(self, rows: Sequence[Row]) -> list[Prompt]:
        """The rendered rows, without those skipped: run over finite data before training, a long prompt is found at once.

        Raises:
            DataError: as for one row; or every row was skipped.
        """
        prompts = [p for p in map(self, rows) if p is not None]
        if rows and not prompts:
            raise DataError("Prompts", got=f"all {len(rows)} longer than {self._max} tokens", expected="some within the limit",
                            do="Raise task.max_prompt_tokens.")  # fmt: skip
        return prompts

    def _templated(self, row: Row) -> list[int]:
        messages: list[Message] = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else list(row.prompt)
        if self._system_prompt is not None:
            if messages[0].get("role") == "system":
                self._say("the system prompt is not used where a row brings its own system message")
            else:
                messages.insert(0, {"role": "system", "content": self._system_prompt})
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **self._kwargs)
        except Exception as error:
            raise DataError(f"Prompt of row {row.id!r}", got=f"{type(error).__name__}: {error} from the chat template",
                            expected="messages it can render", do="See which roles and order the model's template takes.") from error  # fmt: skip
        return self._encode(text, row, add_special_tokens=False)

    def _bare(self, row: Row) -> list[int]:
        if not isinstance(row.prompt, str):
            raise DataError(f"Prompt of row {row.id!r}", got="chat messages without a chat template", expected="a text, or an instruct model",
                            do="Use a model whose tokenizer has a template, or give prompts as text.")  # fmt: skip
        if self._bare_instruct:
            self._say("an instruct model is given bare text: its chat template is off")
        ids = self._encode(row.prompt, row)
        eos = self._tokenizer.eos_token_id
        # Some tokenizers close every text; a closed prompt has nothing left to say.
        if eos is not None and ids[-1:] == [eos] and self._encode(row.prompt, row, add_special_tokens=False)[-1:] != [eos]:
            ids.pop()
        return ids

    def _encode(self, text: str, row: Row | None = None, **options: Any) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise DataError(f"Prompt of row {row.id if row else ''!r}", got=f"half a character, \\u{ord(half):04x}", expected="text",
                            do="Mend or drop the row.") from error  # fmt: skip
        # Not verbose: the tokenizer's own warning about long texts would say less than the limit's error does.
        return list(self._tokenizer(text, verbose=False, **options)["input_ids"])

    def _check_bos(self, ids: list[int]) -> None:
        if self._bos is None:
            return
        if ids[:2] == [self._bos, self._bos]:
            self._say("prompts begin with two beginning-of-text tokens: one is written in the text or template itself")
        elif self._adds_bos and ids[0] != self._bos:
            self._say("prompts lack the beginning-of-text token that this tokenizer puts in front of text: the chat template leaves it out")

    def _say(self, message: str) -> None:
        self.warned[message] += 1
        if self.warned[message] == 1:
            self._warn_function(message)


def render(
    row: Row,
    tokenizer: Any,
    *,
    system_prompt: str | None = None,
    chat_template: ChatTemplate = "auto",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    max_prompt_tokens: int | None = None,
    on_long: Literal["error", "skip"] = "error",
) -> Prompt | None:
    """One row rendered: `Renderer(tokenizer, ...)(row)`, which see."""
    return Renderer(
        tokenizer, system_prompt=system_prompt, chat_template=chat_template, chat_template_kwargs=chat_template_kwargs,
        max_prompt_tokens=max_prompt_tokens, on_long=on_long,
    )(row)  # fmt: skip


def first_prompt_shown(prompt: Prompt, tokenizer: Any) -> str:
    """The prompt as the policy reads it, made from its ids: special tokens as they are spelt, and their number in a header line.

    Shown once at the start of a run, so that a wrong template is seen before it is trained on.
    """
    ids = prompt.token_P.tolist()
    special = sum(1 for i in ids if i in set(tokenizer.all_special_ids))
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return f"prompt {prompt.id!r}: {len(ids)} tokens, {special} of them special\n{text}"
