import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlmrt.answer import AnswerText
from dlmrt.errors import RequestError, TokenizerError
from dlmrt.text import TextCodec

TEMPLATES = {
    "last message": "{{ messages[-1]['content'] + '\\n' }}",
    "trailing newline": "{{ messages[-1]['content'] }}\n",
    "chatml": (
        "{%- for message in messages %}\n    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim }}\n"
        "    {{- '<|im_end|>\\n' }}\n{%- endfor %}\n{%- if add_generation_prompt %}\n"
        "    {{- '<|im_start|>assistant\\n' }}\n"
        "    {%- if enable_thinking is defined and enable_thinking is false %}\n"
        "        {{- '<think>\\n\\n</think>\\n\\n' }}\n"
        "    {%- endif %}\n{%- endif %}\n"
    ),
    "special tokens": "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "generation": "{% for m in messages %}{% generation %}<{{ m.content }}>{% endgeneration %}\n{% endfor %}",
    "namespace": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "   {{ ns.n }}{{ messages[0]['content'][::-1] }}\n   {% if tools %}tools{% endif %}"
    ),
}
CONVERSATION = [
    {"role": "user", "content": " Hé <b>llo & 'you' "},
    {"role": "assistant", "content": "Hi\n"},
    {"role": "user", "content": '日本 "x"'},
]


@pytest.fixture(scope="module")
def reference(tokenizer):
    """transformers' own tokenizer class over the same tokenizer."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<pad>", eos_token="<eos>")


@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_rendered_template_equals_transformers(tokenizer, reference, name, thinking):
    codec = TextCodec(tokenizer, TEMPLATES[name], {"bos_token": "<pad>", "eos_token": "<eos>"})
    variables = {} if thinking is None else {"enable_thinking": thinking}
    for messages in (CONVERSATION, CONVERSATION[:1]):
        expected = reference.apply_chat_template(
            messages, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=True, **variables
        )
        assert codec.render(messages, thinking) == expected
        ids = reference(expected, add_special_tokens=False)["input_ids"]
        assert codec.encode_messages(messages, thinking) == ids


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('only one system message') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ x.y }}",
        "{{ messages[0]['content'] + 1 }}",
        "{% if %}",
    ],
)
def test_template_that_refuses_or_leaves_its_sandbox_is_a_request_error(tokenizer, template):
    with pytest.raises(RequestError, match="chat template"):
        TextCodec(tokenizer, template).render(CONVERSATION)


def test_prompt_without_a_template_is_used_as_it_is(tokenizer):
    codec = TextCodec(tokenizer)
    assert codec.decode(codec.encode_prompt("a b\n")) == "a b\n"
    with pytest.raises(RequestError, match="no chat template"):
        codec.encode_messages(CONVERSATION)


def test_decoding_leaves_special_tokens_out(codec):
    assert codec.decode([*codec.encode("ab"), 256]) == "ab"


def test_folder_with_the_template_in_its_own_file(checkpoint, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    assert TextCodec.from_folder(tmp_path).render(CONVERSATION) == '日本 "x"\n'
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}!")
    assert TextCodec.from_folder(tmp_path).render(CONVERSATION) == "<eos>!"


def test_folder_with_several_named_templates_and_special_tokens_as_objects(checkpoint, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}yes"}]
    config = {"chat_template": named, "bos_token": {"content": "<s>", "lstrip": False}, "eos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert TextCodec.from_folder(tmp_path).render(CONVERSATION) == "<s>yes"


def test_missing_and_damaged_tokenizers_are_named(tmp_path):
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        TextCodec.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        TextCodec.from_folder(tmp_path)


@settings(deadline=None)
@given(
    text=st.text(st.sampled_from("abé日🙂 "), max_size=30),
    stop=st.lists(st.text(st.sampled_from("abé"), min_size=1, max_size=4), max_size=3),
    block=st.integers(1, 9),
)
def test_answer_shown_piece_by_piece_is_the_text_before_the_first_stop_string(codec, text, stop, block):
    ids = codec.encode(text)
    answer, shown = AnswerText(codec, stop), ""
    for end in range(block, len(ids) + block, block):
        shown += answer.update(ids[:end])
        assert "\ufffd" not in shown
        assert answer.text.startswith(shown)
        if answer.stopped_after is not None:
            break
    shown += answer.update(ids[: answer.stopped_after], final=True)
    assert shown == answer.text == before_stop(text, stop)
    assert (answer.stopped_after is not None) == any(word in text for word in stop)


def before_stop(text, stop):
    """What a decoder of single bytes would keep: the first stop string to be complete wins."""
    raw = text.encode()
    for length in range(1, len(raw) + 1):
        so_far = raw[:length].decode(errors="ignore")
        found = [so_far.find(word) for word in stop if word in so_far]
        if found:
            return so_far[: min(found)]
    return text
