"""The methods of `Accelerator` that save and load."""

from __future__ import annotations

import os
from typing import Any

from accelerate_megatron.checkpoint.background import BackgroundSave
from accelerate_megatron.checkpoint.capture import lasting_pieces_of
from accelerate_megatron.checkpoint.loading import load_state
from accelerate_megatron.checkpoint.saving import save_state
from accelerate_megatron.errors import UnsupportedError


class Checkpoints:
    """`save_state`, `load_state` and `skip_first_batches` of an `Accelerator`."""

    _background_save: BackgroundSave | None = None
    _goes_on_in_mid_epoch = True
    """Whether a loader continues its epoch after `load_state`, or starts it again in the same
    order, for a script that skips what was used by itself."""

    def _checkpoint_settings(self) -> dict[str, Any]:
        """Return what decides which ranks meet in a save, and so must be equal on all."""
        configuration: Any = self.project_configuration  # type: ignore[attr-defined]  # accelerate's
        return {
            "automatic_checkpoint_naming": configuration.automatic_checkpoint_naming,
            "total_limit": configuration.total_limit,
        }

    def _look_after_saves(self, session: Any) -> None:
        """Let a session take over, before each update, what was saved in the background."""
        self._background_save = BackgroundSave(session.device)
        session.before_update = self._background_save.before_update
        if session.run.async_save:
            has_optimizer = not self.state.megatron_lm_plugin.no_save_optim  # type: ignore[attr-defined]
            self._background_save.reserve(lasting_pieces_of(session, has_optimizer=has_optimizer))

    def _forget_saves(self) -> None:
        """Wait for a save in the background, and let go of what it needed. Every rank calls it."""
        self.wait_for_save()
        if self._background_save is not None:
            self._background_save.close()

    def wait_for_save(self) -> None:
        """Return when a save in the background is complete; does nothing without one.

        Every rank calls it. Saving, loading, ending the training and the end of the script do.

        Raises:
            CheckpointError: It could not be written; alike on every rank.
        """
        if self._background_save is not None:
            self._background_save.wait()

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Write a checkpoint that is complete or not there, and return its folder.

        Every rank calls it. With `automatic_checkpoint_naming` it is
        `project_dir/checkpoints/checkpoint_N`, and `output_dir` is not read.

        With `other_megatron_args={"async_save": True}` it returns as soon as the state has been
        copied, and files are written while training goes on. An error is then raised by the next
        update; `wait_for_save` waits.

        Args:
            output_dir: The checkpoint's folder, on a file system that all machines share.
            safe_serialization: Must be True: there is no other kind here.
            **save_model_func_kwargs: Refused: nothing reads them.

        Raises:
            CheckpointError: It, or the save before it, could not be written: disk full, no
                permission, a registered object that cannot be loaded safely. Older checkpoints are
                as they were.
            CheckpointLockedError: Another job writes there.
        """
        if not safe_serialization or save_model_func_kwargs:
            raise UnsupportedError(
                "save_state takes no options here: checkpoints are always safe to load. Leave out "
                f"{', '.join(save_model_func_kwargs) or 'safe_serialization=False'}."
            )
        return save_state(self, output_dir)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        allow_pickle: bool = False,
        **load_model_func_kwargs: Any,
    ) -> str | None:
        """Load a checkpoint and return its folder: training goes on where it was saved.

        Every rank calls it, after `prepare` and `register_for_checkpointing`, with any layout.
        The next iteration of a prepared DataLoader goes on with the next batch.

        Args:
            input_dir: The checkpoint's folder. None: the newest good one in
                `project_dir/checkpoints`. "auto": the same, or None is returned when there is none
                at all, for a script that starts anew and resumes by the same line.
            load_kwargs: Refused: nothing reads them.
            allow_pickle: Let the files run code. Only for files of your own.
            **load_model_func_kwargs: Refused, as `load_kwargs`.

        Raises:
            CheckpointError: There is none, or it is damaged or incomplete.
            CheckpointMismatchError: It is of another model, or without the optimizer.
            UnsafeCheckpointError: It holds what could run code.
        """
        if load_kwargs or load_model_func_kwargs:
            given = ", ".join({**(load_kwargs or {}), **load_model_func_kwargs})
            raise UnsupportedError(f"load_state does not read {given}; leave it out.")
        folder = load_state(self, input_dir, allow_pickle=allow_pickle)
        if not self._goes_on_in_mid_epoch:
            for loader in self._dataloaders:  # type: ignore[attr-defined]  # accelerate's
                loader.skip_to(0)
        return folder

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Let the next iteration of `dataloader` begin with batch `num_batches`; return it.

        Every rank calls it. After `load_state` in mid-epoch the loader stands there already, and
        the same number changes nothing.
        """
        dataloader.skip_to(num_batches)
        return dataloader
