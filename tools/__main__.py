"""The entry point of all tools.

    python tools                     lists the commands
    python tools COMMAND --help      describes one
    python tools COMMAND …           runs it

A command is a module of `oracle/`, `bench/` or `tables/` that has a function `main`.
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDERS = ("oracle", "bench", "tables")


def commands() -> dict[str, Path]:
    """Returns the file of each command, by the command's name."""
    files = [file for folder in FOLDERS for file in sorted((HERE / folder).glob("*.py"))]
    return {file.stem: file for file in files if "\ndef main() -> int:" in file.read_text()}


def summary(file: Path) -> str:
    """Returns the first line of a module's docstring, without importing the module."""
    return (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n")[0]


def main() -> int:
    known = commands()
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        for folder in FOLDERS:
            print(f"{folder}:")
            for name, file in known.items():
                if file.parent.name == folder:
                    print(f"  {name:18} {summary(file)}")
        return 0
    name = sys.argv[1].replace("-", "_")
    if name not in known:
        print(f"tools: no command `{name}`; `python tools` lists them", file=sys.stderr)
        return 2
    # Modules import each other as `tools.FOLDER.NAME`, from any working directory.
    sys.path.insert(0, str(HERE.parent))
    sys.argv = [f"python tools {name}", *sys.argv[2:]]
    return importlib.import_module(f"tools.{known[name].parent.name}.{name}").main()


if __name__ == "__main__":
    sys.exit(main())
