"""Turn workflows of the older SUPIR wrapper (ComfyUI-SUPIR) into workflows of this pack.

Owns reading both formats of ComfyUI (saved workflows and API prompts), the conversion and its
report. Standard library only; knows no ComfyUI, touches no file.

    result = convert(json.loads(text))
    result.workflow, result.report.as_dict()
"""

from __future__ import annotations

from .conversion import Converted, convert, old_nodes_in
from .errors import MigrateError
from .old_nodes import OLD_NODES
from .report import Entry, Report

__all__ = [
    "OLD_NODES",
    "Converted",
    "Entry",
    "MigrateError",
    "Report",
    "convert",
    "old_nodes_in",
]
