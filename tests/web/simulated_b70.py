"""The device of the browser tests: an Arc Pro B70 by its facts, and a crash its journal remembers."""

from __future__ import annotations

import time
from pathlib import Path

LARGEST_STEPS = 5
"""Steps of a demo job that is as large as one may be after the crash the journal remembers."""

DEVICE, DRIVER = "Intel(R) Arc(TM) Pro B70 Graphics", "32.0.101.8629"
B70 = f"""
facts:
  kind: xpu
  family: battlemage
  os: Windows
  driver: "{DRIVER}"
  name: {DEVICE}
  total_bytes: 34359738368
  free_bytes: 30064771072
  max_alloc_bytes: 4294967296
profiles:
  battlemage-windows-known-bad:
    gap_s: 1
    heavy_gap_s: 1
    load_settle_s: 0
    image_settle_s: 0
"""
DAY_S = 86_400


def remember_crash(path: Path, launches: int) -> None:
    """Write what a sampling phase leaves in the journal when the machine dies in it."""
    from supir_xpu.xpu.boot import Owner
    from supir_xpu.xpu.journal import Journal, RunInfo

    when = time.time() - 3 * DAY_S

    def start(boot: str) -> Journal:
        owner = Owner(boot, 1, "start")
        return Journal(path, owner=owner, clock=lambda: when, start_of=lambda _: None)

    summary = "Sample 2944x2944 px"
    run = RunInfo("crashed", DEVICE, DRIVER, "2.14", "fused_pieces", launches, 0.0, True, summary)
    dying = start("boot:before")
    row = dying.open_phase(run, "sample")
    dying.progress(row, step=3, launches=launches // 2)
    dying._db.close()
    later = start("boot:after")
    assert [death.kind for death in later.find_deaths()] == ["machine"]
    later.close()
