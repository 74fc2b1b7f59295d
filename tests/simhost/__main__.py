"""`simhost` and, with `--ctl ROOT` first, `simhost-ctl`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from simhost.cli import end_as

    if sys.argv[1:2] == ["--ctl"]:
        from simhost.ctl import main
    else:
        from simhost.cli import main
    status = main(sys.argv[1:])
    end_as(status)
    sys.exit(status)
