"""From rows to token ids: templates, special tokens, limits."""

import logging

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from nearpolicy.errors import DataError, UsageError
from nearpolicy.rollout import Prompt
from nearpolicy.tasks.render import Renderer, first_prompt_shown, render
from nearpolicy.tasks.rows import Row

CHAT = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
CHAT += "{% if add_generation_prompt %}[assistant]{% if think %}(think){% endif %}{% endif %}"
CHAT_WITH_BOS = "{{ bos_token }}" + CHAT
MERGES = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
CHARACTERS = list("abcdefghijklmnopqrstuvwxyz0123456789[]()?! .\n")
SPECIAL = ["<s>", "</s>"]


def make(template=None, *, add_bos=False, add_eos=False) -> PreTrainedTokenizerFast:
    """A toy BPE in which he + llo merge to hello."""
    vocabulary = {t: i for i, t in enumerate([*SPECIAL, *CHARACTERS, "he", "ll", "llo", "hello"])}
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.Split(" ", "isolated"), decoders.Fuse()
    if add_bos or add_eos:
        bpe.post_processor = processors.TemplateProcessing(
            single=f"{'<s> ' if add_bos else ''}$A{' </s>' if add_eos else ''}", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


ROW = Row("r1", "hi?", {"answer": "1"})


def test_bare_text():
    prompt = render(ROW, make())
    assert prompt.token_P.tolist() == [CHARACTERS.index(c) + 2 for c in "hi?"]
    assert prompt.token_P.dtype == "int64"
    assert (prompt.id, prompt.text, prompt.columns) == ("r1", "hi?", {"answer": "1", "prompt": "hi?"})


@pytest.mark.parametrize("chat_template", ["auto", True])
def test_text_becomes_a_user_message_of_an_instruct_model(chat_template):
    assert render(ROW, make(CHAT), chat_template=chat_template).text == "[user]hi?\n[assistant]"


def test_messages_system_prompt_and_template_arguments():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    row = Row("m", messages)
    assert render(row, make(CHAT)).text == "[user]a\n[assistant]b\n[user]c\n[assistant]"
    prompt = render(row, make(CHAT), system_prompt="be good", chat_template_kwargs={"think": True})
    assert prompt.text == "[system]be good\n[user]a\n[assistant]b\n[user]c\n[assistant](think)"
    assert prompt.columns["prompt"] == messages
    assert len(messages) == 3


def test_a_rows_own_system_message_stays_and_is_said_once():
    said = []
    renderer = Renderer(make(CHAT), system_prompt="be good", warn=said.append)
    row = Row("m", [{"role": "system", "content": "be bad"}, {"role": "user", "content": "a"}])
    assert [renderer(row).text for _ in range(2)] == ["[system]be bad\n[user]a\n[assistant]"] * 2
    assert len(said) == 1
    assert list(renderer.warned.values()) == [2]


def test_bare_text_to_an_instruct_model_is_warned_about():
    with pytest.warns(UserWarning, match="instruct model is given bare text"):
        prompt = render(ROW, make(CHAT), chat_template=False)
    assert prompt.text == "hi?"


def test_bos_of_template_and_tokenizer_is_not_doubled():
    said = []
    prompt = Renderer(make(CHAT_WITH_BOS, add_bos=True), warn=said.append)(ROW)
    assert prompt.text == "<s>[user]hi?\n[assistant]"
    assert said == []


def test_doubled_bos_is_warned_about():
    with pytest.warns(UserWarning, match="two beginning-of-text tokens"):
        prompt = render(ROW, make("<s>" + CHAT_WITH_BOS, add_bos=True))
    assert prompt.token_P.tolist()[:3] == [0, 0, CHARACTERS.index("[") + 2]
    with pytest.warns(UserWarning, match="two beginning-of-text tokens"):
        render(Row("r", "<s>hi"), make(add_bos=True))


def test_missing_bos_is_warned_about_only_where_the_tokenizer_adds_one():
    with pytest.warns(UserWarning, match="lack the beginning-of-text token"):
        render(ROW, make(CHAT, add_bos=True))
    said = []
    Renderer(make(CHAT), warn=said.append)(ROW)
    assert said == []


def test_a_tokenizer_that_closes_texts_leaves_the_prompt_open():
    assert render(ROW, make(add_bos=True, add_eos=True)).text == "<s>hi?"
    assert render(Row("r", "hi?</s>"), make()).text == "hi?</s>"  # the row's own stays


def test_ids_are_the_truth():
    """A prompt of [he, llo] is shown and kept as it is; encoding its text would give [hello]."""
    tokenizer = make()
    ids = tokenizer.convert_tokens_to_ids(["<s>", "he", "llo"])
    assert tokenizer("hello")["input_ids"] == tokenizer.convert_tokens_to_ids(["hello"])
    prompt = Prompt(id="x", token_P=np.array(ids), text="hello")
    assert first_prompt_shown(prompt, tokenizer) == "prompt 'x': 3 tokens, 1 of them special\n<s>hello"


def test_long_prompts():
    tokenizer = make()
    assert len(render(ROW, tokenizer, max_prompt_tokens=3).token_P) == 3
    with pytest.raises(DataError, match="Prompt of row 'r1': got 3 tokens; expected at most 2"):
        render(ROW, tokenizer, max_prompt_tokens=2)
    renderer = Renderer(tokenizer, max_prompt_tokens=2, on_long="skip")
    assert [p.id for p in renderer.all([ROW, Row("r2", "hi"), ROW])] == ["r2"]
    assert renderer.skipped == 2
    with pytest.raises(DataError, match="all 1 longer than 2 tokens"):
        renderer.all([ROW])


@pytest.mark.parametrize("template", [None, CHAT])
def test_a_prompt_beyond_the_tokenizers_own_limit_prints_nothing(template):
    tokenizer, lines = make(template), []
    tokenizer.model_max_length = 3

    class Lines(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("transformers"), Lines()
    logger.addHandler(handler)
    try:
        with pytest.raises(DataError, match=r"row 'r1'.*at most 2"):
            render(Row("r1", "hi? " * 5), tokenizer, max_prompt_tokens=2)
        assert lines == []
        tokenizer("hi? " * 5)  # the line that is not printed above
        assert len(lines) == 1
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("template", [None, CHAT])
def test_half_a_character_names_its_row(template):
    with pytest.raises(DataError, match=r"row 'r7': got half a character, \\ud800"):
        render(Row("r7", "\ud800 1+1="), make(template))


def test_refusals():
    with pytest.raises(UsageError, match="a tokenizer without one"):
        Renderer(make(), chat_template=True)
    with pytest.raises(UsageError, match="System prompt"):
        Renderer(make(), system_prompt="x")
    with pytest.raises(UsageError, match="System prompt"):
        Renderer(make(CHAT), system_prompt="x", chat_template=False)
    with pytest.raises(DataError, match="messages without a chat template"):
        render(Row("m", [{"role": "user", "content": "a"}]), make())
    with pytest.raises(DataError, match="Prompt of row 'r1': got TemplateError: roles"):
        render(ROW, make("{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(DataError, match="no tokens"):
        render(Row("r", "\u00e9"), make())
