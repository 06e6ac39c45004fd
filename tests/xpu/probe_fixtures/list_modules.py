"""Leaves the device as it is and reports every module the child process has loaded at its end."""

from __future__ import annotations

import json
import sys


def stand_in(base, options):
    kind = type(base)

    class Listing(kind):
        def empty_cache(self):  # the last thing the battery does
            super().empty_cache()
            self.listed = json.dumps(sorted(sys.modules))

    device = Listing(base.name, base.torch)
    child = sys.modules["__main__"]
    compare = child.Bench.compare

    def comparing(bench, *args, **kwargs):
        numbers = compare(bench, *args, **kwargs)
        if hasattr(device, "listed"):
            numbers["modules"] = device.listed
        return numbers

    child.Bench.compare = comparing
    return device
