#!/usr/bin/env python3
"""The same as `python tools parity`."""

import runpy
import sys
from pathlib import Path

sys.argv.insert(1, "parity")
runpy.run_path(str(Path(__file__).resolve().parent), run_name="__main__")
