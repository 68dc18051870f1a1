"""Text in and out: the tokenizer and chat templates."""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dlmrt.checkpoint.folder import read_json
from dlmrt.errors import RequestError, TokenizerError

Message = Mapping[str, Any]


class TextCodec:
    """A tokenizer and its chat template.

    chat_template: Jinja source, or None. special_tokens: what a template may name, such as {"eos_token": "</s>"}.
    """

    def __init__(
        self, tokenizer: Tokenizer, chat_template: str | None = None, special_tokens: Mapping[str, str] | None = None
    ) -> None:
        self.tokenizer, self.chat_template = tokenizer, chat_template
        self.special_tokens = dict(special_tokens or {})

    @classmethod
    def from_folder(cls, folder: Path) -> "TextCodec":
        """Reads tokenizer.json, tokenizer_config.json and chat_template.jinja. Raises TokenizerError."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(
                f"{folder} has no tokenizer.json; save the tokenizer in the fast format (save_pretrained), "
                "or give the prompt as token ids"
            )
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{path} cannot be read: {error}") from error
        config_path, template_path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        config = read_json(config_path) if config_path.is_file() else {}
        template = template_path.read_text(encoding="utf-8") if template_path.is_file() else config.get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        return cls(tokenizer, template, _special_tokens(config))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that is not a conversation, with the special tokens that the tokenizer itself adds."""
        return self.tokenizer.encode(text).ids

    def encode_prompt(self, prompt: str, thinking: bool | None = None) -> list[int]:
        """A prompt as the only message of a conversation, or as it is if there is no chat template."""
        if self.chat_template is None:
            return self.encode(prompt)
        return self.encode_messages([{"role": "user", "content": prompt}], thinking)

    def encode_messages(self, messages: Sequence[Message], thinking: bool | None = None) -> list[int]:
        """Token ids of a conversation, up to where the answer begins."""
        return self.tokenizer.encode(self.render(messages, thinking), add_special_tokens=False).ids

    def render(self, messages: Sequence[Message], thinking: bool | None = None) -> str:
        """The chat template filled in as transformers' `apply_chat_template(..., add_generation_prompt=True)` does.

        thinking: passed as `enable_thinking` if it is not None. Raises RequestError, also for images and other parts
        that are not text.
        """
        _check_text_only(messages)
        if self.chat_template is None:
            raise RequestError("the model has no chat template, so it takes a prompt and not messages")
        variables: dict[str, Any] = {**self.special_tokens, "messages": list(messages), "add_generation_prompt": True}
        variables |= {"tools": None, "documents": None}
        if thinking is not None:
            variables["enable_thinking"] = thinking
        try:
            return _environment().from_string(self.chat_template).render(variables)
        except Exception as error:  # a template is a program, and fails as programs do
            raise RequestError(f"the chat template refuses these messages: {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)


def _check_text_only(messages: Sequence[Message]) -> None:
    for index, message in enumerate(messages):
        content = message.get("content")
        for part in content if isinstance(content, list | tuple) else ():
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind != "text":
                raise RequestError(
                    f"message {index} holds a part of type {kind!r}; the engine reads text only, also with models that "
                    'were trained on images: send strings or parts {"type": "text", "text": ...}'
                )


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    names = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
    values = {name: config[name] for name in names if config.get(name)}
    return {name: value["content"] if isinstance(value, Mapping) else value for name, value in values.items()}


def _environment():
    """The sandbox in which transformers renders templates, without importing transformers (seconds of start-up)."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks the assistant's words for training; here it only passes them through."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str):
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment
