"""What a `GenerationConfig` asks for, resolved as `generate` resolves it; or why it cannot be had."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from chairlift import _native

# Fields that change tokens and are not served, with the values at which they do nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "bad_words_ids": (None, []),
    "begin_suppress_tokens": (None, []),
    "constraints": (None,),
    "diversity_penalty": (None, 0.0),
    "dola_layers": (None,),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "exponential_decay_length_penalty": (None,),
    "force_words_ids": (None, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "guidance_scale": (None, 1, 1.0),
    "max_time": (None,),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "min_p": (None, 0.0),
    "no_repeat_ngram_size": (None, 0),
    "num_beam_groups": (None, 1),
    "num_beams": (None, 1),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "output_logits": (None, False),
    "output_scores": (None, False),
    "penalty_alpha": (None, 0.0),
    "prompt_lookup_num_tokens": (None,),
    "remove_invalid_values": (None, False),
    "renormalize_logits": (None, False),
    "repetition_penalty": (None, 1.0),
    "sequence_bias": (None,),
    "stop_strings": (None, []),
    "suppress_tokens": (None, []),
    "token_healing": (None, False),
    "top_h": (None, 1.0),
    "typical_p": (None, 1.0),
    "watermarking_config": (None,),
}
# Of these, the ones that are logits processors: `drop_unsupported_processors` may drop them.
_PROCESSORS = frozenset(_NEUTRAL) - {
    "constraints", "diversity_penalty", "dola_layers", "force_words_ids", "max_time", "num_beam_groups", "num_beams",
    "output_attentions", "output_hidden_states", "output_logits", "output_scores",
    "penalty_alpha", "prompt_lookup_num_tokens", "stop_strings", "token_healing",
}  # fmt: skip
_INSTEAD = {
    "num_beams": "call model.generate",
}


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen.

    Attributes:
        do_sample: Drawn; else the most probable one.
        temperature: Of a draw.
        top_k: Draws are among the most probable tokens, so many of them; 0: all.
        top_p: And of these, among the most probable ones that together have this probability.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} is {value!r}, but must be a number")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int):
            raise TypeError(f"top_k is {self.top_k!r}, but must be an integer")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}, but must be at least 0 (0: all tokens)")
        if not isinstance(self.do_sample, bool):
            raise TypeError(f"do_sample is {self.do_sample!r}, but must be True or False")

    def with_asked(self, **asked: Any) -> "SamplingOptions":
        """These, but for what somebody asked for; None was not asked for.

        Raises:
            TypeError: A value of the wrong type.
            ValueError: A value out of its bounds, or of a draw where nothing is drawn.
        """
        asked = {name: value for name, value in asked.items() if value is not None}
        options = replace(self, **asked)
        of_draws = sorted(set(asked) - {"do_sample"})
        if of_draws and not options.do_sample:
            values = " and ".join(f"{name}={asked[name]!r}" for name in of_draws)
            raise ValueError(f"{values} would have no effect: do_sample is False, pass do_sample=True beside it")
        return options

    def native(self) -> _native.Sampling:
        """For the engine.

        Raises:
            ValueError: A value out of its bounds.
        """
        if not self.do_sample:
            return _native.Sampling.greedy()
        return _native.Sampling.draw(float(self.temperature), min(self.top_k, 2**31 - 1), float(self.top_p))


@dataclass(frozen=True)
class GenerationOptions:
    """How requests generate, unless they say otherwise.

    Attributes:
        max_new_tokens: Bound on the generated tokens; None: only the model and the pool bound them.
        max_length: Bound on prompt and generated tokens together, when `max_new_tokens` is None.
        eos_token_ids: Tokens that end a sequence.
        sampling: Greedy, or a draw.
        num_return_sequences: Sequences that continue each prompt.
    """

    max_new_tokens: int | None
    max_length: int | None
    eos_token_ids: tuple[int, ...]
    sampling: SamplingOptions
    num_return_sequences: int = 1

    @classmethod
    def resolve(
        cls,
        model: PreTrainedModel,
        generation_config: GenerationConfig | None = None,
        *,
        drop_unsupported_processors: bool = False,
        **kwargs: Any,
    ) -> "GenerationOptions":
        """Resolves a generation config for a model: keywords over the config over the model's own.

        Args:
            model: The model.
            generation_config: None: the model's.
            drop_unsupported_processors: Logits processors that are not served are dropped with a warning.
            kwargs: Fields of `GenerationConfig`.

        Raises:
            TypeError: A keyword that is no field of `GenerationConfig`.
            ValueError: A field that is not served is set, or a value is out of bounds.
        """
        given = generation_config
        if given is not None and not isinstance(given, GenerationConfig):
            raise TypeError(f"generation_config is a {type(given).__name__}, but must be a GenerationConfig or None")
        unknown = sorted(set(kwargs) - set(GenerationConfig().to_dict()))
        if unknown:
            raise TypeError(f"unknown keyword {', '.join(map(repr, unknown))}: not a field of GenerationConfig")
        fields = {name: value for name, value in kwargs.items() if (name, value) != ("max_new_tokens", None)}
        explicit_length = fields.get("max_length", None if given is None else given.max_length)
        if fields:
            # Merged here: handed to `generate`'s own resolution together, the two would warn.
            base = given if given is not None else model.generation_config
            given = GenerationConfig.from_dict({**base.to_dict(), **fields})
        config, _ = model._prepare_generation_config(given)
        _refuse_unserved(config, drop_unsupported_processors)
        max_new_tokens = config.max_new_tokens
        max_length = None
        if max_new_tokens is None:
            # A default that the library itself filled in is no wish of anybody's.
            max_length = explicit_length if explicit_length is not None else model.generation_config.max_length
        return cls(
            max_new_tokens=None if max_new_tokens is None else _new_tokens(max_new_tokens),
            max_length=max_length,
            eos_token_ids=eos_tuple(config.eos_token_id),
            sampling=_sampling(config),
            num_return_sequences=_num_return_sequences(config.num_return_sequences),
        )

    def new_tokens_for(self, prompt_length: int, limit: int) -> int:
        """Bound on the tokens that a prompt of that length generates, `limit` being what model and pool bear."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        if self.max_length is not None:
            return max(1, self.max_length - prompt_length)
        return max(1, limit - prompt_length)


