"""The engine: one model, one request at a time, the least time to its last token."""

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from dlmrt.cache import KVCache
from dlmrt.checkpoint.folder import Defaults, ModelFolder, parse_settings, read_folder
from dlmrt.checkpoint.hub import resolve
from dlmrt.checkpoint.weights import check_tensors, load_tensors
from dlmrt.devices import pick_device, pick_dtype
from dlmrt.errors import CheckpointError, NumericsError, RequestError
from dlmrt.loop.decode import cache_capacity
from dlmrt.loop.drivers import make_driver
from dlmrt.models.base import BlockModel
from dlmrt.params import GenerationParams
from dlmrt.request import Request, check_request, draft_of, prompt_ids
from dlmrt.result import Event, Finished, GenerationResult
from dlmrt.rollout import rollout
from dlmrt.run import Run
from dlmrt.text import Message, TextCodec
from orl_core.capture import CaptureMode
from orl_core.decoders import Decoder
from orl_core.trajectory import Trajectory

Cancel = threading.Event | Callable[[], bool]


class Engine:
    """Generates with one block-diffusion model.

    codec     tokenizer and chat template; None takes and gives token ids only
    defaults  what a request gets where it says nothing
    driver    runs the denoising step: "auto" or "host"
    context   prompt and answer tokens for which the cache is reserved now, and above which requests are refused; None
              reserves each request's own worst case when it begins, up to the model's context
    z_top_k   None: exact residual context; a number: from that many of the most probable tokens
    capture_mode  how `rollout` copies captured states: "async" (at first), in a worker thread, or "sync"
    """

    def __init__(
        self,
        model: BlockModel,
        codec: TextCodec | None,
        defaults: Defaults,
        *,
        name: str,
        driver: str = "auto",
        context: int | None = None,
        z_top_k: int | None = None,
    ) -> None:
        if context is not None and not 1 <= context <= model.spec.max_context:
            raise RequestError(f"context is {context}; it must lie in [1, {model.spec.max_context}]")
        if z_top_k is not None and z_top_k < 1:
            raise RequestError(f"z_top_k is {z_top_k}; it must be at least 1, or None for an exact residual context")
        self.model, self.codec, self.defaults, self.name = model, codec, defaults, name
        self.driver, self.z_top_k = make_driver(driver), z_top_k
        self.capture_mode: CaptureMode = "async"
        self.context = context or model.spec.max_context
        self._cache: KVCache | None = None
        if context is not None:
            self._cache = model.new_cache(1, cache_capacity(model.spec, 0, context) + model.spec.canvas_length)

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: str | Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        driver: str = "auto",
        revision: str | None = None,
        context: int | None = None,
        z_top_k: int | None = None,
    ) -> Self:
        """Loads an embedded checkpoint ("embedded:base"), a folder or a hub id; safetensors only, never remote code.

        device: "auto", "cpu", "cuda" or "cuda:N". dtype: "float32", "bfloat16", "float16", or "auto": as stored on a
        GPU, float32 on a CPU. The rest as in `Engine`. Raises CheckpointError or RequestError.
        """
        driver = make_driver(driver).name
        device = pick_device(device)
        folder = resolve(path_or_id, revision)
        settings = read_folder(folder)
        codec = TextCodec.from_folder(folder)
        tensors = load_tensors(folder, settings.config, device, pick_dtype(dtype, device), settings.quantization)
        model = settings.model_class.from_tensors(settings.config, tensors, fuse=True)
        name = str(path_or_id)
        return cls(model, codec, settings.defaults, name=name, driver=driver, context=context, z_top_k=z_top_k)

    @classmethod
    def from_state(
        cls,
        config: Mapping[str, Any],
        state_dict: Mapping[str, Tensor],
        *,
        codec: TextCodec | None = None,
        generation: Mapping[str, Any] | None = None,
        name: str = "in memory",
        driver: str = "auto",
        z_top_k: int | None = None,
    ) -> Self:
        """An engine over the weights of a model in memory, shared and not copied.

        config, generation: the contents of config.json and generation_config.json. state_dict: tensors under their
        checkpoint names, such as `module.state_dict()`. Raises CheckpointError.
        """
        settings = parse_settings(config, generation or {})
        model = _shared_model(settings, state_dict)
        engine = cls(model, codec, settings.defaults, name=name, driver=driver, z_top_k=z_top_k)
        engine._settings = settings
        return engine

    _settings: ModelFolder | None = None

    def load_state(self, state_dict: Mapping[str, Tensor]) -> None:
        """Makes an engine of `from_state` run on other tensors, which are shared and not copied.

        Tensors that are updated in place need no new call. Raises CheckpointError.
        """
        if self._settings is None:
            raise CheckpointError("this engine owns its weights; build it with Engine.from_state to exchange them")
        self.model = _shared_model(self._settings, state_dict)
        self._cache = None

    def prepare(
        self,
        params: GenerationParams | None = None,
        *,
        prompt: str | None = None,
        messages: Sequence[Message] | None = None,
        ids: Sequence[int] | None = None,
    ) -> Request:
        """Checks a request before any work is done. Raises RequestError."""
        params = params or GenerationParams()
        tokens = prompt_ids(self.codec, params, prompt, messages, ids)
        return check_request(tokens, params, self.model.spec, self.defaults, self.context)

    def generate(
        self,
        prompt: str | None = None,
        params: GenerationParams | None = None,
        *,
        messages: Sequence[Message] | None = None,
        ids: Sequence[int] | None = None,
        cancel: Cancel | None = None,
    ) -> GenerationResult:
        """Answers a prompt, a conversation or token ids. Arguments and errors as in `stream`."""
        for event in self.stream(prompt, params, messages=messages, ids=ids, cancel=cancel):
            if isinstance(event, Finished):
                return event.result
        raise AssertionError("a stream ends with Finished")

    def stream(
        self,
        prompt: str | None = None,
        params: GenerationParams | None = None,
        *,
        messages: Sequence[Message] | None = None,
        ids: Sequence[int] | None = None,
        cancel: Cancel | None = None,
        drafts: bool = False,
    ) -> Generator[Event, None, None]:
        """The answer as it comes: Draft after each step if `drafts`, BlockCommitted after each block, then Finished.

        messages: dicts with "role" and "content", for a model with a chat template. cancel: an event, or a function
        that returns True, asked between steps. Dropping the iterator abandons the request as well.
        Raises RequestError at once, before any work; NumericsError if the model's logits are not finite.
        """
        request = self.prepare(params, prompt=prompt, messages=messages, ids=ids)
        if request.params.n > 1:
            raise RequestError(f"n is {request.params.n} and this gives one answer; generate_all gives n")
        return self._run(request, _cancel_function(cancel), drafts)

    def generate_all(
        self,
        prompt: str | None = None,
        params: GenerationParams | None = None,
        *,
        messages: Sequence[Message] | None = None,
        ids: Sequence[int] | None = None,
        cancel: Cancel | None = None,
    ) -> list[GenerationResult]:
        """`params.n` answers to one prompt, decoded as a batch: those of the seeds seed, seed + 1, .., each with the
        tokens that `generate` gives with that seed, up to the rounding of a product with other rows.

        Arguments and errors as in `stream`. The timings of every result are those of the batch.
        """
        request, cancelled = self.prepare(params, prompt=prompt, messages=messages, ids=ids), _cancel_function(cancel)
        run = self._start(request, self._new_cache(request.params.n, self._capacity(request)))
        decoding = run.decoding
        while decoding.live and not cancelled():
            for _ in decoding.denoise():
                if cancelled():
                    break
            else:
                run.finish_block()
                decoding.commit()
        return [result for result, _ in run.results()]

    def _run(self, request: Request, cancelled: Callable[[], bool], drafts: bool) -> Generator[Event, None, None]:
        cache = self._take_cache(self._capacity(request))
        try:
            run = self._start(request, cache)
            decoding = run.decoding
            while decoding.live and not cancelled():
                for step in decoding.denoise():
                    if drafts:
                        yield draft_of(decoding, step, self.codec)
                    if cancelled():
                        break
                else:
                    yield from run.finish_block()
                    decoding.commit()
        except NumericsError:
            cache = None  # it may hold NaN, which would reach the next request even through a mask
            raise
        finally:
            if cache is not None and (self._cache is None or self._cache.capacity < cache.capacity):
                self._cache = cache
        ((result, rest),) = run.results()
        yield Finished(result, rest)

    def _start(self, request: Request, cache: KVCache) -> Run:
        options = {"codec": self.codec, "z_top_k": self.z_top_k, "name": self.name}
        return Run(self.model, request, cache, self.driver, **options)

    def _capacity(self, request: Request) -> int:
        edit_blocks = request.params.edit_blocks
        return cache_capacity(self.model.spec, len(request.ids), request.max_new_tokens, edit_blocks)

    def rollout(
        self,
        prompts: Sequence[Tensor],
        decoder: Decoder,
        *,
        max_new_tokens: int,
        seeds: Sequence[int],
        residual: bool = True,
        capture: bool = True,
    ) -> list[Trajectory]:
        """Answers of many prompts at once, with every state on the way (see orl_core.protocols.RolloutEngine).

        prompts: int64 [P] each. Row i draws from seeds[i] and gives what it gives alone. capture: False keeps the
        blocks' steps and tokens but no states. Raises RequestError, or CaptureMemoryError before anything is generated
        if the states do not fit into memory.
        """
        return rollout(
            self.model,
            prompts,
            decoder,
            driver=self.driver,
            max_new_tokens=max_new_tokens,
            context=self.context,
            seeds=seeds,
            stop_ids=self.defaults.stop_ids,
            residual=residual,
            z_top_k=self.z_top_k,
            capture=self.capture_mode if capture else None,
            name=self.name,
        )

    def _take_cache(self, capacity: int) -> KVCache:
        """The kept cache if it is large enough, else a new one. Two requests never share one: a taken cache is kept
        nowhere until its request gives it back."""
        cache, self._cache = self._cache, None
        return cache if cache is not None and cache.capacity >= capacity else self._new_cache(1, capacity)

    def _new_cache(self, rows: int, capacity: int) -> KVCache:
        try:
            return self.model.new_cache(rows, capacity)
        except (RuntimeError, MemoryError) as error:
            needed = rows * self.model.spec.kv_bytes(capacity, self.model.dtype)
            raise RequestError(
                f"the KV cache of this request takes {needed / 2**20:.0f} MiB, which are not free; "
                "shorten the prompt or max_new_tokens"
            ) from error


def _shared_model(settings: ModelFolder, state_dict: Mapping[str, Tensor]) -> BlockModel:
    check_tensors(settings.config, {name: tuple(t.shape) for name, t in state_dict.items()}, "the state dict")
    return settings.model_class.from_tensors(settings.config, state_dict, fuse=False)


def _cancel_function(cancel: Cancel | None) -> Callable[[], bool]:
    if cancel is None:
        return lambda: False
    return cancel.is_set if isinstance(cancel, threading.Event) else cancel
