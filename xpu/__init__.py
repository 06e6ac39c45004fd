"""The machine: device facts, attention pieces, faults, risk. Knows no model and no ComfyUI."""
