"""Where the `octavo` command begins: almost nothing is imported before an interrupt or a closed stream can end in one line."""

import os
import sys


def main() -> None:
    """Run the command line. Status: 0 well, 1 an engine or server failed, 2 wrong use, 74 the output cannot be written, 130 interrupted."""
    if sys.stdin is None:  # closed by the caller: as good as empty
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - for as long as the process lives
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        sys.stderr.write("octavo: standard output is closed\n")
        sys.exit(74)
    try:
        from octavo.cli.main import run

        run()
        sys.stdout.flush()
    except KeyboardInterrupt:
        if process := sys.modules.get("octavo.engine.process"):
            process.remove_folders()
        sys.stderr.write("\n")
        os._exit(130)  # not by way of whatever was half imported
    except OSError as error:
        # Only the output is left to fail like this: everything else that reads or writes has its own typed error.
        sys.stderr.write(f"octavo: {error.strerror or error}\n")
        sys.stderr.flush()
        os._exit(74)  # not by way of a second flush of what could not be written


if __name__ == "__main__":
    main()
