"""What the conversion refuses, each with what to do about it."""

from __future__ import annotations


class MigrateError(ValueError):
    """The input is nothing that can be converted. ``code`` is stable, the message is for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
