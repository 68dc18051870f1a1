"""orl-train bench."""

import json
from typing import Annotated

import typer

from orl_train.cli.common import fail_cleanly, set_threads


def bench(
    rollouts: Annotated[
        list[int] | None, typer.Option(min=1, help="Rollouts per prompt; repeat it for more (default: 8, 16, 24).")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of a step.")] = 2,
    start: Annotated[
        str | None,
        typer.Option(help="Model folder or embedded:base, on arithmetic problems (default: random weights)."),
    ] = None,
    context: Annotated[int, typer.Option(min=8, help="Mean prompt length with random weights.")] = 320,
    repeat: Annotated[int, typer.Option(min=1, help="Steps of each arm; medians are reported.")] = 3,
    engine: Annotated[str, typer.Option(help="Rollout engine: auto, dlmrt or reference.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads (default: all).")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure a training step with and without packing, cost balancing and asynchronous capture."""
    with fail_cleanly():
        set_threads(threads)
        from orl_train.bench.measure import Seconds, bench_report
        from orl_train.bench.workload import random_workload, start_workload

        def progress(what: str, seconds: Seconds) -> None:
            phases = f"rollout {seconds.rollout:.2f}, replay {seconds.replay:.2f}, optimizer {seconds.optimizer:.2f}"
            typer.echo(f"{what}: {seconds.step:.2f} s, processor {seconds.cpu:.2f} s ({phases})", err=True)

        workload = start_workload(start, prompts) if start else random_workload(prompts, context=context)
        report = bench_report(workload, rollouts or [8, 16, 24], repeat, engine=engine, report=progress)
        if json_:
            typer.echo(json.dumps(report))
            return
        for number, result in report["by_rollouts"].items():
            parts = ", ".join(f"{name.replace('_', ' ')} {ratio:.2f}x" for name, ratio in result["parts"].items())
            speedups = f"{result['speedup']:.2f}x (processor time {result['cpu_speedup']:.2f}x)"
            typer.echo(f"{number} rollouts per prompt: {speedups}: {parts}")
