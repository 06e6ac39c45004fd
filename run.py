"""One command for everything: ``python run.py demo | test | convert | ...`` (see ``--help``).

Standard library only, on Windows, macOS and Linux. This file and tools/interpreters.py keep to
syntax that old Pythons read, so that those get a sentence instead of a traceback.
"""

import os
import sys

TOOLS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tools")
OLDEST, NEWEST = (3, 10), (3, 13)

sys.path.insert(0, TOOLS)

if __name__ == "__main__":
    if OLDEST <= sys.version_info[:2] <= NEWEST:
        if sys.argv[1:2] == ["doctor"]:  # asks the Python that calls it; sets nothing up
            import doctor

            sys.exit(doctor.main(sys.argv[2:]))
        if sys.argv[1:2] == ["stress"]:
            import stress

            sys.exit(stress.main(sys.argv[2:]))
        if sys.argv[1:2] == ["convert"]:  # so does this
            import convert

            sys.exit(convert.main(sys.argv[2:]))
        if not os.path.exists(os.path.join(TOOLS, "command_line.py")):
            sys.exit(
                "This installed copy knows doctor, stress and convert. The rest is in the repository."
            )
        import command_line

        sys.exit(command_line.main(sys.argv[1:]))

    import interpreters

    sys.stderr.write(interpreters.advice(sys.version_info[:2], OLDEST, NEWEST, sys.argv) + "\n")
    sys.exit(2)
