"""From logits to tokens: what the user asked for, and the draws."""

from chairlift.sampling.draw import choose
from chairlift.sampling.options import GenerationOptions

__all__ = ["GenerationOptions", "choose"]
