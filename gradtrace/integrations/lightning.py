"""A callback for Lightning's Trainer, of the package ``lightning`` or ``pytorch_lightning``."""

from __future__ import annotations

from typing import Any

from gradtrace.integrations.callback import Callback


class LightningCallback(Callback):
    """Records each ``fit`` of a ``Trainer``; see ``Callback`` for the arguments.

    ``step`` is ``trainer.global_step`` at the start of the batch. The sanity check before the first step is left out,
    validation in between is recorded.

    Example::

        recording = LightningCallback("run.parquet", mode="watch")
        Trainer(callbacks=[recording]).fit(model, batches)
        gradtrace.open_run(recording.path).sql("select * from steps")
    """

    bases = (("lightning.pytorch", "Callback"), ("pytorch_lightning", "Callback"))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the recording: by now a checkpoint has set the count of steps."""
        self._start(pl_module, trainer.global_step)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Count."""
        self._step(trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Finish the recording."""
        self._stop("completed")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Finish the recording: nothing else tells of a training that is left by an error."""
        self._failed(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Finish the recording where the Trainer has left its loop without a word."""
        self._stop("completed")
