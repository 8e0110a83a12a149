"""What recordings of steps of different sizes have in common, and the law of the numbers in which they differ."""

from fractions import Fraction
from math import lcm

import numpy as np
import numpy.typing as npt

from chairlift.engine.replay.calls import Call
from chairlift.engine.replay.recorder import Recording

# A number of a call: (a, c, b, d) for (a * tokens + c * sampled + b) / d.
Law = tuple[int, int, int, int]
Point = tuple[int, int]


class Disagreement(Exception):
    """Why two forwards of one model are not the same calls."""


class Agreement:
    """Recordings that agree.

    Their calls are equal, and every number in which they differ is an affine function of the tokens of the step and of
    its sampled rows.
    """

    def __init__(self, recording: Recording) -> None:
        """The first recording agrees with itself."""
        self.calls: list[Call] = recording.calls
        self.constants = recording.constants
        self.output = recording.output
        self.unchanged = dict(recording.unchanged)
        self.count = 1
        self.version = 0  # moves when more became known of the numbers or of what calls give back
        self.proven_version: int | None = None  # whose program gave the model's logits
        self._points: set[Point] = set()
        self._reach: dict[int, tuple[int, int]] = {}  # by kind of sampled rows, the tokens that recordings speak for
        self._basis: list[tuple[Point, npt.NDArray[np.int64]]] = []
        self._take(recording)

    def add(self, recording: Recording) -> None:
        """Takes a further recording.

        Raises:
            Disagreement: It does not agree with the others.
        """
        for index, (ours, theirs) in enumerate(zip(self.calls, recording.calls, strict=False)):
            if ours != theirs:
                raise Disagreement(f"call {index} of its forward ({ours.name}, {theirs.name}) is not always the same")
        if len(self.calls) != len(recording.calls) or self.output != recording.output:
            counts = f"{len(self.calls)} and {len(recording.calls)}"
            raise Disagreement(f"its forward makes now more calls and now fewer ({counts})")
        constants = recording.constants
        if self.constants.keys() != constants.keys() or any(
            constants[value] is not tensor for value, tensor in self.constants.items()
        ):
            raise Disagreement("it computes with tensors of unknown origin that are others each time")
        self._check_numbers(recording)
        self._take(recording)
        self.count += 1
        unchanged = {value: other for value, other in self.unchanged.items() if recording.unchanged.get(value) == other}
        if unchanged != self.unchanged:
            self.unchanged, self.version = unchanged, self.version + 1

    @property
    def one_token(self) -> bool:
        """Whether all of its steps were of one token."""
        return all(tokens == 1 for tokens, _ in self._points)

    def covers(self, point: Point) -> bool:
        """Whether the numbers of a step of (tokens, sampled) are known."""
        if self.count < 2:
            return False
        if point in self._points:
            return True
        least, most = self._reach.get(_kind(point), (0, -1))
        return self._is_straight() and least <= point[0] <= most and self._weights_of(point) is not None

    def _is_straight(self) -> bool:
        """Whether the points tell a plane from what is bent: one more than a plane goes through in any case, and no two
        sizes alone."""
        sizes = (len(set(axis)) for axis in zip(*self._points, strict=True))
        return len(self._points) > len(self._basis) and 2 not in sizes

    def laws(self) -> list[Law]:
        """The law of each number, right for all points that are covered."""
        columns = np.stack([numbers for _, numbers in self._basis])
        points = [point for point, _ in self._basis]
        solved: dict[tuple[int, ...], Law] = {}
        laws = []
        for column in columns.T.tolist():
            known = tuple(column)
            if known not in solved:
                solved[known] = _law(points, known)
            laws.append(solved[known])
        return laws

    def _take(self, recording: Recording) -> None:
        point = (recording.tokens, recording.sampled)
        if self._weights_of(point) is None:
            self._basis.append((point, np.array(recording.numbers, dtype=np.int64)))
            self.version += 1
        self._points.add(point)
        # A model that asks for a size gets the same answer at both ends and so between them; beyond, up to twice as few
        # or as many tokens, it is taken to.
        least, most = self._reach.get(_kind(point), (point[0], 0))
        self._reach[_kind(point)] = min(least, point[0] // 2), max(most, 2 * point[0])

    def _check_numbers(self, recording: Recording) -> None:
        weights = self._weights_of((recording.tokens, recording.sampled))
        if weights is None:
            return
        whole = lcm(*(weight.denominator for weight in weights))
        expected = sum(int(weight * whole) * numbers for weight, (_, numbers) in zip(weights, self._basis, strict=True))
        differing = np.flatnonzero(expected != whole * np.array(recording.numbers, dtype=np.int64))
        if differing.size:
            name = self._call_of_number(int(differing[0])).name
            raise Disagreement(f"a number of {name} is no affine function of the tokens and sampled rows of a step")

    def _call_of_number(self, index: int) -> Call:
        for call in self.calls:
            index -= call.num_numbers
            if index < 0:
                return call
        raise IndexError("no call has that number")

    def _weights_of(self, point: Point) -> list[Fraction] | None:
        """The point as an affine combination of the basis, where it is one."""
        return _combination([(*known, 1) for known, _ in self._basis], (*point, 1))


def _kind(point: Point) -> int:
    """None, one or several sampled rows: a model may tell these apart."""
    return min(point[1], 2)


def _combination(vectors: list[tuple[int, ...]], wanted: tuple[int, ...]) -> list[Fraction] | None:
    """Weights with which independent vectors add up to the wanted one, if there are any."""
    rows = [[Fraction(vector[i]) for vector in vectors] + [Fraction(wanted[i])] for i in range(len(wanted))]
    width = len(vectors)
    for column in range(width):
        pivot = next(i for i in range(column, len(rows)) if rows[i][column])
        rows[column], rows[pivot] = rows[pivot], rows[column]
        scale = rows[column][column]
        rows[column] = [entry / scale for entry in rows[column]]
        for i, row in enumerate(rows):
            if i != column and row[column]:
                factor = row[column]
                rows[i] = [entry - factor * of_pivot for entry, of_pivot in zip(row, rows[column], strict=True)]
    if any(row[-1] for row in rows[width:]):
        return None
    return [row[-1] for row in rows[:width]]


def _law(points: list[Point], known: tuple[int, ...]) -> Law:
    """The simplest affine function that has these values there: a constant, else one of the tokens, else of both."""
    for columns in ((2,), (0, 2), (1, 2), (0, 1, 2)):
        vectors = [tuple((*point, 1)[column] for point in points) for column in columns]
        weights = _combination(vectors, known) if _are_independent(vectors) else None
        if weights is not None:
            factors = dict(zip(columns, weights, strict=True))
            divisor = lcm(*(weight.denominator for weight in weights))
            a, c, b = (int(factors.get(column, Fraction(0)) * divisor) for column in range(3))
            return a, c, b, divisor
    raise AssertionError("values at independent points always have an affine function")


def _are_independent(vectors: list[tuple[int, ...]]) -> bool:
    return bool(np.linalg.matrix_rank(np.array(vectors, dtype=np.float64)) == len(vectors))
