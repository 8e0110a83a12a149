"""Small forwards that a test makes up, recorded in a few sizes."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from chairlift.engine.replay.agreement import Agreement
from chairlift.engine.replay.calls import Call
from chairlift.engine.replay.fusion import RowRun, fuse
from chairlift.engine.replay.instructions import instructions_of
from chairlift.engine.replay.program import Linears, Program, write_program
from chairlift.engine.replay.recorder import Recorder

WIDTH, HEADS, SIZE = 24, 3, 8
# Three that no plane is missed by, and one that proves it.
POINTS = [(5, 2), (7, 3), (9, 1), (6, 6)]
Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def weights(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(tokens: int, sampled: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, 50, (1, tokens), generator=generator)
    return ids, torch.arange(tokens).unsqueeze(0), torch.randint(0, tokens, (sampled,), generator=generator)


class Toy:
    """A forward with an embedding, whose other calls are a test's."""

    def __init__(self, forward: Forward, dtype: torch.dtype, points: list[tuple[int, int]] = POINTS) -> None:
        self.forward = forward
        self.table = weights(50, WIDTH, dtype=dtype)
        self.agreement: Agreement | None = None
        for point in points:
            given = inputs(*point)
            recorder = Recorder(given, [self.table])
            with torch.no_grad(), recorder:
                out = self(*given)
            recorder.finish(out)
            assert recorder.refusal is None
            if self.agreement is None:
                self.agreement = Agreement(recorder.recording)
            else:
                self.agreement.add(recorder.recording)

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self.forward(F.embedding(ids, self.table), rows)

    @property
    def program(self) -> Program:
        return self.program_with(None)

    def program_with(self, linears: Linears | None) -> Program:
        """Its program, whose linear layers are computed by these."""
        assert self.agreement is not None
        return write_program(self.agreement, linears)

    @property
    def runs(self) -> list[Call]:
        """The calls that became runs."""
        assert self.agreement is not None
        instructions, output = instructions_of(self.agreement)
        fused = fuse(instructions, output, self.agreement.constants, one_token=self.agreement.one_token)
        return [made.call for made in fused if isinstance(made.call.func, RowRun)]

    def check(self, tolerance: float, points: list[tuple[int, int]] = POINTS) -> None:
        """Its program gives what it gives."""
        run = self.program.run
        further = [(tokens + 40, sampled) for tokens, sampled in points if tokens > 1]
        for point in [*points, *further, *((tokens, 0) for tokens, _ in further)]:
            given = inputs(*point)
            with torch.no_grad():
                got, expected = run(None, None, *given), self(*given)
            assert got.dtype is expected.dtype
            assert got.shape == expected.shape
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
