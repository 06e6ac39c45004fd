"""Numbers of SUPIR and SDXL that more than one module needs, each with its source."""

SIGMA_MAX = 14.6146
"""Top noise level of the ramps (SUPIR's published config; SDXL's table ends at 14.6146412)."""

TABLE_STEPS = 1000
"""Entries of the discrete noise table (SDXL training schedule)."""

LINEAR_START, LINEAR_END = 0.00085, 0.012
"""First and last beta of the schedule; their square roots are spaced evenly (SDXL config)."""

KARRAS_RHO = 7.0
"""Curvature of the Karras spacing (Karras et al. 2022, table 1)."""

RESTORE_MIN_SIGMA_NEXT = 0.05
"""Restoration guidance stops when the next sigma is at or below this (SUPIR's sampler)."""

SIZE_PX = 1024
"""Original and target size SUPIR tells SDXL for every picture, crop (0, 0) (SUPIR's config)."""

PAD_PX = 64
"""Pictures are padded to a multiple of this: 8 px per latent cell times the UNet's factor of 4,
doubled as the original does."""

WORK_KEY = "supir_xpu"
"""Our one key in ComfyUI's dictionaries: wrappers, transformer options, LATENT extras."""
