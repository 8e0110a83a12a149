"""Recordings that agree, written out as one Python function without the model: what a replayed step runs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from chairlift.engine.replay.agreement import Agreement, Law
from chairlift.engine.replay.calls import NUMBER, TENSOR, Call, Pattern, attend, is_plain_linear, mask
from chairlift.engine.replay.fusion import fuse
from chairlift.engine.replay.instructions import Instruction, instructions_of
from chairlift.engine.replay.joining import Joins, join
from chairlift.engine.replay.recorder import NUM_INPUTS
from chairlift.engine.replay.selection import select_early

Linear = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


class Linears(Joins, Protocol):
    """Linear layers computed in another way than torch's."""

    def find(self, weight: torch.Tensor) -> Linear | None:
        """What computes the linear layer of that very weight, where something does."""
        ...


@dataclass
class Program:
    """A forward to be run.

    Attributes:
        run: `(attend, mask, input_ids, position_ids, logits_rows) -> logits`; the first two answer the model's
            attention calls and its requests for masks.
        num_calls: Calls that it makes.
        version: Of the agreement, when it was written.
        source: What it runs.
    """

    run: Callable[..., torch.Tensor]
    num_calls: int
    version: int
    source: str


def write_program(agreement: Agreement, linears: Linears | None = None) -> Program:
    """The program of recordings that agree.

    Args:
        agreement: What was recorded.
        linears: Computes linear layers where it can.
    """
    instructions, output = _selected(agreement)
    instructions = fuse(instructions, output, agreement.constants, one_token=agreement.one_token)
    if linears is not None:
        instructions = join(instructions, output, agreement.constants, linears)
    writer = _Writer(agreement.constants, linears)
    source = writer.write(instructions, output)
    exec(compile(source, "<recorded forward>", "exec"), writer.scope)
    return Program(writer.scope["forward"], len(instructions), agreement.version, source)


# What comes before the addresses of weights play a part, by agreement: it stays when a manager follows another one.
_known: "WeakKeyDictionary[Agreement, tuple[int, list[Instruction], int]]" = WeakKeyDictionary()


def _selected(agreement: Agreement) -> tuple[list[Instruction], int]:
    """The calls that are needed, of the rows that are, and the value that the forward returns."""
    known = _known.get(agreement)
    if known is None or known[0] != agreement.version:
        instructions, output = instructions_of(agreement)
        if not agreement.one_token:
            instructions, output = select_early(instructions, output, agreement.constants)
        known = _known[agreement] = (agreement.version, instructions, output)
    return known[1:]


class _Writer:
    """Writes instructions as the source of a function, and gathers what it refers to."""

    def __init__(self, constants: Mapping[int, torch.Tensor], linears: Linears | None) -> None:
        self.scope: dict[str, Any] = {}
        self._constants = constants
        self._linears = linears
        self._names: dict[tuple[str, Any], str] = {}  # of what the scope has
        self._laws: dict[Law, str] = {}  # numbers that the function computes first

    def write(self, instructions: Sequence[Instruction], output: int) -> str:
        """The source of `forward`."""
        last_use = {value: n for n, instruction in enumerate(instructions) for value in instruction.call.values}
        last_use[output] = len(instructions)
        lines = []
        for n, instruction in enumerate(instructions):
            call = instruction.call
            lines.append(self._line(instruction))
            # What nobody reads any more is freed where it dies.
            values = {*call.values, *(result for result in call.results if result is not None)}
            dead = [value for value in sorted(values - self._constants.keys()) if last_use.get(value, n) == n]
            if dead:
                lines.append("del " + ", ".join(map(self._value, dead)))
        lines.append(f"return {self._value(output)}")
        inputs = ", ".join(f"v{value}" for value in range(NUM_INPUTS))
        sizes = ["tokens, sampled = v0.shape[1], v2.shape[0]"] if self._laws else []
        numbers = [f"{name} = {_formula(law)}" for law, name in self._laws.items()]
        body = "\n    ".join([*sizes, *numbers, *lines])
        return f"def forward(attend, mask, {inputs}):\n    {body}\n"

    def _line(self, instruction: Instruction) -> str:
        call = instruction.call
        values, laws = iter(call.values), iter(instruction.laws)
        _, args, kwargs = call.pattern
        given = [self._argument(item, values, laws) for item in args[1:]]
        given += [f"{name}={self._argument(item, values, laws)}" for name, item in kwargs[1:]]
        linear = self._linear(call)
        if linear is not None:
            del given[1]  # the weight, which it holds
        text = f"{linear or self._function(call)}({', '.join(given)})"
        if not call.results:
            return text
        names = ["_" if result is None else self._value(result) for result in call.results]
        return f"{', '.join(names)}{',' if call.several else ''} = {text}"

    def _function(self, call: Call) -> str:
        if call.func is attend or call.func is mask:
            return call.func.__name__
        return self._object("f", call.func)

    def _linear(self, call: Call) -> str | None:
        """What computes a linear layer in another way than torch, where something does."""
        if self._linears is None or not is_plain_linear(call):
            return None
        weight = self._constants.get(call.values[1])
        linear = None if weight is None else self._linears.find(weight)
        return None if linear is None else self._object("linear", linear)

    def _value(self, value: int) -> str:
        if value in self._constants:
            return self._object("c", self._constants[value])
        return f"v{value}"

    def _number(self, law: Law) -> str:
        a, c, b, divisor = law
        if a == c == 0 and divisor == 1:
            return str(b)
        return self._laws.setdefault(law, f"n{len(self._laws)}")

    def _argument(self, pattern: Pattern, values: Iterator[int], laws: Iterator[Law]) -> str:
        kind = pattern[0]
        if pattern == TENSOR:
            return self._value(next(values))
        if pattern == NUMBER:
            return self._number(next(laws))
        if kind == "float":
            return self._object("x", float.fromhex(pattern[1]))
        if kind == "plain":
            return repr(pattern[2]) if pattern[2] in (None, True, False) else self._object("x", pattern[2])
        if kind == "dict":
            items = [f"{key!r}: {self._argument(item, values, laws)}" for key, item in pattern[1:]]
            return f"{{{', '.join(items)}}}"
        items = [self._argument(item, values, laws) for item in pattern[1:]]
        match kind:
            case "list":
                return f"[{', '.join(items)}]"
            case "slice":
                text = f"slice({', '.join(items)})"
                fixed = all(item == "None" or item.lstrip("-").isdigit() for item in items)
                return self._object("s", text, slice(*map(_literal, items))) if fixed else text
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"

    def _object(self, prefix: str, key: Any, stands_for: Any = None) -> str:
        """The name of an object in the function's scope."""
        known = (prefix, key if isinstance(key, str) else id(key))
        if known not in self._names:
            self._names[known] = f"{prefix}{len(self._names)}"
            self.scope[self._names[known]] = key if stands_for is None else stands_for
        return self._names[known]


def _formula(law: Law) -> str:
    a, c, b, divisor = law
    text = f"{a} * tokens + {c} * sampled + {b}"
    return text if divisor == 1 else f"({text}) // {divisor}"


def _literal(text: str) -> int | None:
    return None if text == "None" else int(text)
