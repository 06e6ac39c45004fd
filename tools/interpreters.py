"""Name a Python that can run this repository, for a Python that cannot.

Read by Pythons of any age (2.7 included): no annotations, no f-strings, nothing recent.
"""
# ruff: noqa: ANN001, ANN201, UP031

import os
import subprocess

ASK = "import sys; sys.stdout.write('%d.%d' % sys.version_info[:2])"


def answers(command):
    """The version that an interpreter's command says it is, or None if it does not start."""
    with open(os.devnull, "w") as nowhere:
        try:
            said = subprocess.check_output(list(command) + ["-c", ASK], stderr=nowhere)
        except (OSError, subprocess.CalledProcessError):
            return None
    return said.decode("ascii", "replace")


def usable(oldest, newest, ask=answers, windows=os.name == "nt"):
    """The command line of an installed interpreter from oldest to newest, newest first, or None."""
    for minor in range(newest[1], oldest[1] - 1, -1):
        version = "%d.%d" % (newest[0], minor)
        command = ["py", "-" + version] if windows else ["python" + version]
        if ask(command) == version:
            return " ".join(command)
    return None


def advice(version, oldest, newest, argv, ask=answers, windows=os.name == "nt"):
    """One line: what runs this, what is needed, what to type instead."""
    found = usable(oldest, newest, ask, windows)
    todo = (
        "Run: " + " ".join([found] + list(argv))
        if found
        else "Install Python %d.%d and call run.py with it." % (newest[0], newest[1] - 1)
    )
    return "This is Python %d.%d, but run.py needs Python %d.%d to %d.%d. %s" % (
        tuple(version) + tuple(oldest) + tuple(newest) + (todo,)
    )
