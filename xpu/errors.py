"""What can go wrong on the device.

DeviceError
├── DeviceMemoryError   memory ran out, or one allocation was larger than the device allows
├── DeviceFaultError    an operation failed and every known way around it was used up
│   └── NonFiniteError  a stage produced NaN or infinity
├── DeviceLostError     the device's state is gone; nothing on it may be used again
├── RiskBlockedError    the run was judged too risky and was not started
└── FactsError          a device description cannot be read
"""

import torch


class DeviceError(Exception):
    """Base of every device error this package raises on purpose."""


class DeviceMemoryError(DeviceError, torch.OutOfMemoryError, MemoryError):
    """Device memory ran out, or one allocation exceeded the device's limit.

    It is torch's own error too, by which a host unloads its models.
    """


class DeviceFaultError(DeviceError, RuntimeError):
    """An operation failed and no known way around it is left."""


class DeviceLostError(DeviceError, RuntimeError):
    """The device's state is gone. Only a restart of ComfyUI brings it back."""


class RiskBlockedError(DeviceError, RuntimeError):
    """The run was judged before it started and refused."""


class FactsError(DeviceError, ValueError):
    """A device description has a key that is unknown, missing or of the wrong kind."""


class NonFiniteError(DeviceFaultError):
    """A stage produced NaN or infinity."""
