"""SUPIR's model and mathematics. Knows neither ComfyUI (but for host_blocks.py) nor devices."""
