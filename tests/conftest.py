"""Options and models that the tests share."""

from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from tiny_models import tiny_model


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--heavy", action="store_true", help="run the full-size suites")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--heavy"):
        return
    skip = pytest.mark.skip(reason="full size: give --heavy")
    for item in items:
        if "heavy" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    # Tiny models: a second thread costs more than it computes.
    torch.set_num_threads(min(torch.get_num_threads(), 2))


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture
def checked_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Proves the engine's books before and after every step; yields the rows of each step."""
    from chairlift.engine.runner import Runner
    from chairlift.engine.session import Session

    rows: list[int] = []
    init, run = Session.__init__, Runner.run

    def checked_init(self: Session, *args: object, **kwargs: object) -> None:
        init(self, *args, **kwargs)  # type: ignore[arg-type]
        engine = self.engine

        def checked_run(step: object) -> None:
            engine.check_integrity()
            run(self.runner, step)  # type: ignore[arg-type]
            engine.check_integrity()
            rows.append(step.shape[0])  # type: ignore[attr-defined]

        self.runner.run = checked_run  # type: ignore[method-assign]

    monkeypatch.setattr(Session, "__init__", checked_init)
    yield rows
    assert rows, "no step was run"
