"""dlmrt chat: a conversation in the terminal, in which one sees the canvas settle."""

from contextlib import closing
from typing import TYPE_CHECKING, Any

from dlmrt.cli.common import (
    DeviceOption,
    DriverOption,
    DtypeOption,
    ModelOption,
    RevisionOption,
    ThreadsOption,
    load_engine,
    with_request_options,
)

if TYPE_CHECKING:
    from dlmrt.engine import Engine
    from dlmrt.params import GenerationParams
    from dlmrt.result import GenerationResult
    from dlmrt.text import Message


@with_request_options
def chat(
    *,
    params: dict[str, Any],
    model: ModelOption = None,
    revision: RevisionOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    driver: DriverOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Talk to a model. /new forgets the conversation, /quit or Ctrl-D ends it; Ctrl-C abandons an answer."""
    from rich.console import Console

    from dlmrt.cli.summary import summary
    from dlmrt.errors import RequestError
    from dlmrt.params import GenerationParams

    settings = GenerationParams(**params)
    engine = load_engine(model, revision, device, dtype, driver, threads)
    console = Console()
    console.print(f"{engine.name} · /new forgets, /quit ends", style="dim", highlight=False)
    messages: list[Message] = []
    while (line := _ask(console)) not in (None, "/quit"):
        if line == "/new":
            messages = []
        if not line or line == "/new":
            continue
        messages.append({"role": "user", "content": line})
        try:
            result = _answer(engine, messages, settings, console)
        except RequestError as error:
            console.print(f"error: {error}", style="red", highlight=False)
            messages.pop()
        except KeyboardInterrupt:
            console.print("abandoned", style="dim")
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": result.text})
            console.print(summary(result), style="dim", highlight=False)


def _ask(console) -> str | None:
    try:
        return console.input("[bold]> [/bold]").strip()
    except EOFError:
        return None


def _answer(engine: "Engine", messages: "list[Message]", params: "GenerationParams", console) -> "GenerationResult":
    """A model without chat template sees only the last line."""
    from dlmrt.cli.canvas import show_stream

    drafts = console.is_terminal
    if engine.codec is not None and engine.codec.chat_template is not None:
        events = engine.stream(messages=messages, params=params, drafts=drafts)
    else:
        events = engine.stream(messages[-1]["content"], params, drafts=drafts)
    with closing(events):
        return show_stream(events, console)
