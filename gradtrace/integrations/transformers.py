"""A callback for the Trainer of transformers."""

from __future__ import annotations

import functools
from typing import Any

from gradtrace.integrations.callback import Callback


class TransformersCallback(Callback):
    """Records each ``train`` of a ``Trainer``; see ``Callback`` for the arguments.

    ``step`` is ``state.global_step`` when the step begins, ``micro_step`` the batches that are accumulated in it.

    Example::

        recording = TransformersCallback("run.parquet", mode="watch")
        Trainer(model, arguments, train_dataset=texts, callbacks=[recording]).train()
        gradtrace.open_run(recording.path).sql("select * from steps")
    """

    bases = (("transformers.trainer_callback", "TrainerCallback"),)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        callback = super().__new__(cls)
        _tell_of_errors()
        return callback

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        """Open the recording: by now a checkpoint has set the count of steps."""
        self._start(model, state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count."""
        self._step(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Finish the recording."""
        self._stop("completed")


@functools.cache
def _tell_of_errors() -> None:
    """Let ``Trainer.train`` tell these callbacks of an error: it has no event for that."""
    from transformers import Trainer

    train = Trainer.train

    @functools.wraps(train)
    def train_and_tell(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return train(trainer, *args, **kwargs)
        except BaseException as error:
            for callback in trainer.callback_handler.callbacks:
                if isinstance(callback, TransformersCallback):
                    callback._failed(error)
            raise

    Trainer.train = train_and_tell
