"""Oracles, benchmarks and tables of ckpt-opt. `python tools` lists the commands."""
