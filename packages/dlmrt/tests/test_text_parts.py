"""Messages whose content is a list of parts."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from dlmrt.errors import RequestError
from dlmrt.text import TextCodec

TEMPLATE = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"


@pytest.fixture
def codec() -> TextCodec:
    return TextCodec(Tokenizer(WordLevel({"?": 0}, unk_token="?")), TEMPLATE)


def test_text_parts_reach_the_template(codec):
    parts = [{"type": "text", "text": "two "}, {"type": "text", "text": "parts"}]
    assert codec.render([{"role": "user", "content": parts}]) == "two parts"


@pytest.mark.parametrize(
    "part", [{"type": "image", "url": "x.png"}, {"type": "image_url", "image_url": {}}, {"type": "audio"}, "loose", {}]
)
def test_an_image_or_any_other_part_is_refused_by_message_and_type(codec, part):
    messages = [
        {"role": "system", "content": "hello"},
        {"role": "user", "content": [{"type": "text", "text": ""}, part]},
    ]
    with pytest.raises(RequestError, match=r"message 1 holds a part of type .*text only"):
        codec.render(messages)
