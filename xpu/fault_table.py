"""The fault list of the XPU stack as data: how each fault reads, means and is answered.

Owns text patterns and the order of reactions. Runs nothing; ``faults.py`` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FaultClass = Literal["transient", "specific", "memory", "lost", "platform", "silent", "benign"]
Reaction = Literal["retry", "contiguous", "smaller", "dtype", "cpu_block", "abort"]

RESTART = (
    "Restart ComfyUI before using the GPU again; restart the computer if the next run fails at "
    "once. Nothing was kept from the device."
)
_DRIVER = "Update the Intel graphics driver; set risk to block if it repeats."
_DTYPE = "Load the model in float16 or float32 where float64 or an unsupported dtype was asked for."


@dataclass(frozen=True)
class Fault:
    """One row of the table: how it reads, what it means, what to try in which order."""

    row: int
    code: str
    pattern: str
    meaning: str
    kind: FaultClass
    reactions: tuple[Reaction, ...] = ()
    advice: str = _DRIVER


_LADDER: tuple[Reaction, ...] = ("retry", "contiguous", "dtype", "cpu_block")
_MEMORY: tuple[Reaction, ...] = ("smaller",)
_CPU: tuple[Reaction, ...] = ("cpu_block",)

# Numbers are the rows of the fault list in docs/xpu.md, section 3, with a reference for each.
# The first match wins, so exact codes stand before general texts.
FAULT_TABLE: tuple[Fault, ...] = (
    Fault(2, "DEVICE_LOST", r"UR_RESULT_ERROR_DEVICE_LOST|error: 20\b|ZE_RESULT_ERROR_DEVICE_LOST|PI_ERROR_DEVICE_NOT_(?:FOUND|AVAILABLE)",
          "the driver lost the device's state", "lost", advice=RESTART),
    Fault(25, "GPU_PAGE_FAULT", r"Abort was called at \d+ line in file.*drm_neo\.cpp|Segmentation fault from GPU at 0x",
          "the device read a bad address and its context was banned", "lost", advice=RESTART),
    Fault(41, "DEVICE_ASSERT", r"AssertHandler::printMessage",
          "a kernel stopped on an assertion", "lost", advice=RESTART),
    Fault(29, "ENGINE_RESET", r"Engine reset: engine_class=(?:ccs|bcs|rcs)|Timedout job",
          "the kernel driver reset the engine", "lost",
          advice="Use GuC firmware 70.72 or newer. " + RESTART),
    Fault(31, "KERNEL_DRIVER_CRASH", r"igdkmdnd64|(?:bugcheck|BSOD)\D{0,20}0x0*(?:D1|7E)\b",
          "the Windows graphics driver crashed the machine", "lost",
          advice="Install another graphics driver version and run smaller jobs with pauses."),
    Fault(32, "SCHEDULER_CRASH", r"VIDEO_SCHEDULER_INTERNAL_ERROR",
          "the Windows graphics scheduler crashed the machine", "lost",
          advice="Install another graphics driver version and run smaller jobs with pauses."),
    Fault(24, "ACCESS_VIOLATION", r"0xC0000005|-1073741819|\b3221225477\b",
          "a library of the GPU stack crashed the process", "lost",
          advice="If it happens at start, reinstall torch for XPU in a clean environment. " + RESTART),
    Fault(30, "STALL", r"no progress on the device for",
          "the device stopped answering", "lost",
          advice="End ComfyUI once and start it again; do not end it repeatedly. " + RESTART),
    Fault(3, "OUT_OF_DEVICE_MEMORY", r"UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY|error: 39\b|ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY|PI_ERROR_MEM_OBJECT_ALLOCATION_FAILURE",
          "device memory ran out", "memory", _MEMORY),
    Fault(4, "OUT_OF_RESOURCES", r"UR_RESULT_ERROR_OUT_OF_RESOURCES|error: 40\b|PI_ERROR_OUT_OF_RESOURCES",
          "device memory ran out, or an engine was reset", "memory", _MEMORY),
    Fault(6, "ALLOCATION_LIMIT", r"Tried to allocate 4\.0\d GiB[^\n]*15\.1\d? ?GiB is free|can NOT allocate memory block with size larger than 4GB",
          "one allocation reached the device's 4 GiB limit", "memory", _MEMORY),
    Fault(5, "OUT_OF_MEMORY", r"(?:XPU )?out of memory\. Tried to allocate|out of memory",
          "the allocator ran out of device memory", "memory", _MEMORY),
    Fault(1, "INVALID_ARGUMENT", r"UR_RESULT_ERROR_INVALID_ARGUMENT|error: 45\b",
          "a kernel argument or dtype was rejected", "specific", ("contiguous", "dtype", "cpu_block")),
    Fault(18, "KERNEL_MISSING", r"UR_RESULT_ERROR_INVALID_KERNEL_NAME|No kernel named .* was found",
          "this build has no such kernel for the device", "specific", _CPU),
    Fault(19, "KERNEL_ARGUMENT", r"UR_RESULT_ERROR_INVALID_KERNEL_ARGUMENT_INDEX",
          "a compiled graph passed a wrong argument", "specific", _CPU,
          "Run the model without torch.compile."),
    Fault(8, "INVALID_BINARY", r"CL_INVALID_BINARY",
          "a compiled kernel was rejected", "specific", _LADDER),
    Fault(9, "HOST_MEMORY", r"CL_OUT_OF_HOST_MEMORY",
          "the driver failed with a host memory error", "specific", _LADDER),
    Fault(12, "BUILD_FAILED", r"Error during the build of OpenCL program",
          "a kernel did not compile", "specific", _LADDER),
    Fault(11, "CONV_GENERATOR", r"onednn_verbose.*error.*(?:internal error|conv/jit)",
          "the convolution generator rejected a shape", "specific", ("contiguous", "cpu_block")),
    Fault(7, "NO_PRIMITIVE", r"could not create a primitive",
          "oneDNN rejected a shape, dtype or driver", "specific", _LADDER),
    Fault(10, "PRIMITIVE_FAILED", r"could not execute a primitive",
          "oneDNN failed while running, often for lack of memory", "specific",
          ("retry", "smaller", "cpu_block")),
    Fault(13, "STOULL", r"invalid stoull argument",
          "the driver's extension list or an allocator setting could not be read", "specific",
          ("retry",), "Remove PYTORCH_ALLOC_CONF and similar variables, then restart ComfyUI."),
    Fault(15, "NO_FP64", r"Required aspect fp64 is not supported",
          "float64 reached a device that has none", "specific", ("dtype", "cpu_block"), _DTYPE),
    Fault(17, "NO_DOUBLE", r"Double type is not supported on this platform",
          "a compiled kernel uses float64", "specific", _CPU, "Run the model without torch.compile."),
    Fault(16, "KERNEL_INCOMPATIBLE", r"Kernel is incompatible with all devices in devs",
          "a kernel needs a feature the device lacks", "specific", _CPU),
    Fault(20, "COMPILER_FAILED", r"The program was built for \d+ devices|backend compiler failed build",
          "the driver could not compile a kernel for this device", "platform", ("cpu_block",)),
    Fault(21, "MODULE_BUILD", r"ZE_RESULT_ERROR_MODULE_BUILD_FAILURE",
          "a compiled module was rejected", "specific", _CPU, "Run the model without torch.compile."),
    Fault(38, "HEAD_DIM", r"FlashAttentionForwardXPU only support headdim",
          "the flash kernel does not take this head width", "specific", ("smaller", "cpu_block"),
          "Update torch, or keep planned attention on."),
    Fault(39, "NO_SDPA_KERNEL", r"No available kernel\. Aborting execution",
          "every attention kernel was switched off", "specific", ("smaller", "cpu_block"),
          "Do not restrict attention backends for the whole process."),
    Fault(40, "NOT_IMPLEMENTED", r"operator 'aten::.*' is not currently implemented for the XPU",
          "this torch has no XPU version of an operator", "specific", _CPU, "Update torch."),
    Fault(42, "NO_FREE_MEMORY_QUERY", r"doesn't support querying the available free memory",
          "the device does not report free memory", "benign",
          advice="Nothing to do: free memory is taken as total minus reserved."),
    Fault(43, "FIRST_COMPILE", r"first operation still compiling",
          "kernels are compiled at first use, for minutes on some devices", "benign",
          advice="Wait. SYCL_CACHE_PERSISTENT=1 in the environment keeps the result."),
    Fault(44, "EXIT_HANG", r"hang at interpreter exit",
          "the runtime deadlocks when the process ends", "benign",
          advice="End the process; results are already saved."),
    Fault(33, "NAN_AFTER_RELEASE", r"all values are NaN after empty_cache",
          "memory was corrupted when cached blocks were released", "silent",
          advice="Use torch 2.11 or newer, or keep the model loaded between runs."),
    Fault(37, "NON_FINITE", r"NaN or infinite values",
          "numbers left the range of the dtype", "silent", ("dtype",),
          "Run the VAE in bfloat16 or float32."),
    Fault(14, "NATIVE_API", r"Native API failed\. Native API returns: (-?\d+)",
          "the driver reported an error number", "transient", ("retry",)),
)  # fmt: skip

# Error numbers of the UR interface and, negative, of its predecessor PI.
CODE_OF_NUMBER = {
    20: "DEVICE_LOST", -1: "DEVICE_LOST", -2: "DEVICE_LOST", 29: "KERNEL_MISSING",
    30: "KERNEL_ARGUMENT", 39: "OUT_OF_DEVICE_MEMORY", -4: "OUT_OF_DEVICE_MEMORY",
    40: "OUT_OF_RESOURCES", -5: "OUT_OF_RESOURCES", -997: "OUT_OF_RESOURCES",
    45: "INVALID_ARGUMENT", -30: "INVALID_ARGUMENT",
}  # fmt: skip
