"""Rollouts of a batch with and without the rows that are done: python benchmarks/rollout_rows.py --model embedded:base

The same answers are made by the host driver and by one that runs the model on every row until the block's last row is
done. The order alternates; the ratio of a repeat is taken from its own two times.
"""

import argparse
import json
import time
from statistics import median

import torch

from dlmrt.engine import Engine
from dlmrt.loop.host import HostDriver
from dlmrt.loop.step import Denoising
from orl_core.arithmetic import problems


class EveryRow(Denoising):
    """The baseline: no row is left out."""

    def skip_done(self) -> None:
        """Leaves out nothing."""


class EveryRowDriver(HostDriver):
    """The host driver over `EveryRow`."""

    def run(self, denoising, capture=None):
        denoising.__class__ = EveryRow
        return super().run(denoising, capture)


def answer(engine: Engine, prompts: list[torch.Tensor], driver: HostDriver, batch: int) -> tuple[float, list]:
    """Seconds of processor time, and the tokens of every answer."""
    engine.driver, tokens, began = driver, [], time.process_time()
    decoder = engine.prepare(ids=prompts[0].tolist()).decoder
    for first in range(0, len(prompts), batch):
        part = prompts[first : first + batch]
        answers = engine.rollout(
            part, decoder, max_new_tokens=128, seeds=range(first, first + len(part)), capture=False
        )
        tokens += [a.response_ids.tolist() for a in answers]
    return time.process_time() - began, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="embedded:base")
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    engine = Engine.from_pretrained(options.model)
    prompts = [torch.tensor(engine.codec.encode(p.prompt + "\n")) for p in problems("dev", options.problems)]
    seconds: dict[str, list[float]] = {"every row": [], "running rows": []}
    drivers = {"every row": EveryRowDriver(), "running rows": HostDriver()}
    for repeat in range(options.repeat):
        found = {}
        for name in list(drivers)[:: 1 if repeat % 2 == 0 else -1]:
            taken, found[name] = answer(engine, prompts, drivers[name], options.batch)
            seconds[name].append(taken)
        if found["every row"] != found["running rows"]:
            raise SystemExit("the two gave different answers")
    ratios = [a / b for a, b in zip(*seconds.values(), strict=True)]
    print(json.dumps({"ratio": median(ratios), "ratios": ratios, "processor_seconds": seconds} | vars(options)))


if __name__ == "__main__":
    main()
