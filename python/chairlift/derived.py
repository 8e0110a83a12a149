"""What is derived from a model, and is worth nothing once the model is another: K and V in the prefix cache, packed
copies of weights, and the recorded forward."""

from transformers import PreTrainedModel
from transformers.utils import logging

from chairlift.engine.fingerprint import Fingerprint, fingerprint
from chairlift.engine.linears import LinearPlan, pack
from chairlift.engine.session import Session
from chairlift.knowledge import Knowledge, forget_knowledge, knowledge_of

logger = logging.get_logger(__name__)


class Derived:
    """Notices that a model changed, and makes anew what was derived from it. Only while its loop rests."""

    def __init__(
        self, model: PreTrainedModel, session: Session, plan: LinearPlan, knowledge: Knowledge, *, shares: bool
    ) -> None:
        """
        Args:
            model: The model.
            session: What computes with it.
            plan: Which weights are packed.
            knowledge: What is known of the model.
            shares: Whether requests share K and V of others.
        """
        self._model = model
        self._session = session
        self._plan = plan
        self._shares = shares
        self._knowledge = knowledge
        self._weights: Fingerprint | None = None  # None: unknown
        self._is_fresh = True

    def notice_weights(self, *, once: bool = False, in_pause: bool = False) -> bool:
        """Finds out whether weights changed since the last time.

        Args:
            once: Nothing that comes of it will serve another start: the first one need not read the weights.
            in_pause: After a pause, from before which there are requests.
        """
        first, self._is_fresh = self._is_fresh, False
        weights = None
        depends = self._shares or self._plan.least_rows or in_pause
        if depends and not (first and once):
            try:
                weights = fingerprint(self._model)
            except TypeError as error:
                if self._shares or in_pause:
                    logger.warning(f"Weights count as changed at each start, and after each pause: {error}")
        changed = weights is None or weights != self._weights
        if changed:
            if depends and not first:
                self._session.engine.new_epoch()
            self.release()  # before the new ones take their place
        runner = self._session.runner
        runner.linears = pack(self._model, self._plan, runner.linears)
        self._weights = weights
        return changed

    def notice_model(self, *, always: bool = False) -> None:
        """Takes over what is known of the model, where that is another than it was."""
        known = knowledge_of(self._model)
        if always or known is not self._knowledge:
            self._session.forward.forget(known.take_recordings())
        self._knowledge = known

    def count_weights_as_changed(self) -> None:
        """Whatever the values will be."""
        self._weights = None

    def forget(self) -> None:
        """All of it is to be made anew."""
        self.count_weights_as_changed()
        forget_knowledge(self._model)

    def release(self) -> None:
        """Gives the memory of packed copies back."""
        self._session.runner.linears = None

    def keep_recordings(self) -> None:
        """What the forward recorded serves the model's next session, too."""
        self._knowledge.give_recordings(self._session.forward.recordings)
