"""Sampling written plainly, one row and one token at a time, in float64: the tests' oracle."""

import math

from engine.sampling.inputs import SamplingInput


def adjusted_logits(logits: list[float], item: SamplingInput) -> list[float]:
    """Bias, minimum length, then penalties."""
    params, output = item.params, list(item.output_token_ids)
    adjusted = []
    for token, logit in enumerate(logits):
        value = logit + params.logit_bias.get(token, 0.0)
        if len(output) < params.min_tokens and token in params.stop_token_ids:
            value = -math.inf
        if token in output or token in item.prompt_token_ids:
            scale = params.repetition_penalty
            value = value / scale if value > 0 else value * scale
        value -= params.frequency_penalty * output.count(token)
        value -= params.presence_penalty * (token in output)
        adjusted.append(value)
    return adjusted


def kept_tokens(logits: list[float], item: SamplingInput) -> set[int]:
    """Temperature, then min-p, top-k and top-p over distinct logits."""
    params = item.params
    best = max(logits)
    weights = {t: math.exp((logit - best) / params.temperature) for t, logit in enumerate(logits)}
    weights = {t: w for t, w in weights.items() if w >= params.min_p and w > 0}
    order = sorted(weights, key=lambda token: -weights[token])
    if params.top_k > 0:
        order = order[: params.top_k]
    total = sum(weights[token] for token in order)
    kept: set[int] = set()
    mass = 0.0
    for token in order:
        # Rounding may make the mass before a rare token the total.
        if kept and params.top_p < 1.0 and mass >= params.top_p * total:
            break
        kept.add(token)
        mass += weights[token]
    return kept


def distribution(logits: list[float], item: SamplingInput) -> list[float]:
    """Probabilities that the sampler should draw from."""
    adjusted = adjusted_logits(logits, item)
    kept = kept_tokens(adjusted, item)
    best = max(adjusted)
    weights = [
        math.exp((logit - best) / item.params.temperature) if token in kept else 0.0
        for token, logit in enumerate(adjusted)
    ]
    return [weight / sum(weights) for weight in weights]
