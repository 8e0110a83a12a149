"""Linear layers on a CPU, their weights packed once instead of in every call.

Owns which weights are packed, whether that pays here, and the packed copies; never writes a weight. Which weights take
part is learned from a forward; whether packing pays, and which packing pays most, is measured on this machine: it
depends on the processor, on how torch was built, on the dtype and on the shape.
"""

import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from chairlift import _native
from chairlift.engine.linear_calls import TORCHS_LINEAR, linear_context
from chairlift.engine.packings import PACKINGS, NativeJoin, NativePacking, Packing, padded_rows

# A call with a smaller weight is over before the way to a packed one is.
LEAST_ELEMENTS = 1 << 15
# Rows of the measured calls: one sequence, some, a step of decodes, and one with prompts.
MEASURED_ROWS = (1, 8, 64, 512)
# Those whose times are told.
TOLD_ROWS = 64
# Multiplications of a measured call, at most, with as many rows as are told and with more.
MOST_WORK, MOST_FURTHER_WORK = 1 << 31, 1 << 29
# Calls are repeated for so long, and at least so often.
MEASURED_S, LEAST_REPEATS = 0.01, 3
# Packed calls must take at most this part of the time of torch's.
WORTH_IT = 0.95
# Part of the free memory that copies may take.
MOST_MEMORY = 0.25
# The largest difference from torch's result, relative to the largest element: of a result that is rounded once.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


class PackedLinear:
    """A weight of a linear layer with its packed copy. Called with the input of a layer, it gives the output."""

    __slots__ = ("_address", "_dtype", "_least_rows", "_version", "_weight", "packed")

    def __init__(self, weight: torch.Tensor, packed: Packing, least_rows: int = 1) -> None:
        """Takes a weight's packed copy. Inputs of fewer rows than `least_rows` will be torch's."""
        self._weight = weakref.ref(weight)
        self._dtype, self._least_rows = weight.dtype, least_rows
        self._version, self._address = _version(weight), weight.data_ptr()
        self.packed = packed

    def is_of(self, weight: torch.Tensor) -> bool:
        """Whether this is the weight, and as it was when it was packed as far as can be told without reading it."""
        return self._weight() is weight and self._version == _version(weight) and self._address == weight.data_ptr()

    def moved_to(self, weight: torch.Tensor) -> "PackedLinear":
        """The same copy for a weight of the same elements."""
        return PackedLinear(weight, self.packed, self._least_rows)

    def __call__(self, input: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., in] to [..., out]. An input that a packed weight cannot serve is torch's."""
        if not self.serves(input):
            return TORCHS_LINEAR(input, self._weight(), bias)
        return self.packed(input, bias)

    def serves(self, input: torch.Tensor) -> bool:
        """Whether a layer with that input is computed by the copy."""
        if type(input) is not torch.Tensor or input.dtype is not self._dtype or input.dim() < 2:
            return False
        return input.numel() // input.shape[-1] >= self._least_rows


