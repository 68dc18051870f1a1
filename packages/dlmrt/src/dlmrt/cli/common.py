"""What the commands share: options, error reporting, loading."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from dlmrt.engine import Engine

INTERRUPTED = 130

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help='Model: "embedded:NAME", a folder or a hub id.', show_default="the embedded model"
    ),
]
RevisionOption = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
DtypeOption = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
DriverOption = Annotated[str, typer.Option(help="Driver of the denoising loop: auto or host.")]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="CPU threads.", show_default="torch's own")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]


@contextmanager
def reported_errors() -> Iterator[None]:
    """An error of ours becomes one line on standard error and exit code 1; Ctrl-C becomes exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        from orl_core.errors import OrlError

        if not isinstance(error, OrlError):
            raise
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


def load_engine(
    model: str | None, revision: str | None, device: str, dtype: str, driver: str, threads: int | None
) -> "Engine":
    """The engine that the common options describe."""
    import torch

    from dlmrt.checkpoint.embedded import DEFAULT_MODEL
    from dlmrt.engine import Engine

    if threads is not None:
        torch.set_num_threads(threads)
    return Engine.from_pretrained(model or DEFAULT_MODEL, revision=revision, device=device, dtype=dtype, driver=driver)


def _request_options(
    max_new_tokens: Annotated[int | None, typer.Option(help="Most tokens of the answer.")] = None,
    decoder: Annotated[
        str | None,
        typer.Option(
            help="entropy_bound, threshold, draft_edit, draft_edit_quality, draft_edit_speed or insert_delete."
        ),
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; above 0 tokens are sampled.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the K most probable tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the fewest tokens of that probability.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same tokens.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends the answer; may be repeated.")] = None,
    residual: Annotated[bool, typer.Option(help="Hand each step's prediction on to the next one.")] = True,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Decode through end tokens.")] = False,
    repetition_stop: Annotated[
        int | None, typer.Option(help="End an answer that repeats itself over that many canvases.")
    ] = None,
    thinking: Annotated[bool | None, typer.Option(help="Set enable_thinking in the chat template.")] = None,
    entropy_bound: Annotated[float | None, typer.Option(help="entropy_bound: nats accepted a step.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="entropy_bound: most steps of a block.")] = None,
    t_min: Annotated[float | None, typer.Option(help="entropy_bound: temperature of the last step.")] = None,
    t_max: Annotated[float | None, typer.Option(help="entropy_bound: temperature of the first step.")] = None,
    stability_threshold: Annotated[int | None, typer.Option(help="entropy_bound: unchanged steps to stop.")] = None,
    confidence_threshold: Annotated[float | None, typer.Option(help="entropy_bound: mean nats to stop.")] = None,
    threshold: Annotated[float | None, typer.Option(help="threshold, draft_edit: probability to commit.")] = None,
    steps: Annotated[int | None, typer.Option(help="threshold: steps that a block is divided over.")] = None,
    edit_threshold: Annotated[float | None, typer.Option(help="draft_edit: probability to rewrite.")] = None,
    edit_blocks: Annotated[int, typer.Option(help="draft_edit: finished blocks that it may still edit.")] = 0,
    max_post_steps: Annotated[int | None, typer.Option(help="draft_edit: most steps that only edit.")] = None,
    min_transfer: Annotated[int | None, typer.Option(help="draft_edit: least positions filled a step.")] = None,
) -> None:
    """The options behind GenerationParams, under the names of its fields."""


def with_request_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of a request in place of its parameter `params` (fields of GenerationParams)."""
    options = list(inspect.signature(_request_options).parameters.values())
    own = inspect.signature(command).parameters

    @wraps(command)
    def wrapped(**values: Any) -> None:
        params = {option.name: values.pop(option.name) for option in options}
        params["stop"] = tuple(params["stop"] or ())
        with reported_errors():
            command(params=params, **values)

    parameters = [parameter for name, parameter in own.items() if name != "params"]
    keyword = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in [*parameters, *options]]
    wrapped.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in keyword}
    del wrapped.__wrapped__  # type: ignore[attr-defined]
    return wrapped
