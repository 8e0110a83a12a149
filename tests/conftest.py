"""Options and models that the tests share."""

import os
from typing import Any

import pytest
import torch
from hypothesis import settings
from transformers import PreTrainedModel

from tiny_models import tiny_model

# On CI the same examples every time: a change fails by what it does, not by chance.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


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


@pytest.fixture(autouse=True)
def _books_balance_around_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves the engine's books before and after every step of every session that a test makes."""
    from chairlift.engine.runner import Runner
    from chairlift.engine.session import Session

    init = Session.__init__

    def checked_init(self: Session, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)

        def checked_run(step: Any) -> None:
            self.engine.check_integrity()
            Runner.run(self.runner, step)
            self.engine.check_integrity()

        self.runner.run = checked_run  # type: ignore[method-assign]

    monkeypatch.setattr(Session, "__init__", checked_init)
