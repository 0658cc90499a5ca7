"""Sequential Monte Carlo: what does the model write where some letters are forbidden, and how likely is that?

Run `python examples/particle_filter.py --particles 16 --seed 1` (the default model is fetched once). At every
step each particle asks for its next-token distribution; after resampling many are equal, and equal ones are
computed once.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from logprobe.next_token import AsyncLM

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass
class Particle:
    """A continuation on its way, and the log of what it stands for."""

    token_ids: list[int]
    log_weight: float = 0.0  # nats
    is_ended: bool = False

    def copy(self) -> Particle:
        """One of its own."""
        return Particle(list(self.token_ids), self.log_weight, self.is_ended)


def allowed_tokens(lm: AsyncLM, forbidden: str) -> NDArray[np.bool_]:
    """(V,) whether a token may be drawn: text without the forbidden letters, or the end of text."""
    letters = set(forbidden.lower().encode())
    allowed = [bool(token) and letters.isdisjoint(token.byte_string.lower()) for token in lm.byte_vocab]
    mask = np.array(allowed)
    mask[lm.tokenizer.all_special_ids] = False
    mask[lm.tokenizer.eos_token_id] = True
    return mask


def log_mean(values: NDArray[np.float64]) -> float:
    """The log of the mean of what `values` are the logs of."""
    return float(np.logaddexp.reduce(values) - np.log(len(values)))


def extend(
    particle: Particle, row: NDArray[np.float32], allowed: NDArray[np.bool_], random: np.random.Generator
) -> int:
    """Draw the particle's next token from what is allowed; its weight takes in how likely that was."""
    inside = np.where(allowed, row.astype(np.float64), -np.inf)
    log_mass = float(np.logaddexp.reduce(inside))
    particle.log_weight += log_mass
    cumulative = np.cumsum(np.exp(inside - log_mass))
    token_id = int(np.searchsorted(cumulative / cumulative[-1], random.random(), side="right"))
    particle.token_ids.append(token_id)
    return token_id


def resample(particles: list[Particle], random: np.random.Generator) -> list[Particle]:
    """Where fewer than half of the particles carry the weight, draw as many of them anew (systematically)."""
    log_weights = np.array([particle.log_weight for particle in particles])
    log_level = log_mean(log_weights)
    shares = np.exp(log_weights - log_level) / len(particles)
    if 1 / np.sum(shares**2) >= len(particles) / 2:
        return particles
    points = (random.random() + np.arange(len(particles))) / len(particles)
    cumulative = np.cumsum(shares)
    chosen = np.searchsorted(cumulative / cumulative[-1], points, side="right")
    drawn = [particles[place].copy() for place in chosen]
    for particle in drawn:
        particle.log_weight = log_level
    return drawn


async def run(
    lm: AsyncLM, prompt_ids: list[int], allowed: NDArray[np.bool_], num: tuple[int, int], seed: int
) -> tuple[list[Particle], float]:
    """`num` particles and tokens: the weighted particles, and the log of the estimated normaliser in nats.

    The normaliser is the probability that the model writes nothing forbidden in so many tokens.
    """
    num_particles, num_tokens = num
    random = np.random.default_rng(seed)
    particles = [Particle([]) for _ in range(num_particles)]
    for _ in range(num_tokens):
        particles = resample(particles, random)
        alive = [particle for particle in particles if not particle.is_ended]
        rows = await asyncio.gather(
            *(lm.next_token_logprobs([*prompt_ids, *particle.token_ids]) for particle in alive)
        )
        for particle, row in zip(alive, rows, strict=True):
            particle.is_ended = extend(particle, row, allowed, random) == lm.tokenizer.eos_token_id
    return particles, log_mean(np.array([particle.log_weight for particle in particles]))


def main() -> None:
    """Print the particles by weight, and the estimate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompt", default="The lighthouse keeper lit the lamp. Then")
    parser.add_argument("--forbid", default="e", help="letters that must not appear")
    parser.add_argument("--particles", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with AsyncLM.from_name("smollm2") as lm:
        allowed = allowed_tokens(lm, given.forbid)
        prompt_ids = lm.tokenizer.encode(given.prompt)
        particles, log_normaliser = asyncio.run(
            run(lm, prompt_ids, allowed, (given.particles, given.tokens), given.seed)
        )
        total = log_normaliser + np.log(len(particles))
        for particle in sorted(particles, key=lambda one: -one.log_weight):
            text = lm.tokenizer.decode(particle.token_ids, skip_special_tokens=True)
            print(f"{np.exp(particle.log_weight - total):.4f}  {text!r}")
    print(f"log normaliser: {log_normaliser:.4f} nats")


if __name__ == "__main__":
    main()