def eos_tuple(eos_token_id: int | list[int] | tuple[int, ...] | None) -> tuple[int, ...]:
    """End tokens as `GenerationConfig` writes them: one, several or none; negative ones end nothing."""
    if eos_token_id is None:
        return ()
    ids = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
    wrong = [token for token in ids if isinstance(token, bool) or not isinstance(token, int)]
    if wrong:
        raise TypeError(f"eos_token_id contains {wrong[0]!r}, but token ids are integers")
    # No vocabulary reaches int32, so an id beyond it never comes up.
    return tuple(token for token in ids if 0 <= token < 2**31)


def _new_tokens(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"max_new_tokens is {value!r}, but must be an integer of at least 1")
    if value < 1:
        raise ValueError(f"max_new_tokens is {value}, but a request generates at least 1 token")
    return value


def _num_return_sequences(value: Any) -> int:
    if value is None:
        return 1
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"num_return_sequences is {value!r}, but must be an integer of at least 1")
    if not 1 <= value < 2**31:
        raise ValueError(f"num_return_sequences is {value}, but must be at least 1")
    return value


def _refuse_unserved(config: GenerationConfig, drop_processors: bool) -> None:
    dropped = []
    for name, neutral in _NEUTRAL.items():
        value = getattr(config, name, None)
        if value in neutral:
            continue
        if name in _PROCESSORS and drop_processors:
            dropped.append(f"{name}={value!r}")
            continue
        way_out = _INSTEAD.get(name) or (
            "leave it out, or set drop_unsupported_processors=True to do without"
            if name in _PROCESSORS
            else "leave it out"
        )
        raise ValueError(f"{name}={value!r} of the generation config is not served yet: {way_out}")
    if dropped:
        warnings.warn(f"not served yet and dropped, as asked: {', '.join(dropped)}", UserWarning, stacklevel=4)


def _sampling(config: GenerationConfig) -> SamplingOptions:
    # Without draws their values change nothing, whatever they are.
    values = {name: getattr(config, name) for name in ("temperature", "top_k", "top_p")} if config.do_sample else {}
    options = SamplingOptions(
        do_sample=bool(config.do_sample), **{name: value for name, value in values.items() if value is not None}
    )
    options.native()  # its bounds
    return options
