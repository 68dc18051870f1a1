"""The engine beside transformers: the same prompts, the same random draws, the same tokens; how much faster?

transformers' own draws are recorded once, outside the measurement, and replayed to the engine. Whoever runs first
alternates, so that both meet the same machine.
"""

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dlmrt.benchmark import device_name, versions
from dlmrt.engine import Engine
from dlmrt.errors import ComparisonError
from dlmrt.loop.replay import RecordedDraws, ReplayDriver
from dlmrt.models.diffusion_gemma import DiffusionGemma
from dlmrt.params import GenerationParams
from dlmrt.request import Request
from orl_core.decoders import EntropyBound

_PROMPT, _ANSWER = 64, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonReport:
    """Medians over the repeats, each of which answers every prompt once with either.

    tokens, forwards: of one repeat, the same for both. ratio: the engine's tokens per second over the reference's;
    ratios: of each repeat. identical_tokens: always true, since a difference is an error.
    """

    model: str
    reference: str
    workload: str
    requests: int
    tokens: int
    forwards: int
    tpf: float
    identical_tokens: bool
    tokens_per_second: float
    reference_tokens_per_second: float
    ratio: float
    ratios: tuple[float, ...]
    device: str
    dtype: str
    threads: int
    versions: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[tuple[str, str]]:
        """(label, value) pairs for people."""
        return [
            ("model", f"{self.model}, {self.dtype} on {self.device}, {self.threads} threads"),
            ("workload", f"{self.requests} requests, {len(self.ratios)} times: {self.workload}"),
            ("tokens", f"{self.tokens} in {self.forwards} forwards, identical to {self.reference}"),
            ("tokens/s", f"{self.tokens_per_second:.1f}, {self.reference} {self.reference_tokens_per_second:.1f}"),
            ("ratio", f"{self.ratio:.2f} ({min(self.ratios):.2f} to {max(self.ratios):.2f})"),
            ("versions", ", ".join(f"{name} {number}" for name, number in self.versions.items())),
        ]


class Reference:
    """transformers' DiffusionGemmaForBlockDiffusion over the folder that the engine was loaded from, at the default
    attention implementation and a dynamic cache, without compilation."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        try:
            import transformers
        except ImportError as error:
            raise ComparisonError("transformers is not installed; install dlmrt[compare]") from error
        logging: Any = transformers.utils.logging
        level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()  # it would name the vision tower's weights, which text does not need
        logging.disable_progress_bar()
        try:
            kind: Any = transformers.DiffusionGemmaForBlockDiffusion
            self.model: Any = kind.from_pretrained(folder, dtype=engine.model.dtype).to(engine.model.device).eval()
        finally:
            logging.set_verbosity(level)
            if bars:
                logging.enable_progress_bar()
        self.name = f"transformers {transformers.__version__}"

    def configure(self, request: Request) -> None:
        """Gives `generate` the settings of a request."""
        decoder, config = request.decoder, self.model.generation_config
        assert isinstance(decoder, EntropyBound)
        config.max_denoising_steps, config.max_new_tokens = decoder.max_steps, request.max_new_tokens
        config.t_min, config.t_max = decoder.t_min, decoder.t_max
        config.stability_threshold = decoder.stability_threshold
        config.confidence_threshold = decoder.confidence_threshold
        config.sampler_config = type(config.sampler_config)(entropy_bound=decoder.entropy_bound)
        config.eos_token_id = sorted(request.stop_ids) or None

    def generate(self, ids: list[int], seed: int) -> list[int]:
        """The answer, in whole canvases; what follows an end token is padding."""
        torch.manual_seed(seed)
        prompt = torch.tensor([ids], device=self.model.device)
        output = self.model.generate(prompt)
        return output.sequences[0, len(ids) :].tolist()


class _Recorder(TorchFunctionMode):
    """Takes down every draw of the reference, in order: ("randint" or "multinomial", tokens [C])."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[tuple[str, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.randint, torch.multinomial):
            self.drawn.append((func.__name__, result.flatten()))
        return result

    def draws(self) -> RecordedDraws:
        """A canvas draws its noise, then each of its steps the candidates and the new noise: a randint that follows
        no multinomial begins a canvas."""
        initial, renoise, candidate, first = [], [], [], []
        before = ""
        for kind, tokens in self.drawn:
            if kind == "multinomial":
                candidate.append(tokens)
            elif before == "multinomial":
                renoise.append(tokens)
            else:
                initial.append(tokens)
                first.append(len(candidate))
            before = kind
        noise, new, sampled = (torch.stack(tokens) for tokens in (initial, renoise, candidate))
        return RecordedDraws(noise, new, sampled, torch.tensor(first, device=noise.device))