class JoinedLinears:
    """Layers of one input and a program over their results, as a function of the input and the biases."""

    def __init__(self, layers: Sequence[PackedLinear], program: _native.RowProgram, joined: NativeJoin) -> None:
        """Takes the layers, the program, and both together."""
        self._layers = layers
        self._program = program
        self._joined = joined

    def __call__(self, input: torch.Tensor, biases: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """[..., in] to [..., out]."""
        if all(layer.serves(input) for layer in self._layers):
            return self._joined(input, biases)
        results = [layer(input, bias).contiguous() for layer, bias in zip(self._layers, biases, strict=True)]
        out = torch.empty_like(results[0])
        self._program.run([to_dlpack(result) for result in results], [to_dlpack(out)])
        return out


class PackedLinears:
    """The packed copies of a model's weights."""

    def __init__(self, by_name: Mapping[str, PackedLinear], weights: Mapping[str, torch.Tensor]) -> None:
        """Copies and their weights, both by the weight's name in the model."""
        self.by_name = by_name
        self._by_id = {id(weights[name]): packed for name, packed in by_name.items()}

    def find(self, weight: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor] | None:
        """What computes a linear layer with this very tensor as its weight, from the layer's input [..., in] and bias
        to its output [..., out].

        None: it is not packed, or was changed since. Changes that neither count as a version of the tensor nor move its
        memory are not seen here.
        """
        packed = self._by_id.get(id(weight))
        return packed if packed is not None and packed.is_of(weight) else None

    def join(self, weights: Sequence[torch.Tensor], program: _native.RowProgram) -> JoinedLinears | None:
        """What computes layers of these weights and a program over their results in one; None: nothing does.

        What holds for `find` holds for each weight.
        """
        layers = [self._by_id.get(id(weight)) for weight in weights]
        found = [layer for layer, weight in zip(layers, weights, strict=True) if layer and layer.is_of(weight)]
        packings = [layer.packed for layer in found if isinstance(layer.packed, NativePacking)]
        joined = NativeJoin.of(packings, program) if len(packings) == len(weights) else None
        return None if joined is None else JoinedLinears(found, program, joined)

    def entered(self) -> AbstractContextManager[None]:
        """Answers this thread's linear calls with packed weights inside the block; those without, and those under
        autocast or with gradients, are torch's."""

        def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            packed = self.find(weight)
            if packed is None or torch.is_autocast_enabled("cpu") or torch.is_grad_enabled():
                return TORCHS_LINEAR(input, weight, bias)
            return packed(input, bias)

        return linear_context(linear)


class LinearPlan(NamedTuple):
    """Which weights of a model are to be packed, and what that takes and brings."""

    least_rows: Mapping[str, int]  # by weight (one of its names), from how many rows on it is called packed
    packings: Mapping[str, str]  # by weight, whose packing
    reason: str  # where nothing is to be packed, why
    num_weights: int  # of the model's linear calls
    part: float  # of the elements of these weights that are to be packed
    copy_bytes: int  # at most
    kernel_bytes: int  # at most
    told_ms: tuple[float, float]  # one call of each that is to be packed, as measured: torch's, packed

    @property
    def num_bytes(self) -> int:
        """Bytes that packing takes, at most."""
        return self.copy_bytes + self.kernel_bytes

    def described(self) -> str:
        """For people."""
        if not self.least_rows:
            return f"as torch computes them: {self.reason}"
        before, after = self.told_ms
        packings = list(self.packings.values())
        by = " and ".join(
            title if packings.count(title) == len(packings) else f"{title} ({packings.count(title)})"
            for title in dict.fromkeys(packings)
        )
        return (
            f"{len(self.least_rows)} of {self.num_weights} weights ({self.part:.0%} of the elements) packed by {by}, "
            f"{TOLD_ROWS} rows in {after:,.1f} ms instead of {before:,.1f}; copies {self.copy_bytes / 2**20:,.1f} MiB"
            + (f", kernels at most {self.kernel_bytes / 2**20:,.1f} MiB" if self.kernel_bytes else "")
        )


def plan_linears(
    model: torch.nn.Module,
    used: Collection[str],
    *,
    wanted: bool | None,
    free_bytes: int,
    max_rows: int,
) -> LinearPlan:
    """Decides which weights are packed.

    Args:
        model: The model.
        used: Names of the weights of its linear calls.
        wanted: None: those that packing makes faster, as measured. True: all that can be packed. False: none.
        free_bytes: What is free for copies and all else.
        max_rows: Rows of a step, at most.

    Raises:
        ValueError: `wanted`, and it cannot be had; why.
    """
    names = {name: parameter for name, parameter in model.named_parameters() if name in used}
    if wanted is False:
        return _nothing(names, "packed_linears is False")
    if torch.is_autocast_enabled("cpu"):
        return _refused(names, "autocast is on, under which weights are cast in every call", wanted)
    of_shape: dict[tuple[torch.Size, torch.dtype], list[str]] = {}
    for name, weight in names.items():
        if _can_be_packed(weight) and (wanted or weight.numel() >= LEAST_ELEMENTS):
            of_shape.setdefault((weight.shape, weight.dtype), []).append(name)
    if not of_shape:
        few = f"of {LEAST_ELEMENTS:,} elements or more " if wanted is None else ""
        return _refused(names, f"no linear call has a plain weight {few}in fp32, bf16 or fp16 on the CPU", wanted)
    chosen: dict[str, int] = {}
    packings: dict[str, str] = {}
    before, after, reasons = 0.0, 0.0, []
    for alike in of_shape.values():
        known = _known(names[alike[0]])
        found = {title: measured for title, measured in known.items() if isinstance(measured, _Measured)}
        reasons += [str(reason) for reason in known.values() if not isinstance(reason, _Measured)]
        if not found:
            continue
        title = min(found, key=lambda title: found[title].gain())
        measured = found[title]
        least_rows = measured.worth_it_from()
        if least_rows is not None or wanted:
            chosen |= dict.fromkeys(alike, least_rows or 1)
            packings |= dict.fromkeys(alike, title)
            before += measured.before_ms[measured.told] * len(alike)
            after += measured.after_ms[measured.told] * len(alike)
        else:
            reasons.append("packed weights were not faster here")
    if not chosen:
        return _refused(names, reasons[-1], wanted)
    shapes = {(names[name].shape, names[name].dtype): packings[name] for name in chosen}
    copy_bytes = sum(PACKINGS[packings[name]].copy_bytes(names[name]) for name in chosen)
    if copy_bytes > MOST_MEMORY * free_bytes:
        reason = (
            f"the copies would take {copy_bytes / 2**20:,.1f} MiB, but at most {MOST_MEMORY:.0%} of the free "
            f"{free_bytes / 2**20:,.1f} MiB may be"
        )
        return _refused(names, reason, wanted)
    part = sum(names[name].numel() for name in chosen) / sum(weight.numel() for weight in names.values())
    row_counts = len({padded_rows(rows) for rows in range(1, max_rows + 1)})
    kernel_bytes = row_counts * sum(PACKINGS[title].kernel_bytes for title in shapes.values())
    return LinearPlan(chosen, packings, "", len(names), part, copy_bytes, kernel_bytes, (before, after))


def pack(model: torch.nn.Module, plan: LinearPlan, kept: PackedLinears | None = None) -> PackedLinears | None:
    """Packs the weights of a plan as they are now.

    Args:
        model: The model.
        plan: Its plan.
        kept: Copies of weights that did not change since; what has one is not packed again.

    Returns:
        None where the plan is to pack nothing.
    """
    by_name: dict[str, PackedLinear] = {}
    weights: dict[str, torch.Tensor] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, least_rows in plan.least_rows.items():
            weight = parameters.get(name)
            # A weight that is gone or became something else is torch's.
            if weight is None or not _can_be_packed(weight):
                continue
            old = None if kept is None else kept.by_name.get(name)
            if old is None:
                by_name[name] = PackedLinear(weight, PACKINGS[plan.packings[name]](weight), least_rows)
            else:
                by_name[name] = old.moved_to(weight)
            weights[name] = weight
    return PackedLinears(by_name, weights) if by_name else None


def packed_calls(linears: PackedLinears | None) -> AbstractContextManager[None]:
    """The context of a forward with packed linear layers, or with none."""
    return nullcontext() if linears is None else linears.entered()


@dataclass(frozen=True)
class _Measured:
    """Times of calls by their number of rows, rising."""

    before_ms: Mapping[int, float]  # torch's
    after_ms: Mapping[int, float]  # packed

    @property
    def told(self) -> int:
        """The number of rows whose times are told."""
        return max(rows for rows in self.before_ms if rows <= TOLD_ROWS)

    def gain(self) -> float:
        """The part of torch's time that packed calls take, over all measured numbers of rows alike."""
        return sum(self.after_ms[rows] / before for rows, before in self.before_ms.items()) / len(self.before_ms)

    def worth_it_from(self) -> int | None:
        """The least of the measured numbers of rows from which on packing pays."""
        ratios = {rows: self.after_ms[rows] / before for rows, before in self.before_ms.items()}
        for least, ratio in ratios.items():
            from_here = [other for rows, other in ratios.items() if rows >= least]
            if ratio < 1 and sum(from_here) / len(from_here) <= WORTH_IT:
                return least
        return None


# By packing: what was measured, or why it cannot be had.
_Known = Mapping[str, _Measured | str]
# What was measured in this process, by shape, dtype and threads: it is the machine's, not the model's.
_measurements: dict[tuple[torch.Size, torch.dtype, int], _Known] = {}


def _known(weight: torch.Tensor) -> _Known:
    """As `_measured`, once a process."""
    key = (weight.shape, weight.dtype, torch.get_num_threads())
    if key not in _measurements:
        _measurements[key] = _measured(weight)
    return _measurements[key]


def _measured(weight: torch.Tensor) -> _Known:
    """Packs a weight in every way, holds the results against torch's, and takes the times."""
    out_size, in_size = weight.shape
    counts = sorted(
        {
            max(1, min(rows, (MOST_WORK if rows <= TOLD_ROWS else MOST_FURTHER_WORK) // weight.numel()))
            for rows in MEASURED_ROWS
        }
    )
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cpu").to(weight.dtype)

    known: dict[str, _Measured | str] = {}
    packed: dict[str, PackedLinear] = {}
    with torch.no_grad():
        for title, packing in PACKINGS.items():
            try:
                linear = PackedLinear(weight, packing(weight))
                # 17 rows are no whole tiles.
                for rows, bias in ((17, random(out_size)), (8, None)):
                    _check(linear, random(rows, in_size), weight, bias)
            except (RuntimeError, AttributeError) as error:
                known[title] = str(error).partition("\n")[0]
            else:
                packed[title] = linear
        best = {rows: _best_ms(random(rows, in_size), weight, packed) for rows in counts} if packed else {}
    for title in packed:
        before = {rows: torchs for rows, (torchs, _) in best.items()}
        known[title] = _Measured(before, {rows: ours[title] for rows, (_, ours) in best.items()})
    return known


def _check(packed: PackedLinear, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    expected = TORCHS_LINEAR(input, weight, bias).double()
    difference = float((packed(input, bias).double() - expected).abs().max())
    largest = float(expected.abs().max())
    if not difference <= _TOLERANCE[weight.dtype] * largest:
        raise RuntimeError(f"packed weights gave results that differ by {difference:.3g} of {largest:.3g}")


def _best_ms(
    input: torch.Tensor, weight: torch.Tensor, packed: Mapping[str, PackedLinear]
) -> tuple[float, dict[str, float]]:
    """The shortest times of torch and of each packing, in turns, so that what else the machine does meets all."""
    torchs = float("inf")
    ours = dict.fromkeys(packed, float("inf"))
    linears = {title: PackedLinears({"weight": linear}, {"weight": weight}) for title, linear in packed.items()}
    end, repeats = time.perf_counter() + MEASURED_S, 0
    while time.perf_counter() < end or repeats < LEAST_REPEATS:
        torchs = min(torchs, _seconds(input, weight))
        for title in packed:
            with linears[title].entered():
                ours[title] = min(ours[title], _seconds(input, weight))
        repeats += 1
    return 1000 * torchs, {title: 1000 * seconds for title, seconds in ours.items()}


def _seconds(input: torch.Tensor, weight: torch.Tensor) -> float:
    start = time.perf_counter()
    torch.nn.functional.linear(input, weight)
    return time.perf_counter() - start


def _can_be_packed(weight: torch.Tensor) -> bool:
    """Whether it is a plain matrix in the host's memory: no subclass, nothing quantised, sparse or made on demand."""
    return (
        type(weight) in (torch.nn.Parameter, torch.Tensor)
        and weight.device.type == "cpu"
        and weight.layout is torch.strided
        and weight.dtype in _TOLERANCE
        and not weight.is_nested
        and weight.dim() == 2
        and weight.numel() > 0
    )


def _version(weight: torch.Tensor) -> int:
    # Tensors made in inference mode do not count.
    return 0 if weight.is_inference() else weight._version


def _nothing(names: Mapping[str, torch.Tensor], reason: str) -> LinearPlan:
    return LinearPlan({}, {}, reason, len(names), 0.0, 0, 0, (0.0, 0.0))


def _refused(names: Mapping[str, torch.Tensor], reason: str, wanted: bool | None) -> LinearPlan:
    if wanted:
        raise ValueError(f"packed_linears=True cannot be had: {reason}. Set it to None (packed where it pays) or False")
    return _nothing(names, reason)
