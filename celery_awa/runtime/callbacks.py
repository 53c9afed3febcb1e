"""Runs where an attempt is claimed, and on its task's thread: who outside has answered."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from ..errors import CallbackFailed


class Callbacks:
    """The answers that a run was given, as an attempt found them, and what it waits for itself."""

    def __init__(self) -> None:
        #: By the callback's name.
        self.payloads: Mapping[str, Any] = {}
        self._failures: Mapping[str, str] = {}
        self._expected: tuple[str, str] | None = None

    def found(self, answers: Mapping[str, Any]) -> None:
        """Take over what the row held: ``{"payload": …}`` or ``{"error": …}`` by name."""
        self.payloads = {
            name: answer["payload"] for name, answer in answers.items() if "payload" in answer
        }
        self._failures = {
            name: answer["error"] for name, answer in answers.items() if "error" in answer
        }

    def expected(self, name: str) -> str | None:
        """The id that this attempt has announced last, if it is of this name."""
        known, callback_id = self._expected or ("", None)
        return callback_id if known == name else None

    def expect(self, name: str, callback_id: str) -> None:
        """Remember what was announced."""
        self._expected = (name, callback_id)

    def new_id(self, name: str, job_id: int) -> str:
        """Of one that is to be announced; raises CallbackFailed, ValueError where it was answered.

        The job's id, to find it by, and what cannot be guessed.
        """
        self.raise_if_failed(name)
        if name in self.payloads:
            raise ValueError(
                f"callback {name!r} was answered in this run: look for it in self.callbacks before "
                "asking, or ask under another name"
            )
        return f"{job_id}-{secrets.token_urlsafe(24)}"

    def raise_if_failed(self, name: str) -> None:
        """Raise CallbackFailed where it failed while an earlier attempt was running."""
        if name in self._failures:
            raise CallbackFailed(self._failures[name])