def compare(engine: Engine, folder: Path, params: GenerationParams, *, prompts: int, repeat: int) -> ComparisonReport:
    """Answers `prompts` random prompts `repeat` times with either. folder: where the engine's weights lie.

    Raises ComparisonError if the model or the decoder has no counterpart, or if any token differs.
    """
    spec = engine.model.spec
    canvas, context = spec.canvas_length, engine.context
    answer = params.max_new_tokens or min(_ANSWER, context // 2)
    answer = min(-(-answer // canvas) * canvas, (context - 1) // canvas * canvas)  # the reference fills whole canvases
    length = max(1, min(_PROMPT, context - answer))
    params = replace(params, max_new_tokens=answer)
    generator = torch.Generator().manual_seed(0)
    requests = torch.randint(3, spec.vocab_size - 8, (prompts, length), generator=generator).tolist()
    checked = _checked(engine, engine.prepare(params, ids=requests[0]))
    reference = Reference(folder, engine)
    reference.configure(checked)

    recorded, tokens, forwards = [], 0, 0
    for index, ids in enumerate(requests):
        with _Recorder() as recorder:
            expected = reference.generate(ids, params.seed + index)
        recorded.append((ids, params.seed + index, expected, recorder.draws()))
        result = _answer(engine, params, recorded[-1])
        if result.forwards != len(recorded[-1][3].candidate_SC):
            raise ComparisonError(
                f"prompt {index}: {result.forwards} forwards, {reference.name} {len(recorded[-1][3].candidate_SC)}"
            )
        tokens, forwards = tokens + len(result.token_ids), forwards + result.forwards

    seconds: list[list[float]] = [[], []]
    for round_ in range(repeat):
        spent = [0.0, 0.0]
        for index, request in enumerate(recorded):
            for who in ((0, 1), (1, 0))[(round_ + index) % 2]:
                began = _now(engine)
                if who == 0:
                    _answer(engine, params, request)
                elif reference.generate(*request[:2]) != request[2]:
                    raise ComparisonError(f"prompt {index}: {reference.name} gives other tokens for the same seed")
                spent[who] += _now(engine) - began
        for own, total in zip(seconds, spent, strict=True):
            own.append(total)
    ratios = tuple(theirs / ours for ours, theirs in zip(*seconds, strict=True))
    import transformers

    return ComparisonReport(
        model=engine.name,
        reference=reference.name,
        workload=f"{length} random tokens in, up to {answer} out, the same draws for both",
        requests=prompts,
        tokens=tokens,
        forwards=forwards,
        tpf=tokens / forwards,
        identical_tokens=True,
        tokens_per_second=tokens / median(seconds[0]),
        reference_tokens_per_second=tokens / median(seconds[1]),
        ratio=median(ratios),
        ratios=ratios,
        device=device_name(engine.model.device),
        dtype=str(engine.model.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        versions=versions() | {"transformers": transformers.__version__},
    )


def _checked(engine: Engine, request: Request) -> Request:
    """Raises ComparisonError for what transformers does not do."""
    decoder, params = request.decoder, request.params
    if not isinstance(engine.model, DiffusionGemma):
        raise ComparisonError("transformers does not decode this model block by block; only diffusion_gemma compares")
    if not isinstance(decoder, EntropyBound) or decoder.greedy or request.truncation is not None:
        raise ComparisonError("transformers samples from all tokens; give neither temperature 0 nor top_k nor top_p")
    if not params.residual or params.stop:
        raise ComparisonError("transformers always conditions on its last step and has no stop strings; change neither")
    return request


def _answer(engine: Engine, params: GenerationParams, request: tuple[list[int], int, list[int], RecordedDraws]):
    """The engine's answer under the recorded draws. Raises ComparisonError if a token differs."""
    ids, _, expected, draws = request
    driver, engine.driver = engine.driver, ReplayDriver(draws)
    try:
        result = engine.generate(ids=ids, params=params)
    finally:
        engine.driver = driver
    found = result.token_ids
    whole = result.finish_reason == "stop" or len(found) == len(expected)
    if found != expected[: len(found)] or not whole:
        place = next((i for i, pair in enumerate(zip(found, expected, strict=False)) if len(set(pair)) > 1), len(found))
        raise ComparisonError(f"the answers differ at token {place}: {found[place:][:4]} and {expected[place:][:4]}")
    return result


def _now(engine: Engine) -> float:
    if engine.model.device.type == "cuda":
        torch.cuda.synchronize(engine.model.device)
    return time.perf_counter()
