"""The kit behind `tools/cuda-checks`: packs all checks of the CUDA runtime, and runs them on a machine with a device."""
