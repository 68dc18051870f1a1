"""A plain reference of the whole decoding: no cache, transformers' model on the full sequence under a dense mask, and
the decoders written as loops over Python numbers."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from orl_core.rng import CounterRng, Stream


@dataclass
class Reference:
    """tokens of the answer, steps of each block, and every (canvas, z, unresolved, entropies) that was consumed."""

    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    states: list[list[tuple]] = field(default_factory=list)


class ReferenceDecoding:
    def __init__(self, raw, tensors):
        from transformers import Qwen3Config, Qwen3ForCausalLM

        self.raw, self.tensors = raw, tensors
        self.model = Qwen3ForCausalLM(Qwen3Config(**{k: v for k, v in raw.items() if k != "model_type"})).eval()
        body = {name: tensor for name, tensor in tensors.items() if not name.startswith("residual_adapter")}
        self.model.load_state_dict(body)
        self.embedding = tensors["model.embed_tokens.weight"]
        self.has_adapter = raw["residual_intermediate_size"] > 0
        self.aligned = raw["model_type"] == "sdar"
        self.length = raw["block_size"] if self.aligned else raw["canvas_length"]
        self.mask_id = raw["mask_token_id"] if raw["state_family"] == "masked" else None

    def adapter(self, z):
        w = {n.removeprefix("residual_adapter."): t for n, t in self.tensors.items() if n.startswith("residual")}
        h = z / (z.pow(2).mean(-1, keepdim=True) + self.raw["rms_norm_eps"]).sqrt() * w["norm.weight"]
        gate, up = h @ w["gate_proj.weight"].T, h @ w["up_proj.weight"].T
        return w["alpha"] * ((gate * torch.sigmoid(gate) * up) @ w["down_proj.weight"].T)

    def logits(self, context, canvas, z, receives):
        x = self.embedding[torch.tensor(context + canvas)]
        if z is not None:
            added = self.adapter(z)
            for i, receive in enumerate(receives):
                if receive:
                    x[len(context) + i] = x[len(context) + i] + added[i]
        total = len(context) + len(canvas)
        allowed = torch.zeros(total, total, dtype=torch.bool)
        for q in range(total):
            end = (q // self.length + 1) * self.length if self.aligned else q + 1
            allowed[q, : total if q >= len(context) else min(end, len(context))] = True
        mask = torch.zeros(1, 1, total, total).masked_fill(~allowed, torch.finfo(torch.float32).min)
        with torch.no_grad():
            out = self.model(inputs_embeds=x[None], attention_mask=mask, position_ids=torch.arange(total)[None])
        logits = out.logits[0, len(context) :].double()
        if self.mask_id is not None:
            logits[:, self.mask_id] = -math.inf
        return logits

    def __call__(self, prompt, decoder, *, max_new_tokens, seed=0, stop_ids=(), residual=True):
        out, context = Reference(), list(prompt)
        tail = []
        if self.aligned:
            cut = len(prompt) // self.length * self.length
            context, tail = list(prompt[:cut]), list(prompt[cut:])
        while True:
            width = min(self.length, self.raw["max_position_embeddings"] - len(context))
            block = self.block(context, tail, width, decoder, len(out.steps), seed, residual, out)
            for token in block[len(tail) :]:
                out.tokens.append(token)
                if token in stop_ids or len(out.tokens) == max_new_tokens:
                    return out
            context, tail = context + block, []

    def block(self, context, tail, width, decoder, block, seed, residual, out):
        rng, at = CounterRng(torch.tensor([seed])), torch.tensor([block])
        uniform_family = decoder.family == "uniform"
        fixed = [i < len(tail) for i in range(width)]

        def noise(stream, step):
            return rng.tokens(stream, at, torch.tensor([step]), self.length, self.raw["vocab_size"])[0].tolist()

        start = noise(Stream.CANVAS, 0) if uniform_family else [self.mask_id] * width
        canvas = [tail[i] if fixed[i] else start[i] for i in range(width)]
        unresolved, z, states = [not f for f in fixed], None, []
        answer, stable, post_steps = None, 0, 0
        for step in range(decoder.max_steps):
            receives = [True] * width if uniform_family else unresolved
            states.append((list(canvas), z, list(unresolved)))
            logits = self.logits(context, canvas, z if residual and self.has_adapter else None, receives)
            if uniform_family:
                left = (decoder.max_steps - step) / decoder.max_steps
                logits = logits / (decoder.t_min + (decoder.t_max - decoder.t_min) * left)
            elif decoder.sampling_temperature:
                logits = logits / decoder.sampling_temperature
            p = logits.softmax(-1)
            z = p.float() @ self.embedding
            best = p.argmax(-1).tolist()
            candidate = best
            if not decoder.greedy:
                u = rng.uniform(Stream.CANDIDATE, at, torch.tensor([step]), self.length, self.raw["vocab_size"])[0]
                candidate = (logits - torch.log(-torch.log(u[:width].double()))).argmax(-1).tolist()
            prob = [p[i, candidate[i]].item() for i in range(width)]
            entropy = [-sum(v * math.log(v) for v in row if v > 0) for row in p.tolist()]
            if uniform_family:
                spent, accepted = 0.0, set()
                for i in sorted((i for i in range(width) if not fixed[i]), key=lambda i: entropy[i]):
                    if spent <= decoder.entropy_bound:
                        accepted.add(i)
                    spent += entropy[i]
                fresh = noise(Stream.RENOISE, step)
                new = [candidate[i] if i in accepted else fresh[i] for i in range(width)]
                canvas = [canvas[i] if fixed[i] else new[i] for i in range(width)]
                unresolved = [not fixed[i] and i not in accepted for i in range(width)]
                read = [tail[i] if fixed[i] else best[i] for i in range(width)]
                stable = stable + 1 if read == answer else 0
                answer = read
                mean = sum(entropy[i] for i in range(width) if not fixed[i]) / (width - len(tail))
                done = stable >= decoder.stability_threshold and mean < decoder.confidence_threshold
            else:
                began_filled = not any(unresolved)
                canvas, edited, unresolved = self.fill(decoder, step, canvas, unresolved, fixed, candidate, prob)
                answer = canvas
                if hasattr(decoder, "edit_threshold"):
                    post_steps += began_filled
                    filled = not any(unresolved)
                    done = (began_filled and not edited) or (filled and post_steps >= decoder.max_post_steps)
                else:
                    done = not any(unresolved)
            if done:
                break
        out.steps.append(len(states))
        out.states.append(states)
        return answer

    def fill(self, decoder, step, canvas, unresolved, fixed, candidate, prob):
        if hasattr(decoder, "min_transfer"):
            quota = decoder.min_transfer
        elif decoder.steps is None:
            quota = 1
        else:
            share, rest = divmod(decoder.canvas_length, decoder.steps)
            quota = share + (step < rest)
        open_ = [i for i, is_open in enumerate(unresolved) if is_open]
        chosen = [i for i in open_ if prob[i] > decoder.threshold]
        if len(chosen) < quota:
            chosen = sorted(open_, key=lambda i: -prob[i])[:quota]
        edits = []
        if hasattr(decoder, "edit_threshold"):
            edits = [
                i
                for i in range(len(canvas))
                if not fixed[i] and not unresolved[i] and prob[i] > decoder.edit_threshold and candidate[i] != canvas[i]
            ]
        new = [candidate[i] if i in chosen or i in edits else token for i, token in enumerate(canvas)]
        return new, bool(edits), [is_open and i not in chosen for i, is_open in enumerate(unresolved)]


@pytest.fixture(scope="session")
def reference() -> Callable[..., ReferenceDecoding]:
    """Builds the reference over a config.json and weights."""
    return ReferenceDecoding
