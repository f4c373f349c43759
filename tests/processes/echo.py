"""What `test_forked` runs: says who it is, then does what its first argument says."""

from __future__ import annotations

import os
import sys
import time


def main() -> None:
    """One line, then the end that was asked for."""
    said = __name__, os.getpid(), os.getsid(0), os.environ.get("WHO"), *sys.argv[1:]
    sys.stdout.write(" ".join(map(str, said)) + "\n")  # one write: another may write there, too
    sys.stdout.flush()
    match sys.argv[1]:
        case "exit":
            sys.exit(int(sys.argv[2]))
        case "raise":
            raise ValueError(sys.argv[2])
        case "sleep":
            time.sleep(600)
        case "leave":
            del os.environ["PATH"]
            print("unflushed at the end")


if __name__ == "__main__":
    main()
