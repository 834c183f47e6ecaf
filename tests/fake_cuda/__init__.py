"""Whole training steps on CUDA tensors that do not exist, on any machine.

Fake tensors have a device, a type and a shape, and no values. Torch's builds for CPUs know no CUDA device; `device.cpp`
registers one on which nothing runs. `trace.py` takes steps of the engine there.
"""
