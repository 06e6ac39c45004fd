"""What can be wrong with the input of a SUPIR run.

SupirError
├── CheckpointError   the file is not what the input needs, or is damaged
├── ShapeError        tensors or sizes do not fit together
├── SettingsError     a setting, or a combination of settings, cannot work
└── ModelError        a connected MODEL, CLIP or VAE cannot be used with SUPIR

Every message says what happened with the actual values, why it cannot work, and what to do,
naming the node input.
"""


class SupirError(Exception):
    """Base of every error this package raises on purpose."""


class CheckpointError(SupirError, ValueError):
    """The file is not a usable SUPIR checkpoint."""


class ShapeError(SupirError, ValueError):
    """Tensors or picture sizes do not fit together."""


class SettingsError(SupirError, ValueError):
    """A setting, or a combination of settings, cannot work."""


class ModelError(SupirError, TypeError):
    """A connected model is of a kind SUPIR cannot restore with."""
